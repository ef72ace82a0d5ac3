# SPDX-License-Identifier: Apache-2.0
"""The demo's report.json and report.html: stored traces joined with what the client measured.

scripts/demo gives the database and the client's list; people and other programs read the files.
tests/golden/report.schema.json is the shape of report.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ttft_otel.original import ms
from ttft_otel.report import answer
from ttft_otel.report.query import MOST, Reader, Trace, Wanted, reader
from ttft_otel.report.shape import Request
from ttft_otel.report.summary import line, summarize


@dataclass(frozen=True, slots=True)
class Measured:
    """What the client knows of one request; None where it did not measure."""

    request_id: str
    kind: str = ""
    client_ttft_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Pair:
    """One request from both sides."""

    request: Request
    client: Measured


def measured(rows: Iterable[Mapping[str, Any]]) -> list[Measured]:
    """Read the client's list, `[{"request_id", "kind", "client_ttft_ms"}]`; further keys pass by."""
    return [
        Measured(row["request_id"], row.get("kind") or "", row.get("client_ttft_ms"))
        for row in rows
    ]


def join(found: Reader, client: Sequence[Measured]) -> tuple[list[Pair], list[str]]:
    """Pair the client's requests, in its order, with stored ones; also the ids that have none.

    Without a client's list: all that is stored, oldest first.
    """
    if not client:
        stored = reversed(found.latest(Wanted(last=MOST)))
        return [Pair(request, Measured(request.request_id)) for request in stored], []
    pairs: list[Pair] = []
    missing: list[str] = []
    for one in client:
        request = found.request(one.request_id)
        if request:
            pairs.append(Pair(request, one))
        else:
            missing.append(one.request_id)
    return pairs, missing


def build(pairs: Sequence[Pair], missing: Sequence[str] = ()) -> dict[str, Any]:
    """Make report.json. Pure."""
    kinds = dict.fromkeys(pair.client.kind for pair in pairs if pair.client.kind)
    return {
        "requests": [_request(pair) for pair in pairs],
        "summary": {
            **_summary(pairs),
            "missing": list(missing),
            "by_kind": {
                kind: _summary([pair for pair in pairs if pair.client.kind == kind])
                for kind in kinds
            },
        },
    }


def html(pairs: Sequence[Pair], traces: Mapping[str, Trace], title: str) -> str:
    """Make report.html, one file that loads nothing. Needs the extra `serve` (jinja2)."""
    from ttft_otel.report import pages

    entries = [
        (pair.request, traces[pair.request.trace_id], pair.client.kind, pair.client.client_ttft_ms)
        for pair in pairs
        if pair.request.trace_id in traces
    ]
    return pages.document(title, summarize([pair.request for pair in pairs]), entries)


def write(
    database: Path, client: Sequence[Measured], folder: Path, title: str = "ttft-otel"
) -> dict[str, Any]:
    """Write report.json and report.html into a folder; gives report.json's content back."""
    with reader(database) as found:
        pairs, missing = join(found, client)
        ids = dict.fromkeys(pair.request.trace_id for pair in pairs)
        traces = {each: trace for each in ids if (trace := found.trace(each))}
    report = build(pairs, missing)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, indent=2, ensure_ascii=False)
    (folder / "report.json").write_text(text + "\n", "utf-8")
    (folder / "report.html").write_text(html(pairs, traces, title), "utf-8")
    return report


def _request(pair: Pair) -> dict[str, Any]:
    one = pair.request
    roles = [role for role in one.roles if role != "router"]
    legs = {role: answer.leg(found) for role in roles if (found := one.leg(role))}
    return {
        "request_id": pair.client.request_id or one.request_id,
        "trace_id": one.trace_id,
        "kind": pair.client.kind or None,
        "client_ttft_ms": pair.client.client_ttft_ms,
        "ttft_ms": ms(one.ttft_us),
        "unattributed_ms": ms(one.unattributed_us),
        "stages": {name: ms(value) for name, value in one.stages.items()},
        "legs": legs,
        "encode_all": [answer.leg(each) for each in one.legs if each.role == "encode"],
        "error": one.error or None,
        "pending": one.pending,
        "closed": one.closed,
    }


def _summary(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Percentiles of what the servers said, of what the client saw, and of their difference."""
    good = [pair for pair in pairs if not pair.request.error and not pair.request.pending]
    both = [
        (pair.client.client_ttft_ms, pair.request.ttft_us)
        for pair in good
        if pair.client.client_ttft_ms is not None
    ]
    client = [round(theirs * 1000) for theirs, _ in both]
    gap = [round(theirs * 1000) - ours for theirs, ours in both]
    return {
        **answer.summary(summarize([pair.request for pair in pairs])),
        "client_ttft": _line(client),
        "client_minus_ttft": _line(gap),
    }


def _line(values: Sequence[int]) -> dict[str, Any] | None:
    if not values:
        return None
    return {key: value for key, value in asdict(line("", values)).items() if key != "name"}
