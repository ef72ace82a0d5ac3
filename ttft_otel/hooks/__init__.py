# SPDX-License-Identifier: Apache-2.0
"""The hooks in vLLM's processes: the only package that knows vLLM.

Rules: vLLM's own call is never inside our `try`; we change no argument and no result (except our own
key in `trace_headers` and a private attribute on plain objects); we raise nothing; a target that is
missing makes its stages unattributed and does not affect the server.

targets         all patched functions, as data      wrap            the only code that patches
api_server      arrival to first chunk              engine_core     the engine core's input
scheduler       queue; join with worker's marks     model_runners   both model runners
ec_connectors   encoder-cache connectors            kv              KV connectors
ec_items        sources of media items              ec_kept         encodings kept for others
device          host or device clock                device_anchor   host time of a device's events
encoder_runs    encoders that outlast the answer    vllm_fields     differences between releases
ec_fields       state of EC connectors              target_check    which targets a vLLM has
"""
