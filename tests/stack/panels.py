# SPDX-License-Identifier: Apache-2.0
"""Every query of every panel, read from grafana/dashboards and asked as Grafana would ask it.

Variables take the values that a person who opens the dashboard has; test_panels.py gives the time
range and where Prometheus and Tempo are, or a Grafana, which then asks them itself.
"""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ttft_otel.lab.stack.parts import DASHBOARDS

STEP_S: Final = 15
TIMEOUT_S: Final = 30
_VARIABLE: Final = re.compile(r"\$(?:\{(\w+)(?::(\w+))?\}|(\w+))|\[\[(\w+)\]\]")


@dataclass(frozen=True, slots=True)
class Dashboard:
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

    def panels(self) -> Iterator[Mapping[str, Any]]:
        """All panels, those of collapsed rows too; no rows."""
        for panel in self.model["panels"]:
            yield from panel.get("panels", ())
            if panel["type"] != "row":
                yield panel


@dataclass(frozen=True, slots=True)
class Query:
    """One target of one panel."""

    dashboard: Dashboard
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


def dashboards() -> list[Dashboard]:
    """All that are committed."""
    return [
        Dashboard(path, json.loads(path.read_text("utf-8")))
        for path in sorted(DASHBOARDS.glob("*.json"))
    ]


def queries() -> list[Query]:
    """All queries of all dashboards."""
    return [
        Query(dashboard, panel, target)
        for dashboard in dashboards()
        for panel in dashboard.panels()
        for target in panel.get("targets", ())
    ]


@dataclass(frozen=True, slots=True)
class Asker:
    """Asks over [start, end] (Unix seconds); `chosen` overrides variables by name."""

    prometheus: str
    tempo: str
    start: float
    end: float
    chosen: Mapping[str, str] = field(default_factory=dict)

    def values(self, dashboard: Dashboard) -> dict[str, str]:
        """Each variable's value: what is chosen, else what the dashboard opens with."""
        span = round(self.end - self.start)
        built_in = {
            "__range": f"{span}s",
            "__range_s": f"{span}",
            "__range_ms": f"{span * 1000}",
            "__interval": f"{STEP_S}s",
            "__interval_ms": f"{STEP_S * 1000}",
            "__rate_interval": f"{4 * STEP_S}s",
        }
        own = {str(each["name"]): opened(each) for each in dashboard.variables}
        return {**built_in, **own, **self.chosen}

    def written(self, query: Query) -> str:
        """The query's text, every variable replaced."""
        values = self.values(query.dashboard)

        def put(found: re.Match[str]) -> str:
            name = found[1] or found[3] or found[4]
            if name not in values:
                raise AssertionError(f"{query.name}: ${name} is no variable of the dashboard")
            return values[name]

        return _VARIABLE.sub(put, query.text)

    def ask(self, query: Query) -> Any:
        """Run it: Prometheus's result, Tempo's traces, or Tempo's series."""
        text = self.written(query)
        if query.prometheus:
            return self.promql(text, query.instant)
        return self.traceql(text, int(query.target.get("limit") or 20))

    def promql(self, text: str, instant: bool = True) -> list[Any]:
        """Series of a PromQL query, at the end of the range or over it."""
        if instant:
            fields: dict[str, Any] = {"query": text, "time": self.end}
            found = get(f"{self.prometheus}/api/v1/query", fields)
        else:
            fields = {"query": text, "start": self.start, "end": self.end, "step": STEP_S}
            found = get(f"{self.prometheus}/api/v1/query_range", fields)
        series: list[Any] = found["data"]["result"]
        return series

    def exemplars(self, text: str) -> list[Any]:
        """Exemplars of the series in a PromQL query."""
        fields = {"query": text, "start": self.start, "end": self.end}
        found: list[Any] = get(f"{self.prometheus}/api/v1/query_exemplars", fields)["data"]
        return found

    def traceql(self, text: str, limit: int = 20) -> list[Any]:
        """Traces of a search, or series of a metrics query."""
        fields: dict[str, Any] = {"q": text, "start": int(self.start), "end": int(self.end) + 1}
        if re.search(r"\|\s*(rate|\w+_over_time|compare|histogram)\b", text):
            fields["step"] = f"{STEP_S}s"
            series: list[Any] = get(f"{self.tempo}/api/metrics/query_range", fields)["series"]
            return series
        fields |= {"limit": limit, "spss": 10}
        traces: list[Any] = get(f"{self.tempo}/api/search", fields)["traces"]
        return traces

    def trace(self, trace_id: str) -> list[Any]:
        """The spans of a trace; none when Tempo does not know it."""
        try:
            found = get(f"{self.tempo}/api/traces/{trace_id}", {})
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return []
            raise
        return [
            span
            for batch in found["batches"]
            for scope in batch["scopeSpans"]
            for span in scope["spans"]
        ]


def opened(variable: Mapping[str, Any]) -> str:
    """The value that a variable has when the dashboard is opened, as Prometheus's matchers want it."""
    value = variable.get("current", {}).get("value", "")
    if isinstance(value, list):
        value = value[0] if len(value) == 1 else f"({'|'.join(value)})"
    if value == "$__all" or (not value and variable.get("includeAll")):
        return str(variable.get("allValue") or ".*")
    return str(value or variable.get("query", ""))


def get(url: str, fields: Mapping[str, Any]) -> Any:
    """JSON of a GET; an error's text says what was asked."""
    asked = f"{url}?{urllib.parse.urlencode(fields)}"
    request = urllib.request.Request(asked, headers={"accept": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code != 404:
            error.add_note(f"{asked}\n{error.read().decode(errors='replace')}")
        raise
