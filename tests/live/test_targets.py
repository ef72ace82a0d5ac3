# SPDX-License-Identifier: Apache-2.0
"""Without a patch target its stages become unattributed, and the sum of all is the client's TTFT still.

A known delay inside the lost stages makes them large: all of it must be in `unattributed`, and a
neighbouring stage that took part of it would have grown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lab.evidence import Errors, ErrorTolerance, measure_until_decided
from tests.live.bench import LiveDeployment, read_breakdown
from tests.live.test_injected import Ask, Sample, load_from_files
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
# A deployment and what is asked of it -> how, and the targets that are taken out there.
CASES: dict[str, tuple[Ask, Sequence[str]]] = {
    # V1 runner.
    "epd prefill_decode": (LiveDeployment.encode_then_prefill, ON_PD),
    "epd encode": (
        lambda epd: epd.read_one("encode", **IMAGE),
        ("worker.encoder", "transfer.save", "worker.execute"),
    ),
    # The time of prefill's KV blocks is neither queue nor transfer.
    "pd decode": (
        lambda pd: read_breakdown(pd.prefill_then_decode()[1]),
        ("kv.match", "kv.arrive", "engine.input", "scheduler.schedule", "worker.execute"),
    ),
    # V2 runner and async scheduling.
    "newer all": (
        lambda newer: newer.read_one(image=True, max_tokens=1),
        (
            *("worker.execute", "worker.encoder", "worker.forward", "worker.sample"),
            "worker.output",
        ),
    ),
    # Copies that start at the step's end are lost. It runs the language model, too.
    "nixl encoder": (lambda nixl: nixl.read_one("encode", **IMAGE), ("transfer.flush",)),
    # The step's time before loads, or after saves.
    "files all": (load_from_files, ("kv.load", "kv.save")),
}
# One of each process in every run: the API server, the engine core, the worker, and the connector in both;
# of decode what prefill_decode does not show.
EVERY_DAY = ("frontend.assign", "engine.input", "worker.forward", "transfer.wait", "transfer.load")


def is_everyday(case: str, target: str) -> bool:
    """Whether a target is taken out there in every run."""
    if case == "pd decode":
        return target not in ON_PD
    return case != "epd prefill_decode" or target in EVERY_DAY


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


@pytest.mark.parametrize(
    ("deployment", "case", "target"),
    [
        pytest.param(
            *(case.split()[0], case, target),
            id=f"{case} {target}",
            marks=() if is_everyday(case, target) else pytest.mark.full,
        )
        for case, (_, targets) in CASES.items()
        for target in targets
    ],
    indirect=["deployment"],
)
def test_a_lost_target_costs_its_stages(deployment: LiveDeployment, case: str, target: str) -> None:
    """Only the target's stages are lost."""
    ask, _ = CASES[case]
    is_encoder = case == "epd encode"
    place = "encoder" if is_encoder and target == "worker.execute" else DELAYED[target]
    check_loss(deployment, lambda: ask(deployment), target, place, encode=is_encoder)


@pytest.mark.untimed
@pytest.mark.parametrize("target", PARTS)
def test_a_lost_part_costs_no_stage(epd: LiveDeployment, target: str) -> None:
    """Without the target of a part nothing is unattributed: the stage around it has marks of its own."""
    found = [ask_without(epd, target, "", epd.encode_then_prefill) for _ in range(PARTS_TIMES)]
    epd.control.set_injections()
    epd.control.wait_applied()

    assert all(sample[stages.UNATTRIBUTED] == 0 for sample in found)


@pytest.mark.untimed
def test_every_target_is_taken_out_somewhere() -> None:
    """Each target is in one of the lists above, except those whose effect is fixed at a server's start."""
    fixed = {"frontend.app", "transfer.create", "kv.create"}
    tried = {*PARTS, *(target for _, targets in CASES.values() for target in targets)}

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
