# SPDX-License-Identifier: Apache-2.0
"""vLLM's step loops over simulated runners, and the judge of what the hooks recorded of each step.

C = v1/engine/core.py, M = v1/executor/multiproc_executor.py of vLLM 0.32. Results go to
accelerator_cases.py.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final

from hooks.device.accelerated_runners import AcceleratedRunner, AsyncRunnerOutput, StepTruth
from hooks.device.accelerator import SimulatedHost
from hooks.process import CORE, WORKER
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
