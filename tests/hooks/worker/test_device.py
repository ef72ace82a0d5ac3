# SPDX-License-Identifier: Apache-2.0
"""The clocks of worker marks, each alone: what a device's events tell of places, also where clocks drift.

At the end any legal interleaving of the two threads that share the device clock, against a model of its
events. One thread queues steps, the other one reads outputs in their order. Each of the device's calls lets
the other thread go on, at times that Hypothesis draws; renewals of the anchor and the pool's end come after
few steps.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hooks.device.accelerator import SimulatedDevice, SimulatedEvent, SimulatedHost, SimulatedQueue
from hooks.device.accelerator_cases import CASES, LOOPS, MAX_QUEUED_STEPS, make_step, run_case
from hooks.process import CORE, HOOKS, WORKER
from ttft_otel.hooks.worker import device, model_runners
from ttft_otel.model import breakdown
from ttft_otel.tracing import carrier
from ttft_otel.tracing import clock as clocks

NEAR_US = 40  # of an idle stream: launch latency, and device.IDLE_LATENCY_US


class ClockedDevice:
    """A host whose time is ours, a device of it, and a clock of that device."""

    def __init__(self) -> None:
        self.host = SimulatedHost()
        self.device = SimulatedDevice(self.host)
        self.clock = self.make_clock()

    def make_clock(self) -> device.DeviceClock:
        return device.DeviceClock(self.device.make_event, self.device.is_idle)

    def stamp_work(self, us: float) -> device.DeviceStamps:
        """A step of one piece of work; its first stamp is that of the idle stream, if there is one."""
        stamps = self.clock.open_step()
        self.clock.add_stamp(stamps)
        self.device.main.queue_work(us)
        self.clock.add_stamp(stamps)
        return stamps

    def place(self, stamps: device.DeviceStamps, ahead_us: int = 0) -> tuple[float, int]:
        """How far the worst place is from when its event happened, and the told error.

        ahead_us: by how much the clock that is read differs from the time in which events happen.
        """
        places, _, error_us = self.clock.place_stamps(stamps)
        errors = [
            abs(place - ahead_us - event.at)
            for place, (event, _) in zip(places, stamps, strict=True)
        ]
        return max(errors), error_us

    def place_steps(self, count: int, ahead_us: int = 0) -> list[tuple[float, int]]:
        """The same of steps of 5 ms on an idle stream, each read when it is over."""
        found = []
        for _ in range(count):
            self.host.sleep(device.IDLE_PROBE_US + 1)
            stamps = self.stamp_work(5_000)
            self.host.sleep(9_000)
            found.append(self.place(stamps, ahead_us))
            self.clock.release_stamps(stamps)
        return found


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> ClockedDevice:
    """The device, while its host's time is the process's."""
    made = ClockedDevice()
    monkeypatch.setattr(clocks, "now_us", made.host)
    monkeypatch.setattr(clocks, "count_switches", made.host.count_switches)
    return made


def test_idle_stream_that_wakes_late(clocked: ClockedDevice) -> None:
    """An event on an idle stream that does not happen at once is no bound: the told error covers it."""
    clocked.device.sleepy = True
    late = 0
    for _ in range(60):
        clocked.host.sleep(device.ANCHOR_RENEWAL_US + 1)
        clocked.clock = clocked.make_clock()
        stamps = clocked.stamp_work(5000)
        clocked.host.sleep(9_000)
        error, told = clocked.place(stamps)
        assert error <= told + NEAR_US
        late += error > NEAR_US
    assert late >= 5


def test_nothing_reached(clocked: ClockedDevice) -> None:
    """On a device that is busy with other work no mark has a place, not even the anchor."""
    clocked.device.main.queue_work(1e6)
    places, read_at, _ = clocked.clock.place_stamps(clocked.stamp_work(5000))

    assert places == [0, 0]
    assert clocked.host.at - read_at < 10


def test_wait_for_the_lock(clocked: ClockedDevice) -> None:
    """A reader that waits for Python's lock says how much later it may be; the next ones know better."""
    clocked.host.main_thread = "python"
    told: list[tuple[float, int]] = []
    for _ in range(40):
        clocked.device.main.queue_work(40_000)
        stamps = clocked.stamp_work(5000)
        assert clocked.clock.note_pending(stamps, -1)
        stamps[-1][0].synchronize()
        clocked.clock.note_reached(stamps)
        told.append(clocked.place(stamps))

    assert told[0][0] > 4_000 and told[0][1] == device.LOCK_WAIT_US
    assert all(error <= error_us for error, error_us in told)
    assert told[-1][0] <= device.READING_US


def test_never_after_the_reading(clocked: ClockedDevice) -> None:
    """Over an hour of random steps: in order, none after the moment of its reading, lengths true."""
    chance = random.Random(7)
    placed = 0
    for _ in range(400):
        clocked.host.sleep(chance.randrange(100, 9_000_000))
        stamps = clocked.stamp_work(chance.randrange(50, 40_000))
        length = stamps[-1][0].at - stamps[-2][0].at
        clocked.host.sleep(chance.randrange(60_000))
        begin, end = clocked.clock.place_stamps(stamps)[0][-2:]
        if end:
            placed += 1
            assert begin <= end <= clocked.host.at
            assert abs(end - begin - length) <= 5
    assert placed > 200


@pytest.mark.parametrize("result", [object(), SimpleNamespace(req_ids=[])])
def test_step_without_output(clocked: ClockedDevice, result: Any) -> None:
    """An earlier pipeline stage hands on tensors, which carry no record: its events are used again."""
    WORKER.clock = clocked.clock
    step = make_step(items=True)
    for _ in range(1000):
        opened = WORKER.open_step(None, step)
        HOOKS["worker.encoder"].after(WORKER.stamp_encoder_start(), None)  # type: ignore[misc]
        WORKER.close_step(opened, result)
        clocked.host.sleep(1000)

    assert clocked.device.calls["record"] >= 2000 and clocked.device.calls["make"] < 20
    assert not clocked.device.calls["elapsed"] and not WORKER.open_steps


def test_bounds_pass_to_the_next_anchor(clocked: ClockedDevice) -> None:
    """What was known of an anchor holds for its successor: no step after a renewal knows less."""
    for _ in range(device.MIN_ANCHOR_STEPS):
        first = clocked.stamp_work(500)
        clocked.host.sleep(1_000)
        clocked.clock.place_stamps(first)
    clocked.host.sleep(device.ANCHOR_RENEWAL_US)
    clocked.device.main.queue_work(90_000)
    stamps = clocked.stamp_work(5000)  # nothing of its own tells its place
    clocked.host.sleep(200_000)

    assert stamps.anchor is not first.anchor
    assert clocked.place(stamps)[0] <= 150


def test_events_of_a_shared_encoder(clocked: ClockedDevice) -> None:
    """Two requests ask for the same step's encoder: both get the same, and no event is pooled twice."""
    step = model_runners.StepStamps(clocked.clock, True, False, 0)
    step.encoded_ids = ("a", "b")
    begin = step.take_stamp()
    clocked.device.main.queue_work(30_000)
    step.close_interval(breakdown.CODE_ENCODER, begin)
    assert WORKER.resolve_step(step)[2] & carrier.ENCODER_UNFINISHED
    assert CORE.answer_encoder_run("a") == carrier.PENDING_ANSWER
    clocked.host.sleep(40_000)
    first = CORE.answer_encoder_run("a")
    clocked.stamp_work(5_000)  # uses the events again

    assert CORE.answer_encoder_run("b") == first
    run = carrier.decode_answer(carrier.EncoderRun, first)
    assert run is not None and abs(run.until - run.since - 30_000) <= 20
    assert len(set(map(id, clocked.clock.pool))) == len(clocked.clock.pool)
    assert CORE.answer_encoder_run("a") == ""


def test_lengths_clock(clocked: ClockedDevice) -> None:
    """Where events were never placed, differences are the device's and what is unfinished is out."""
    lengths, stamps = device.LengthsClock(clocked.device.make_event), list[Any]()
    lengths.add_stamp(stamps)
    clocked.device.main.queue_work(5000)
    lengths.add_stamp(stamps)

    clocked.host.sleep(100)
    assert lengths.place_stamps(stamps)[0][1] == 0
    clocked.host.sleep(6000)
    begin, end = lengths.place_stamps(stamps)[0]
    assert abs(end - begin - 5000) <= 10


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """vLLM's platform and a torch, as far as choose_clock() asks them."""
    made = SimpleNamespace(cpu=False, cuda=False, alike=False, accelerator=False, untimed=False)

    def make_event(enable_timing: bool) -> object:
        if made.untimed:
            raise RuntimeError("timing is not supported by this backend")
        return object()

    current = SimpleNamespace(
        is_cpu=lambda: made.cpu, is_cuda=lambda: made.cuda, is_cuda_alike=lambda: made.alike
    )
    torch = SimpleNamespace(
        accelerator=SimpleNamespace(is_available=lambda: made.accelerator),
        cuda=None,
        Event=make_event,
    )
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=current))
    monkeypatch.setitem(sys.modules, "torch", torch)
    yield made


@pytest.mark.parametrize(
    ("has", "kind"),
    [
        (["cpu"], clocks.CLOCK_HOST),
        (["cuda", "alike", "accelerator"], clocks.CLOCK_DEVICE),
        (["alike", "accelerator"], clocks.CLOCK_LENGTHS),  # ROCm
        (["accelerator"], clocks.CLOCK_LENGTHS),  # XPU
        (["accelerator", "untimed"], clocks.CLOCK_NONE),
        ([], clocks.CLOCK_NONE),
        (["no vllm.platforms"], clocks.CLOCK_HOST),
        (["no torch"], clocks.CLOCK_HOST),
    ],
)
def test_choice(
    platform: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, has: list[str], kind: int
) -> None:
    """A device clock is used only where it was tested; launch times are never reported as compute.

    Where no platform is known, the host's clock is used.
    """
    for name in has:
        setattr(platform, name, True)
        if name.startswith("no "):
            monkeypatch.setitem(sys.modules, name.removeprefix("no "), None)

    assert device.choose_clock().kind == kind


SLEWED_CASES = [case for case in CASES if "slewed" in case.name]
NTP_PPM = 500.0
# Until two anchors have ended nothing tells that the clocks drift faster than they should.
UNTOLD_US = 2 * device.ANCHOR_RENEWAL_US


@pytest.mark.parametrize("drift_ppm", [pytest.param(NTP_PPM, marks=pytest.mark.full), -NTP_PPM])
@pytest.mark.parametrize(
    "loop",
    [pytest.param(loop, marks=() if loop == "async" else pytest.mark.full) for loop in LOOPS],
)
@pytest.mark.parametrize("case", SLEWED_CASES, ids=lambda case: case.name)
def test_slewed_host(kinds: dict[str, Any], case: Any, loop: str, drift_ppm: float) -> None:
    """NTP corrects the host's clock at its fastest: the told error covers the places' all the same."""
    for kind in kinds:
        judgement = run_case(replace(case, drift_ppm=drift_ppm), kinds, kind, loop)
        step_us = judgement.virtual_us / case.steps
        told = judgement.told_errors[int(UNTOLD_US / step_us) + 1 :]
        slack_us = device.READING_US
        uncovered = [error for error, error_us in told if error > error_us + slack_us]

        assert len(told) > 100 and len(uncovered) <= 0.01 * len(told), (kind, max(uncovered))
        is_off = drift_ppm < 0 and not case.gap_us and loop != "sync"
        assert (max(error for error, _ in told) > 5 * slack_us) is is_off


@pytest.mark.parametrize("jump_us", [50_000, -50_000])
def test_set_clock(clocked: ClockedDevice, jump_us: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host clock that jumps (a machine that was moved): one step tells an error, the next are right."""
    clocked.place_steps(20)
    monkeypatch.setattr(clocks, "now_us", lambda: clocked.host() + jump_us)
    after = clocked.place_steps(20, jump_us)

    assert all(error <= told + NEAR_US for error, told in after), after
    assert after[0][1] >= 40_000
    assert all(error <= NEAR_US for error, _ in after[1:]), after


def test_backlog(clocked: ClockedDevice) -> None:
    """Steps that are read seconds after they were queued: what was known is handed on."""
    clocked.place_steps(3)
    queued = []
    for _ in range(20):  # 6 s of work in 2 s
        queued.append(clocked.stamp_work(300_000))
        clocked.host.sleep(100_000)
    anchors = {id(stamps.anchor) for stamps in queued}
    clocked.host.sleep(6_000_000)
    errors = [clocked.place(stamps)[0] for stamps in queued]

    assert 1 <= len(anchors) <= 2  # an anchor that nobody has read tells its successor nothing
    # Seven seconds of drift beside what is assumed of it.
    assert max(errors) <= 7 * 70 + device.READING_US


def test_few_steps(clocked: ClockedDevice) -> None:
    """With few marked steps an anchor lasts until four have been read, or five seconds."""
    ages: dict[int, int] = {}
    for _ in range(60):
        clocked.host.sleep(800_000)
        clocked.place_steps(1)
        assert clocked.clock.anchor is not None
        ages[clocked.clock.anchor.recorded_at] = clocked.host() - clocked.clock.anchor.recorded_at

    told = list(ages.values())[:-1]  # the last one is not over
    assert len(told) > 10
    assert all(2_500_000 < age < device.SPARSE_RENEWAL_US for age in told)


def test_reached_while_it_is_asked(clocked: ClockedDevice) -> None:
    """A step that ends between two queries of one reading has all its places."""
    stamps = clocked.stamp_work(5_000)
    clocked.host.sleep(stamps[-1][0].at - clocked.host.at - 2)  # a query takes 1.5 us
    places, read_at, _ = clocked.clock.place_stamps(stamps)

    assert read_at and all(places)


def test_never_read(clocked: ClockedDevice) -> None:
    """Steps whose output nobody reads leave nothing: no events, no chain of anchors."""
    for _ in range(100):
        clocked.stamp_work(10)
        clocked.host.sleep(device.ANCHOR_RENEWAL_US + 1)
    gc.collect()

    assert not clocked.clock.pool
    anchors = [each for each in gc.get_objects() if type(each) is device.Anchor]
    assert len(anchors) <= 2


RENEWAL_US = 4_000  # of the anchor: every few steps
MAX_BOUND = 3  # steps that are not read: of more the oldest gives its events back
ERROR_US = 20  # beyond the told one: the hook's own calls


@dataclass(frozen=True)
class PlannedStep:
    """work_us: after each of its stamps but the last. read: somebody reads its output."""

    work_us: tuple[int, ...]
    host_us: int
    read: bool


class OwnedEvent(SimulatedEvent):
    """An event that knows for which step it was recorded last; reading it for another one is an error."""

    def __init__(self, stream: Any, threads: TwoThreads) -> None:
        super().__init__(stream)
        self.threads = threads
        self.owner: int | None = None  # None: an anchor

    def record(self) -> None:
        self.owner = self.threads.queued
        super().record()

    def elapsed_time(self, other: SimulatedEvent) -> float:
        """From an anchor to a step's event, or to the next anchor."""
        assert isinstance(other, OwnedEvent)
        assert self.owner is None, "an anchor's event was recorded again"
        assert other.owner in (None, self.threads.read), (
            f"step {self.threads.read} got {other.owner}'s"
        )
        return super().elapsed_time(other)


class TwoThreads:
    """One run: what is queued, what is read, and the truth of each step."""

    def __init__(
        self, seed: int, make_clock: Callable[..., device.DeviceClock] = device.DeviceClock
    ) -> None:
        self.host = SimulatedHost(seed)
        self.device = SimulatedDevice(self.host)
        self.queued: int | None = None
        self.read: int | None = None
        self.clock = make_clock(self.make_event, self.device.is_idle)
        self.to_reader, self.to_main = (SimulatedQueue(self.host, 5) for _ in range(2))
        self.bound: dict[int, tuple[device.DeviceStamps, list[float]]] = {}
        self.errors: list[tuple[float, int]] = []

    def make_event(self) -> OwnedEvent:
        return OwnedEvent(self.device.main, self)

    def renew_anchor(self, now: int, original: Callable[[int], Any]) -> Any:
        """An anchor belongs to no step."""
        step, self.queued = self.queued, None
        try:
            return original(now)
        finally:
            self.queued = step

    def queue_steps(self, plan: list[PlannedStep]) -> None:
        """The first thread: as open_step() to bind_step(), and what becomes of outputs that nobody reads.

        It runs ahead by MAX_QUEUED_STEPS outputs.
        """
        awaited = 0
        for number, step in enumerate(plan):
            self.queued = number
            stamps, truth = self.clock.open_step(), []
            for us in (*step.work_us, 0):
                self.clock.add_stamp(stamps)
                truth.append(self.device.main.busy_until)
                self.device.main.queue_work(us)
            self.host.sleep(step.host_us)
            self.bound[number] = stamps, truth
            if step.read:
                self.to_reader.put(number)
                awaited += 1
            if len(self.bound) > MAX_BOUND:
                # By its ID: the reader may have taken it meanwhile.
                oldest = min(self.bound)
                self.clock.release_stamps(self.bound.pop(oldest)[0])
            if awaited == MAX_QUEUED_STEPS:
                self.to_main.get()
                awaited -= 1
        self.to_reader.put(None)

    def read_steps(self) -> None:
        """The second thread: as observe_step() to resolve_step()."""
        while (number := self.to_reader.get()) is not None:
            if number in self.bound:
                self.read_step(number)
            self.to_main.put(number)

    def read_step(self, number: int) -> None:
        """One output, unless it has waited for so long that its step has gone."""
        stamps, truth = self.bound[number]
        pending = self.clock.note_pending(stamps, -1)
        stamps[-1][0].synchronize()
        if pending:
            self.clock.note_reached(stamps)
        if self.bound.pop(number, None) is None:
            return
        self.read = number
        places, _, told_us = self.clock.place_stamps(stamps)
        extra = len(stamps) - len(truth)  # the event that looked whether the stream was idle
        places = places[extra:]
        assert all(places)
        worst = max(abs(place - at) for place, at in zip(places, truth, strict=True))
        self.errors.append((worst, told_us))
        self.clock.release_stamps(stamps)

    def run(self, plan: list[PlannedStep], pooled: int) -> None:
        """Both threads, to their end; what the second one raises is raised here.

        pooled: events that are kept.
        """
        raised: list[BaseException] = []

        def read() -> None:
            try:
                self.read_steps()
            except BaseException as error:  # noqa: BLE001 - of a thread, for the test
                raised.append(error)
                self.to_main.latency_us = 0.0
                for _ in plan:
                    self.to_main.put(None)

        original = self.clock._renew_anchor
        self.clock._renew_anchor = lambda now: self.renew_anchor(now, original)  # type: ignore[method-assign]
        limits = {
            "ANCHOR_RENEWAL_US": RENEWAL_US,
            "MIN_ANCHOR_STEPS": 1,
            "IDLE_PROBE_US": 500,
            "MAX_POOLED_EVENTS": pooled,
        }
        with self.host.replace_clock(), mock.patch.multiple(device, **limits):
            self.host.start_thread(read)
            self.queue_steps(plan)
            self.host.sleep(10_000_000)
        if raised:
            raise raised[0]


planned_steps = st.builds(
    PlannedStep,
    st.lists(st.integers(0, 3_000), min_size=1, max_size=4).map(tuple),
    st.integers(0, 4_000),
    st.sampled_from([True, True, True, False]),
)
with_any_plan = given(
    st.lists(planned_steps, min_size=2, max_size=40), st.integers(0, 10_000), st.integers(0, 20)
)
RARELY = settings(
    max_examples=settings.default.max_examples // 2,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


@RARELY
@with_any_plan
def test_any_interleaving(plan: list[PlannedStep], seed: int, pooled: int) -> None:
    """No step gets another one's events, and no place is further off than is told."""
    threads = TwoThreads(seed)
    threads.run(plan, pooled)

    late = [each for each in threads.errors if each[0] > each[1] + ERROR_US]
    assert len(late) <= 0.01 * len(threads.errors), (late, threads.errors)
    assert not any(event.owner is None for event in threads.clock.pool)


class HastyClock(device.DeviceClock):
    """Gives events back when they are read, before they are placed."""

    def note_pending(self, stamps: Any, awaited: int) -> bool:
        """As its base's, but too early."""
        pending = super().note_pending(stamps, awaited)
        self.release_stamps(stamps)
        return pending


def test_events_that_are_given_back_early() -> None:
    """The model sees it: another step has recorded them again."""
    plan = [PlannedStep((1_000, 1_000), 100, True)] * 20
    with pytest.raises((AssertionError, RuntimeError), match="got|not ready|recorded again"):
        TwoThreads(1, HastyClock).run(plan, device.MAX_POOLED_EVENTS)
