# SPDX-License-Identifier: Apache-2.0
"""The cases in which the device clock is judged, each over both runners and vLLM's step loops.

First the loops (C = v1/engine/core.py, M = v1/executor/multiproc_executor.py of vLLM 0.32), and the judge of
what the hooks recorded of each step. test_accelerator.py runs all cases and compares the table of their
errors in benchmarks/results/device-clock.md. To write it anew, in tests/:

    ../.venv/bin/python -m hooks.device.accelerator_cases
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, TypeAlias

from hooks.device.accelerated_runners import (
    AcceleratedEcConnector,
    AcceleratedKvConnector,
    AcceleratedRunner,
    AsyncRunnerOutput,
    StepTruth,
    StepWork,
    wrap_accelerated_classes,
)
from hooks.device.accelerator import SimulatedDevice, SimulatedHost
from hooks.process import CORE, WORKER, drop_state, wrap_ec_connector
from ttft_otel.hooks.worker import device
from ttft_otel.model import breakdown
from ttft_otel.tracing import carrier

MAX_QUEUED_STEPS: Final = 2  # C: batch_queue_size under async scheduling
JUDGED_STAGES: Final = ("dispatch", "pipeline", "encoder.compute", "prefill.compute", "prefill.stall",
                        "sample", "output")  # fmt: skip


@dataclass(slots=True)
class StepOutcome:
    """One step as the engine core saw it. Host times in microseconds; `record` is the hooks'.

    answered_at: execute_model() returned. read_at: the worker had read the output.
    """

    record: tuple[int, ...] | None
    truth: StepTruth
    scheduled_at: int
    answered_at: float
    read_at: float
    output_at: int


def make_step(
    number: int = 0,
    *,
    marked: bool = True,
    items: bool = False,
    kv: bool = False,
    tokens: bool = True,
) -> Any:
    """A scheduler's output with one request; kv: there is something for a KV connector."""
    name = f"r{number}"
    output = SimpleNamespace(
        num_scheduled_tokens={name: 10} if tokens else {},
        scheduled_encoder_inputs={name: [0]} if items else {},
        scheduled_new_reqs=[SimpleNamespace(mm_features=[1] if items else [])],
        has_sync_kv_loads=False,
    )
    if kv:
        output.kv_connector_metadata = object()
    if marked:
        output._ttft_marked = True
    return output


class StepLoop:
    """C:step() without async scheduling, and what the other loops share.

    gap_us: how long the engine has nothing to do between two steps.
    """

    max_queued = 1  # of so many steps the oldest is read before another one is launched

    def __init__(self, host: SimulatedHost, runner: AcceleratedRunner, gap_us: float = 0) -> None:
        self.host = host
        self.runner = runner
        self.gap_us = gap_us
        self.outcomes: list[StepOutcome] = []
        #: Of encoders, with outputs of later steps.
        self.reported_runs: dict[str, tuple[int, int]] = {}

    def run(self, steps: list[Any]) -> list[StepOutcome]:
        """Run all steps, with the worker in the engine core's process; the outcomes, in their order."""
        queue: deque[tuple[int, Any, float]] = deque()
        for step in steps:
            queue.append((self.schedule(), *self.execute(step)))
            if len(queue) == self.max_queued:
                self._finish(*queue.popleft())
        while queue:
            self._finish(*queue.popleft())
        return self.outcomes

    def _finish(self, scheduled_at: int, output: Any, answered_at: float) -> None:
        self.update(scheduled_at, self.read_output(output), answered_at)

    def schedule(self) -> int:
        """The scheduler's work; when it has returned."""
        self.host.sleep(self.gap_us)
        self.host.work(120)
        return self.host()

    def execute(self, step: Any) -> tuple[Any, float]:
        """Execute and sample: the output, and when execute_model answered."""
        output = self.runner.execute_model(step, self.runner.receive_tensors())
        answered_at = self.host.at
        return self.runner.sample_tokens() if output is None else output, answered_at

    def update(self, scheduled_at: int, output: Any, answered_at: float) -> None:
        """The scheduler takes the output, and the API server makes a chunk of it."""
        self.host.work(60)
        record = getattr(output, "_ttft_record", None)
        self.reported_runs |= getattr(output, "_ttft_runs", {})
        self.outcomes.append(
            StepOutcome(
                record, output.truth, scheduled_at, answered_at, output.read_at, self.host() + 200
            )
        )

    def read_output(self, output: Any) -> Any:
        """Wait for the output's copy, if it is asynchronous."""
        if isinstance(output, AsyncRunnerOutput):
            output = output.get_output()
        output.read_at = self.host.at
        return output


class AsyncLoop(StepLoop):
    """C:step_with_batch_queue(): the next step is launched before this one's output is read."""

    max_queued = MAX_QUEUED_STEPS


class MultiprocLoop(StepLoop):
    """The same over M: the worker is another process, and a thread of it reads the outputs (M:1020)."""

    def run(self, steps: list[Any]) -> list[StepOutcome]:
        """Three threads, which send to each other."""
        to_worker, to_core = self.host.make_queue(60), self.host.make_queue(60)
        to_reader = self.host.make_queue(5)

        def work() -> None:
            for _ in steps:
                to_reader.put(self.execute(to_worker.get()))

        def read() -> None:
            for _ in steps:
                output, answered_at = to_reader.get()
                to_core.put((self.read_output(output), answered_at))

        self.host.start_thread(work)
        self.host.start_thread(read)
        queue: deque[int] = deque()
        for step in steps:
            queue.append(self.schedule())
            to_worker.put(step)
            if len(queue) == MAX_QUEUED_STEPS:
                self.update(queue.popleft(), *to_core.get())
        while queue:
            self.update(queue.popleft(), *to_core.get())
        return self.outcomes


LOOPS: Final[dict[str, type[StepLoop]]] = {
    "sync": StepLoop,
    "async": AsyncLoop,
    "async, own process": MultiprocLoop,
}


@dataclass(slots=True)
class Judgement:
    """Errors of places (recorded minus true), and of stages, in microseconds; what is missing.

    stage_errors: by stage (error, true length). unattributed: the difference to what it has to be.
    told_errors: (greatest error of a step's places, the error that its record tells).
    calls: how often each of the device's calls was made, in virtual_us. encoder_errors: of the length
    and the begin of each encoder that ran on after its answer; reported_runs of them by later steps.
    outcomes: what was judged.
    """

    place_errors: list[float] = field(default_factory=list)
    told_errors: list[tuple[float, int]] = field(default_factory=list)
    stage_errors: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    missing: int = 0
    unattributed: int = 0
    requests: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    virtual_us: float = 0.0
    encoder_errors: list[tuple[float, float]] = field(default_factory=list)
    reported_runs: int = 0
    outcomes: list[StepOutcome] = field(default_factory=list)


def judge_outcomes(
    outcomes: list[StepOutcome], chunks: int, encode_only: bool, lost: int
) -> Judgement:
    """Hold the records of marked steps against the truth.

    chunks: steps per request. encode_only: what the request waited for ends with the answer.
    lost: LOST_* flags that the records have to have.
    """
    judgement = Judgement(outcomes=outcomes)
    for first in range(0, len(outcomes) - chunks + 1, chunks):
        steps = outcomes[first : first + chunks]
        if any(step.record is None for step in steps):
            continue
        for step in steps:
            _clip_truth(step, step.answered_at if encode_only else step.read_at)
            _judge_places(judgement, step)
        _judge_stages(judgement, steps, encode_only, lost)
    return judgement


def judge_encoder_runs(loop: StepLoop) -> list[tuple[float, float]]:
    """The encoders that ran on: most were told by later steps, the last are asked for when all is over."""
    assert CORE.answer_encoder_run("unknown") == ""
    unfinished = list(WORKER.unfinished_steps)
    if unfinished:
        assert CORE.answer_encoder_run(unfinished[-1]) == carrier.PENDING_ANSWER
    ends_at = max(outcome.truth.intervals[-1][2] for outcome in loop.outcomes)
    loop.host.sleep(ends_at - loop.host.at + 50_000)
    runs = dict(loop.reported_runs)
    for request_id in unfinished:
        run = carrier.decode_answer(carrier.EncoderRun, CORE.answer_encoder_run(request_id))
        assert run is not None and request_id not in runs
        runs[request_id] = (run.since, run.until)
    errors: list[tuple[float, float]] = []
    for request_id, (start, end) in runs.items():
        intervals = loop.outcomes[int(request_id[1:])].truth.intervals
        ((_, true_start, true_end),) = [e for e in intervals if e[0] == breakdown.CODE_ENCODER]
        errors.append((end - start - (true_end - true_start), start - true_start))
    return errors


def _clip_truth(step: StepOutcome, until: float) -> None:
    """Nobody waited for what came after the answer: saves, and an encoder-only instance's encoder."""
    step.truth.intervals = [
        (code, min(begin, until), min(end, until))
        for code, begin, end in step.truth.intervals
        if end <= until or code == breakdown.CODE_ENCODER
    ]


def _judge_places(judgement: Judgement, step: StepOutcome) -> None:
    assert step.record is not None
    recorded = read_intervals(step.record)
    errors: list[float] = []
    for code in {code for code, _, _ in step.truth.intervals}:
        true = sorted(each[1:] for each in step.truth.intervals if each[0] == code)
        ours = sorted(each[1:] for each in recorded if each[0] == code)
        for (begin, end), (our_begin, our_end) in zip(true, ours, strict=False):
            errors += [our_begin - begin, our_end - end]
        judgement.missing += abs(len(true) - len(ours))
    if step.truth.sampled and step.record[1]:
        errors.append(step.record[1] - step.truth.sampled)
    elif step.truth.sampled:
        judgement.missing += 1
    judgement.place_errors += errors
    told = [error for code, _, error in list_entries(step.record) if code == carrier.CODE_CLOCK]
    if told and errors:
        judgement.told_errors.append((max(map(abs, errors)), told[0]))


def list_entries(record: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """The entries behind the head of a worker's record."""
    return list(zip(record[3::3], record[4::3], record[5::3], strict=True))


def read_intervals(record: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """The (code, begin, end) of a worker's record, in its order."""
    return [each for each in list_entries(record) if each[0] > carrier.CODE_CLOCK]


def _judge_stages(
    judgement: Judgement, steps: list[StepOutcome], encode_only: bool, lost: int
) -> None:
    ours, true = (_make_marks(steps, encode_only) for _ in range(2))
    for step in steps:
        assert step.record is not None
        if ours.steps:  # no step of others lies between
            ours.turns.append((step.scheduled_at, 0))
            true.turns.append((step.scheduled_at, 0))
        ours.steps.append(
            breakdown.EngineStep(read_intervals(step.record), step.record[1], step.record[2])
        )
        pairs = [(code, round(begin), round(end)) for code, begin, end in step.truth.intervals]
        true.steps.append(breakdown.EngineStep(pairs, round(step.truth.sampled), lost))
    cut, truth = breakdown.partition_marks(ours), breakdown.partition_marks(true)
    for stage in JUDGED_STAGES:
        length = truth.stages.get(stage, 0)
        error = cut.stages.get(stage, 0) - length
        judgement.stage_errors.setdefault(stage, []).append((error, length))
    judgement.unattributed += abs(cut.unattributed - truth.unattributed)
    judgement.requests += 1


def _make_marks(steps: list[StepOutcome], encode_only: bool) -> breakdown.Marks:
    start = steps[0].scheduled_at
    marks = breakdown.Marks(start - 40, start - 30, start - 20, start - 10, start)
    marks.output = steps[-1].output_at
    marks.encode_only = encode_only
    return marks


@dataclass(frozen=True, slots=True)
class AcceleratorCase:
    """One case: what a step costs, and how the server is set up.

    marked: of how many steps one is marked; 0: none. items: steps run the encoder. chunks: steps per request.
    gap_us: the engine has nothing to do for so long between steps. main_thread, late_us: see SimulatedHost.
    rows, aux_us: see AcceleratedRunner. sleepy, one_queue, foreign_us: see SimulatedDevice.
    unknowable_us: by so much more places may be off than in other cases; untold: nothing tells how much.
    connector: "" (none), "kv", "ec" or "ec, synchronizing".
    """

    name: str
    work: StepWork
    steps: int = 200
    marked: int = 1
    items: bool = False
    chunks: int = 1
    gap_us: float = 0.0
    main_thread: str = ""
    late_us: float = 0.0
    rows: int = 1
    aux_us: float = 0.0
    sleepy: bool = False
    one_queue: bool = False
    foreign_us: float = 0.0
    unknowable_us: float = 0.0
    untold: bool = False
    connector: str = ""
    encode_only: bool = False
    receive_us: float = 0.0
    drift_ppm: float = 20.0


def make_encoder_case(load: str, **fields: Any) -> AcceleratorCase:
    """A case of an encoder instance, whose steps run nothing else, for 30 ms. load: ends its name."""
    fields = {"connector": "ec", **fields}
    name = f"encoder-only, 30 ms, {load}"
    return AcceleratorCase(
        name, StepWork(encoder_us=30_000), items=True, encode_only=True, **fields
    )


CASES: Final[tuple[AcceleratorCase, ...]] = (
    AcceleratorCase("host-bound, 0.3 ms", StepWork(300)),
    AcceleratorCase("one request at a time, 40 ms", StepWork(40_000), gap_us=100_000),
    AcceleratorCase("device-bound, 1 ms", StepWork(1_000).scale_host(0.25), steps=400, chunks=2),
    AcceleratorCase("device-bound, 10 ms", StepWork(10_000), chunks=2),
    AcceleratorCase("device-bound, 40 ms", StepWork(40_000), chunks=2),
    AcceleratorCase("device-bound, 200 ms", StepWork(200_000), chunks=2),
    AcceleratorCase("device-bound, 10 ms, launched as graphs", StepWork(10_000).scale_host(0.05)),
    AcceleratorCase(
        "device-bound, 40 ms, one of 5 steps marked", StepWork(40_000), steps=400, marked=5
    ),
    AcceleratorCase(
        "device-bound, 40 ms, one of 40 steps marked", StepWork(40_000), steps=1200, marked=40
    ),
    AcceleratorCase("device-bound, 40 ms, clock 20 ppm slow", StepWork(40_000), drift_ppm=-20.0),
    AcceleratorCase(
        "images, 30 ms encoder, 20 ms forward", StepWork(20_000, encoder_us=30_000), items=True
    ),
    AcceleratorCase(
        "drafter and KV connector, 20 ms",
        StepWork(20_000, drafter_us=6_000, kv_save_us=900),
        connector="kv",
    ),
    AcceleratorCase("KV connector, 20 ms", StepWork(20_000, kv_save_us=900), connector="kv"),
    AcceleratorCase(
        "the anchor is renewed in flight, 40 ms, 1000 steps", StepWork(40_000), steps=1000
    ),
    AcceleratorCase(
        "tensor parallel, waits up to 5 ms for other ranks", StepWork(20_000, slowest_rank_us=5_000)
    ),
    AcceleratorCase("last of two pipeline stages, 15 ms each", StepWork(15_000), receive_us=15_000),
    AcceleratorCase("last pipeline stage, images", StepWork(15_000), items=True, receive_us=15_000),
    AcceleratorCase(
        "host time slewed by 500 ppm, one request at a time",
        StepWork(40_000),
        gap_us=100_000,
        drift_ppm=-500.0,
    ),
    AcceleratorCase(  # what is known of an anchor is up to two seconds old
        "host time slewed by 500 ppm, device-bound, 400 steps",
        StepWork(40_000),
        steps=400,
        drift_ppm=-500.0,
        unknowable_us=1_000,
    ),
    AcceleratorCase(
        "every thread gets a core 2 ms late, one request at a time",
        StepWork(40_000),
        gap_us=100_000,
        late_us=2_000,
    ),
    AcceleratorCase(
        "every thread gets a core 2 ms late, device-bound, 600 steps",
        StepWork(40_000),
        steps=600,
        late_us=2_000,
        unknowable_us=2_000,
        untold=True,
    ),
    AcceleratorCase(
        "logprobs of 1024 requests and 2 ms of other output, device-bound, 40 ms",
        StepWork(40_000),
        chunks=2,
        rows=1024,
        aux_us=2_000,
    ),
    AcceleratorCase(
        "main thread launches, device-bound, 40 ms",
        StepWork(40_000),
        steps=600,
        main_thread="launching",
    ),
    AcceleratorCase(
        "main thread in pure Python, device-bound, 10 ms",
        StepWork(10_000),
        steps=1200,
        main_thread="python",
    ),
    AcceleratorCase(
        "main thread in pure Python, device-bound, 200 ms",
        StepWork(200_000),
        steps=300,
        main_thread="python",
        unknowable_us=5_200,
    ),
    AcceleratorCase(
        "main thread in pure Python, host-bound, 0.3 ms",
        StepWork(300),
        steps=600,
        main_thread="python",
    ),
    AcceleratorCase(
        "device that falls asleep, one request at a time",
        StepWork(40_000),
        gap_us=100_000,
        sleepy=True,
    ),
    AcceleratorCase(
        "device that falls asleep, host-bound, 0.3 ms",
        StepWork(300),
        gap_us=3_000,
        sleepy=True,
        steps=600,
    ),
    AcceleratorCase(
        "streams in one queue of the hardware, 20 ms",
        StepWork(20_000, kv_save_us=900),
        connector="kv",
        one_queue=True,
    ),
    AcceleratorCase("device shared in time slices, 10 ms", StepWork(10_000), foreign_us=1_500.0),
    make_encoder_case("idle", gap_us=50_000),
    make_encoder_case("saturated", gap_us=15_000),
    make_encoder_case("overloaded for 30 s", steps=1000, gap_us=28_000),
    make_encoder_case("connector waits", connector="ec, synchronizing"),
)


def simulate_device(case: AcceleratorCase) -> SimulatedDevice:
    """The device of `case`, with a host of its own."""
    host = SimulatedHost()
    host.main_thread, host.late_us = case.main_thread, case.late_us
    return SimulatedDevice(host, case.drift_ppm, case.sleepy, case.one_queue, case.foreign_us)


def run_case(
    case: AcceleratorCase,
    kinds: dict[str, Any],
    runner_kind: str,
    loop: str,
    make_clock: Callable[..., device.StepClock] = device.DeviceClock,
    make_device: Callable[[AcceleratorCase], Any] = simulate_device,
) -> Judgement:
    """Run `case` on a runner of `kinds` in a loop of LOOPS, and judge it.

    make_clock: called as DeviceClock is. make_device: gives the device, and its host.
    """
    simulated = make_device(case)
    host = simulated.host
    began_at = host.at
    WORKER.clock = make_clock(simulated.make_event, simulated.is_idle)
    with simulated.measure_truth():
        runner = _make_runner(case, kinds[runner_kind], simulated, loop)
        steps = [
            make_step(
                number,
                marked=bool(case.marked) and number % case.marked == 0,
                items=case.items,
                kv=case.connector == "kv",
                tokens=not case.encode_only or runner_kind != "V1",
            )
            for number in range(case.steps)
        ]
        step_loop = LOOPS[loop](host, runner, case.gap_us)
        outcomes = step_loop.run(steps)
        encoder_errors = judge_encoder_runs(step_loop) if case.encode_only else []
    drop_state()
    for outcome in outcomes:
        outcome.truth.resolve_times(simulated)
    lost = breakdown.LATE_STAGE if case.receive_us else 0
    judgement = judge_outcomes(outcomes, case.chunks, case.encode_only, lost)
    judgement.reported_runs = len(step_loop.reported_runs)
    judgement.calls, judgement.virtual_us = simulated.calls, host.at - began_at
    judgement.encoder_errors = encoder_errors
    return judgement


def _make_runner(
    case: AcceleratorCase, kind: type[AcceleratedRunner], simulated: SimulatedDevice, loop: str
) -> AcceleratedRunner:
    connectors: dict[str, Any] = {}
    if case.connector == "kv":
        connectors["kv_connector"] = AcceleratedKvConnector()
    elif case.connector:
        connectors["ec_connector"] = AcceleratedEcConnector("synchronizing" in case.connector)
        wrap_ec_connector(connectors["ec_connector"])
    return kind(
        simulated,
        case.work,
        asynchronous=loop != "sync",
        encode_only=case.encode_only,
        receive_us=case.receive_us,
        rows=case.rows,
        aux_us=case.aux_us,
        **connectors,
    )


DOCS_PAGE: Final = Path(__file__).parents[3] / "benchmarks" / "results" / "device-clock.md"
TABLE_BEGIN: Final = "<!-- places -->\n"
TABLE_END: Final = "<!-- end of places -->\n"
Runs: TypeAlias = dict[AcceleratorCase, dict[tuple[str, str], Judgement]]


def run_everywhere(
    case: AcceleratorCase, kinds: dict[str, Any]
) -> dict[tuple[str, str], Judgement]:
    """The case over both runners of `kinds` and all loops: a quarter of a second each; time is virtual."""
    return {(kind, loop): run_case(case, kinds, kind, loop) for kind in kinds for loop in LOOPS}


def find_percentile(values: list[float], share: float) -> float:
    """The value that `share` of `values` do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def format_table(runs: Runs) -> str:
    """One row per case: errors of all its runs together, in microseconds."""
    lines = [
        "| case | place p50 | p99 | max | `dispatch` max | `output` max | `prefill.stall` max |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, judgements in runs.items():
        places = [abs(error) for each in judgements.values() for error in each.place_errors]
        cells = [find_percentile(places, 0.5), find_percentile(places, 0.99), max(places)]
        for stage in ("dispatch", "output", "prefill.stall"):
            errors = [each.stage_errors[stage] for each in judgements.values()]
            cells.append(max(abs(error) for pairs in errors for error, _ in pairs))
        lines.append(f"| {case.name} | {' | '.join(f'{round(cell):d}' for cell in cells)} |")
    return "\n".join(lines) + "\n"


def render_page(text: str, runs: Runs) -> str:
    """Replace the table in a page's text."""
    head, _, rest = text.partition(TABLE_BEGIN)
    return head + TABLE_BEGIN + format_table(runs) + TABLE_END + rest.partition(TABLE_END)[2]


if __name__ == "__main__":
    wrapped = wrap_accelerated_classes()
    all_runs = {case: run_everywhere(case, wrapped) for case in CASES}
    DOCS_PAGE.write_text(render_page(DOCS_PAGE.read_text(), all_runs))
