# SPDX-License-Identifier: Apache-2.0
"""KV connectors of any class: waiting for blocks, work inside a step, blocks kept for another instance."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ttft_otel import carrier, names, testing
from ttft_otel import clock as clocks
from ttft_otel.breakdown import BLOCKS, FORWARD, LOST_AFTER, LOST_BEFORE
from ttft_otel.carrier import counts, kept
from ttft_otel.hooks import engine, kv, worker, wrap
from ttft_otel.hooks.targets import BY_NAME

from .fakes import Core, request, told
from .runners import FORWARD as FORWARD_US
from .runners import V1, fresh_classes, scheduled

STEP = (clocks.boot_once(), 5000, 0, FORWARD, 3000, 4000)
LOAD, SAVE = 400, 300


class Connector:
    """Both sides of a KV connector; what it answers is said by the test."""

    def __init__(self, clock: testing.Clock) -> None:
        self.clock = clock
        self.found: tuple[int | None, bool] = (0, False)
        self.keeps = False
        self.slow = True

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """The scheduler's side: how many tokens come from elsewhere, and whether later."""
        return self.found

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, Any]:
        """A request has ended; its blocks are kept, or not."""
        return self.keeps, None

    def start_load_kv(self, context: Any) -> None:
        """The worker's side, before or after the forward."""
        self.clock.tick(LOAD if self.slow else 10)

    def wait_for_save(self) -> None:
        """After the forward."""
        self.clock.tick(SAVE if self.slow else 10)


def finished(
    came: tuple[str, ...] = (), fetched: tuple[str, ...] = (), **figures: list[float]
) -> Any:
    """A KVConnectorOutput."""
    stats = SimpleNamespace(data=figures) if figures else None
    return SimpleNamespace(
        finished_recving=set(came), finished_sending=set(fetched), kv_connector_stats=stats
    )


@pytest.fixture
def d(core: Core, clock: testing.Clock) -> Iterator[Any]:
    """An engine core whose scheduler has a connector; every hook is in."""

    def update(self: Any, kv_connector_output: Any) -> None:
        return None

    kind = type(core)
    kind._update_from_kv_xfer_finished = update  # type: ignore[attr-defined]
    wrap.put(BY_NAME["kv.arrive"], kind, "_update_from_kv_xfer_finished", kv.HOOKS["kv.arrive"])
    core.connector = type("Mine", (Connector,), dict(vars(Connector)))(clock)  # type: ignore[attr-defined]
    core.block_size = 16  # type: ignore[attr-defined]
    kv.created(None, core.connector)  # type: ignore[attr-defined]
    yield core
    assert not kv.moving
    kv.gone.clear()


def ask(core: Any, name: str, found: tuple[int | None, bool]) -> None:
    """The scheduler comes by a waiting request and asks the connector."""
    core.connector.found = found
    core.connector.get_num_new_matched_tokens(core.requests[name], 0)


def first(core: Any, name: str) -> Any:
    """Its first chunk is scheduled and its first output comes: marks and journey."""
    mine = core.requests[name]
    step = core.schedule((name,), {name: mine.num_tokens - mine.num_computed_tokens})
    return told(core.update(step, first=(name,), record=STEP)[name])


def test_wait(d: Any, clock: testing.Clock) -> None:
    """From the answer "they come" until the engine core hears of them it is kv.transfer."""
    d.add(request("a", 40))
    clock.tick(100)
    ask(d, "a", (39, True))
    d.requests["a"].num_computed_tokens = 39
    began = clock.at
    clock.tick(7000)
    d._update_from_kv_xfer_finished(
        finished(("a",), bytes_transferred=[100, 28], transfer_duration=[0.002, 0.003])
    )
    clock.tick(200)
    marks, journey = first(d, "a")

    assert marks.waits == [("kv.transfer", began, began + 7000)]
    assert marks.scheduled == began + 7200
    assert not marks.queue_lost and not marks.moving
    found = counts(journey)
    assert (found[names.KV_TOKENS], found[names.KV_BLOCKS]) == (39, 3)
    assert (found[names.KV_BYTES], found[names.KV_MOVE]) == (128, 3000)


def test_looking(d: Any, clock: testing.Clock) -> None:
    """While a connector still looks for blocks they are on their way already."""
    d.add(request("a", 40))
    began = clock.at
    for _ in range(3):
        ask(d, "a", (None, False))
        clock.tick(1000)
    ask(d, "a", (0, False))
    marks, journey = first(d, "a")

    assert marks.waits == [("kv.transfer", began, began + 3000)]
    assert names.KV_TOKENS not in counts(journey)


def test_no_room(d: Any, clock: testing.Clock) -> None:
    """As long as there is no room for its blocks it queues: only the last answer counts."""
    d.add(request("a", 40))
    for _ in range(3):
        ask(d, "a", (39, True))
        clock.tick(1000)
    d._update_from_kv_xfer_finished(finished(("a",)))
    marks, _ = first(d, "a")

    assert [(name, end - start) for name, start, end in marks.waits] == [("kv.transfer", 1000)]


def test_found_here_meanwhile(d: Any, clock: testing.Clock) -> None:
    """Blocks that another request has fetched before there was room are none that it waits for."""
    d.add(request("a", 40))
    ask(d, "a", (39, True))
    clock.tick(1000)
    ask(d, "a", (0, False))
    assert not kv.moving
    marks, _ = first(d, "a")

    assert not marks.waits and not marks.queue_lost


def test_preempted(d: Any, clock: testing.Clock) -> None:
    """What a preempted request finds when it comes back changes nothing that was told before."""
    mine = request("a", 40)
    d.add(mine)
    ask(d, "a", (32, False))
    d.update(d.schedule(("a",), {"a": 4}), record=STEP)
    d.update(d.schedule(preempted=("a",)))
    ask(d, "a", (39, True))
    clock.tick(1000)
    d._update_from_kv_xfer_finished(finished(("a",)))
    _, journey = told(d.update(d.schedule(tokens={"a": 40}), first=("a",), record=STEP)["a"])

    assert not journey.waits
    assert counts(journey)[names.KV_TOKENS] == 32


def test_loaded_in_the_step(d: Any) -> None:
    """A connector that loads inside the step keeps nobody waiting."""
    d.add(request("a", 40))
    ask(d, "a", (32, False))
    marks, journey = first(d, "a")

    assert not marks.waits and not marks.queue_lost
    assert counts(journey)[names.KV_TOKENS] == 32


def test_not_later_after_all(d: Any) -> None:
    """What was to come later and was scheduled at once did not wait."""
    d.add(request("a", 40))
    ask(d, "a", (39, True))
    marks, _ = first(d, "a")

    assert not marks.waits and not marks.queue_lost and not marks.moving


@pytest.mark.parametrize("gone", ["kv.match", "kv.arrive"])
def test_unseen(d: Any, clock: testing.Clock, gone: str) -> None:
    """Without one of its two marks the queue is unattributed, not fattened."""
    wrap.switch(off=[gone])
    d.add(request("a", 40))
    ask(d, "a", (39, True))
    d.requests["a"].num_computed_tokens = 39
    clock.tick(7000)
    d._update_from_kv_xfer_finished(finished(("a",)))
    marks, _ = first(d, "a")
    wrap.switch()

    assert marks.queue_lost and not marks.waits


def test_unseen_without_blocks(d: Any) -> None:
    """Where nothing came from elsewhere nothing is lost with the marks."""
    wrap.switch(off=["kv.match", "kv.arrive"])
    d.add(request("a", 40))
    marks, _ = first(d, "a")
    wrap.switch()

    assert not marks.queue_lost


def test_figures_of_two(d: Any, clock: testing.Clock) -> None:
    """Two at once: the connector's figures are nobody's, the times everybody's."""
    for name in ("a", "b"):
        d.add(request(name, 40))
        ask(d, name, (39, True))
    clock.tick(500)
    d._update_from_kv_xfer_finished(finished(("a", "b"), bytes_transferred=[100]))

    for name in ("a", "b"):
        marks, journey = first(d, name)
        assert len(marks.waits) == 1
        assert names.KV_BYTES not in counts(journey)


def test_aborted(d: Any, clock: testing.Clock) -> None:
    """One that is aborted while its blocks are on their way says so, and leaves nothing."""
    d.add(request("a", 40))
    ask(d, "a", (39, True))
    began = clock.at
    clock.tick(500)
    d.free("a")

    marks, _ = told({names.CARRIER: engine.died(d, "a")})
    assert marks.moving == began
    d._update_from_kv_xfer_finished(finished(("a",)))


def test_untraced(d: Any) -> None:
    """A request that is not traced is not looked at."""
    d.add(request("a", 40, traced=False))
    ask(d, "a", (39, True))
    d.connector.keeps = True
    d.connector.request_finished(d.requests["a"], [1])

    assert not kv.moving


def ended(core: Any, name: str, block_ids: Any) -> None:
    """P's request ends with its first token, as inside vLLM's update."""
    core.add(request(name, 40))
    core.requests[name].num_computed_tokens = 40
    step = core.schedule((name,), {name: 0})
    core.connector.keeps = True
    core.connector.request_finished(core.requests[name], block_ids)
    assert told(core.update(step, finish=(name,), record=STEP)[name])[1].kept


def test_kept(d: Any, clock: testing.Clock) -> None:
    """P keeps its blocks until they are fetched; who asked before that hears of it then."""
    ended(d, "a", ([1, 2, 3],))
    began = clock.at
    asked = kv.sent(d, "a")
    clock.tick(900)
    assert not asked.done()
    d._update_from_kv_xfer_finished(finished(fetched=("a",)))

    assert kept(asked.result()) == carrier.Kept(began, began + 900, 40, 3, False)
    assert kv.sent(d, "a") == ""


def test_kept_and_asked_late(d: Any, clock: testing.Clock) -> None:
    """Who asks after they were fetched hears of it too, once; leases that ran out are told apart."""
    ended(d, "a", [7, 8])
    clock.tick(900)
    d._update_from_kv_xfer_finished(finished(fetched=("a",), num_kv_expired_reqs=[1]))
    found = kept(kv.sent(d, "a"))

    assert found is not None and (found.blocks, found.over) == (2, True)
    assert kv.sent(d, "a") == ""


def test_not_kept(d: Any) -> None:
    """Without blocks kept there is nothing to ask for."""
    d.add(request("a", 40))
    d.connector.request_finished(d.requests["a"], [1])

    assert kv.sent(d, "a") == "" and not kv.moving
    assert not first(d, "a")[1].kept


def test_bounded(d: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many wait or were fetched unasked, the state has a bound."""
    monkeypatch.setattr(kv, "LIMIT", 10)
    monkeypatch.setattr(kv, "UNASKED", 5)
    for number in range(30):
        ended(d, f"r{number}", [1])
    assert len(kv.moving) == 10
    d._update_from_kv_xfer_finished(finished(fetched=tuple(kv.moving)))

    assert not kv.moving and len(kv.gone) == 5


def test_bounded_asked(d: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asked for blocks that the bound pushed out is answered: nobody will know."""
    monkeypatch.setattr(kv, "LIMIT", 1)
    ended(d, "a", [1])
    asked = kv.sent(d, "a")
    ended(d, "b", [2])

    assert list(kv.moving) == ["b"] and kept(asked.result(0)) is None
    d._update_from_kv_xfer_finished(finished(fetched=("b",)))


def test_not_ours() -> None:
    """What is no answer of ours is none."""
    assert kept("") is None and kept("[1]") is None and kept("é") is None


def test_older_class(fresh: None) -> None:
    """A class without one of the methods is wrapped as far as it goes."""

    class Old:
        def start_load_kv(self, context: Any) -> str:
            return "loaded"

    made = Old()
    kv.created(None, made)

    assert made.start_load_kv(None) == "loaded"
    assert wrap.active("kv.load") and not wrap.active("kv.save")


class Runner(V1):
    """V1's runner with a KV connector around its forward."""

    kv: Any

    def _model_forward(self) -> None:
        if self.state.has_sync_kv_loads:
            self.kv.start_load_kv(None)
        self._forward()
        if not self.state.has_sync_kv_loads:
            self.kv.start_load_kv(None)
        self.kv.wait_for_save()

    def _forward(self) -> None:
        self.clock.tick(FORWARD_US)


@pytest.fixture
def runner(fresh: None, clock: testing.Clock) -> Iterator[Any]:
    """One of these, with a connector that takes its time; the wrapped classes are put back."""
    fresh_classes()
    kind = type("Own", (Runner,), dict(vars(Runner)))
    wrap.put(BY_NAME["worker.forward"], kind, "_forward", worker.HOOKS["worker.forward"])
    made: Any = kind(clock)
    made.kv = type("Mine", (Connector,), dict(vars(Connector)))(clock)
    kv.created(None, made.kv)
    yield made
    for patches in wrap.installed.values():
        for patch in patches:
            setattr(patch.owner, patch.name, patch.original)


def run(runner: Any, sync: bool) -> tuple[int, list[Any]]:
    """One marked step: what was lost, and (stage's code, length) in order."""
    output = scheduled({"a": 9})
    output.has_sync_kv_loads = sync
    output.kv_connector_metadata = object()
    runner.execute_model(output)
    record = runner.sample_tokens()._ttft
    pairs = zip(record[3::3], record[4::3], record[5::3], strict=True)
    return record[2], [(code, end - start) for code, start, end in pairs]


FORWARDED = (FORWARD, FORWARD_US)


def test_step_loads_first(runner: Any) -> None:
    """A load that the forward needs comes before it, a save after it."""
    assert run(runner, True) == (0, [(BLOCKS, LOAD), FORWARDED, (BLOCKS, SAVE)])


def test_step_loads_after(runner: Any) -> None:
    """Loads for other requests are submitted after the forward, and keep this step's from sampling."""
    assert run(runner, False) == (0, [FORWARDED, (BLOCKS, LOAD), (BLOCKS, SAVE)])


def test_step_of_nothing(runner: Any) -> None:
    """Most connectors only look whether there is something to do: no stage of their own."""
    runner.kv.slow = False

    assert run(runner, True) == (0, [FORWARDED])


@pytest.mark.parametrize(
    ("gone", "sync", "lost"),
    [
        ("kv.load", True, LOST_BEFORE | LOST_AFTER),
        ("kv.load", False, LOST_AFTER),
        ("kv.save", True, LOST_AFTER),
    ],
)
def test_step_unseen(runner: Any, gone: str, sync: bool, lost: int) -> None:
    """Without its hook nobody knows where a load or a save was."""
    wrap.switch(off=[gone])
    found = run(runner, sync)[0]
    wrap.switch()

    assert found == lost


def test_step_elsewhere(runner: Any, clock: testing.Clock) -> None:
    """Outside a measured step connectors just work."""
    runner.kv.start_load_kv(None)
    runner.kv.wait_for_save()

    assert clock.at == 1_000_000 + LOAD + SAVE
