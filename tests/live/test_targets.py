# SPDX-License-Identifier: Apache-2.0
"""Each target of the ledger taken out in turn: its stages become unattributed, their sum unchanged."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.live.bench import Bench, breakdown, lows
from ttft_otel import stages
from ttft_otel.hooks.targets import BY_NAME, TARGETS

SETTLE = 0.3  # seconds until every process has seen the control file
MARGIN_US = 2500
Sample = dict[str, int]
# Found once, when a connector is made; async outputs: neither can be switched at run time on V1.
FIXED = ("frontend.app", "transfer.create", "worker.output", "transfer.wait")
GAPS = {"dispatch", "prefill.stall", "ec.transfer"}
ALSO = {stages.UNATTRIBUTED}
SWITCHED = [target.name for target in TARGETS if target.name not in FIXED]


def paired(
    bench: Bench, once: Callable[[], Sample], target: str
) -> tuple[list[Sample], list[Sample]]:
    """Some requests with everything in place and with this target taken out, in turn."""
    full: list[Sample] = []
    found: list[Sample] = []
    for _ in range(3):
        for off, samples in (((), full), ((target,), found)):
            bench.control.set(off=off)
            time.sleep(SETTLE)
            once()
            samples += [once() for _ in range(3)]
    bench.control.set()
    return full, found


def check(target: str, encode: bool, full: list[Sample], found: list[Sample]) -> None:
    """The ledger's lost stages are gone into the remainder; every other stage stays."""
    row = BY_NAME[target]
    lost = row.lost_encode if encode and row.lost_encode is not None else row.lost
    before, after = lows(full), lows(found)
    gone = {name for name in before if name in lost}
    kept = set(before) - gone - {stages.UNATTRIBUTED, "ttft"}
    for name in kept:
        assert abs(after.get(name, 0) - before[name]) < MARGIN_US, (name, before, after)
    for sample in found:
        assert (sample[stages.UNATTRIBUTED] > 0) is bool(gone), sample
        # Gaps between marks that are still there stay what they were.
        assert not (gone - GAPS) & {name for name, us in sample.items() if us}, (gone, sample)
    sums = [sum(us for name, us in each.items() if name in gone) for each in full]
    rest = [sum(us for name, us in each.items() if name in ALSO | gone) for each in found]
    low, high = sorted(sums)[len(sums) // 4], sorted(rest)[len(rest) // 4]
    assert abs(high - low) < MARGIN_US + 0.15 * low, (low, high, before, after)


@pytest.mark.parametrize("target", SWITCHED)
def test_a_lost_target_costs_its_stages_on_prefill_decode(epd: Bench, target: str) -> None:
    """PD, V1 runner, an image that E has encoded."""

    def once() -> Sample:
        picture = epd.fresh()
        epd.ask(epd.fleet.url("encode"), pictures=(picture,), max_tokens=1, stream=False)
        url = epd.fleet.url("prefill_decode")
        return breakdown(epd.ask(url, pictures=(picture,), max_tokens=1))

    full, found = paired(epd, once, target)

    if target in ("worker.encoder", "transfer.save"):  # PD neither encoded nor saved
        assert lows(found)[stages.UNATTRIBUTED] == 0
    else:
        check(target, False, full, found)


@pytest.mark.parametrize("target", ("worker.encoder", "transfer.save", "worker.execute"))
def test_a_lost_target_costs_its_stages_on_the_encoder(epd: Bench, target: str) -> None:
    """E, V1 runner, a new image each time."""

    def once() -> Sample:
        url = epd.fleet.url("encode")
        answer = epd.ask(url, pictures=(epd.fresh(),), max_tokens=1, stream=False)
        return breakdown(answer)

    full, found = paired(epd, once, target)

    check(target, True, full, found)


@pytest.mark.parametrize(
    "target",
    ("worker.execute", "worker.encoder", "worker.forward", "worker.sample", "worker.output"),
)
def test_a_lost_target_costs_its_stages_on_cudas_runner(newer: Bench, target: str) -> None:
    """V2 runner and async scheduling, a new image each time."""

    def once() -> Sample:
        return breakdown(newer.ask(newer.front, pictures=(newer.fresh(),), max_tokens=1))

    full, found = paired(newer, once, target)

    check(target, False, full, found)


def test_a_hook_that_raises_never_reaches_the_client(epd: Bench) -> None:
    """Every hook made to fail, one by one: same answer, and the server still closes afterwards."""
    url = epd.fleet.url("prefill_decode")
    plain = epd.ask(url, max_tokens=4)
    assert not epd.complaints("prefill_decode")
    for target in TARGETS:
        epd.control.set(fail=[target.name])
        time.sleep(SETTLE)
        answer = epd.ask(url, max_tokens=4)
        assert (answer.status, answer.text) == (200, plain.text), target.name
    epd.control.set()
    time.sleep(SETTLE)

    found = breakdown(epd.ask(url, max_tokens=1))

    assert found[stages.UNATTRIBUTED] == 0
    said = epd.complaints("prefill_decode")
    assert len(said) >= 10, said  # each hook that ran said so, once
