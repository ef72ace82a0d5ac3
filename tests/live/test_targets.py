# SPDX-License-Identifier: Apache-2.0
"""Without a patch target its stages become unattributed, and the sum of all is the client's TTFT still.

A known delay inside the lost stages makes them large: all of it must be in `unattributed`, and a
neighbouring stage that took part of it would have grown.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from lab.evidence import Errors, ErrorTolerance, measure_until_decided
from tests.live.bench import LiveDeployment, mark_repeated, read_breakdown
from tests.live.test_injected import Sample, load_from_files
from ttft_otel.hooks.targets import TARGETS, TARGETS_BY_NAME
from ttft_otel.model import stages

PARTS_TIMES = 3
DELAY_MS = 60.0
RESOLUTION_MS = 0.75 * DELAY_MS
MAX_STRAY_MS = 6.0  # by which a stage may move that is not lost
MAX_SHARE = 0.1  # of what is lost, by which the remainder may be off
CLIENT = "client beyond all stages"
IMAGE = {"image": True, "max_tokens": 1, "stream": False}  # for an encoder
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
    "transfer.flush": "ec_save",
}
PARTS = [target.name for target in TARGETS if not target.lost]
# An image that the encoder has encoded: prefill_decode neither encodes nor saves it. V1 without async has
# no late output.
ON_PD = [
    name
    for name in DELAYED
    if name not in ("worker.encoder", "worker.output", "transfer.save", "transfer.flush")
    and not name.startswith("kv.")
]
# One of each process in every run: the API server, the engine core, the worker, and the connector in both.
EVERY_DAY = ("frontend.assign", "engine.input", "worker.forward", "transfer.wait", "transfer.load")
ON_E = ("worker.encoder", "transfer.save", "worker.execute")
ON_D = ("kv.match", "kv.arrive", "engine.input", "scheduler.schedule", "worker.execute")
BY_FILES = ("kv.load", "kv.save")
ON_NIXLS_E = ("transfer.flush",)
ON_CUDAS = ("worker.execute", "worker.encoder", "worker.forward", "worker.sample", "worker.output")


def ask_without(
    bench: LiveDeployment, target: str, place: str, once: Callable[[], Sample]
) -> Sample:
    """Send one delayed request while `target` is removed ("": none is); CLIENT is among its stages."""
    bench.control.set_injections(
        {place: DELAY_MS} if place else {}, off=(target,) if target else ()
    )
    bench.control.wait_applied()
    sample = once()
    total = sample.pop("ttft")
    assert sum(sample.values()) == total, (sample, total)
    return {**sample, CLIENT: bench.latest_client_us - total}


def check_loss(
    bench: LiveDeployment, once: Callable[[], Sample], target: str, place: str, encode: bool = False
) -> None:
    """Check that the target's lost stages become unattributed and every other stage stays.

    Each round measures with and without the target; rounds go on until the intervals decide.
    """
    row = TARGETS_BY_NAME[target]
    lost = set(row.lost_encode if encode and row.lost_encode is not None else row.lost)
    limits = {
        # At least nine tenths of the delay. It cannot be too much: the other stages stay as they are, and the
        # sum of all is exact. Two requests' lost stages are not compared: they differ by what steps vary.
        "unattributed beyond the delay": ErrorTolerance(
            -MAX_SHARE * DELAY_MS, math.inf, RESOLUTION_MS
        ),
    }
    other = ErrorTolerance(-MAX_STRAY_MS, MAX_STRAY_MS, RESOLUTION_MS)

    def measure_round() -> Errors:
        full, found = (ask_without(bench, off, place, once) for off in ("", target))
        assert full[stages.UNATTRIBUTED] == 0, full
        kept = set(full) - lost - {stages.UNATTRIBUTED}
        assert kept <= set(found), (kept, found)
        beyond = found[stages.UNATTRIBUTED] / 1000 - DELAY_MS
        return {
            **{name: (found[name] - full[name]) / 1000 for name in kept},
            "unattributed beyond the delay": beyond,
        }

    once()
    try:
        measure_until_decided(measure_round, lambda name: limits.get(name, other))
    finally:
        bench.control.set_injections()
        bench.control.wait_applied()  # the next test must find everything in place


@pytest.mark.parametrize("target", mark_repeated(ON_PD, {*ON_PD} - {*EVERY_DAY}))
def test_a_lost_target_costs_its_stages_on_prefill_decode(epd: LiveDeployment, target: str) -> None:
    """V1 runner, for an image that the encoder has encoded: only the target's stages are lost."""
    check_loss(epd, epd.encode_then_prefill, target, DELAYED[target])


@pytest.mark.untimed
@pytest.mark.parametrize("target", PARTS)
def test_a_lost_part_costs_no_stage(epd: LiveDeployment, target: str) -> None:
    """Without the target of a part nothing is unattributed: the stage around it has marks of its own."""
    found = [ask_without(epd, target, "", epd.encode_then_prefill) for _ in range(PARTS_TIMES)]
    epd.control.set_injections()
    epd.control.wait_applied()

    assert all(sample[stages.UNATTRIBUTED] == 0 for sample in found)


@pytest.mark.parametrize("target", ON_E)
def test_a_lost_target_costs_its_stages_on_the_encoder(epd: LiveDeployment, target: str) -> None:
    """V1 runner, for a new image: only the target's stages are lost."""
    place = "encoder" if target == "worker.execute" else DELAYED[target]
    check_loss(epd, partial(epd.read_one, "encode", **IMAGE), target, place, encode=True)


@pytest.mark.parametrize("target", mark_repeated(ON_D, ON_PD))
def test_a_lost_target_costs_its_stages_on_decode(pd: LiveDeployment, target: str) -> None:
    """Without it the time of prefill's KV blocks is unattributed, neither queue nor transfer."""
    check_loss(pd, lambda: read_breakdown(pd.prefill_then_decode()[1]), target, DELAYED[target])


@pytest.mark.parametrize("target", ON_CUDAS)
def test_a_lost_target_costs_its_stages_on_cudas_runner(newer: LiveDeployment, target: str) -> None:
    """With the V2 runner and async scheduling only the target's stages are lost."""
    check_loss(newer, partial(newer.read_one, image=True, max_tokens=1), target, DELAYED[target])


@pytest.mark.parametrize("target", ON_NIXLS_E)
def test_a_lost_target_costs_its_stages_on_an_encoder_over_nixl(
    nixl: LiveDeployment, target: str
) -> None:
    """V2 runner: the copies that start at the step's end are lost. It runs the language model, too."""
    check_loss(nixl, partial(nixl.read_one, "encode", **IMAGE), target, DELAYED[target])


@pytest.mark.parametrize("target", BY_FILES)
def test_a_lost_target_costs_its_stages_with_files(files: LiveDeployment, target: str) -> None:
    """Without the hook around loads or saves, the step's time before or after them is unattributed."""
    check_loss(files, partial(load_from_files, files), target, DELAYED[target])


@pytest.mark.untimed
def test_every_target_is_taken_out_somewhere() -> None:
    """Each target is in one of the lists above, except those whose effect is fixed at a server's start."""
    fixed = {"frontend.app", "transfer.create", "kv.create"}
    tried = {*ON_PD, *ON_E, *ON_D, *BY_FILES, *ON_NIXLS_E, *ON_CUDAS, *PARTS}

    assert {target.name for target in TARGETS} == tried | fixed


def check_failing_hooks(bench: LiveDeployment, server: str, **question: Any) -> None:
    """Make every hook fail in turn: the answer is the same, and afterwards the stages add up again."""
    url = bench.fleet.get_url(server)
    plain = bench.send_request(url, **question)
    assert not bench.list_complaints(server)
    for target in TARGETS:
        bench.control.set_injections(fail=[target.name])
        bench.control.wait_applied()
        answer = bench.send_request(url, **question)
        assert (answer.status, answer.text) == (200, plain.text), target.name
    bench.control.set_injections()
    bench.control.wait_applied()

    assert read_breakdown(bench.send_request(url, **question))[stages.UNATTRIBUTED] == 0
    said = bench.list_complaints(server)
    assert len(said) >= 10, said  # each hook that ran said so, once


@pytest.mark.untimed
@pytest.mark.parametrize("server", ("prefill_decode", "encode"))
def test_a_hook_that_raises_never_reaches_the_client(epd: LiveDeployment, server: str) -> None:
    """V1 runner: failing hooks change no answer to a text, and of the encoder none to an image."""
    image = {"pictures": (epd.new_picture_seed(),), "max_tokens": 1, "stream": False}
    check_failing_hooks(epd, server, **(image if server == "encode" else {"max_tokens": 4}))


def test_a_hook_that_raises_never_reaches_the_client_of_cudas_runner(newer: LiveDeployment) -> None:
    """With the V2 runner and async scheduling failing hooks change no answer."""
    pictures = (newer.new_picture_seed(),)
    check_failing_hooks(newer, "prefill_decode", pictures=pictures, max_tokens=4)


def test_a_hook_that_raises_never_reaches_the_client_of_decode(pd: LiveDeployment) -> None:
    """On prefill and decode failing hooks of the KV connectors change no answer, and the blocks arrive."""
    for target in (name for name in TARGETS_BY_NAME if name.startswith("kv.")):
        pd.control.set_injections(fail=[target])
        pd.control.wait_applied()
        first, second = pd.prefill_then_decode(max_tokens=4)
        assert (first.status, second.status) == (200, 200), target
        assert second.text.startswith(first.text), target
    pd.control.set_injections()
    pd.control.wait_applied()

    found = read_breakdown(pd.prefill_then_decode()[1])
    assert found[stages.UNATTRIBUTED] == 0 < found["kv.transfer"]
    assert pd.list_complaints("decode") and pd.list_complaints("prefill")
