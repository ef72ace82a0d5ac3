# SPDX-License-Identifier: Apache-2.0
"""The only folder that knows vLLM: what we hang into it, and nothing of what we do with the numbers.

A guest's contract: the host's call is never inside our `try`; we change no argument and no result
(but our own key in `trace_headers` and a private attribute on plain objects); we raise nothing; a
target that is missing costs its stage, never the server.

targets    the ledger: every patched target as data         wrap    the only patching code
frontend   API server: arrival .. first chunk               engine  engine core's input
scheduler  engine core: queue, join, carrier                worker  both model runners
transfer   encoder-cache connectors                         kv      KV connectors
device     host or device clock                             fields  what differs between releases
"""
