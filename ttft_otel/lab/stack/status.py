# SPDX-License-Identifier: Apache-2.0
"""Which parts of a stack are ready, native or in containers; command.py prints it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttft_otel.lab.stack import ask, docker, parts, state
from ttft_otel.lab.stack.native import Row
from ttft_otel.lab.stack.state import State


@dataclass(frozen=True, slots=True)
class Status:
    """mode: "native", "containers" or "none"."""

    mode: str
    parts: list[Row]

    @property
    def ready(self) -> bool:
        """Whether everything is."""
        return bool(self.parts) and all(part.ready for part in self.parts)


def look(data: Path) -> Status:
    """Ask the native stack on these data, else the containers."""
    if found := state.read(data):
        return Status("native", natives(found))
    if docker.there() and (rows := [contained(each) for each in docker.services()]):
        return Status("containers", rows)
    return Status("none", [])


def natives(found: State) -> list[Row]:
    """Every program of a native stack, asked now."""
    at = found.addresses
    health = {
        "collector": (parts.url(at.collector_health), "/", parts.url(at.collector_http)),
        "tempo": (parts.url(at.tempo), "/ready", parts.url(at.tempo)),
        "prometheus": (parts.url(at.prometheus), "/-/ready", parts.url(at.prometheus)),
        "grafana": (found.grafana, "/api/health", found.grafana),
    }
    rows = []
    for name, (base, path, url) in health.items():
        if not base:
            continue
        ready = ask.alive(base + path)
        note = f"pid {found.programs[name][0]}" if name in found.programs else "not ours"
        rows.append(Row(name, url, ready, note if ready else f"{note}: no answer"))
    return rows


def contained(service: dict[str, Any]) -> Row:
    """One container, as compose sees it; one without a health check is ready when it runs.

    Volumes get their owner from a service that then ends.
    """
    condition = service.get("Health") or service.get("State", "")
    done = service.get("Service") == docker.ONCE and service.get("ExitCode") == 0
    ready = condition in ("healthy", "running") or done
    return Row(service.get("Service", "?"), "", ready, service.get("Status") or condition)
