# SPDX-License-Identifier: Apache-2.0
"""Who held late requests while they waited: kinds of work, and the requests that held most of them longest.

Kinds are in RequestFacts; holders are links of the queues' spans, which otlp_decoder.py keeps as
an attribute. window_answer.py and commands/answers.py ask.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from ttft_otel.explain.window.request_facts import RequestFacts
from ttft_otel.model.names import span_names
from ttft_otel.report.breakdown_source import BreakdownSource
from ttft_otel.report.receive.otlp_decoder import StoredHolder, read_holders
from ttft_otel.report.report_types import StoredSpan

MAX_READ: Final = 50  # late requests whose spans are read for their holders, the longest first
MAX_HOLDERS: Final = 5


@dataclass(frozen=True, slots=True)
class HoldingWork:
    """What the engine did while the late requests waited."""

    kinds: Mapping[str, float]  #: shares of that time, together 1
    holders: tuple[StoredHolder, ...]  #: the largest are first
    requests: int  #: late requests whose spans were read for `holders`


def read_holding(opened: BreakdownSource, late: Sequence[RequestFacts]) -> HoldingWork | None:
    """Who held the late requests; None where their servers do not tell. Raises StoreError."""
    sums: dict[str, int] = {}
    for each in late:
        for kind, us in each.held.items():
            sums[kind] = sums.get(kind, 0) + us
    total = sum(sums.values())
    if not total:
        return None
    longest = sorted(late, key=lambda each: -sum(each.held.values()))[:MAX_READ]
    found: list[StoredHolder] = []
    for each in longest:
        trace = opened.find_trace(each.trace_id)
        # A client's trace may have many requests: only the queues of this one.
        spans = [span for span in (trace.spans if trace else ()) if span.parent_id in each.legs]
        # It was held once, in whichever of its legs.
        held = _join_holders(holder for span in spans for holder in list_holders(span))
        found += [replace(holder, delayed=1) for holder in held]
    kinds = {kind: us / total for kind, us in sorted(sums.items(), key=lambda part: -part[1])}
    return HoldingWork(kinds, _join_holders(found)[:MAX_HOLDERS], len(longest))


def list_holders(span: StoredSpan) -> list[StoredHolder]:
    """The holders that a queue's span names; [] for others, and for text that is not ours."""
    return read_holders(span.attributes) if span.scope == span_names.SCOPE else []


def _join_holders(found: Iterable[StoredHolder]) -> tuple[StoredHolder, ...]:
    """Each holder once, with the sum of its times, the longest first."""
    joined: dict[tuple[str, str, str], StoredHolder] = {}
    for each in found:
        key = (each.trace_id, each.request_id, each.kind)
        known = joined.get(key)
        joined[key] = (
            each
            if known is None
            else replace(
                known,
                us=known.us + each.us,
                tokens=max(known.tokens, each.tokens),
                delayed=known.delayed + 1,
            )
        )
    return tuple(sorted(joined.values(), key=lambda each: (-each.us, each.request_id)))
