# SPDX-License-Identifier: Apache-2.0
"""Put the requests of two windows into strata of like requests, so that like is compared with like. Pure.

Input: RequestFacts of windows A and B. stage_difference.py compares the windows stratum by stratum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Final

from ttft_otel.explain.window.request_facts import RequestFacts

MIN_PER_WINDOW: Final = 5  # requests of each window in a stratum; with fewer a coarser one is used
UNMATCHED: Final = "unmatched"  # the stratum of requests whose kind a window has too few of


def assign_strata(
    a: Sequence[RequestFacts], b: Sequence[RequestFacts]
) -> tuple[list[Hashable], list[Hashable]]:
    """The stratum of each request of `a` and of `b`, in their order.

    A stratum is a model, a kind of request, a size of prompt (to a factor of two) and a share of cached
    tokens. Where either window has too few of one, the cached share is left out, then the size; what is
    still left joins the stratum of its model and kind that is nearest in size. Windows without a common
    model are two models compared, or one under two names: then it does not count.
    """
    by_model = bool({each.model for each in a} & {each.model for each in b})
    found_a: list[Hashable] = [UNMATCHED] * len(a)
    found_b: list[Hashable] = [UNMATCHED] * len(b)
    left_a, left_b = list(range(len(a))), list(range(len(b)))
    # From fine to coarse: whoever finds enough of its like early is compared most closely.
    for detail in (3, 2, 1):
        labels_a = {index: describe_request(a[index], detail, by_model) for index in left_a}
        labels_b = {index: describe_request(b[index], detail, by_model) for index in left_b}
        count_a, count_b = Counter(labels_a.values()), Counter(labels_b.values())
        enough = {
            label
            for label in count_a
            # Both windows need enough: a mean of two or three requests would pass for a change.
            if min(count_a[label], count_b.get(label, 0)) >= MIN_PER_WINDOW
        }
        for labels, found, left in ((labels_a, found_a, left_a), (labels_b, found_b, left_b)):
            for index, label in labels.items():
                if label in enough:
                    found[index] = label
                    left.remove(index)
    # Those of A suffice: a stratum is used only if both windows have it.
    used = {label for label in found_a if isinstance(label, tuple)}
    for window, found, left in ((a, found_a, left_a), (b, found_b, left_b)):
        for index in left:
            found[index] = find_nearest(window[index], used, by_model)
    return found_a, found_b


def find_nearest(
    facts: RequestFacts, used: set[tuple[Hashable, ...]], by_model: bool = False
) -> Hashable:
    """The stratum of `used` of the same kind that is nearest in size; UNMATCHED without one."""
    size = facts.tokens.bit_length()
    (kind,) = describe_request(facts, 1, by_model)
    distances = {
        label: abs(size - label[1]) if len(label) > 1 and isinstance(label[1], int) else 0
        for label in used
        if label[0] == kind
    }
    return min(distances, key=lambda label: (distances[label], str(label)), default=UNMATCHED)


def describe_request(
    facts: RequestFacts, detail: int, by_model: bool = False
) -> tuple[Hashable, ...]:
    """The label of a request's stratum.

    detail: 1 for the kind alone, 2 with the size of the prompt, 3 with the share of cached tokens.
    by_model: kinds of two models are two kinds.
    """
    kind = (facts.kind, facts.model) if by_model else facts.kind
    share = facts.cached / facts.tokens if facts.tokens else 0.0
    # Thirds: a prompt is mostly computed, partly, or mostly found in the cache.
    return (kind, facts.tokens.bit_length(), min(int(share * 3), 2))[:detail]
