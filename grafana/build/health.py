# SPDX-License-Identifier: Apache-2.0
"""The Pipeline health dashboard: is what the other dashboard shows complete?"""

from __future__ import annotations

from typing import Any, Final

from grafana.build import panels

UID: Final = "ttft-health"


def board() -> Any:
    """The dashboard, along the way of a span."""
    made = panels.board("Pipeline health", UID, "Is TTFT's telemetry complete?", ("TTFT", "ttft"))
    made.with_variable(panels.source("prometheus", "prometheus", "Prometheus"))
    return made
