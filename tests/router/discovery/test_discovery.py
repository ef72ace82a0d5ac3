# SPDX-License-Identifier: Apache-2.0
"""How findings of several sources become instances: forgotten ones, refusals, failures, cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from functools import partial

import pytest

from ttft_otel.router.discovery.discovery import (
    Discovery,
    Findings,
    WatchedSource,
    end_tasks,
    parse_source_address,
)
from ttft_otel.router.discovery.found_instances import FoundInstances
from ttft_otel.router.errors import SourceUnreachable
from ttft_otel.router.upstream.instance_pool import InstancePool

A, B, C = "http://10.0.0.1:8001", "http://10.0.0.2:8001", "http://10.0.0.3:8001"


async def play_script(script: list[Findings | Exception]) -> AsyncGenerator[Findings, None]:
    """Give what a test has put into it, then wait."""
    while script:
        step = script.pop(0)
        if isinstance(step, Exception):
            raise step
        yield step
    await asyncio.Event().wait()


def build_discovery(*scripts: list[Findings | Exception]) -> Discovery:
    """A discovery with a source for each script, which has found nothing yet."""
    sources = [
        WatchedSource(
            parse_source_address(f"k8s://default/app=s{number}"), partial(play_script, script)
        )
        for number, script in enumerate(scripts)
    ]
    return Discovery(sources, FoundInstances(InstancePool({}), {}), 0.001)


def list_places(discovery: Discovery) -> list[tuple[str, str]]:
    """Leg and URL of each instance that there is."""
    return [(each.leg, each.url) for each in discovery.found.pool]


def test_new_ones_come_before_old_ones_go() -> None:
    """A rollout that replaces all pods at once leaves no moment without; the same again changes nothing."""
    discovery = build_discovery([])
    (source,) = discovery.watched
    counts: list[int] = []
    discovery.found.pool.change_listeners.add(lambda: counts.append(len(list_places(discovery))))

    for url in (A, B, B):
        discovery.apply_findings(source, Findings({url: "decode"}))

    assert list_places(discovery) == [("decode", B)]
    assert counts == [1, 2, 1]


def test_what_another_source_still_names_stays() -> None:
    """An instance that two sources name stays until both have dropped it."""
    discovery = build_discovery([], [])
    first, second = discovery.watched

    discovery.apply_findings(first, Findings({A: "decode", B: "decode"}))
    discovery.apply_findings(second, Findings({B: "decode"}))
    discovery.apply_findings(first, Findings())
    assert list_places(discovery) == [("decode", B)]
    discovery.apply_findings(second, Findings())
    assert not list_places(discovery)


def test_one_refusal_keeps_nobody_else_out() -> None:
    """An instance that cannot be mixed with others is told, and tried again; the others are added."""
    discovery = build_discovery([])
    (source,) = discovery.watched

    discovery.apply_findings(source, Findings({A: "decode", B: "prefill_decode", C: "prefill"}))
    assert list_places(discovery) == [("decode", A), ("prefill", C)]
    assert source.problem.startswith(f"{B} was refused: ") and "cannot be mixed" in source.problem
    for findings in ({B: "prefill_decode"}, {B: "prefill_decode"}):
        discovery.apply_findings(source, Findings(findings))
    assert (list_places(discovery), source.problem) == ([("prefill_decode", B)], "")


@pytest.mark.parametrize("error", [SourceUnreachable("gone"), KeyError("odd")])
async def test_a_source_that_fails_is_asked_again(error: Exception) -> None:
    """Any exception of a source is logged, and the source is asked again."""
    discovery = build_discovery([Findings({A: "decode"}), error, Findings({B: "decode"})])

    async with discovery.run():
        while list_places(discovery) != [("decode", B)]:
            await asyncio.sleep(0.001)
    assert discovery.watched[0].failures == 1


async def test_a_task_that_swallows_a_cancellation_ends_all_the_same() -> None:
    """A task that ignores one cancellation, as asyncio.wait_for could before Python 3.12, still ends."""
    swallowed = 0

    async def ask_forever() -> None:
        nonlocal swallowed
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                swallowed += 1
                if swallowed == 2:
                    raise

    task = asyncio.create_task(ask_forever())
    await asyncio.sleep(0)
    await end_tasks([task])
    assert task.cancelled() and swallowed == 2
