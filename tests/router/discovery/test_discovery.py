# SPDX-License-Identifier: Apache-2.0
"""Sources as people write them, how their findings become instances, legs, and how instances leave."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

import pytest

from router import fake_instances
from router.discovery.test_sources import run_discovery_site
from router.fake_instances import STREAM_EVENTS, InstancePlan
from ttft_otel.router.discovery import discovery
from ttft_otel.router.discovery.discovery import (
    Discovery,
    Findings,
    SourceAddress,
    WatchedSource,
    end_tasks,
    parse_source_address,
)
from ttft_otel.router.errors import SourceUnreachable
from ttft_otel.router.types import Instance, parse_instance_url
from ttft_otel.router.upstream.instance_pool import InstancePool

A, B, C = "http://10.0.0.1:8001", "http://10.0.0.2:8001", "http://10.0.0.3:8001"
UNREACHABLE_SOURCE = ("--discover", "k8s://default/app=x", "--kubernetes-api")


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
    return Discovery(InstancePool({}), {}, sources, 0.001)


def list_places(watching: Discovery) -> list[tuple[str, str]]:
    """Leg and URL of each instance that there is."""
    return [(each.leg, each.url) for each in watching.pool]


def test_new_ones_come_before_old_ones_go() -> None:
    """A rollout that replaces all pods at once leaves no moment without; the same again changes nothing."""
    watching = build_discovery([])
    (source,) = watching.watched
    counts: list[int] = []
    watching.pool.change_listeners.add(lambda: counts.append(len(list_places(watching))))

    for url in (A, B, B):
        watching.apply_findings(source, Findings({url: "decode"}))

    assert list_places(watching) == [("decode", B)]
    assert counts == [1, 2, 1]


def test_what_another_source_still_names_stays() -> None:
    """An instance that two sources name stays until both have dropped it."""
    watching = build_discovery([], [])
    first, second = watching.watched

    watching.apply_findings(first, Findings({A: "decode", B: "decode"}))
    watching.apply_findings(second, Findings({B: "decode"}))
    watching.apply_findings(first, Findings())
    assert list_places(watching) == [("decode", B)]
    watching.apply_findings(second, Findings())
    assert not list_places(watching)


def test_one_refusal_keeps_nobody_else_out() -> None:
    """An instance that cannot be mixed with others is told, and tried again; the others are added."""
    watching = build_discovery([])
    (source,) = watching.watched

    watching.apply_findings(source, Findings({A: "decode", B: "prefill_decode", C: "prefill"}))
    assert list_places(watching) == [("decode", A), ("prefill", C)]
    assert source.problem.startswith(f"{B} was refused: ") and "cannot be mixed" in source.problem
    for findings in ({B: "prefill_decode"}, {B: "prefill_decode"}):
        watching.apply_findings(source, Findings(findings))
    assert (list_places(watching), source.problem) == ([("prefill_decode", B)], "")


@pytest.mark.parametrize("error", [SourceUnreachable("gone"), KeyError("odd")])
async def test_a_source_that_fails_is_asked_again(error: Exception) -> None:
    """Any exception of a source is logged, and the source is asked again."""
    watching = build_discovery([Findings({A: "decode"}), error, Findings({B: "decode"})])

    async with watching.run():
        while list_places(watching) != [("decode", B)]:
            await asyncio.sleep(0.001)
    assert watching.watched[0].failures == 1


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


def configure(**urls: str) -> dict[str, tuple[Instance, ...]]:
    """An instance of the configuration for each leg."""
    return {leg: (parse_instance_url(url, leg),) for leg, url in urls.items()}


def build_found(**urls: str) -> Discovery:
    """A pool of configured instances, by leg, in which none was found yet."""
    configured: dict[str, tuple[Instance, ...]] = configure(**urls) or {"prefill_decode": ()}
    return Discovery(InstancePool(configured), configured)


def map_states(found: Discovery) -> dict[str, str]:
    """The state of each instance, by leg and URL."""
    return {f"{each.leg} {each.url}": each.state for each in found.pool}


@pytest.mark.parametrize(
    "url",
    [
        "10.0.0.7:8001",
        "http://10.0.0.7",
        "http://:8001",
        "http://10.0.0.7:0",
        "http://10.0.0.7:99999",
        "http://10.0.0.7:x",
        "http://u:p@10.0.0.7:8001",
        "http://10.0.0.7:8001?a=b",
        "http://10.0.0.7:8001/#a",
        "ftp://10.0.0.7:8001",
        "file:///etc/passwd",
        "http://[::1:8001",
        "http://10.0.0.7:8001/\nttft-otel: forged",
        "http://10.0.0.7:8001/\u00e9",
        "http://10.0.0.7:8001/" + "a" * 2048,
        "",
    ],
)
def test_what_is_no_instance(url: str) -> None:
    """It is refused with the remedy, adds nothing, and cannot forge a log line."""
    found = build_found()
    with pytest.raises(ValueError, match="write it like http://10.0.0.7:8001") as refusal:
        found.add_instance("encode", url)
    assert "\n" not in str(refusal.value) and not list(found.pool)


def test_unknown_roles() -> None:
    """A role that is none is refused, with those that are."""
    with pytest.raises(ValueError, match="one of encode, prefill, decode, prefill_decode"):
        build_found().add_instance("x" * 10_000, A)


def test_roles_that_cannot_be_mixed() -> None:
    """Combined instances beside separate prefill and decode are refused, with what is there."""
    found = build_found()
    found.add_instance("prefill_decode", A)
    for role in ("prefill", "decode"):
        with pytest.raises(ValueError, match="has prefill_decode instances"):
            found.add_instance(role, B)
    found.add_instance("encode", C)
    found.drop_instance(A)
    found.add_instance("prefill", B)
    with pytest.raises(ValueError, match="has prefill instances"):
        found.add_instance("prefill_decode", A)
    with pytest.raises(ValueError, match="has prefill_decode instances"):
        build_found(prefill_decode=A).add_instance("decode", B)
    with pytest.raises(ValueError, match="has decode and prefill instances"):
        build_found(prefill=A, decode=B).add_instance("prefill_decode", C)


def test_an_instance_has_one_role() -> None:
    """One that is named with another role moves to that role's leg; the same one changes nothing."""
    found = build_found()
    for role in ("decode", "encode", "prefill"):
        for _ in range(2):
            found.add_instance(role, A + "/")
            assert [f"{each.leg} {each.url}" for each in found.pool] == [f"{role} {A}"]


def test_there_is_a_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """One instance more than the limit is refused; known ones are not."""
    monkeypatch.setattr(discovery, "MAX_FOUND_INSTANCES", 2)
    found = build_found()
    for url in (A, B, A):
        found.add_instance("encode", url)
    with pytest.raises(ValueError, match="the maximum"):
        found.add_instance("encode", C)


def test_who_is_dropped_ends_what_it_has(caplog: pytest.LogCaptureFixture) -> None:
    """It drains until its last request has ended; named again, or added by an operator, it stays."""
    found = build_found()
    for again in (lambda: found.add_instance("encode", A), None):
        found.add_instance("encode", A)
        (instance,) = found.pool
        instance.in_flight = 1
        found.drop_instance(A)
        assert map_states(found)[f"encode {A}"] == "draining"
        assert "the 1 in flight may finish; then it is removed" in caplog.messages[-1]
        if again is not None:
            again()
        else:
            found.pool.set_draining(instance, False)
        instance.in_flight = 0
        found.remove_ended()
        assert map_states(found)[f"encode {A}"] != "draining"
    found.drop_instance(A)
    found.pool.set_draining(instance, True)
    found.remove_ended()
    found.drop_instance(B)


def test_who_is_configured_too_stays_drained(caplog: pytest.LogCaptureFixture) -> None:
    """One that is configured as well is one instance, and is drained while no source names it."""
    found = build_found(prefill_decode=A)
    found.add_instance("prefill_decode", A)
    found.drop_instance(A)
    found.remove_ended()
    assert map_states(found) == {f"prefill_decode {A}": "draining"}
    assert "stays drained until one does" in caplog.messages[-1]
    found.add_instance("prefill_decode", A)
    assert map_states(found)[f"prefill_decode {A}"] != "draining"


def test_a_reload_keeps_who_was_found() -> None:
    """Other configured instances, the same found ones; what an operator removed does not come back."""
    found = build_found(prefill_decode=A)
    for url in (A, B, C):
        found.add_instance("prefill_decode", url)
    one, removed = (found.pool.find_instance("prefill_decode", url) for url in (B, C))
    assert one is not None and removed is not None
    found.pool.remove_instance(removed)
    added, _ = found.set_configured(configure(prefill_decode="http://10.0.0.4:8001"))
    assert [each.rpartition("//")[2] for each in added] == ["10.0.0.4:8001"]
    assert [each.url for each in found.pool] == ["http://10.0.0.4:8001", A, B]
    assert found.pool.find_instance("prefill_decode", B) is one


def test_a_configuration_that_does_not_fit_changes_nothing() -> None:
    """Separate prefill and decode are refused while combined instances are found, and the reverse."""
    found = build_found()
    found.add_instance("prefill_decode", A)
    with pytest.raises(ValueError, match="have the roles prefill_decode, which cannot be mixed"):
        found.set_configured(configure(prefill=B, decode=C))
    assert [each.url for each in found.pool] == [A]
    found.drop_instance(A)
    found.add_instance("decode", A)
    with pytest.raises(ValueError, match="have the roles decode, which cannot be mixed"):
        found.set_configured(configure(prefill_decode=B))


def test_a_reload_without_sources_is_applied() -> None:
    """Such a file's instances are of a leg that no source names; found ones stay until a restart."""
    found = build_found()
    found.add_instance("prefill_decode", A)
    found.set_configured(configure(mono=B))
    assert [(each.leg, each.url) for each in found.pool] == [("mono", B), ("prefill_decode", A)]


async def test_a_router_without_instances_says_what_it_waits_for() -> None:
    """Not ready, and requests are refused naming the missing leg, until the first instance is found.

    It looks by itself whether one that leaves is idle, while its sources cannot be asked.
    """
    flags = (*UNREACHABLE_SOURCE, fake_instances.find_unused_url())
    async with (
        fake_instances.run_instance(InstancePlan({})) as one,
        run_discovery_site(*flags) as site,
    ):
        status, _, said = await site.router.get_json("/readyz")
        assert (status, said["reason"]) == (503, "there is no instance yet for prefill_decode")
        status, headers, body = await site.router.post_chat()
        assert (status, headers["Retry-After"]) == (503, "1")
        assert b"There is no prefill_decode instance." in body
        found = site.router.app.discovery
        assert found is not None
        found.add_instance("prefill_decode", one.url)
        assert (await site.router.get_json("/readyz"))[0] == 200
        assert (await site.router.post_chat())[2] == b"".join(STREAM_EVENTS)
        (instance,) = found.pool
        instance.in_flight = 1
        found.drop_instance(one.url)
        assert list(found.pool) == [instance]
        instance.in_flight = 0
        while list(found.pool):
            await asyncio.sleep(0.01)


async def test_policies_follow_the_legs() -> None:
    """The chosen policy applies to the leg that prefills, also when that leg changes."""
    policies = ("--routing-logic", "ttft", "--encoder-routing-logic", "ttft")
    flags = (*UNREACHABLE_SOURCE, fake_instances.find_unused_url(), *policies)
    async with run_discovery_site(*flags) as site:
        routing, found = site.router.app.endpoint.routing, site.router.app.discovery
        assert found is not None
        chosen: Any = routing.prefill_policy
        assert routing.prefilling_leg == "prefill_decode"
        for role, url in (("decode", A), ("encode", B), ("prefill", C)):
            found.add_instance(role, url)
        assert routing.prefilling_leg == "prefill"
        assert routing.prefill_policy is chosen and routing.get_policy("decode") is not chosen
        assert sorted(routing.reported_legs) == ["encode", "prefill"]


def test_parsed() -> None:
    """Each kind of --discover value is parsed with its options."""
    text = "dns://vllm.default:8000?role=encoder"
    assert parse_source_address(text) == SourceAddress(
        text, "dns", "vllm.default", port="8000", role="encode"
    )
    text = "dns://_http._tcp.vllm?scheme=https"
    assert parse_source_address(text) == SourceAddress(
        text, "dns", "_http._tcp.vllm", instance_scheme="https"
    )
    text = "k8s://prod/app=vllm,tier%20in%20(a)?port=api"
    assert parse_source_address(text) == SourceAddress(
        text, "k8s", "prod", "app=vllm,tier in (a)", port="api"
    )


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("http://vllm:8000", "names no source"),
        ("dns://vllm", "dns://SERVICE:PORT"),
        ("dns://_http._tcp.vllm:80", "which say the port"),
        ("dns://vllm:0", "is not a port"),
        ("dns://vllm:８", "is not a port"),
        ("dns://vllm:80/x", "dns://SERVICE:PORT"),
        ("dns://vllm:80?nameserver=1.2.3.4", "is not a port"),
        ("k8s://prod", "selects nothing"),
        ("k8s://prod/app=x?roles=decode", "'roles' is not one of role, port"),
        ("k8s://prod/app=x?role=decoder", "is not a role"),
        ("k8s://prod/app=x?port=0", "is not a port"),
        ("k8s://prod/app=x?scheme=tls", "the scheme of instances is http or https"),
    ],
)
def test_refused(text: str, remedy: str) -> None:
    """A wrong value is refused with a message that says what to write."""
    with pytest.raises(ValueError, match=re.escape(remedy)):
        parse_source_address(text)
