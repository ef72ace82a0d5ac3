# SPDX-License-Identifier: Apache-2.0
"""The options of `ttft-otel serve`: commands/serve.py makes them of its flags for servers and pages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ttft_otel.report.breakdown_source import Explainer
from ttft_otel.report.report_types import SourceChoice


@dataclass(frozen=True, slots=True)
class ServeOptions:
    path: Path  #: of the database
    host: str = "127.0.0.1"
    http_port: int = 4318  #: 0 takes a free one
    grpc_port: int = 4317  #: likewise; -1 disables gRPC
    # Limits of the database; the oldest traces are removed.
    max_traces: int = 20_000
    max_age_hours: float = 168.0
    max_bytes: int = 2 << 30
    allowed_hosts: tuple[str, ...] = ()  #: further Host headers to accept
    token: str = ""  #: that whoever sends or reads has to show; "" asks nobody
    #: Answers the page's "Why?" and alerts; None: neither is there.
    explain: Explainer | None = None
    #: What pages show instead of the database; nothing is received then.
    tempo: SourceChoice | None = None
    page_url: str = ""  #: where people reach the pages, for links in an alert's answer
    grafana_url: str = ""  #: where people reach the dashboards, for the pages' links; "": no links
    alertmanager_url: str = ""  #: where answers to alerts go; "": only to who asked

    @property
    def source(self) -> SourceChoice:
        """What pages and answers are made of."""
        return self.tempo or SourceChoice(db=self.path)
