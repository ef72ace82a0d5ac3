# SPDX-License-Identifier: Apache-2.0
"""Where media items came from, added up; docs/stages.md defines the terms."""

from __future__ import annotations

import pytest

from ttft_otel.model.names import keys
from ttft_otel.tracing.media_items import (
    BIT_ANNOUNCED,
    BIT_AWAITED,
    BIT_CACHED,
    SOURCE_ENCODED,
    SOURCE_LOCAL,
    SOURCE_REMOTE,
    SOURCE_SKIPPED,
    SOURCE_UNSEEN,
    SOURCES_UNKNOWN,
    ItemCounts,
    count_items,
    list_item_attributes,
    summarize_items,
)


def make_media(*codes: int, unmatched: int = 0, size: int = 0) -> list[int]:
    """A filled EngineTimeline.media."""
    return [0, 0, size, unmatched, *codes]


def test_each_way() -> None:
    """One item of each kind; what was skipped is in no count but the items', and not encoded here."""
    found = count_items(
        make_media(
            SOURCE_SKIPPED | BIT_ANNOUNCED,
            SOURCE_LOCAL | BIT_ANNOUNCED | BIT_CACHED,
            SOURCE_REMOTE | BIT_ANNOUNCED,
            SOURCE_ENCODED,
            SOURCE_UNSEEN,
            size=64,
        ),
        complete=True,
        encoded_before=False,
    )

    assert found == ItemCounts(5, 4, 1, 2, 0, 64)


@pytest.mark.parametrize(
    ("codes", "unmatched", "before", "recomputed"),
    [
        ((SOURCE_ENCODED,), 0, False, 0),
        ((SOURCE_ENCODED,), 0, True, 1),
        ((SOURCE_ENCODED | BIT_ANNOUNCED,), 0, False, 1),
        ((SOURCE_ENCODED | BIT_ANNOUNCED, SOURCE_ENCODED), 0, True, 1),
        ((SOURCE_ENCODED, SOURCE_ENCODED), 1, False, 1),
        ((SOURCE_ENCODED | BIT_ANNOUNCED, SOURCE_ENCODED, SOURCE_ENCODED), 5, True, 3),
        ((SOURCE_REMOTE | BIT_ANNOUNCED, SOURCE_ENCODED), 0, True, 0),
        ((SOURCE_LOCAL,), 3, True, 0),
    ],
)
def test_recomputed(codes: tuple[int, ...], unmatched: int, before: bool, recomputed: int) -> None:
    """Item by item where the request names items; else by the router's word."""
    found = count_items(make_media(*codes, unmatched=unmatched), True, before)

    assert found.recomputed == recomputed


def test_awaited() -> None:
    """An item that another request has loaded while this one waited for it came from elsewhere."""
    codes = (
        SOURCE_UNSEEN | BIT_AWAITED | BIT_ANNOUNCED,
        SOURCE_UNSEEN | BIT_ANNOUNCED,
        SOURCE_LOCAL | BIT_AWAITED,
    )

    assert count_items(make_media(*codes), True, False)[2:4] == (1, 2)
    assert count_items(make_media(*codes), False, False)[2:4] == (0, 1)


def test_nobody_saw() -> None:
    """Where nobody saw the items' ways only their number is known."""
    found = count_items(
        make_media(SOURCE_ENCODED, SOURCE_UNSEEN, unmatched=SOURCES_UNKNOWN), True, True
    )

    assert found == ItemCounts(2, 1, None, None, None, 0)
    assert summarize_items(found) is None
    assert list_item_attributes(found, "") == {keys.ENCODER_CACHED_ITEMS: 1}
    assert list_item_attributes(found, "X") == {
        keys.ENCODER_CACHED_ITEMS: 1,
        keys.EC_CONNECTOR: "X",
        keys.EC_ITEMS: 2,
    }
