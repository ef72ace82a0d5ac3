# SPDX-License-Identifier: Apache-2.0
"""The demo's report.json and report.html: stored traces joined with the client's measurements.

tests/golden/report.schema.json is the schema of report.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ttft_otel.model import stages
from ttft_otel.model.timing import to_ms
from ttft_otel.report.assemble.summary import (
    Summary,
    collect_recomputed,
    summarize,
    summarize_values,
)
from ttft_otel.report.report_types import Request
from ttft_otel.report.show import json_answers
from ttft_otel.report.store.database_reader import (
    MAX_REQUESTS,
    DatabaseReader,
    RequestFilter,
    StoredTrace,
    open_reader,
)


@dataclass(frozen=True, slots=True)
class ClientMeasurement:
    """One request as the client measured it; None where it did not measure. kind: for example "image"."""

    request_id: str
    kind: str = ""
    client_ttft_ms: float | None = None


@dataclass(frozen=True, slots=True)
class MeasuredRequest:
    """One stored request with its client's measurement."""

    request: Request
    client: ClientMeasurement


def read_measurements(rows: Iterable[Mapping[str, Any]]) -> list[ClientMeasurement]:
    """Read the client's list.

    rows: `{"request_id", "kind", "client_ttft_ms"}`, the last two optional; other keys are ignored.
    """
    return [
        ClientMeasurement(row["request_id"], row.get("kind") or "", row.get("client_ttft_ms"))
        for row in rows
    ]


def join_measurements(
    db_reader: DatabaseReader, client: Sequence[ClientMeasurement]
) -> tuple[list[MeasuredRequest], list[str]]:
    """Pair the client's requests, in their order, with stored ones.

    client: the measurements; without any, all stored requests are taken, oldest first.
    Returns the pairs, and the IDs of requests that are not stored.
    """
    if not client:
        # Oldest first, as a client would have listed them.
        stored = reversed(db_reader.list_latest(RequestFilter(last=MAX_REQUESTS)))
        return [
            MeasuredRequest(request, ClientMeasurement(request.request_id)) for request in stored
        ], []
    pairs: list[MeasuredRequest] = []
    missing: list[str] = []
    for measurement in client:
        request = db_reader.find_request(measurement.request_id)
        if request:
            pairs.append(MeasuredRequest(request, measurement))
        else:
            # The ID is listed, not dropped: a request without a trace is a finding.
            missing.append(measurement.request_id)
    return pairs, missing


def build_report_json(
    pairs: Sequence[MeasuredRequest], missing: Sequence[str] = ()
) -> dict[str, Any]:
    """The content of report.json. missing: IDs of requests that are not stored. Pure."""
    # Not a set: the order of the client's list is kept.
    kinds = dict.fromkeys(pair.client.kind for pair in pairs if pair.client.kind)
    return {
        "requests": [_describe_pair(pair) for pair in pairs],
        "summary": {
            **_summarize_pairs(pairs),
            "missing": list(missing),
            "by_kind": {
                kind: _summarize_pairs([pair for pair in pairs if pair.client.kind == kind])
                for kind in kinds
            },
        },
    }


def build_report_html(
    pairs: Sequence[MeasuredRequest], traces: Mapping[str, StoredTrace], title: str
) -> str:
    """The content of report.html, a self-contained file. Needs the extra `serve` (jinja2).

    traces: by trace ID; pairs without a trace are left out.
    """
    entries = [
        (pair.request, traces[pair.request.trace_id], pair.client.kind, pair.client.client_ttft_ms)
        for pair in pairs
        if pair.request.trace_id in traces
    ]
    return render_document(title, summarize([pair.request for pair in pairs]), entries)


def render_document(
    title: str, summary: Summary, entries: Sequence[tuple[Request, StoredTrace, str, float | None]]
) -> str:
    """A self-contained HTML file with a summary and many traces.

    entries: (request, its trace, kind of request, TTFT measured by the client in ms or None).
    """
    # Imported here, because report.json needs no jinja2.
    from markupsafe import Markup

    from ttft_otel.report.show import pages

    static = pages.PACKAGE_FOLDER / "static"
    style_sheet = (static / "style.css").read_text("utf-8") + stages.build_style_sheet()
    return pages.render_template(
        "document.html",
        title=title,
        summary=summary,
        entries=entries,
        longest=max((each.ttft_us for each, *_ in entries), default=0),
        # Safe without escaping: our own files, no data in them.
        sheet=Markup(style_sheet),
        script=Markup((static / "page.js").read_text("utf-8")),
        made=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )


def write_report_files(
    database: Path, client: Sequence[ClientMeasurement], folder: Path, title: str = "ttft-otel"
) -> dict[str, Any]:
    """Write report.json and report.html into `folder`, which is created; returns report.json."""
    with open_reader(database) as db_reader:
        pairs, missing = join_measurements(db_reader, client)
        # Requests of one trace share it: each is read once.
        ids = dict.fromkeys(pair.request.trace_id for pair in pairs)
        # One reader for all: the snapshot does not change between the queries.
        traces = {each: trace for each in ids if (trace := db_reader.find_trace(each))}
    report = build_report_json(pairs, missing)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, indent=2, ensure_ascii=False)
    (folder / "report.json").write_text(text + "\n", "utf-8")
    (folder / "report.html").write_text(build_report_html(pairs, traces, title), "utf-8")
    return report


def _describe_pair(pair: MeasuredRequest) -> dict[str, Any]:
    request = pair.request
    # The router's share is the request's own sums.
    roles = [role for role in request.roles if role != "router"]
    legs = {
        role: json_answers.describe_leg(found)
        for role in roles
        if (found := request.find_leg(role))
    }
    return {
        "request_id": pair.client.request_id or request.request_id,
        "trace_id": request.trace_id,
        "kind": pair.client.kind or None,
        "client_ttft_ms": pair.client.client_ttft_ms,
        "ttft_ms": to_ms(request.ttft_us),
        "unattributed_ms": to_ms(request.unattributed_us),
        "stages": {name: to_ms(value) for name, value in request.stages.items()},
        "before": json_answers.describe_before(request),
        "recomputed": json_answers.list_recomputed(collect_recomputed([request])),
        "legs": legs,
        # `legs` has only the slowest encoder; a request with several items has many.
        "encode_all": [
            json_answers.describe_leg(each) for each in request.legs if each.role == "encode"
        ],
        "error": request.error or None,
        "pending": request.pending,
        "closed": request.closed,
    }


def _summarize_pairs(pairs: Sequence[MeasuredRequest]) -> dict[str, Any]:
    """Percentiles of the servers' TTFT, of the client's, and of the client's minus the servers'."""
    # The same rule as in summary.py, or the two tables would be over different requests.
    complete = [pair for pair in pairs if not pair.request.error and not pair.request.pending]
    both = [
        (pair.client.client_ttft_ms, pair.request.ttft_us)
        for pair in complete
        if pair.client.client_ttft_ms is not None
    ]
    # Microseconds, as stages are, so that the difference is exact.
    client = [round(theirs * 1000) for theirs, _ in both]
    gap = [round(theirs * 1000) - ours for theirs, ours in both]
    return {
        **json_answers.describe_summary(summarize([pair.request for pair in pairs])),
        "client_ttft": _summarize_or_none(client),
        "client_minus_ttft": _summarize_or_none(gap),
    }


def _summarize_or_none(values: Sequence[int]) -> dict[str, Any] | None:
    if not values:
        return None
    return {
        key: value for key, value in asdict(summarize_values("", values)).items() if key != "name"
    }
