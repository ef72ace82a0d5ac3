# SPDX-License-Identifier: Apache-2.0
"""Find an instance's engine steps in the stored spans of the requests that they computed. Pure.

perfetto_trace.py draws them. Requests that share a step have the same forward or encoder pass in their
stages; steps without a traced request's prompt or media items left no record, and are not here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from ttft_otel.model.names import keys, span_names
from ttft_otel.report.report_types import StoredSpan

PASSES: Final = {"encoder.compute": "encode", "prefill.compute": "forward"}
MAX_REQUESTS: Final = 16  # of a step, that are named


@dataclass(slots=True)
class StoredStep:
    """One pass of an instance, and what is known of it; times in Unix nanoseconds.

    span: one of the spans that show it. request_ids: of the traced requests in it, `requests` many.
    prompt_tokens: of those with one chunk. step_tokens: all of the step, 0 where no request tells.
    """

    word: str
    span: StoredSpan
    start_ns: int
    end_ns: int
    requests: int = 0
    prompt_tokens: int = 0
    step_tokens: int = 0
    request_ids: list[str] = field(default_factory=list)


def find_steps(spans: Iterable[StoredSpan]) -> list[StoredStep]:
    """The steps in `spans`, which may be of several traces, in the order of their begin."""
    known = {(span.trace_id, span.span_id): span for span in spans}
    passes: dict[tuple[str, str, str], list[StoredSpan]] = defaultdict(list)
    for span in known.values():
        if span.scope == span_names.SCOPE and span.name in PASSES and span.end_ns > span.start_ns:
            instance = str(span.resource.get("service.instance.id") or "")
            passes[span.service, instance, PASSES[span.name]].append(span)
    steps: list[StoredStep] = []
    for (_, _, word), found in passes.items():
        step: StoredStep | None = None
        for span in sorted(found, key=lambda each: each.start_ns):
            # Passes of one worker follow each other: those that overlap are one.
            if step is None or span.start_ns >= step.end_ns:
                step = StoredStep(word, span, span.start_ns, span.end_ns)
                steps.append(step)
            step.end_ns = max(step.end_ns, span.end_ns)
            _add_request(step, known.get((span.trace_id, span.parent_id)))
    return sorted(steps, key=lambda each: each.start_ns)


def _add_request(step: StoredStep, ttft: StoredSpan | None) -> None:
    """Count the request whose `ttft` span is above one that shows the step."""
    step.requests += 1
    if ttft is None or not ttft.is_ttft_span:
        return
    if len(step.request_ids) < MAX_REQUESTS:
        step.request_ids.append(str(ttft.attributes.get(keys.REQUEST_ID, "")))
    own, total = (
        ttft.attributes.get(name) for name in (keys.PREFILL_OWN_TOKENS, keys.PREFILL_STEP_TOKENS)
    )
    # Of several chunks only their sums are known.
    if (
        ttft.attributes.get(keys.PREFILL_CHUNKS) == 1
        and isinstance(own, int)
        and isinstance(total, int)
    ):
        step.prompt_tokens += own
        step.step_tokens = max(step.step_tokens, total)
