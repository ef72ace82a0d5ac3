# SPDX-License-Identifier: Apache-2.0
"""Media items that were encoded twice, by instance; shown by pages, terminal and JSON alike.

A server that takes encodings from other instances counts on its `ttft` span the items that it encoded
although an encoder had encoded them for the same request (`ttft.ec.recomputed_items`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from ttft_otel.report.report_types import Request

REMEDY_PAGE: Final = "docs/router.md#encoder-cache-parameters"
MAX_NAMED_INSTANCES: Final = 4  # instances named in the sentence, those with the most items


@dataclass(frozen=True, slots=True)
class RecomputedCount:
    """Number of media items that one instance encoded again.

    instance: its service.instance.id, "" when unknown.
    """

    role: str
    instance: str
    items: int


def collect_recomputed(requests: Iterable[Request]) -> tuple[RecomputedCount, ...]:
    """Add up the items of `requests` by instance, the most items first; () without any."""
    items: Counter[tuple[str, str]] = Counter()
    for request in requests:
        for leg in request.legs:
            if leg.recomputed_items:
                items[leg.role, leg.instance] += leg.recomputed_items
    return tuple(RecomputedCount(*place, count) for place, count in items.most_common())


def describe_recomputed(counts: Sequence[RecomputedCount]) -> str:
    """`counts` in one sentence, with the page that has the remedy; "" when there are none."""
    if not counts:
        return ""
    total = sum(each.items for each in counts)
    instances = [
        f"{each.role} ({each.instance})" if each.instance else each.role
        for each in counts[:MAX_NAMED_INSTANCES]
    ]
    if len(counts) > MAX_NAMED_INSTANCES:
        instances.append(f"{len(counts) - MAX_NAMED_INSTANCES} more")
    items = "media item was" if total == 1 else "media items were"
    them = "it" if total == 1 else "them"
    return (
        f"{total} {items} encoded again on {', '.join(instances)} although an encoder had encoded {them}: "
        f"see {REMEDY_PAGE}"
    )
