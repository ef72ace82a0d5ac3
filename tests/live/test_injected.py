# SPDX-License-Identifier: Apache-2.0
"""Injected truth: a known delay in one place of real vLLM shows in that stage, and nowhere else."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.live.bench import Bench, again, breakdown, medians, moved
from ttft_otel import stages
from ttft_otel.lab.matrix import PLACES

DELAY = 80.0  # ms
TIMES = 9
Sample = dict[str, int]

# place -> the stage it must show in, on the instance that is asked; scripts/compat asks for the same.
TEXT = PLACES["text"]
ENCODE = {
    "media": "preprocess",
    "multimodal": "preprocess",
    "encoder": "encoder.compute",
    "ec_save": "ec.transfer",
}
DECODE = {"ec_load": "ec.transfer", "ec_wait": "ec.transfer"}
NEWER = {
    "dispatch": "dispatch",
    "encoder": "encoder.compute",
    "forward": "prefill.compute",
    "sample": "sample",
    "output": "output",
}


@dataclass(frozen=True, slots=True)
class Found:
    """How far each stage's median moved (ms), what was injected (ms), medians before (us)."""

    shift: dict[str, float]
    real: float
    before: dict[str, float]


def compare(bench: Bench, place: str, once: Callable[[], Sample]) -> Found:
    """Plain and delayed requests in turn: how far each stage's median moved, and what was injected.

    Both in ms. A sleep of 80 ms lasts a little longer; the guest noted how long by its own clock.
    """
    plain: list[Sample] = []
    delayed: list[Sample] = []
    once()
    began = time.monotonic_ns()
    for _ in range(TIMES):
        bench.control.set()
        plain.append(once())
        bench.control.set({place: DELAY})
        delayed.append(once())
    bench.control.set()
    real = [delay.ms for delay in bench.control.delays(began) if delay.place == place]
    assert len(real) >= TIMES, f"{place} was delayed {len(real)} times"
    assert abs(statistics.median(real) - DELAY) < 0.1 * DELAY, real
    return Found(moved(plain, delayed), statistics.median(real), medians(plain))


def check(found: Found, stage: str, noise: float = 0.0) -> None:
    """D in its stage within 2 %, less than 2 ms anywhere else.

    noise: share of a stage's own length that it varies by, where that is more (V2 on a CPU runs its
    kernels in an interpreter: 30 ms of dispatch, give or take five).
    """
    slack = {name: noise * found.before.get(name, 0) / 1000 for name in found.shift}
    off = abs(found.shift[stage] - found.real)
    assert off <= max(0.02 * found.real, slack[stage]), (stage, found)
    others = {
        name: ms
        for name, ms in found.shift.items()
        if name != stage and abs(ms) >= max(2.0, slack[name])
    }
    assert not others, (stage, found)


@pytest.mark.parametrize("place", TEXT)
@again
def test_text_delays_show_in_their_stage(epd: Bench, place: str) -> None:
    """PD with the V1 runner, a text request."""
    url = epd.fleet.url("prefill_decode")

    found = compare(epd, place, lambda: breakdown(epd.ask(url, max_tokens=1)))

    check(found, TEXT[place])


@pytest.mark.parametrize("place", ENCODE)
@again
def test_encoder_delays_show_in_their_stage(epd: Bench, place: str) -> None:
    """E with the V1 runner, a new image each time."""

    def once() -> Sample:
        picture = (epd.fresh(),)
        url = epd.fleet.url("encode")
        return breakdown(epd.ask(url, pictures=picture, max_tokens=1, stream=False))

    check(compare(epd, place, once), ENCODE[place])


@pytest.mark.parametrize("place", DECODE)
@again
def test_transfer_delays_show_in_their_stage(epd: Bench, place: str) -> None:
    """PD takes an image that E has encoded: it waits for it, or loads it slowly."""
    check(compare(epd, place, lambda: epd.pair(epd.fresh())[1]), DECODE[place])


@pytest.mark.parametrize("place", NEWER)
@again
def test_delays_show_in_their_stage_on_cudas_runner(newer: Bench, place: str) -> None:
    """V2 runner and async scheduling, a new image each time."""

    def once() -> Sample:
        return breakdown(newer.ask(newer.front, pictures=(newer.fresh(),), max_tokens=1))

    check(compare(newer, place, once), NEWER[place], noise=0.25)


def test_nothing_is_unattributed_while_delays_run(epd: Bench) -> None:
    """Delays everywhere at once still close, with nothing left over."""
    epd.control.set(dict.fromkeys(("tokenize", "forward", "sample", "output"), 20))

    found = breakdown(epd.ask(epd.fleet.url("prefill_decode"), max_tokens=1))

    assert found[stages.UNATTRIBUTED] == 0
    assert medians([found])["prefill.compute"] >= 20_000
