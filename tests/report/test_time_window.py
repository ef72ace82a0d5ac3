# SPDX-License-Identifier: Apache-2.0
"""Time windows as a user writes them."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from ttft_otel.report.time_window import parse_window

NOW = datetime(2026, 3, 29, 14, 30, tzinfo=timezone(timedelta(hours=2)))


def describe_window(text: str) -> tuple[str, str]:
    """Both ends, as clock times of the same zone."""
    ends = (datetime.fromtimestamp(ns / 1e9, NOW.tzinfo) for ns in parse_window(text, NOW))
    first, last = (end.strftime("%d %H:%M:%S") for end in ends)
    return first, last


@pytest.mark.parametrize(
    ("text", "since", "until"),
    [
        ("2h..1h", "29 12:30:00", "29 13:30:00"),
        ("1h..", "29 13:30:00", "29 14:30:00"),
        ("90s", "29 14:28:30", "29 14:30:00"),
        ("14:00..14:05", "29 14:00:00", "29 14:05:00"),
        ("23:50:10..0:10", "28 23:50:10", "29 00:10:00"),  # the last ones that have been
        ("2026-03-28T10:00..2026-03-28T10:00:30Z", "28 10:00:00", "28 12:00:30"),
        ("1.5d..30m", "28 02:30:00", "29 14:00:00"),
    ],
)
def test_windows(text: str, since: str, until: str) -> None:
    """Times ago, clock times and moments, with and without an end."""
    assert describe_window(text) == (since, until)


@pytest.mark.parametrize(
    "text",
    ["", "..", "yesterday", "1h..2h", "25:00..26:00", "1x..", "1h..1h", "800000d", f"{'9' * 400}d"],
)
def test_refused(text: str) -> None:
    """What is no window is refused with a sentence that quotes it."""
    with pytest.raises(ValueError, match="is not a time|ends before it begins"):
        parse_window(text, NOW)
