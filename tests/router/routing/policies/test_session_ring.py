# SPDX-License-Identifier: Apache-2.0
"""Consistent hashing of sessions: what the ring costs, and that it is the same ring for any instances."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttft_otel.router.routing.policies import policy_registry
from ttft_otel.router.routing.policies.policy_registry import POINTS_PER_INSTANCE, HashRing

INSTANCE_URLS = tuple(f"http://10.0.0.{number}:8000" for number in range(20))


def choose_from_ring(key: str, urls: Sequence[str]) -> str:
    """The same from the ring of these instances alone."""
    points = sorted(
        (policy_registry._hash_text(f"{url}#{n}"), url)
        for url in urls
        for n in range(POINTS_PER_INSTANCE)
    )
    return points[
        bisect([point for point, _ in points], policy_registry._hash_text(key)) % len(points)
    ][1]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sets(st.sampled_from(INSTANCE_URLS), min_size=1), st.text()), min_size=1)
)
def test_same(asked: list[tuple[set[str], str]]) -> None:
    """Whoever was offered before, a session goes where the ring of those offered now puts it."""
    ring = HashRing()
    for urls, key in asked:
        ring.add_urls(urls)
        assert ring.find_owner(key, urls) == choose_from_ring(key, sorted(urls))


def test_no_new_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """When one of many instances is not offered, or is again, nothing but the key is hashed."""
    urls = {f"http://10.0.0.{count_hashes}:8000" for count_hashes in range(128)}
    ring = HashRing()
    ring.add_urls(urls)
    hashed: list[str] = []

    def count_hashes(text: str) -> int:
        hashed.append(text)
        return len(hashed) << 54

    monkeypatch.setattr(policy_registry, "_hash_text", count_hashes)

    for gone in sorted(urls):
        ring.add_urls(urls - {gone})
        assert ring.find_owner("ann", urls - {gone}) != gone

    assert hashed == ["ann"] * 128


def test_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instances that come and go do not stay on the ring for ever."""
    monkeypatch.setattr(policy_registry, "MAX_RING_INSTANCES", 3)
    ring = HashRing()

    for number in range(2, len(INSTANCE_URLS)):
        urls = set(INSTANCE_URLS[number - 2 : number])
        ring.add_urls(urls)
        assert ring.find_owner("ann", urls) == choose_from_ring("ann", sorted(urls))
        assert len(ring._points) <= 3 * POINTS_PER_INSTANCE
