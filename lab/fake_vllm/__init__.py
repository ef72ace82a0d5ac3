# SPDX-License-Identifier: Apache-2.0
"""Servers in place of vLLM, for tests without it; fakes of objects inside an engine are in tests/hooks.

instances.py: one that follows a plan. pair_servers.py: prefill and decode. prefix_cache.py: the cache and
its KV events, which kv_publisher.py sends. word_server.py: of the standard library alone, for a pod that has
nothing else.
"""

from pathlib import Path

FAKE_VLLM_FOLDER = Path(__file__).parent
