# SPDX-License-Identifier: Apache-2.0
"""Engine core: find out for each media item of a request where its encoding came from.

tracer.py opens the list when the connector is first asked, or the first chunk scheduled, and passes the
items that a step encodes. The result is EngineDetails.media (layout in
media_items.py), which is empty for a request without media items.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from ttft_otel.hooks import ec_fields
from ttft_otel.tracing import media_items
from ttft_otel.tracing.engine_timeline import EngineTimeline
from ttft_otel.tracing.media_items import (
    BIT_ANNOUNCED,
    BIT_AWAITED,
    BIT_CACHED,
    HEADER_LENGTH,
    SOURCE_ALLOCATED,
    SOURCE_ENCODED,
    SOURCE_LOCAL,
    SOURCE_MASK,
    SOURCE_REMOTE,
    SOURCE_SKIPPED,
)


def open_items(
    timeline: EngineTimeline, request: Any, connector: Any, is_seen: bool, available: bool
) -> list[int]:
    """Create the list of a request: which items its ec_transfer_params name, and which are cached here.

    Called once, right after the connector was first asked about the request: what is in its cache then
    was not fetched for this request.
    connector: None without one. is_seen: the hook at its allocations is there. available: what it answered.
    """
    features = request.mm_features
    # One list of integers, not objects: it travels in the timeline's JSON.
    media = [0] * (HEADER_LENGTH + len(features))
    timeline.open_details().media = media
    # `added` is 0 where the hook at the engine core's input is missing: the timeline was then created
    # after schedule(), too late for this request's first allocations.
    if connector is None or not (is_seen and timeline.added):
        media[media_items.INDEX_UNMATCHED] = media_items.SOURCES_UNKNOWN
        return media
    params = ec_fields.get_announced_params(request)
    if params:
        _mark_named(media, features, params)
    # A producer's cache says nothing: it holds what it encoded itself, for others.
    is_cached = ec_fields.find_cache_test(connector)
    if is_cached is not None and ec_fields.is_consumer(connector):
        _mark_cached(media, features, is_cached, available)
    return media


def _mark_named(media: list[int], features: Any, params: dict[str, Any]) -> None:
    names, places = ec_fields.list_announced_names(params)
    matched: set[str] = set()
    for at, feature in enumerate(features, HEADER_LENGTH):
        # The key of vLLM's encoder cache, by which both sides of a transfer name an item.
        if feature.identifier in names:
            media[at] |= BIT_ANNOUNCED
            matched.add(feature.identifier)
    for place in places:
        if place < len(features):
            media[HEADER_LENGTH + place] |= BIT_ANNOUNCED
    media[media_items.INDEX_UNMATCHED] = len(names) - len(matched)


def _mark_cached(
    media: list[int], features: Any, is_cached: Callable[[str], bool], available: bool
) -> None:
    seen: set[str] = set()  # of equal items only the first one waits for the transfer
    for at, feature in enumerate(features, HEADER_LENGTH):
        if is_cached(feature.identifier):
            media[at] |= BIT_CACHED
        elif media[at] & BIT_ANNOUNCED and not available and feature.identifier not in seen:
            media[at] |= BIT_AWAITED
        seen.add(feature.identifier)


def is_named(timeline: EngineTimeline) -> bool:
    """Whether ec_transfer_params name an item of this request: an encoder has worked for it."""
    return any(code & BIT_ANNOUNCED for code in timeline.read_details().media[HEADER_LENGTH:])


def skip_cached(timeline: EngineTimeline, features: Any, computed: int) -> None:
    """Mark the items that need no encoding, because the prefix cache covers all their tokens.

    computed: number of prompt tokens computed before the first chunk.
    """
    media = timeline.open_details().media
    for at, feature in enumerate(features, HEADER_LENGTH):
        position = feature.mm_position
        # All of its tokens: an item that is cached in part is encoded again as a whole.
        is_covered = position.offset + position.length <= computed
        if is_covered and not media[at] & SOURCE_MASK:
            media[at] |= SOURCE_SKIPPED


def settle_items(
    timeline: EngineTimeline,
    request: Any,
    connector: Any,
    encoded: Collection[int],
    step_items: int,
) -> None:
    """Decide the sources of the items that were allocated for a step of this request.

    encoded: indices of its items that the step encodes; allocated items that are not among them are
        loaded by the connector. step_items: items of all requests that the step encodes.
    The first source of an item stays, unless it is encoded here later, for example after a preemption.
    """
    media = timeline.open_details().media
    media[media_items.INDEX_OWN] += len(encoded)
    media[media_items.INDEX_STEP] += step_items
    for index in encoded:
        # The other bits stay: an announced item that is encoded here counts as recomputed.
        media[HEADER_LENGTH + index] = media[HEADER_LENGTH + index] & ~SOURCE_MASK | SOURCE_ENCODED
    for at in range(HEADER_LENGTH, len(media)):
        if media[at] & SOURCE_MASK != SOURCE_ALLOCATED:
            continue
        source = SOURCE_LOCAL if media[at] & BIT_CACHED else SOURCE_REMOTE
        media[at] += source - SOURCE_ALLOCATED
        if source == SOURCE_REMOTE:
            name = request.mm_features[at - HEADER_LENGTH].identifier
            media[media_items.INDEX_BYTES] += ec_fields.find_item_bytes(connector, request, name)
