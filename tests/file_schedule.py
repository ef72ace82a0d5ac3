# SPDX-License-Identifier: Apache-2.0
"""Distribute test files to pytest-xdist's workers: long ones first, those that share what is dear to one.

conftest.py gives the scheduler to pytest-xdist, which scripts/test starts with --dist loadfile.
"""

from __future__ import annotations

from typing import Final

from xdist.scheduler import LoadFileScheduling

# Importing vLLM's connectors or its scheduler takes 8 s of CPU: once, not once per worker.
VLLM_FILES: Final = (
    "tests/hooks/engine_core/test_scheduler.py",
    "tests/hooks/test_encodings.py",
    "tests/hooks/engine_core/test_held_steps.py",
    "tests/hooks/worker/test_model_runners.py",
    "tests/hooks/engine_core/test_queue_reasons.py",
    "tests/explain/test_engine_model.py",
    "tests/explain/test_what_if.py",
    "tests/bench/test_limit_search.py",
    "tests/commands/test_whatif.py",
    "tests/test_plugin.py",
)
# Starting a stack and sending it 2 000 requests takes a minute and a half. The last one sends more.
FILLED_STACK_FILES: Final = (
    "tests/stack/test_browser.py",
    "tests/stack/test_panels.py",
)
# Files of some seconds, the longest first, whatever number of tests. The last ones to begin decide when
# the run ends.
LONG_FILES: Final = (
    "tests/attack/test_stalls.py",
    "tests/bench/test_command.py",
    "tests/commands/router/test_worker_processes.py",
    "tests/bench/test_exchange.py",
    "tests/router/routing/prompts/test_prompt_processes.py",
    "tests/test_wheel.py",
    "tests/attack/test_upstream_faults.py",
    "tests/exporter/test_exporter_process.py",
    "tests/commands/router/test_router_command.py",
    "tests/bench/test_result_document.py",
    "tests/report/receive/test_receiver.py",
    "tests/hooks/device/test_accelerator.py",
    "tests/attack/test_senders.py",
    "tests/lab/test_local_servers.py",
    "tests/test_layers.py",
    "tests/router/proxy/test_prefill_decode.py",
    "tests/router/routing/test_routing_service.py",
    "tests/attack/test_kv_event_publisher.py",
    "tests/router/disagg/test_encoders.py",
    "tests/lab/test_style.py",
    "tests/hooks/test_target_check.py",
    "tests/report/store/test_span_store.py",
    "tests/router/proxy/test_endpoint_soak.py",
)


SHARING_FILES: Final = (VLLM_FILES, FILLED_STACK_FILES)


class FileScheduling(LoadFileScheduling):
    """Gives whole files to workers, each of SHARING_FILES as if they were one file."""

    def _split_scope(self, nodeid: str) -> str:
        """The unit of work that a test belongs to."""
        path = nodeid.partition("::")[0]
        return next((files[0] for files in SHARING_FILES if path in files), path)


def rank_file(path: str) -> int:
    """The place of the file `path` in the order of the run: the smaller, the earlier."""
    first = (*FILLED_STACK_FILES, *VLLM_FILES, *LONG_FILES)
    return first.index(path) if path in first else len(first)
