# SPDX-License-Identifier: Apache-2.0
"""The ledger of every patched vLLM target, as data: wrap.py installs it, doctor prints it, tests hold it
against the sources of each supported release.

`lost` are the stages that become unattributed (their sum unchanged) when the target is gone; on an
encoder instance `lost_encode` counts instead, where it is given. Checked live: tests/live/test_targets.py.
"""

from __future__ import annotations

from typing import Final

from ttft_otel.hooks.targets.core import CORE
from ttft_otel.hooks.targets.frontend import FRONTEND
from ttft_otel.hooks.targets.row import EVERYTHING, Place, Target
from ttft_otel.hooks.targets.transfer import TRANSFER
from ttft_otel.hooks.targets.worker import RUNNERS

TARGETS: Final[tuple[Target, ...]] = (*FRONTEND, *CORE, *RUNNERS, *TRANSFER)
BY_NAME: Final[dict[str, Target]] = {target.name: target for target in TARGETS}

__all__ = ["BY_NAME", "EVERYTHING", "TARGETS", "Place", "Target"]
