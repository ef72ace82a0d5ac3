# SPDX-License-Identifier: Apache-2.0
"""Every query of every panel, read from grafana/dashboards and asked as Grafana would ask it.

Variables take the values that a person who opens the dashboard has; test_panels.py gives the time
range and where Prometheus and Tempo are, or a Grafana, which then asks them itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from lab.stack import backend_queries
from lab.stack.stack_parts import DASHBOARDS
from ttft_otel.stack import stack_queries

STEP_S: Final = 5  # between the points of a line
RATE_S: Final = 60  # four scrapes
_VARIABLE: Final = re.compile(
    r"\$(?:\{(?P<braced>\w+)(?::(?P<format>\w+))?\}|(?P<bare>[A-Za-z_]\w*))"
)


@dataclass(frozen=True, slots=True)
class CommittedDashboard:
    """One committed dashboard."""

    path: Path
    model: Mapping[str, Any]

    @property
    def uid(self) -> str:
        """Its fixed address."""
        return str(self.model["uid"])

    @property
    def variables(self) -> list[Mapping[str, Any]]:
        """What its templating declares."""
        found: list[Mapping[str, Any]] = self.model.get("templating", {}).get("list", [])
        return found

    def list_panels(self) -> Iterator[Mapping[str, Any]]:
        """All panels, those of collapsed rows too; no rows."""
        for panel in self.model["panels"]:
            yield from panel.get("panels", ())
            if panel["type"] != "row":
                yield panel


@dataclass(frozen=True, slots=True)
class PanelQuery:
    """One target of one panel."""

    dashboard: CommittedDashboard
    panel: Mapping[str, Any]
    target: Mapping[str, Any]

    @property
    def title(self) -> str:
        """The panel's title."""
        return str(self.panel["title"])

    @property
    def ref(self) -> str:
        """Its letter."""
        return str(self.target["refId"])

    @property
    def prometheus(self) -> bool:
        """PromQL or, if not, TraceQL."""
        return "expr" in self.target

    @property
    def text(self) -> str:
        """As it is written, variables and all."""
        return str(self.target["expr"] if self.prometheus else self.target.get("query", ""))

    @property
    def instant(self) -> bool:
        """Whether it asks for one point in time."""
        return bool(self.target.get("instant")) and not self.target.get("range")

    @property
    def name(self) -> str:
        """For a person."""
        return f"{self.dashboard.uid}/{self.title}/{self.ref}"


def list_dashboards() -> list[CommittedDashboard]:
    """All that are committed."""
    return [
        CommittedDashboard(path, json.loads(path.read_text("utf-8")))
        for path in sorted(DASHBOARDS.glob("*.json"))
    ]


def list_queries() -> list[PanelQuery]:
    """All queries of all dashboards."""
    return [
        PanelQuery(dashboard, panel, target)
        for dashboard in list_dashboards()
        for panel in dashboard.list_panels()
        for target in panel.get("targets", ())
    ]


@dataclass(frozen=True, slots=True)
class PanelAsker:
    """Asks over [start, end] (Unix seconds); `chosen` overrides variables by name."""

    prometheus: str
    tempo: str
    start: float
    end: float
    chosen: Mapping[str, str] = field(default_factory=dict)

    def expand_variables(self, query: PanelQuery) -> str:
        """The query's text, every variable replaced."""
        span = round(self.end - self.start)
        built_in = {
            "__range": f"{span}s",
            "__interval": f"{STEP_S}s",
            "__rate_interval": f"{RATE_S}s",
        }
        opened = {str(each["name"]): get_initial_value(each) for each in query.dashboard.variables}

        def replace_variable(found: re.Match[str]) -> str:
            name = found["braced"] or found["bare"]
            if name in self.chosen:
                value = self.chosen[name]
                return escape_value(value) if query.prometheus and not found["format"] else value
            assert name in opened or name in built_in, f"{query.name}: nobody declares ${name}"
            return {**built_in, **opened}[name]

        return _VARIABLE.sub(replace_variable, query.text)

    def run_query(self, query: PanelQuery) -> list[Any]:
        """Run it: Prometheus's series, Tempo's traces, or Tempo's series."""
        text = self.expand_variables(query)
        if query.prometheus:
            return self.query_prometheus(text, query.instant)
        if re.fullmatch("[0-9a-f]{32}", text):  # Grafana fetches what looks like an id
            return backend_queries.fetch_trace_spans(self.tempo, text)
        if is_metrics_query(text):
            fields = {"q": text, "start": int(self.start), "end": int(self.end) + 1}
            found = stack_queries.fetch_json(
                f"{self.tempo}/api/metrics/query_range", step=f"{STEP_S}s", **fields
            )
            series: list[Any] = found.get("series") or []
            return series
        return self.search_tempo(text, int(query.target.get("limit") or 20))

    def query_prometheus(self, text: str, instant: bool = True) -> list[Any]:
        """Series of a PromQL query, at the end of the range or over it."""
        if instant:
            return backend_queries.query_instant(self.prometheus, text, self.end)
        fields = {"query": text, "start": self.start, "end": self.end, "step": STEP_S}
        found: list[Any] = stack_queries.fetch_json(
            f"{self.prometheus}/api/v1/query_range", **fields
        )["data"]["result"]
        return found

    def search_tempo(self, text: str, limit: int = 100) -> list[Any]:
        """Traces that a TraceQL search finds in the range."""
        return stack_queries.search_traces(self.tempo, text, limit, self.start, self.end + 1)

    def query_exemplars(self, text: str) -> list[Any]:
        """Exemplars of the series in a PromQL query."""
        return stack_queries.query_exemplars(self.prometheus, text, self.start, self.end)


def is_metrics_query(text: str) -> bool:
    """Whether a TraceQL query gives series instead of traces."""
    return bool(re.search(r"\|\s*(rate|\w+_over_time|compare)\s*\(", text))


def get_initial_value(variable: Mapping[str, Any]) -> str:
    """The value that a variable has when the dashboard is opened."""
    value = variable.get("current", {}).get("value", "")
    if value == "$__all":
        return str(variable["allValue"])
    return str(value)


def escape_value(value: str) -> str:
    """As Grafana puts a chosen value into PromQL: a regular expression inside a string."""
    return re.sub(r"[\\^$*+?.()|{}\[\]]", r"\\\\\g<0>", value)
