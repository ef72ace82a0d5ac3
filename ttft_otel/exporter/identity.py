# SPDX-License-Identifier: Apache-2.0
"""Who a span is from: one OTel resource per service name; flow.py asks, spans.py uses them."""

from __future__ import annotations

import socket
from typing import Final

from opentelemetry.sdk.resources import (
    PROCESS_PID,
    SERVICE_INSTANCE_ID,
    SERVICE_NAME,
    OTELResourceDetector,
    Resource,
)

from ttft_otel import __version__, stages

DISTRO_NAME: Final = "telemetry.distro.name"
DISTRO_VERSION: Final = "telemetry.distro.version"
MOST: Final = 16  # service names of one host; there are as many as roles


class Resources:
    """One resource per service name, bounded; what the operator's OTEL_* variables say wins."""

    def __init__(self, pid: int) -> None:
        own: dict[str, str | int] = {
            SERVICE_INSTANCE_ID: f"{socket.gethostname()}:{pid}",
            PROCESS_PID: pid,
            DISTRO_NAME: "ttft-otel",
            DISTRO_VERSION: __version__,
        }
        self._operator = OTELResourceDetector().detect()
        self._base = Resource.create().merge(Resource(own)).merge(self._operator)
        self._made: dict[str, Resource] = {}

    def get(self, service: str) -> Resource:
        """The resource for records of this service, unless the operator named the service."""
        if service not in self._made and len(self._made) >= MOST:
            service = ""
        if service not in self._made:
            name = Resource({SERVICE_NAME: service or stages.SERVICES["mono"]})
            self._made[service] = self._base.merge(name).merge(self._operator)
        return self._made[service]
