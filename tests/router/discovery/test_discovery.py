# SPDX-License-Identifier: Apache-2.0
"""How findings of several sources become instances: forgotten ones, refusals, failures, cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
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


async def play_script(script: list[Findings | Exception]) -> AsyncGenerator[Findings, None]:
    """Give what a test has put into it, then wait."""
    while script:
        step = script.pop(0)
        if isinstance(step, Exception):
            raise step
        yield step
    await asyncio.Event().wait()


class RecordingInstances(FoundInstances):
    """Takes instances in, except those of a role that it refuses; `calls` are its calls in order."""

    def __init__(self, refused_role: str = "") -> None:
        super().__init__(InstancePool({}), {})
        self.refused_role = refused_role
        self.roles: dict[str, str] = {}
        self.calls: list[str] = []

    def add_instance(self, role: str, url: str) -> None:
        """Take it in."""
        if role == self.refused_role:
            raise ValueError("no")
        self.calls.append(f"+{url}")
        self.roles[url] = role

    def drop_instance(self, url: str) -> None:
        """Take it out."""
        self.calls.append(f"-{url}")
        del self.roles[url]


def build_discovery(
    instances: RecordingInstances, *scripts: list[Findings | Exception] | None
) -> Discovery:
    """A discovery with a source for each script."""
    sources = [
        WatchedSource(
            parse_source_address(f"k8s://default/app=s{number}"), partial(play_script, script or [])
        )
        for number, script in enumerate(scripts)
    ]
    return Discovery(sources, instances, 0.001)


def find(roles_by_url: Mapping[str, str] | None = None) -> Findings:
    """What a source says."""
    return Findings(roles_by_url or {})


def test_new_ones_come_before_old_ones_go() -> None:
    """A rollout that replaces all pods at once leaves no moment without an instance."""
    instances = RecordingInstances()
    discovery = build_discovery(instances, None)
    (source,) = discovery.watched

    discovery.apply_findings(source, find({"a": "decode"}))
    discovery.apply_findings(source, find({"b": "decode"}))

    assert instances.calls == ["+a", "+b", "-a"]


def test_what_another_source_still_names_stays() -> None:
    """An instance that two sources name stays until both have dropped it."""
    instances = RecordingInstances()
    discovery = build_discovery(instances, None, None)
    first, second = discovery.watched

    discovery.apply_findings(first, find({"a": "decode", "b": "decode"}))
    discovery.apply_findings(second, find({"b": "decode"}))
    discovery.apply_findings(first, find())
    assert instances.roles == {"b": "decode"}
    discovery.apply_findings(second, find())
    assert not instances.roles


def test_who_is_there_is_not_added_again() -> None:
    """A source that names the same instances again changes nothing."""
    instances = RecordingInstances()
    discovery = build_discovery(instances, None)
    (source,) = discovery.watched

    for _ in range(2):
        discovery.apply_findings(source, find({"a": "decode", "b": "decode"}))

    assert instances.calls == ["+a", "+b"]


def test_one_refusal_keeps_nobody_else_out() -> None:
    """An instance that cannot be added is logged and tried again; the others are added."""
    instances = RecordingInstances(refused_role="prefill")
    discovery = build_discovery(instances, None)
    (source,) = discovery.watched

    discovery.apply_findings(source, find({"p": "prefill", "d": "decode"}))
    assert instances.roles == {"d": "decode"}
    assert source.problem == "p was refused: no"
    instances.refused_role = ""
    discovery.apply_findings(source, find({"p": "prefill", "d": "decode"}))
    assert (instances.roles, source.problem) == ({"d": "decode", "p": "prefill"}, "")


@pytest.mark.parametrize("error", [SourceUnreachable("gone"), KeyError("odd")])
async def test_a_source_that_fails_is_asked_again(error: Exception) -> None:
    """Any exception of a source is logged, and the source is asked again."""
    instances = RecordingInstances()
    discovery = build_discovery(instances, [find({"a": "decode"}), error, find({"b": "decode"})])

    async with discovery.run():
        while set(instances.roles) != {"b"}:
            await asyncio.sleep(0.001)
    assert discovery.watched[0].failures == 1
    assert instances.calls == ["+a", "+b", "-a"]


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
