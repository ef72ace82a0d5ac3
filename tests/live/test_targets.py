# SPDX-License-Identifier: Apache-2.0
"""Each target of the ledger taken out in turn: its stages become unattributed, their sum unchanged.

A known delay inside the lost stages makes them stand out: it must turn up in the remainder, whole,
and a neighbour that took it over would grow by as much.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.live.bench import Bench, again, breakdown, medians
from ttft_otel import stages
from ttft_otel.hooks.targets import BY_NAME, TARGETS

TIMES = 5
SETTLE = 0.25  # seconds until every process has seen the control file
DELAY = 60.0
NEAR_US = 12_000  # far less than the delay, more than what a busy machine adds
Sample = dict[str, int]

# Target -> where the delay goes while it is out. Parts have none: nothing is lost with them.
DELAYED = {
    "frontend.render": "receive",
    "frontend.assign": "tokenize",
    "frontend.register": "forward",
    "frontend.outputs": "forward",
    "engine.input": "ipc",
    "scheduler.schedule": "queue",
    "scheduler.update": "sample",
    "worker.execute": "forward",
    "worker.encoder": "encoder",
    "worker.forward": "forward",
    "worker.sample": "sample",
    "worker.tokens": "forward",
    "worker.output": "sample",
    "transfer.wait": "ec_wait",
    "transfer.load": "ec_load",
    "transfer.save": "ec_save",
    "kv.match": "kv_wait",
    "kv.arrive": "kv_wait",
    "kv.load": "kv_load",
    "kv.save": "sample",
}
PARTS = [target.name for target in TARGETS if target.part]
# An image that E has encoded: PD neither encodes nor saves it. V1 without async has no late output.
ON_PD = [
    name
    for name in DELAYED
    if name not in ("worker.encoder", "worker.output", "transfer.save") and name[:3] != "kv."
]
ON_E = ("worker.encoder", "transfer.save", "worker.execute")
ON_D = ("kv.match", "kv.arrive", "engine.input", "scheduler.schedule", "worker.execute")
BY_FILES = ("kv.load", "kv.save")  # tests/live/test_files.py
ON_CUDAS = ("worker.execute", "worker.encoder", "worker.forward", "worker.sample", "worker.output")


def paired(
    bench: Bench, once: Callable[[], Sample], target: str, place: str
) -> tuple[list[Sample], list[Sample]]:
    """Delayed requests with everything in place, and with this target taken out."""
    found: list[list[Sample]] = []
    for off in ((), (target,)):
        bench.control.set({place: DELAY} if place else {}, off=off)
        time.sleep(SETTLE)
        once()
        found.append([once() for _ in range(TIMES)])
    bench.control.set()
    time.sleep(SETTLE)  # the next test must find everything in place
    return found[0], found[1]


def check(target: str, encode: bool, full: list[Sample], found: list[Sample]) -> None:
    """The ledger's lost stages are gone into the remainder; every other stage stays."""
    row = BY_NAME[target]
    lost = set(row.lost_encode if encode and row.lost_encode is not None else row.lost)
    before, after = medians(full), medians(found)
    assert all(sample[stages.UNATTRIBUTED] == 0 for sample in full)
    assert after[stages.UNATTRIBUTED] >= DELAY * 900, (before, after)
    for name in set(before) - lost - {stages.UNATTRIBUTED, "ttft"}:
        assert name in after, (name, after)
        assert abs(after[name] - before[name]) < NEAR_US, (name, before, after)
    sums = sum(us for name, us in before.items() if name in lost)
    rest = sum(us for name, us in after.items() if name in lost | {stages.UNATTRIBUTED})
    assert abs(rest - sums) < NEAR_US + 0.2 * sums, (before, after)


def encoded(bench: Bench) -> Callable[[], Sample]:
    """A new image through E, then its breakdown on PD."""

    def once() -> Sample:
        picture = (bench.fresh(),)
        bench.ask(bench.fleet.url("encode"), pictures=picture, max_tokens=1, stream=False)
        url = bench.fleet.url("prefill_decode")
        return breakdown(bench.ask(url, pictures=picture, max_tokens=1))

    return once


@pytest.mark.parametrize("target", ON_PD)
@again
def test_a_lost_target_costs_its_stages_on_prefill_decode(epd: Bench, target: str) -> None:
    """PD, V1 runner, an image that E has encoded."""
    full, found = paired(epd, encoded(epd), target, DELAYED[target])

    check(target, False, full, found)


@pytest.mark.parametrize("target", PARTS)
def test_a_lost_part_costs_no_stage(epd: Bench, target: str) -> None:
    """Without a part nothing is unattributed: the stage around it stays whole."""
    _, found = paired(epd, encoded(epd), target, "")

    assert all(sample[stages.UNATTRIBUTED] == 0 for sample in found)


@pytest.mark.parametrize("target", ON_E)
@again
def test_a_lost_target_costs_its_stages_on_the_encoder(epd: Bench, target: str) -> None:
    """E, V1 runner, a new image each time."""

    def once() -> Sample:
        url = epd.fleet.url("encode")
        return breakdown(epd.ask(url, pictures=(epd.fresh(),), max_tokens=1, stream=False))

    place = "encoder" if target == "worker.execute" else DELAYED[target]
    full, found = paired(epd, once, target, place)

    check(target, True, full, found)


@pytest.mark.parametrize("target", ON_D)
@again
def test_a_lost_target_costs_its_stages_on_decode(pd: Bench, target: str) -> None:
    """D takes its KV blocks from P: without a mark their way is neither queue nor transfer."""

    def once() -> Sample:
        return breakdown(pd.handed()[1])

    full, found = paired(pd, once, target, DELAYED[target])

    check(target, False, full, found)


@pytest.mark.parametrize("target", ON_CUDAS)
@again
def test_a_lost_target_costs_its_stages_on_cudas_runner(newer: Bench, target: str) -> None:
    """V2 runner and async scheduling, a new image each time."""

    def once() -> Sample:
        return breakdown(newer.ask(newer.front, pictures=(newer.fresh(),), max_tokens=1))

    full, found = paired(newer, once, target, DELAYED[target])

    check(target, False, full, found)


def test_every_target_is_taken_out_somewhere() -> None:
    """The ledger's rows are all tried, but for those whose effect is fixed when a server starts."""
    fixed = {"frontend.app", "transfer.create", "kv.create"}
    tried = {*ON_PD, *ON_E, *ON_D, *BY_FILES, *ON_CUDAS, *PARTS}

    assert {target.name for target in TARGETS} == tried | fixed


def raising(bench: Bench, server: str, **question: Any) -> None:
    """Every hook made to fail, one by one: same answer, and the server still closes afterwards."""
    url = bench.fleet.url(server)
    picture = (bench.fresh(),) if question.pop("image", False) else ()
    plain = bench.ask(url, pictures=picture, **question)
    assert not bench.complaints(server)
    for target in TARGETS:
        bench.control.set(fail=[target.name])
        time.sleep(SETTLE)
        answer = bench.ask(url, pictures=picture, **question)
        assert (answer.status, answer.text) == (200, plain.text), target.name
    bench.control.set()
    time.sleep(SETTLE)

    found = breakdown(bench.ask(url, pictures=picture, **question))

    assert found[stages.UNATTRIBUTED] == 0
    said = bench.complaints(server)
    assert len(said) >= 10, said  # each hook that ran said so, once


def test_a_hook_that_raises_never_reaches_the_client(epd: Bench) -> None:
    """PD, V1 runner."""
    raising(epd, "prefill_decode", max_tokens=4)


def test_a_hook_that_raises_never_reaches_the_client_of_decode(pd: Bench) -> None:
    """P and D: each hook of the KV connectors made to fail, and the blocks come all the same."""
    for target in (name for name in BY_NAME if name.startswith("kv.")):
        pd.control.set(fail=[target])
        time.sleep(SETTLE)
        first, second = pd.handed(max_tokens=4)
        assert (first.status, second.status) == (200, 200), target
        assert second.text.startswith(first.text), target
    pd.control.set()
    time.sleep(SETTLE)

    found = breakdown(pd.handed()[1])

    assert found[stages.UNATTRIBUTED] == 0
    assert found["kv.transfer"] > 0
    assert pd.complaints("decode") and pd.complaints("prefill")


def test_a_hook_that_raises_never_reaches_the_encoders_client(epd: Bench) -> None:
    """E, an image."""
    raising(epd, "encode", image=True, max_tokens=1, stream=False)


def test_a_hook_that_raises_never_reaches_the_client_of_cudas_runner(newer: Bench) -> None:
    """V2 runner and async scheduling, an image."""
    raising(newer, "mono", image=True, max_tokens=4)
