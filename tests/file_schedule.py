# SPDX-License-Identifier: Apache-2.0
"""Distribute test files to pytest-xdist's workers: long ones first, all that import vLLM to one worker.

conftest.py gives the scheduler to pytest-xdist, which scripts/test starts with --dist loadfile.
"""

from __future__ import annotations

from typing import Final

from xdist.scheduler import LoadFileScheduling

# Importing vLLM's connectors takes 8 s of CPU: once, not once per worker.
VLLM_FILES: Final = (
    "tests/hooks/test_ec_items.py",
    "tests/hooks/test_ec_kept.py",
    "tests/hooks/test_ec_worker.py",
    "tests/hooks/test_queue_reasons.py",
)
# Files of five seconds and more, whatever number of tests. The last ones to begin decide when the run ends.
LONG_FILES: Final = (
    "tests/router/routing/prompts/test_prompt_processes.py",
    "tests/bench/test_command.py",
    "tests/router/disagg/test_prefill_decode.py",
    "tests/router/cli/test_router_process.py",
    "tests/router/proxy/test_endpoint_fuzz.py",
    "tests/test_wheel.py",
    "tests/report/test_receiver.py",
    "tests/exporter/test_exporter_process.py",
    "tests/router/upstream/test_instance_pool.py",
    "tests/bench/test_comparison.py",
    "tests/bench/test_accuracy.py",
    "tests/router/disagg/test_ec_params.py",
    "tests/router/routing/test_routing_service.py",
    "tests/lab/test_local_servers.py",
    "tests/router/routing/test_routing_simulation.py",
    "tests/router/routing/test_booking.py",
    "tests/router/routing/test_routing_experiments.py",
    "tests/router/routing/prompts/test_prompt_overload.py",
    "tests/bench/test_html_report.py",
    "tests/test_layers.py",
    "tests/hooks/test_target_check.py",
)


class FileScheduling(LoadFileScheduling):
    """Gives whole files to workers, VLLM_FILES as if they were one file."""

    def _split_scope(self, nodeid: str) -> str:
        """The unit of work that a test belongs to."""
        path = nodeid.partition("::")[0]
        return VLLM_FILES[0] if path in VLLM_FILES else path


def rank_file(path: str) -> int:
    """The place of the file `path` in the order of the run: the smaller, the earlier."""
    first = (*VLLM_FILES, *LONG_FILES)
    return first.index(path) if path in first else len(first)
