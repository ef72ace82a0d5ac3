# SPDX-License-Identifier: Apache-2.0
"""KV connectors of any class, on the scheduler's side: waits for blocks, blocks kept for other instances."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from hooks.fakes import decode_headers, make_request
from hooks.process import CORE, HOOKS, PATCHER, wrap_kv_connector
from ttft_otel.hooks.engine_core import transfers
from ttft_otel.hooks.targets import TARGETS_BY_NAME
from ttft_otel.model.breakdown import CODE_FORWARD, find_failed_stage
from ttft_otel.model.names import header_names, keys
from ttft_otel.tracing import clock as clocks
from ttft_otel.tracing import context, request_trace, settings
from ttft_otel.tracing.carrier import (
    EngineTimeline,
    KeptBlocks,
    decode_answer,
    list_timeline_attributes,
)
from ttft_otel.tracing.request_trace import RequestTrace

READ = SimpleNamespace(data={"bytes_transferred": [100, 28], "transfer_duration": [0.002, 0.003]})
STEP = (clocks.get_boot_number(), 5000, 0, CODE_FORWARD, 3000, 4000)


class FakeKvConnector:
    """The scheduler's side of a KV connector; what it answers is said by the test."""

    found: tuple[int | None, bool] = (0, False)
    keeps = False

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        return self.found

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, Any]:
        return self.keeps, None


@pytest.fixture
def kv_core(core: Any) -> Iterator[Any]:
    """An engine core whose scheduler has a connector; every hook is in."""
    kind = type(core)
    kind._update_from_kv_xfer_finished = lambda self, kv_connector_output: None
    target, hook = TARGETS_BY_NAME["kv.arrive"], HOOKS["kv.arrive"]
    PATCHER.patch_attribute(target, kind, "_update_from_kv_xfer_finished", hook)
    core.connector = type("Mine", (FakeKvConnector,), dict(vars(FakeKvConnector)))()
    core.block_size = 16
    wrap_kv_connector(core.connector)
    yield core
    assert not CORE.blocks.tracked
    CORE.blocks.answers.unasked.clear()


def tell(
    core: Any, *came: str, fetched: Iterable[str] = (), meta: Any = None, **figures: Any
) -> None:
    """The worker's side tells whose blocks have come, and whose were fetched, with a step's figures."""
    core._update_from_kv_xfer_finished(
        SimpleNamespace(
            finished_recving=set(came),
            finished_sending=set(fetched),
            kv_connector_stats=SimpleNamespace(data=figures) if figures else None,
            kv_connector_worker_meta=meta,
        )
    )


def ask_connector(core: Any, *answers: tuple[int | None, bool], name: str = "a") -> None:
    """The scheduler comes by a waiting request and asks the connector, a millisecond after each answer."""
    for found in answers:
        core.connector.found = found
        core.connector.get_num_new_matched_tokens(core.requests[name], 0)
        core.clock.tick(1000)


def add_request(
    core: Any, *answers: tuple[int | None, bool], name: str = "a", **fields: Any
) -> int:
    """A request of 40 tokens comes, and the connector answers; when the first answer was."""
    core.add(make_request(name, 40, **fields))
    at: int = core.clock.at
    ask_connector(core, *answers, name=name)
    return at


LATER = (39, True)


def finish_first_chunk(core: Any, name: str = "a") -> Any:
    """Schedule the first chunk of a request and give its first output; its marks and timeline."""
    mine = core.requests[name]
    step = core.schedule((name,), {name: mine.num_tokens - mine.num_computed_tokens})
    return decode_headers(core.update(step, first=(name,), record=STEP)[name])


def test_wait(kv_core: Any) -> None:
    """From the answer "they come" until the engine core hears of them it is kv.transfer."""
    began = add_request(kv_core, LATER)
    kv_core.requests["a"].num_computed_tokens = 39
    kv_core.clock.tick(6000)
    tell(kv_core, "a", **READ.data)
    kv_core.clock.tick(200)
    marks, timeline = finish_first_chunk(kv_core)

    assert marks.waits == [("kv.transfer", began, began + 7000)]
    assert marks.scheduled == began + 7200
    assert not marks.queue_lost and not marks.moving
    attributes = list_timeline_attributes(timeline)
    assert (attributes[keys.KV_TOKENS], attributes[keys.KV_BLOCKS]) == (39, 3)
    assert (attributes[keys.KV_BYTES], attributes[keys.KV_MOVE_US]) == (128, 3000)


class NixlPullConnector(FakeKvConnector):
    """A child that fetches from another instance; of an older vLLM, which asks no connector where from."""


class TieringConnector(FakeKvConnector):
    """A child whose blocks were on this host and on its disk."""

    def get_external_cache_hit_sources(self, request: Any, tokens: int) -> dict[str, int]:
        return {"disk": 16, "host": tokens - 16}


LOAD = SimpleNamespace(transfer_stats=SimpleNamespace(load=SimpleNamespace(bytes=512, time=0.004)))


@pytest.mark.parametrize(
    ("child", "found"),
    [
        (0, ("NixlPullConnector", "p2p", 128, 3000)),
        (1, ("TieringConnector", "disk", 512, 4000)),
        (-1, ("MultiConnector", "external_unspecified", None, None)),
    ],
)
def test_children(kv_core: Any, child: int, found: tuple[Any, ...]) -> None:
    """Of MultiConnector the child that has the blocks is told, and what it moved of all that was."""
    kv_core.connector._connectors = [NixlPullConnector(), TieringConnector()]
    kv_core.connector._requests_to_connector = {"a": child} if child >= 0 else {}
    add_request(kv_core, LATER, prefill_stats=SimpleNamespace(num_external_cached_tokens=32))
    figures = {} if child else {"NixlPullConnector": READ, "TieringConnector": READ}
    tell(kv_core, "a", meta=SimpleNamespace(metadata=(None, LOAD)), **figures)
    attributes = list_attributes(finish_first_chunk(kv_core)[1])

    assert attributes[keys.KV_TOKENS] == 32  # what vLLM took of what was offered
    names = (keys.KV_CONNECTOR, keys.KV_SOURCE, keys.KV_BYTES, keys.KV_MOVE_US)
    assert tuple(map(attributes.get, names)) == found


def test_nothing_taken(kv_core: Any) -> None:
    """Where vLLM's own cache has as much it takes nothing from the connector, and nothing is told of it."""
    add_request(kv_core, (32, False), prefill_stats=SimpleNamespace(num_external_cached_tokens=0))
    attributes = list_attributes(finish_first_chunk(kv_core)[1])

    assert not {keys.KV_TOKENS, keys.KV_SOURCE, keys.KV_CONNECTOR} & attributes.keys()


def test_children_expire(kv_core: Any) -> None:
    """A lease that ran out at MultiConnector's NIXL has expired."""
    end_request(kv_core, "a", ([1, 2, 3],))
    over = SimpleNamespace(data={"num_kv_expired_reqs": [1]})
    tell(kv_core, fetched=("a",), NixlPullConnector=over)
    kept = decode_answer(KeptBlocks, CORE.blocks.answer_kept_blocks("a"))

    assert kept is not None and kept.expired


def list_attributes(timeline: EngineTimeline) -> dict[str, Any]:
    """Attributes of the span of a request with this timeline, at a server with MultiConnector."""
    trace = RequestTrace(0, context.start_context("", "", settings.Settings()), False, False)
    trace.timeline = timeline
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_trace.identity, "kv_connector", "MultiConnector")
        return dict(request_trace._list_ttft_attributes(trace))


@pytest.mark.parametrize(
    ("answers", "come", "waited_us", "tokens"),
    [
        (
            [(None, False)] * 3 + [(0, False)],
            False,
            [3000],
            None,
        ),  # looked for: on their way already
        ([LATER] * 3, True, [1000], 39),  # no room for them: it queues, only the last answer counts
        ([LATER, (0, False)], False, [], None),  # another request has fetched them meanwhile
        ([(0, False)], False, [], None),  # found nowhere
        ([(32, False)], False, [], 32),  # loaded in the step
        ([LATER], False, [], 39),  # scheduled at once after all
    ],
)
def test_answers(
    kv_core: Any, answers: list[Any], come: bool, waited_us: list[int], tokens: int | None
) -> None:
    """Only where blocks are waited for there is a wait; what was found nowhere leaves no details."""
    began = add_request(kv_core, *answers)
    assert bool(CORE.blocks.tracked) == (answers[-1] == LATER)
    tell(kv_core, *["a"] * come)
    marks, timeline = finish_first_chunk(kv_core)
    waits = [(name, end - start) for name, start, end in marks.waits]
    assert waits == [("kv.transfer", us) for us in waited_us]
    if answers[0] == (None, False):
        assert marks.waits[0][1] == began, (
            "what is looked for is on its way from the first answer on"
        )
    assert not marks.queue_lost and not marks.moving
    assert list_timeline_attributes(timeline).get(keys.KV_TOKENS) == tokens
    assert timeline.details is not None or answers == [(0, False)]


def test_preempted(kv_core: Any) -> None:
    """What a preempted request finds when it comes back changes nothing that was told before."""
    add_request(kv_core, (32, False))
    kv_core.update(kv_core.schedule(("a",), {"a": 4}), record=STEP)
    kv_core.update(kv_core.schedule(preempted=("a",)))
    ask_connector(kv_core, LATER)
    tell(kv_core, "a")
    step = kv_core.schedule(tokens={"a": 40})
    _, timeline = decode_headers(kv_core.update(step, first=("a",), record=STEP)["a"])

    assert not timeline.read_details().waits
    assert list_timeline_attributes(timeline)[keys.KV_TOKENS] == 32


@pytest.mark.parametrize("cached", [39, 0])
@pytest.mark.parametrize("gone", ["kv.match", "kv.arrive"])
def test_unseen(kv_core: Any, gone: str, cached: int) -> None:
    """Without one of the two marks the time is unattributed, unless nothing came from elsewhere."""
    PATCHER.switch(off=[gone])
    add_request(kv_core, *[LATER] * bool(cached))
    kv_core.requests["a"].num_computed_tokens = cached
    tell(kv_core, "a")
    marks, _ = finish_first_chunk(kv_core)
    PATCHER.switch()

    assert marks.queue_lost is bool(cached) and not marks.waits


def test_figures_of_two(kv_core: Any) -> None:
    """With two loads at once the connector's figures belong to neither request, the times to both."""
    for name in ("a", "b"):
        add_request(kv_core, LATER, name=name)
    tell(kv_core, "a", "b", bytes_transferred=[100])

    for name in ("a", "b"):
        marks, timeline = finish_first_chunk(kv_core, name)
        assert len(marks.waits) == 1
        assert keys.KV_BYTES not in list_timeline_attributes(timeline)


def test_aborted(kv_core: Any) -> None:
    """One that is aborted while its blocks are on their way says so, and leaves nothing."""
    began = add_request(kv_core, LATER)
    kv_core.free("a")

    marks, _ = decode_headers({header_names.CARRIER_KEY: CORE.answer_aborted("a")})
    assert marks.moving == began
    tell(kv_core, "a")


def end_request(core: Any, name: str, block_ids: Any) -> None:
    """P's request ends with its first token, as inside vLLM's update."""
    add_request(core, name=name, computed=40)
    step = core.schedule((name,), {name: 0})
    core.connector.keeps = True
    core.connector.request_finished(core.requests[name], block_ids)
    out = core.update(step, finish=(name,), record=STEP)
    assert decode_headers(out[name])[1].read_details().kept


def test_kept(kv_core: Any) -> None:
    """P keeps its blocks until they are fetched; who asked before that hears of it then."""
    end_request(kv_core, "a", ([1, 2, 3],))
    began = kv_core.clock.at
    answer_future = CORE.blocks.answer_kept_blocks("a")
    kv_core.clock.tick(900)
    assert not answer_future.done()
    tell(kv_core, fetched=("a",))

    expected = KeptBlocks(began, began + 900, 40, 3, False)
    assert decode_answer(KeptBlocks, answer_future.result()) == expected
    assert CORE.blocks.answer_kept_blocks("a") == ""


def test_not_kept(kv_core: Any) -> None:
    """Without blocks kept there is nothing to ask for."""
    add_request(kv_core)
    kv_core.connector.request_finished(kv_core.requests["a"], [1])

    assert CORE.blocks.answer_kept_blocks("a") == "" and not CORE.blocks.tracked
    assert not finish_first_chunk(kv_core)[1].read_details().kept


def test_bounded(kv_core: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many wait or were fetched unasked, the state has a bound."""
    monkeypatch.setattr(transfers, "MAX_TRACKED_REQUESTS", 10)
    monkeypatch.setattr(transfers, "MAX_UNASKED_ANSWERS", 5)
    for number in range(30):
        end_request(kv_core, f"r{number}", [1])
    assert len(CORE.blocks.tracked) == 10
    tell(kv_core, fetched=CORE.blocks.tracked)

    assert not CORE.blocks.tracked and len(CORE.blocks.answers.unasked) == 5


def test_bounded_asked(kv_core: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asked for blocks that the bound pushed out is answered: nobody will know."""
    monkeypatch.setattr(transfers, "MAX_TRACKED_REQUESTS", 1)
    end_request(kv_core, "a", [1])
    answer_future = CORE.blocks.answer_kept_blocks("a")
    end_request(kv_core, "b", [2])

    assert list(CORE.blocks.tracked) == ["b"]
    assert decode_answer(KeptBlocks, answer_future.result(0)) is None
    tell(kv_core, fetched=("b",))


@pytest.mark.parametrize("others", [(), ("other",)])
def test_a_load_that_fails_ends_the_request(kv_core: Any, others: tuple[str, ...]) -> None:
    """vLLM ends it within update_from_output() with an output that has no token, but marks."""
    add_request(kv_core, LATER)
    kv_core.add(*map(make_request, others))
    step = kv_core.schedule(others, dict.fromkeys(others, 10))
    headers = kv_core.update(step, first=others, finish=("a",))
    marks, timeline = decode_headers(headers["a"])
    marks.render, marks.assign, marks.partial = 2, 3, not timeline.complete

    assert find_failed_stage(marks) == "kv.transfer"
    assert CORE.answer_aborted("a") == ""
    for name in others:
        kv_core.free(name)
