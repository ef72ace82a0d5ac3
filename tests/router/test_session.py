# SPDX-License-Identifier: Apache-2.0
"""Consistent hashing of sessions: what the ring costs, and that it is the same ring for any instances."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttft_otel.router.policies import session
from ttft_otel.router.policies.session import POINTS, Ring

URLS = tuple(f"http://10.0.0.{number}:8000" for number in range(20))


def plain(key: str, urls: Sequence[str]) -> str:
    """The same from the ring of these instances alone."""
    points = sorted((session._hash(f"{url}#{n}"), url) for url in urls for n in range(POINTS))
    return points[bisect([point for point, _ in points], session._hash(key)) % len(points)][1]


@settings(deadline=None)
@given(st.lists(st.tuples(st.sets(st.sampled_from(URLS), min_size=1), st.text()), min_size=1))
def test_same(asked: list[tuple[set[str], str]]) -> None:
    """Whoever was offered before, a session goes where the ring of those offered now puts it."""
    ring = Ring()
    for urls, key in asked:
        ring.know(urls)
        assert ring.find(key, urls) == plain(key, sorted(urls))


def test_no_new_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """When one of many instances is not offered, or is again, nothing but the key is hashed."""
    urls = {f"http://10.0.0.{number}:8000" for number in range(128)}
    ring = Ring()
    ring.know(urls)
    hashed: list[str] = []

    def number(text: str) -> int:
        hashed.append(text)
        return len(hashed) << 54

    monkeypatch.setattr(session, "_hash", number)

    for gone in sorted(urls):
        ring.know(urls - {gone})
        assert ring.find("ann", urls - {gone}) != gone

    assert hashed == ["ann"] * 128


def test_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instances that come and go do not stay on the ring for ever."""
    monkeypatch.setattr(session, "MOST", 3)
    ring = Ring()

    for number in range(2, len(URLS)):
        urls = set(URLS[number - 2 : number])
        ring.know(urls)
        assert ring.find("ann", urls) == plain("ann", sorted(urls))
        assert len(ring._points) <= 3 * POINTS
