# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry resources of spans and metrics, one per service name; used by export_worker.py."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Final

from opentelemetry.sdk.resources import (
    PROCESS_PID,
    SERVICE_INSTANCE_ID,
    SERVICE_NAME,
    OTELResourceDetector,
    Resource,
)

from ttft_otel import __version__
from ttft_otel.model import stages
from ttft_otel.model.names import keys, span_names

# OpenTelemetry's attributes of a distribution; distro.py tells them to other SDKs, too.
DISTRO: Final = {"telemetry.distro.name": "ttft-otel", "telemetry.distro.version": __version__}
MAX_SERVICES: Final = 16  # service names per host process; ours are one per role


class ResourceCache:
    """One resource per service name, bounded; the operator's OTEL_* variables take precedence.

    pid: the host process, for service.instance.id and process.pid.
    counts_requests: metrics come from this process too, and are not to be made of its spans again.
    engine_settings: attributes that the host knows, keys.ENGINE_SETTINGS.
    """

    def __init__(
        self,
        pid: int,
        counts_requests: bool = False,
        engine_settings: Mapping[str, int] | None = None,
    ) -> None:
        self.pid = pid
        attributes: dict[str, str | int] = {
            # Host and process: several servers on one host must not share a series.
            SERVICE_INSTANCE_ID: f"{socket.gethostname()}:{pid}",
            PROCESS_PID: pid,
            **DISTRO,
            **(engine_settings or {}),
        }
        if counts_requests:
            attributes[keys.METRICS_SOURCE] = keys.METRICS_FROM_EXPORTER
        # Read apart from the rest: what the operator set is merged last, and has to win.
        self._operator = OTELResourceDetector().detect()
        self._base = Resource.create().merge(Resource(attributes)).merge(self._operator)
        self._resources: dict[str, Resource] = {}

    def get(self, service: str) -> Resource:
        """The resource for records of `service`, "" for the default name; one object for equal ones.

        OTEL_SERVICE_NAME, where set, replaces the name in all of them.
        """
        found = self._resources.get(service)
        # A name comes from a record; the bound keeps a wrong sender from filling the memory.
        if found is None and len(self._resources) >= MAX_SERVICES:
            found = self._resources.get("")
        if found is None:
            found = self._build_resource(service if len(self._resources) < MAX_SERVICES else "")
        return found

    def build_metrics_resource(self, resource: Resource) -> Resource:
        """The resource of metrics beside spans of `resource`, with a service.instance.id of this process.

        The operator may have given one to a server of several processes. Spans can share it; sums cannot:
        each process would send its own under the same name.
        """
        given = self._operator.attributes.get(SERVICE_INSTANCE_ID)
        if given is None:
            return resource
        return resource.merge(Resource({SERVICE_INSTANCE_ID: f"{given}:{self.pid}"}))

    def _build_resource(self, service: str) -> Resource:
        name = Resource({SERVICE_NAME: service or stages.SERVICE_NAMES["mono"]})
        built = self._base.merge(name).merge(self._operator)
        # Last, and only where no detector has one: the SDK drops a side if two that it merges differ.
        built = Resource(built.attributes, built.schema_url or span_names.SCHEMA_URL)
        # With OTEL_SERVICE_NAME all are equal: one object, because others look it up by id().
        equal = (other for other in self._resources.values() if other == built)
        self._resources[service] = next(equal, built)
        return self._resources[service]
