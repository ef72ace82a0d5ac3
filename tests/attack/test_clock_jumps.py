# SPDX-License-Identifier: Apache-2.0
"""A wall clock that is set by years while everything runs: nothing is lost, and no length is wrong."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
from router import fake_instances
from router.fake_instances import InstancePlan

from attack.test_store_files import count_traces, store_span
from ttft_otel.report.store.span_store import SpanStore

YEARS_NS = 10 * 365 * 86_400 * 10**9
REQUESTS = 20


def set_clock(monkeypatch: pytest.MonkeyPatch, shift_ns: int) -> None:
    """From now on the wall clock is so much ahead."""
    true_ns, true_s = time.clock_gettime_ns, time.clock_gettime
    monkeypatch.setattr(time, "time_ns", lambda: true_ns(time.CLOCK_REALTIME) + shift_ns)
    monkeypatch.setattr(time, "time", lambda: true_s(time.CLOCK_REALTIME) + shift_ns / 1e9)


def test_what_is_stored_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards and back: traces are as old as they are."""
    path = tmp_path / "spans.db"
    store = SpanStore(path)
    try:
        for number, shift_ns in enumerate((0, YEARS_NS, -YEARS_NS, 0), 1):
            set_clock(monkeypatch, shift_ns)
            store_span(store, number)
            assert not store._remove_old()
            assert count_traces(path) == number
    finally:
        store.close()


async def test_lengths_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that jumps at each look: every TTFT adds up, and is as long as it was."""
    looks = itertools.count()
    true_ns = time.clock_gettime_ns
    async with fake_instances.run_routed_instances([InstancePlan(gap_s=0.01)]) as (router, _):
        with monkeypatch.context() as patched:
            patched.setattr(
                time,
                "time_ns",
                lambda: true_ns(time.CLOCK_REALTIME) + (next(looks) % 3 - 1) * YEARS_NS,
            )
            for _ in range(REQUESTS):
                began_ns = time.monotonic_ns()
                assert (await router.post_chat())[0] == 200
                took_us = (time.monotonic_ns() - began_ns) // 1000
        records = [each.ttft for each in await router.wait_for_records(2 * REQUESTS) if each.ttft]
    assert next(looks) > REQUESTS and len(records) == REQUESTS
    for ttft in records:
        assert 0 < ttft.end - ttft.start < 10**7
        assert sum(ttft.stages.values()) + ttft.unattributed == ttft.end - ttft.start
    assert records[-1].end <= took_us
