# SPDX-License-Identifier: Apache-2.0
"""Where the encodings of a request's media items came from: layout and sums of EngineTimeline.media.

transfers.py fills the list in the engine core, carrier.py transports it, recorder.py puts the
counts onto spans and into Server-Timing. The list is empty for a request without media items, which
then costs nothing; else it has HEADER_LENGTH numbers and one code per item, in the prompt's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from ttft_otel.model.names import keys
from ttft_otel.model.record import Attributes
from ttft_otel.model.timing import EncoderCacheCounts

# Indices of the leading numbers. OWN: items encoded for this request (encoded again after a
# preemption: counted again). STEP: all items encoded in those steps. BYTES: fetched from other
# instances. UNMATCHED: items named in the request's ec_transfer_params that it does not have;
# SOURCES_UNKNOWN there means that no source is known (no connector, or a hook is missing).
INDEX_OWN, INDEX_STEP, INDEX_BYTES, INDEX_UNMATCHED, HEADER_LENGTH = range(5)
SOURCES_UNKNOWN: Final = -1

# The source, in the lowest bits of a code. ALLOCATED is replaced within the same schedule().
SOURCE_UNSEEN: Final = 0  # never allocated for it: in the encoder cache already, or not reached yet
SOURCE_SKIPPED: Final = 1  # its tokens were in the prefix cache: its encoding was not needed
SOURCE_LOCAL: Final = 2  # loaded from a cache of this instance
SOURCE_REMOTE: Final = 3  # loaded after it was fetched from elsewhere
SOURCE_ENCODED: Final = 4  # encoded here, at least once
SOURCE_ALLOCATED: Final = 5  # allocated for it, source not decided yet
SOURCE_MASK: Final = 7
BIT_ANNOUNCED: Final = 8  # the request's ec_transfer_params name it: an encoder has encoded it
BIT_CACHED: Final = 16  # in the connector's local cache when this request was first checked
BIT_AWAITED: Final = 32  # not there then, and the request had to wait: it is being fetched


class ItemCounts(NamedTuple):
    """A request's media items by the source of their encodings; docs/stages.md explains the terms.

    cached: items that were not encoded here, for whatever reason.
    remote, recomputed: None on an instance that takes no encodings from other instances.
    remote, recomputed, local: None where the sources are unknown.
    bytes: size of what was fetched from other instances.
    """

    items: int
    cached: int
    remote: int | None
    local: int | None
    recomputed: int | None
    bytes: int


def count_items(media: Sequence[int], complete: bool, encoded_before: bool) -> ItemCounts:
    """Add up a filled EngineTimeline.media.

    media: the list, at least HEADER_LENGTH long.
    complete: the whole prompt was scheduled. Items that were never allocated were then found in a
        cache: fetched for another request, if this one waited for them too, else local.
    encoded_before: the router's header says that an encoder encoded items of this request. Used only
        where the request's ec_transfer_params name no item, since those are exact per item.
    """
    codes = media[HEADER_LENGTH:]
    sources = [code & SOURCE_MASK for code in codes]
    encoded = sources.count(SOURCE_ENCODED)
    cached = len(codes) - encoded
    if media[INDEX_UNMATCHED] == SOURCES_UNKNOWN:
        return ItemCounts(len(codes), cached, None, None, None, 0)
    remote, local = sources.count(SOURCE_REMOTE), sources.count(SOURCE_LOCAL)
    if complete:
        shared = sum(
            code & (BIT_AWAITED | SOURCE_MASK) == BIT_AWAITED | SOURCE_UNSEEN for code in codes
        )
        remote += shared
        local += sources.count(SOURCE_UNSEEN) - shared
    announced_encoded = sum(
        code & (BIT_ANNOUNCED | SOURCE_MASK) == BIT_ANNOUNCED | SOURCE_ENCODED for code in codes
    )
    unannounced_encoded = encoded - announced_encoded
    # An unmatched name may belong to any item: each can explain one item that was encoded here.
    if media[INDEX_UNMATCHED] or any(code & BIT_ANNOUNCED for code in codes):
        recomputed = announced_encoded + min(unannounced_encoded, media[INDEX_UNMATCHED])
    else:
        recomputed = unannounced_encoded if encoded_before else 0
    return ItemCounts(len(codes), cached, remote, local, recomputed, media[INDEX_BYTES])


def list_item_attributes(counts: ItemCounts | None, connector: str) -> Attributes:
    """Span attributes of a request's media items.

    connector: name of the encoder-cache connector; without one ("") only the cached items count.
    """
    if counts is None:
        return {}
    attributes: Attributes = {keys.ENCODER_CACHED_ITEMS: counts.cached}
    if not connector:
        return attributes
    attributes[keys.EC_CONNECTOR] = connector
    attributes[keys.EC_ITEMS] = counts.items
    if counts.local is not None:
        attributes[keys.EC_LOCAL_ITEMS] = counts.local
    if counts.remote is not None:
        attributes[keys.EC_REMOTE_ITEMS] = counts.remote
    if counts.recomputed is not None:
        attributes[keys.EC_RECOMPUTED_ITEMS] = counts.recomputed
    if counts.bytes:
        attributes[keys.EC_BYTES] = counts.bytes
    return attributes


def summarize_items(counts: ItemCounts | None) -> EncoderCacheCounts | None:
    """The counts for Server-Timing's entry `ec`.

    None on an instance that takes no encodings from others, or where the sources are unknown.
    """
    if counts is None or counts.remote is None or counts.local is None or counts.recomputed is None:
        return None
    return EncoderCacheCounts(
        counts.items, counts.remote, counts.local, counts.recomputed, counts.bytes
    )
