# SPDX-License-Identifier: Apache-2.0
"""What stands for vLLM in tests and benchmarks: servers, and the objects that an engine core handles.

instances.py: a server that follows a plan. pair_servers.py: prefill and decode. prefix_cache.py: the cache
and its KV events, which kv_publisher.py sends. word_server.py: of the standard library alone, for a pod that
has nothing else. engine_objects.py: requests, media items and steps.
"""

from pathlib import Path

FAKE_VLLM_FOLDER = Path(__file__).parent
