# SPDX-License-Identifier: Apache-2.0
"""A known delay in one place of real vLLM shows in that place's stage and in no other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest

from lab.compat import PLACES_BY_KIND
from lab.evidence import Errors, ErrorTolerance, measure_until_decided
from tests.live.bench import LiveDeployment, mark_repeated
from ttft_otel.model import stages

DELAY_MS = 80.0
# The control sleeps, too: after any sleep the caches are cold and another process may hold the core,
# which lengthens the next stage. The difference of a long and a short sleep is the delay alone.
CONTROL_MS = 10.0
MAX_SHARE = 0.02  # of the delay, by which its stage may be off
MAX_STRAY_MS = 2.0  # by which any other stage may move
SLEPT = "slept"  # no stage
Sample = dict[str, int]

# place -> the stage it must show in, on the instance that is asked; scripts/compat asks for the same.
TEXT = PLACES_BY_KIND["text"]
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
# Of the sum of a router before three.
LEGS = {"encoder": "encode.encoder.compute", "kv_wait": "decode.kv.transfer"}


@dataclass(frozen=True, slots=True)
class Injection:
    """A delay of one place and its control, both in milliseconds."""

    place: str
    delay_ms: float = DELAY_MS
    control_ms: float = CONTROL_MS


def measure_delay(
    bench: LiveDeployment, injection: Injection, once: Callable[[], Sample]
) -> Sample:
    """Send one request with this delay; returns its stages and, as SLEPT, the time slept, in microseconds.

    A sleep of 80 ms lasts a little longer; the plugin logs how long, by its own clock.
    """
    bench.control.set_injections({injection.place: injection.delay_ms})
    sample, delays = bench.note_delays(injection.place, once)
    assert delays, f"{injection.place} was not delayed"
    assert delays[0].duration_ms >= 0.9 * injection.delay_ms, delays
    return {**sample, SLEPT: round(delays[0].duration_ms * 1000)}


def check_stage(
    bench: LiveDeployment, injection: Injection | str, stage: str, once: Callable[[], Sample]
) -> list[Errors]:
    """Check that the difference of two delays is in `stage` within 2 %, and moves no other stage by 2 ms.

    Each round has a long and a short delay, which of them first alternates; rounds go on until the
    intervals decide.
    """
    injection = Injection(injection) if isinstance(injection, str) else injection
    short = Injection(injection.place, injection.control_ms)
    turns = 0

    def measure_round() -> Errors:
        nonlocal turns
        turns += 1
        pair = (injection, short) if turns % 2 else (short, injection)
        found = {each: measure_delay(bench, each, once) for each in pair}
        long, control = found[injection], found[short]
        expected = {stage: long.pop(SLEPT) - control.pop(SLEPT)}
        return {
            name: (long.get(name, 0) - control.get(name, 0) - expected.get(name, 0)) / 1000
            for name in sorted({*long, *control, stage} - {"ttft"})
        }

    difference = injection.delay_ms - injection.control_ms

    def get_tolerance(name: str) -> ErrorTolerance:
        most = MAX_SHARE * injection.delay_ms if name == stage else MAX_STRAY_MS
        return ErrorTolerance(-most, most, 0.75 * difference)

    once()
    try:
        return measure_until_decided(measure_round, get_tolerance)
    finally:
        bench.control.set_injections()


# What is delayed of an encoding over NIXL, and the stage of the router's sum in which it is waited for.
OVER_NIXL = {
    # The producer says "not ready" for so long, to who asks again every few ms.
    "ec_asked": (Injection("ec_asked", 400.0, 50.0), "prefill_decode.ec.transfer"),
    # prefill_decode copies what it has fetched.
    "ec_load": (Injection("ec_load"), "prefill_decode.ec.transfer"),
    # The encoder starts its copy: this much its answer waits for.
    "ec_save": (Injection("ec_save"), "encode.ec.transfer"),
}
PLAIN = {"max_tokens": 1, "stream": False}


@pytest.mark.parametrize("place", TEXT)
def test_text_delays_show_in_their_stage(epd: LiveDeployment, place: str) -> None:
    """On prefill_decode with the V1 runner a delay of a text request shows in its stage."""
    check_stage(epd, place, TEXT[place], lambda: epd.read_one("prefill_decode", max_tokens=1))


@pytest.mark.full
def test_a_delay_in_another_stage_than_expected_fails(epd: LiveDeployment) -> None:
    """The measurement itself fails when a delay of the forward pass is expected in `sample`."""
    with pytest.raises(AssertionError, match=r"prefill\.compute: .* is outside"):
        check_stage(epd, "forward", "sample", lambda: epd.read_one("prefill_decode", max_tokens=1))


@pytest.mark.parametrize("place", mark_repeated(ENCODE, ("media",)))
def test_encoder_delays_show_in_their_stage(epd: LiveDeployment, place: str) -> None:
    """On the encoder with the V1 runner a delay of an image's request shows in its stage."""
    check_stage(epd, place, ENCODE[place], lambda: epd.read_one("encode", image=True, **PLAIN))


@pytest.mark.parametrize("place", DECODE)
def test_transfer_delays_show_in_their_stage(epd: LiveDeployment, place: str) -> None:
    """On prefill_decode a delay before or while an encoding is loaded shows in ec.transfer."""
    check_stage(epd, place, DECODE[place], epd.encode_then_prefill)


def test_nothing_is_unattributed_while_delays_run(epd: LiveDeployment) -> None:
    """With delays in four places at once the stages still add up to the TTFT."""
    epd.control.set_injections(dict.fromkeys(("tokenize", "forward", "sample", "output"), 20))

    found = epd.read_one("prefill_decode", max_tokens=1)
    assert found[stages.UNATTRIBUTED] == 0
    assert found["prefill.compute"] >= 20_000


def test_late_kv_blocks_show_in_kv_transfer(pd: LiveDeployment) -> None:
    """A delay until decode knows of prefill's blocks is decode's kv.transfer in the router's sum."""
    asked = {"words": 300, "max_tokens": 2, "stream": False}
    check_stage(
        pd, "kv_wait", "decode.kv.transfer", lambda: pd.read_one(prompt=pd.new_prompt(), **asked)
    )


@pytest.mark.parametrize("place", NEWER)
def test_delays_show_in_their_stage_on_cudas_runner(newer: LiveDeployment, place: str) -> None:
    """With the V2 runner and async scheduling a delay of an image's request shows in its stage."""
    check_stage(newer, place, NEWER[place], lambda: newer.read_one(image=True, max_tokens=1))


@pytest.mark.parametrize("place", OVER_NIXL)
def test_late_encodings_show_in_ec_transfer(nixl: LiveDeployment, place: str) -> None:
    """A known delay before an encoding can be read, loaded or saved shows in ec.transfer and nowhere else."""
    check_stage(nixl, *OVER_NIXL[place], partial(nixl.read_one, image=True, **PLAIN))


@pytest.mark.parametrize("place", LEGS)
def test_delays_show_in_their_stage_on_all_three(epd3: LiveDeployment, place: str) -> None:
    """A delay of the encoder's step or of prefill's blocks shows in the stage of its own leg."""
    once = partial(epd3.read_one, image=True, words=200, max_tokens=2, stream=False)
    check_stage(epd3, place, LEGS[place], once)


@pytest.mark.full
def test_late_blocks_show_in_kv_transfer_with_the_v2_runner(nixl3: LiveDeployment) -> None:
    """Where a connector works after the sampler, a delay of prefill's blocks shows in their transfer, too."""
    once = partial(nixl3.read_one, image=True, words=200, max_tokens=2, stream=False)
    check_stage(nixl3, "kv_wait", LEGS["kv_wait"], once)


def load_from_files(bench: LiveDeployment) -> Sample:
    """Send a new prompt twice; the second one's breakdown, whose blocks come from files."""
    asked = {"prompt": bench.new_prompt(), "words": 300, "max_tokens": 1}
    bench.read_one(**asked)
    return bench.read_one(**asked)


def test_a_slow_load_of_files_shows_in_kv_transfer(files: LiveDeployment) -> None:
    """A delay of 80 ms while a file is read inside the step shows in kv.transfer and nowhere else."""
    once = partial(load_from_files, files)
    assert once()[stages.UNATTRIBUTED] == 0

    check_stage(files, "kv_load", "kv.transfer", once)
