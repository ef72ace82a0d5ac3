# SPDX-License-Identifier: Apache-2.0
"""Which parts of a stack are ready, native or in containers; command.py prints it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.stack import backend_queries, docker_compose, native_state, stack_parts
from lab.stack.native_stack import PartStatus
from lab.stack.native_state import NativeState


@dataclass(frozen=True, slots=True)
class StackStatus:
    """mode: "native", "containers" or "none"."""

    mode: str
    parts: list[PartStatus]

    @property
    def is_ready(self) -> bool:
        """Whether everything is."""
        return bool(self.parts) and all(part.ready for part in self.parts)


def read_stack_status(data: Path) -> StackStatus:
    """The status of the native stack on this data folder, else of the containers."""
    # The native one first: its state file says that it was started on this data folder.
    if running_stack := native_state.read_state(data):
        return StackStatus("native", check_native_parts(running_stack))
    if docker_compose.is_docker_available() and (
        rows := [describe_container(each) for each in docker_compose.list_services()]
    ):
        return StackStatus("containers", rows)
    return StackStatus("none", [])


def check_native_parts(running_stack: NativeState) -> list[PartStatus]:
    """Check the health of every program of a native stack."""
    addresses = running_stack.addresses
    health = {
        "collector": (
            stack_parts.format_loopback_url(addresses.collector_health),
            "/",
            stack_parts.format_loopback_url(addresses.collector_http),
        ),
        "tempo": (
            stack_parts.format_loopback_url(addresses.tempo),
            "/ready",
            stack_parts.format_loopback_url(addresses.tempo),
        ),
        "prometheus": (
            stack_parts.format_loopback_url(addresses.prometheus),
            "/-/ready",
            stack_parts.format_loopback_url(addresses.prometheus),
        ),
        "grafana": (running_stack.grafana, "/api/health", running_stack.grafana),
    }
    rows = []
    for name, (base, path, url) in health.items():
        # No Grafana in this stack, which is no fault.
        if not base:
            continue
        # Health, not the process: a program may run and still replay its log.
        ready = backend_queries.is_reachable(base + path)
        note = (
            f"pid {running_stack.programs[name][0]}"
            # A Grafana of the user's has no process of ours.
            if name in running_stack.programs
            else "not ours"
        )
        rows.append(PartStatus(name, url, ready, note if ready else f"{note}: no answer"))
    return rows


def describe_container(service: dict[str, Any]) -> PartStatus:
    """The status of one container; one without a health check is ready when it runs.

    Volumes get their owner from a service that then ends.
    """
    condition = service.get("Health") or service.get("State", "")
    done = (
        service.get("Service") == docker_compose.ONE_SHOT_SERVICE and service.get("ExitCode") == 0
    )
    ready = condition in ("healthy", "running") or done
    return PartStatus(service.get("Service", "?"), "", ready, service.get("Status") or condition)
