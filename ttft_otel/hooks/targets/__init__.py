# SPDX-License-Identifier: Apache-2.0
"""All vLLM functions that we patch, as data. wrap.py installs them, doctor checks them, and
tests/hooks/test_target_check.py checks them against the sources of each supported release.

`lost` are the stages that become unattributed (the total stays exact) without the target; on an
encoder instance `lost_encode` applies instead, where it is given (tests/live/test_targets.py).
"""

from __future__ import annotations

from typing import Final

from ttft_otel.hooks.targets.api_server_targets import FRONTEND_TARGETS
from ttft_otel.hooks.targets.connector_targets import TRANSFER_TARGETS
from ttft_otel.hooks.targets.engine_core_targets import CORE_TARGETS
from ttft_otel.hooks.targets.model_runner_targets import WORKER_TARGETS
from ttft_otel.hooks.targets.patch_target import ALL_STAGES, PatchTarget, TargetPlace

# In the order in which a request passes the processes; connectors, in two of them, last.
TARGETS: Final[tuple[PatchTarget, ...]] = (
    *FRONTEND_TARGETS,
    *CORE_TARGETS,
    *WORKER_TARGETS,
    *TRANSFER_TARGETS,
)
# For connectors' hooks, which patch a class at run time, and for doctor's messages.
TARGETS_BY_NAME: Final[dict[str, PatchTarget]] = {target.name: target for target in TARGETS}

# Of those methods, as of all targets, names and parameters can be checked.
CONNECTOR_METHODS: Final[dict[str, tuple[TargetPlace, ...]]] = {
    target.name: target.methods for target in TARGETS if target.methods
}

__all__ = [
    "ALL_STAGES",
    "CONNECTOR_METHODS",
    "PatchTarget",
    "TARGETS",
    "TARGETS_BY_NAME",
    "TargetPlace",
]
