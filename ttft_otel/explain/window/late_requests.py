# SPDX-License-Identifier: Apache-2.0
"""Choose whom to compare: the late requests of a window with its typical ones, a request with its like. Pure.

Input: RequestFacts of a window. cause_findings.py compares the two sides. Windows that cannot tell are
refused here, with the sentence that says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from ttft_otel.explain.window.request_facts import (
    CannotTellError,
    RequestFacts,
    count_requests,
    describe_request,
)
from ttft_otel.model.statistics import compute_weighted_quantiles
from ttft_otel.report.window_sample import LATE_SHARE, MIN_LATE

MIN_WINDOW: Final = 20  # requests; with fewer there is no p99, and no usual length of a stage
MIN_LIKE: Final = 20  # like requests that one request is compared with
UNUSUAL_RANK: Final = 0.9  # of like requests are faster than one that is worth an explanation
# What like requests have in common, the closest first: by the detail of describe_request().
LIKENESS: Final = (
    (3, "same kind, prompt length and cached share"),
    (2, "same kind and prompt length"),
    (1, "same kind"),
)
MAX_UNCLOSED_SHARE: Final = 0.01  # of requests whose stages do not add up


@dataclass(frozen=True, slots=True)
class ComparedRequests:
    """Who is explained, and by comparison with whom."""

    late: Sequence[RequestFacts]
    typical: Sequence[RequestFacts]
    window: Sequence[RequestFacts]
    #: In words, what the typical ones have in common with the late ones; "" of a window.
    likeness: str = ""
    #: Of a single request, the share of like requests that were faster; 1.0 of a window.
    rank: float = 1.0
    #: Of a single request, all of its time, itself among them; () of a window, whose own are all.
    around: Sequence[RequestFacts] = ()

    @property
    def everyone(self) -> Sequence[RequestFacts]:
        """The requests among which causes are looked for."""
        return self.around or self.window


def split_window(window: Sequence[RequestFacts], slo_us: int = 0) -> ComparedRequests:
    """The late requests, and the middle half of the others. Raises CannotTellError.

    slo_us: from which TTFT on a request is late; 0: the slowest hundredth, at least MIN_LATE.
    """
    check_window(window)
    ordered = sorted(window, key=lambda each: (each.ttft_us, each.trace_id))
    whole = count_requests(window)
    if slo_us:
        late = [each for each in ordered if each.ttft_us > slo_us]
        if not late:
            raise CannotTellError(
                f"none of {whole} requests took longer than {slo_us / 1000:g} ms; "
                "leave --slo out to explain the slowest hundredth"
            )
        if len(late) < MIN_LATE:
            names = ", ".join(each.request_id for each in late)
            raise CannotTellError(
                f"only {len(late)} of {whole} requests were late, {MIN_LATE} are needed to find what "
                f"they have in common; explain each by itself, with --request: {names}"
            )
    else:
        late = _take_slowest(ordered, max(MIN_LATE, round(LATE_SHARE * whole)))
    others = ordered[: len(ordered) - len(late)]
    if len(others) < MIN_WINDOW // 2:
        raise CannotTellError(
            f"{count_requests(late)} of {whole} requests were late: too few others to say what is "
            "usual. Compare with a better time: ttft-otel diff"
        )
    return ComparedRequests(late, take_middle(others), window)


def _take_slowest(ordered: list[RequestFacts], count: float) -> list[RequestFacts]:
    """The last ones of these, as many as stand for `count` requests."""
    first = len(ordered)
    while first and count > 0.5:
        first -= 1
        count -= ordered[first].weight
    return ordered[first:]


def choose_like(request: RequestFacts, window: Sequence[RequestFacts]) -> ComparedRequests:
    """One request, and the middle half of the most like requests. Raises CannotTellError."""
    # Not by its ID alone: some clients send the same one with every request.
    own = (request.trace_id, request.request_id, request.start_ns)
    others = [each for each in window if (each.trace_id, each.request_id, each.start_ns) != own]
    check_window([request, *others])
    for detail, words in LIKENESS:
        label = describe_request(request, detail)
        like = [each for each in others if describe_request(each, detail) == label]
        if len(like) >= MIN_LIKE:
            return replace(_compare_like(request, like, words), around=[request, *others])
    raise CannotTellError(
        f"only {len(like)} other requests of its kind ({request.kind}) are stored, {MIN_LIKE} are "
        f"needed to say what is usual; its stages: ttft-otel report --request {request.request_id}"
    )


def _compare_like(request: RequestFacts, like: list[RequestFacts], words: str) -> ComparedRequests:
    """One request and its like, which have `words` in common."""
    like.sort(key=lambda each: (each.ttft_us, each.trace_id))
    faster = sum(each.ttft_us < request.ttft_us for each in like)
    return ComparedRequests([request], take_middle(like), like, words, faster / len(like))


def take_middle(ordered: Sequence[RequestFacts]) -> Sequence[RequestFacts]:
    """The middle half of requests that are sorted by TTFT."""
    return ordered[len(ordered) // 4 : len(ordered) - len(ordered) // 4]


def check_window(window: Sequence[RequestFacts]) -> None:
    """Raise CannotTellError for a window with too few requests, or sums that are wrong."""
    if len(window) < MIN_WINDOW:
        raise CannotTellError(
            f"{len(window)} requests with a first token, {MIN_WINDOW} are needed to say what is usual; "
            "take a longer window"
        )
    unclosed = [each for each in window if not each.closed]
    if len(unclosed) > MAX_UNCLOSED_SHARE * len(window):
        raise CannotTellError(
            f"in {len(unclosed)} of {len(window)} requests the stages do not add up to the TTFT, for "
            f"example in {unclosed[0].request_id}: an explanation would be wrong. "
            "`ttft-otel doctor --url` says which measurement is missing"
        )


def compute_ttft(window: Sequence[RequestFacts], share: float) -> float:
    """A percentile of the window's TTFT, microseconds."""
    (found,) = compute_weighted_quantiles(
        [each.ttft_us for each in window], [each.weight for each in window], (share,)
    )
    return found
