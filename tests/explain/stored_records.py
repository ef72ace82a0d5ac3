# SPDX-License-Identifier: Apache-2.0
"""Windows of known truth: what vLLM's own Scheduler serves by a clock of ours, as stores; commands asked."""

from __future__ import annotations

import functools
import itertools
import json
import random
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import numpy
import tracing_fakes
from click.testing import CliRunner, Result
from hooks.fakes import import_from_vllm
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan

from tests.fake_tempo import FakeTempo
from ttft_otel.commands import main as cli
from ttft_otel.explain.whatif import what_if
from ttft_otel.explain.whatif.engine_model import EngineLimits
from ttft_otel.explain.whatif.replay_facts import EngineVisit, Recording, ReplayRequest
from ttft_otel.explain.whatif.what_if import TTFT, Fleet
from ttft_otel.explain.whatif.window_check import PlannedChange
from ttft_otel.explain.window.request_facts import RequestFacts
from ttft_otel.exporter import span_batch
from ttft_otel.model.names import keys, span_names
from ttft_otel.model.record import Attributes, Piece, Record, Server, Ttft
from ttft_otel.report.receive import otlp_decoder
from ttft_otel.report.store.span_store import SpanStore

BASE_US, TOKEN_US, GAP_US = 4_000, 25, 300  # of a step: always, for each token, and after it
BEFORE_US = 1500  # from the arrival at the server to that at its engine
STREAM_US = 200  # from a sampled token to the client


@dataclass(frozen=True)
class Device:
    """How long a step takes: reading the weights or computing the tokens, and reading contexts."""

    base_us: float = BASE_US  #: of each step
    floor_us: float = 0  #: reading the weights takes so long, while tokens are computed
    token_us: float = TOKEN_US
    context_us: float = 0  #: for each token that decodes read
    speed: float = 1  #: how many times as long all of that takes
    pauses: tuple[tuple[int, int], ...] = ()  #: begin and end, in which the process does not run

    def find_end(self, begun: int, tokens: int, contexts: int) -> int:
        """When a step ends."""
        work = max(self.floor_us, self.token_us * tokens)
        end = begun + round(self.speed * (self.base_us + work + self.context_us * contexts))
        for begin, until in self.pauses:
            if begin < end and begun < until:
                end += until - max(begin, begun)
        return end


LINEAR = Device()


@dataclass(frozen=True)
class Arrival:
    """A request to come."""

    at_us: int
    tokens: int
    answer: int


@dataclass
class Served:
    """What became of it.

    in_step: until the first schedule() call. end: of its last step. blocked: that it waited for KV blocks.
    """

    queue: int = -1
    in_step: int = 0
    dispatch: int = 0
    chunks: int = 0
    step_tokens: int = 0
    compute: int = 0
    stall: int = 0
    first_token: int = 0
    end: int = 0
    chunk_end: int = 0
    chunk_step: int = 0
    blocked: int = 0
    preemptions: int = 0


def draw_arrivals(
    seed: int,
    count: int = 120,
    mean_gap_us: int = 25_000,
    answer: tuple[int, int] = (1, 40),
    sigma: float = 1.2,
) -> tuple[Arrival, ...]:
    """Poisson arrivals of prompts with log-normal lengths."""
    chance, at, arrivals = random.Random(seed), 0, list[Arrival]()
    for _ in range(count):
        at += round(chance.expovariate(1 / mean_gap_us))
        tokens = round(min(chance.lognormvariate(4.5, sigma), 1500)) + 1
        arrivals.append(Arrival(at, tokens, chance.randint(*answer)))
    return tuple(arrivals)


def hasten(arrivals: Sequence[Arrival], rate: float) -> tuple[Arrival, ...]:
    """The same, so many times as fast."""
    return tuple(replace(each, at_us=round(each.at_us / rate)) for each in arrivals)


def build_driver(limits: EngineLimits) -> Any:
    """vLLM's Scheduler with these limits, or its AsyncScheduler."""
    real, asynchronous = import_from_vllm(
        "tests.hooks.real_scheduler", "vllm.v1.core.sched.async_scheduler"
    )
    plain = real.WrappedScheduler
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if limits.async_scheduling:
                real.WrappedScheduler = asynchronous.AsyncScheduler
            # Without a limit as many as no load here needs.
            return real.SchedulerDriver(
                tracing_fakes.FakeClock(),
                limits.kv_tokens // real.BLOCK_SIZE or 4096,
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=limits.max_batched_tokens,
                enable_chunked_prefill=limits.chunked,
                async_scheduling=limits.async_scheduling,
                max_model_len=2048,
            )
        finally:
            real.WrappedScheduler = plain


@functools.cache
def run_scheduler(
    arrivals: tuple[Arrival, ...], limits: EngineLimits, device: Device = LINEAR
) -> tuple[Served, ...]:
    """What vLLM's Scheduler makes of `arrivals`, in steps as long as the device needs.

    It is the same every time, so several tests share a run. The loop is that of vLLM's engine core: without
    async scheduling one step at a time, with it two of which one runs; where nothing can be scheduled beside
    a step, its end is waited for.
    """
    driver, coming, now = build_driver(limits), list(enumerate(arrivals)), 0
    scheduler, served = driver.scheduler, [Served() for _ in arrivals]
    depth, device_free = 2 if limits.async_scheduling else 1, 0
    flying: deque[tuple[int, Any, list[str], list[bool]]] = deque()
    looked, blocked, steps = 0, list[Any](), 0
    while coming or scheduler.requests:
        if not scheduler.requests:
            now = max(now, coming[0][1].at_us)
        while coming and coming[0][1].at_us <= now:
            number, arrival = coming.pop(0)
            built = driver.build(str(number), arrival.tokens, arrival.answer, traced=False)
            scheduler.add_request(built)
            served[number].in_step = now - arrival.at_us
        for request in blocked:
            served[int(request.request_id)].blocked += now - looked
        output = scheduler.schedule()
        looked, blocked = now, find_blocked(scheduler, output, limits)
        for each in output.preempted_req_ids or ():
            served[int(each)].preemptions += 1
        if output.total_num_scheduled_tokens:
            steps += 1
            begun = max(now, device_free)
            ids, requests = list(output.num_scheduled_tokens), scheduler.requests
            read = sum(
                requests[each].num_computed_tokens
                for each in ids
                if requests[each].num_output_tokens
            )
            device_free = device.find_end(begun, output.total_num_scheduled_tokens, read)
            # vLLM counts them as computed as soon as they are scheduled.
            whole = [
                requests[each].num_computed_tokens >= requests[each].num_tokens for each in ids
            ]
            for each, is_whole in zip(ids, whole, strict=True):
                one = served[int(each)]
                left_out = steps - one.chunk_step > 1
                one.chunk_step = steps
                times = (now, begun, device_free)
                note_step(one, arrivals[int(each)], output, times, is_whole, left_out)
            flying.append((device_free, output, ids, whole))
            if len(flying) < depth:
                continue
        if flying:
            end, finished, ids, whole = flying.popleft()
            now = max(now, end)
            scheduler.update_from_output(finished, make_result(ids, whole))
            now += GAP_US
    return tuple(served)


def find_blocked(scheduler: Any, output: Any, limits: EngineLimits) -> list[Any]:
    """New requests that still wait although places and tokens are left: for KV blocks."""
    if (
        len(scheduler.running) >= limits.max_num_seqs
        or output.total_num_scheduled_tokens >= limits.max_batched_tokens
    ):
        return []
    return [each for each in scheduler.waiting if not each.num_preemptions]


def make_result(ids: list[str], whole: list[bool]) -> Any:
    """What a worker answers: a token of each request whose prompt is complete."""
    from vllm.v1.outputs import ModelRunnerOutput

    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={each: at for at, each in enumerate(ids)},
        sampled_token_ids=[[7] if each else [] for each in whole],
    )


def note_step(
    one: Served,
    arrival: Arrival,
    output: Any,
    times: tuple[int, int, int],
    is_whole: bool,
    left_out: bool,
) -> None:
    """A step that is scheduled, begins and ends at `times` has a part of this request.

    left_out: the step before had none. Beginning a step takes no time, so that it began when that one ended.
    """
    scheduled, begun, one.end = times
    if one.first_token:
        return
    if one.queue < 0:
        one.queue = scheduled - arrival.at_us
        one.dispatch = begun - scheduled
    elif left_out:
        one.stall += begun - one.chunk_end
    else:
        one.dispatch += begun - one.chunk_end
    one.chunks += 1
    one.step_tokens += output.total_num_scheduled_tokens
    one.compute += one.end - begun
    one.chunk_end = one.end
    if is_whole:
        one.first_token = one.end


SMALL = EngineLimits(4, 512)
BUSY = draw_arrivals(11, 200, 40_000, (5, 25))
REPETITIONS = 2  # the first is without noise, and decides what is refused


def record(
    arrivals: tuple[Arrival, ...],
    limits: EngineLimits,
    *,
    tells_answers: bool = False,
    devices: tuple[Device, ...] = (LINEAR,),
) -> Recording:
    """The window as traces would tell it; requests take turns at engines with these devices."""
    served = serve(arrivals, limits, devices)
    found = [
        build_request(number, each, one, f"chat-{1 + number % len(devices)}", tells_answers)
        for number, (each, one) in enumerate(zip(arrivals, served, strict=True))
    ]
    reported = {
        keys.ENGINE_MAX_SEQS: limits.max_num_seqs,
        keys.ENGINE_MAX_TOKENS: limits.max_batched_tokens,
        keys.ENGINE_ASYNC: int(limits.async_scheduling),
        **({keys.ENGINE_KV_TOKENS: limits.kv_tokens} if limits.kv_tokens else {}),
    }
    settings = {f"chat-{1 + number}": reported for number in range(len(devices))}
    return Recording(tuple(found), settings, roles=frozenset({"mono"}))


def serve(
    arrivals: tuple[Arrival, ...], limits: EngineLimits, devices: tuple[Device, ...] = (LINEAR,)
) -> list[Served]:
    """What becomes of requests that take turns at engines with these devices."""
    count = len(devices)
    parts = [
        run_scheduler(arrivals[number::count], limits, device)
        for number, device in enumerate(devices)
    ]
    return [parts[number % count][number // count] for number in range(len(arrivals))]


def build_request(
    number: int, arrival: Arrival, one: Served, instance: str, tells_answers: bool = False
) -> ReplayRequest:
    stages = {
        "prefill.queue": one.queue,
        "prefill.compute": one.compute,
        "prefill.stall": one.stall,
        "dispatch": one.dispatch,
        "sample": 0,
    }
    visit = EngineVisit(
        instance=instance,
        role="mono",
        arrived=arrival.at_us,
        computed=arrival.tokens,
        cached=0,
        stages=stages,
        chunks=one.chunks,
        own_tokens=arrival.tokens,
        step_tokens=one.step_tokens,
        output_tokens=arrival.answer if tells_answers else 0,
        token_us=(one.end - one.first_token) // (arrival.answer - 1) if tells_answers else 0,
        preemptions=one.preemptions,
        reasons={
            "in_step": one.in_step,
            "kv_blocks": one.blocked,
            "max_num_seqs": one.queue - one.in_step - one.blocked,
        },
        answer_us=one.end - one.first_token,
        after_us=STREAM_US,
    )
    whole = {"preprocess": BEFORE_US, **stages, "output": STREAM_US}
    return ReplayRequest(f"r{number}", arrival.at_us - BEFORE_US, visit, whole)


def find_truth(
    arrivals: tuple[Arrival, ...],
    limits: EngineLimits,
    devices: tuple[Device, ...] = (LINEAR,),
    shares: Sequence[float] = (0.5, 0.95),
) -> Any:
    """p50 and p95 of the TTFT that vLLM's Scheduler gives."""
    ttfts = [
        BEFORE_US + one.first_token - each.at_us + STREAM_US
        for each, one in zip(arrivals, serve(arrivals, limits, devices), strict=True)
    ]
    return numpy.quantile(ttfts, shares)


def find_token_times(
    arrivals: tuple[Arrival, ...],
    limits: EngineLimits,
    devices: tuple[Device, ...] = (LINEAR,),
) -> Any:
    """p50, p95 and p99 of the time per output token that vLLM's Scheduler gives."""
    times = [
        (one.end - one.first_token) / (each.answer - 1)
        for each, one in zip(arrivals, serve(arrivals, limits, devices), strict=True)
    ]
    return numpy.quantile(times, (0.5, 0.95, 0.99))


def learn(
    arrivals: tuple[Arrival, ...] = BUSY,
    limits: EngineLimits = SMALL,
    tells_answers: bool = False,
    devices: tuple[Device, ...] = (LINEAR,),
) -> Fleet:
    """What is learned of the window that record() has; several tests ask it for changes."""
    return _learn(arrivals, limits, tells_answers, devices)


@functools.cache
def _learn(
    arrivals: tuple[Arrival, ...],
    limits: EngineLimits,
    tells_answers: bool,
    devices: tuple[Device, ...],
) -> Fleet:
    recording = record(arrivals, limits, tells_answers=tells_answers, devices=devices)
    return what_if.learn_fleet(recording, PlannedChange())


def ask(fleet: Fleet, change: PlannedChange, repetitions: int = REPETITIONS) -> Any:
    """The answer, and p50 and p95 of the predicted TTFT."""
    answer = what_if.predict_fleet(fleet, change, repetitions)
    return answer, [each.predicted for each in answer.figures[TTFT][:2]]


def predict(recording: Recording, change: PlannedChange, repetitions: int = REPETITIONS) -> Any:
    """The same of a recording that is no window of record()."""
    return ask(what_if.learn_fleet(recording, PlannedChange()), change, repetitions)


DOCS = Path(__file__).parents[2] / "docs"


class StoreCommand:
    """`ttft-otel NAME` over a store, with `flags` at each call; its JSON keeps to docs/NAME.schema.json."""

    def __init__(self, name: str, *flags: str) -> None:
        self.name, self.flags = name, flags
        self.schema = json.loads((DOCS / f"{name}.schema.json").read_text("utf-8"))

    def run(self, database: Path, *words: str) -> Result:
        """Run it in a terminal that is wide enough for one line each."""
        return self._invoke("--db", str(database), *words)

    def run_tempo(self, tempo: FakeTempo, *words: str) -> Result:
        """Run it in the same terminal, over a Tempo."""
        return self._invoke("--tempo", tempo.url, *words)

    def _invoke(self, *words: str) -> Result:
        return CliRunner(env={"COLUMNS": "2000"}).invoke(cli.main, [self.name, *self.flags, *words])

    def read_json(self, database: Path, *words: str) -> dict[str, Any]:
        """Its JSON, which keeps to the schema."""
        reported: dict[str, Any] = json.loads(self.run(database, *words, "--json").stdout)
        jsonschema.validate(reported, self.schema)
        return reported

    def check_refusal(self, database: Path, words: list[str], reported: str) -> None:
        """It refuses with `reported`; where the flags themselves are right, in its JSON as well."""
        result = self.run(database, *words)
        assert result.exit_code != 0 and reported in result.output
        if result.exit_code == 1:
            assert reported in self.read_json(database, *words)["refusal"]


BEGIN_S = 1_790_000_000  # Unix seconds of the first request


def build_record(number: int, start_us: int, lengths: dict[str, int], **more: Any) -> Record:
    """Request `number`, `start_us` after BEGIN_S: the stages of `lengths` (us), one after another.

    more: fields of its Ttft that differ.
    """
    pieces, at = [], 0
    for name, length in lengths.items():
        pieces.append(Piece("stage", name, at, at + length))
        at += length
    ttft = Ttft(f"{number + 9001:016x}", span_names.TTFT, 0, at, lengths, 0, 0, tuple(pieces))
    return Record(
        version=1,
        trace_id=f"{number + 1:032x}",
        span_id=f"{number + 1:016x}",
        parent_id="",
        flags=1,
        state="",
        start_ns=BEGIN_S * 10**9 + start_us * 1000,
        role="mono",
        outermost=True,
        service="vllm",
        request_id=f"r{number}",
        attributes={keys.MODEL: "tiny", keys.PROVIDER: "vllm"},
        ttft=msgspec.structs.replace(ttft, **more),
        server=Server("POST /v1/completions", at, 200),
    )


def build_noisy_record(number: int, tokens: int, wait_us: int) -> Record:
    """Request `number`, one a second: stages of usual lengths, and `wait_us` more in prefill.queue."""
    chance = random.Random(number)
    lengths = {
        "preprocess": round(2000 * chance.lognormvariate(0, 0.2)),
        "prefill.queue": round(5000 * chance.lognormvariate(0, 0.3)) + wait_us,
        "prefill.compute": round(30_000 * chance.lognormvariate(0, 0.2)),
    }
    record = build_record(number, number * 1_000_000, lengths)
    attributes = {**record.attributes, keys.INPUT_TOKENS: tokens}
    return msgspec.structs.replace(record, attributes=attributes)


def build_served_record(number: int, arrival: Arrival, one: Served) -> Record:
    """A request that vLLM's Scheduler has served, as its hooks would have recorded it."""
    lengths = {
        "preprocess": BEFORE_US,
        "prefill.queue": one.queue,
        "prefill.compute": one.compute,
        "prefill.stall": one.stall,
        "output": STREAM_US,
    }
    reported = {
        keys.INPUT_TOKENS: arrival.tokens,
        keys.CACHED_TOKENS: 0,
        keys.PREFILL_CHUNKS: one.chunks,
        keys.PREFILL_OWN_TOKENS: arrival.tokens,
        keys.PREFILL_STEP_TOKENS: one.step_tokens,
        keys.STREAMING: True,
        keys.name_reason_attribute("prefill.queue", "max_num_seqs"): one.queue - one.blocked,
        keys.name_reason_attribute("prefill.queue", "kv_blocks"): one.blocked,
    }
    pieces = (Piece("stage", "prefill.compute", 0, one.compute),)
    start_us = arrival.at_us - BEFORE_US
    record = build_record(number, start_us, lengths, pieces=pieces, attributes=reported)
    end = sum(lengths.values()) + one.end - one.first_token
    # What the server knows at its request's end.
    answer: Attributes = {
        keys.OUTPUT_TOKENS: arrival.answer,
        keys.TIME_PER_OUTPUT_TOKEN_US: (one.end - one.first_token) // max(arrival.answer - 1, 1),
    }
    server = Server("POST /v1/completions", end, 200, attributes=answer)
    return msgspec.structs.replace(record, server=server)


def store_served_window(
    path: Path, arrivals: Sequence[Arrival], limits: EngineLimits, *, tells_settings: bool = True
) -> Path:
    """A window that vLLM's Scheduler has served; all waiting was for a place, but for that for KV blocks."""
    resource: dict[str, str | int] = {"service.instance.id": "chat-1"}
    if tells_settings:
        resource[keys.ENGINE_MAX_SEQS] = limits.max_num_seqs
        resource[keys.ENGINE_MAX_TOKENS] = limits.max_batched_tokens
        if limits.kv_tokens:
            resource[keys.ENGINE_KV_TOKENS] = limits.kv_tokens
    served = run_scheduler(tuple(arrivals), limits)
    records = map(build_served_record, itertools.count(), arrivals, served)
    return store_spans(path, build_spans(list(records), resource))


def draw_busy_arrivals() -> tuple[Arrival, ...]:
    """160 requests that wait for each other on four places; none is at the scheduler before BEFORE_US."""
    return delay(draw_arrivals(21, 160, 40_000, (5, 25)))


def delay(arrivals: Sequence[Arrival]) -> tuple[Arrival, ...]:
    """The same, BEFORE_US later."""
    return tuple(replace(each, at_us=each.at_us + BEFORE_US) for each in arrivals)


def build_spans(records: Sequence[Record], attributes: dict[str, Any]) -> list[ReadableSpan]:
    """Their spans, of the service `vllm` with these other resource attributes."""
    resource = Resource.create({"service.name": "vllm", **attributes})
    return [span for record in records for span in span_batch.build_spans(record, resource)]


def store_spans(path: Path, spans: Sequence[ReadableSpan]) -> Path:
    """Write the spans into the database `path`, a new one where there is none; returns `path`."""
    store = SpanStore(path)
    store.add(otlp_decoder.decode_export(encode_spans(spans).SerializeToString()).spans).result(20)
    store.close()
    return path


def name_window(first_s: float, last_s: float) -> str:
    """The window between so many seconds after BEGIN_S, as a user writes it."""
    ends = (datetime.fromtimestamp(BEGIN_S + each, timezone.utc) for each in (first_s, last_s))
    return "..".join(end.isoformat() for end in ends)


SECOND_NS = 1_000_000_000


def make_window(count: int = 300, seed: int = 1) -> list[RequestFacts]:
    """Requests of one kind on two instances, a second apart, with the skew of real ones."""
    chance = numpy.random.default_rng(seed)
    window = []
    for number in range(count):
        stages = {
            "preprocess": round(2_000 * chance.lognormal(0, 0.3)),
            "prefill.queue": round(chance.exponential(5_000)),
            "prefill.compute": round(30_000 * chance.lognormal(0, 0.1)),
            "unattributed": round(chance.exponential(300)),
        }
        tokens = int(chance.integers(520, 1000))
        window.append(
            RequestFacts(
                f"r{number}",
                1_700_000_000 * SECOND_NS + number * SECOND_NS,
                stages,
                tokens,
                100,
                trace_id=f"{number + 1:032x}",
                reasons={"prefill.queue": {"in_step": stages["prefill.queue"]}},
                instances=dict.fromkeys(stages, f"chat-{number % 2}"),
                instance=f"chat-{number % 2}",
                step_tokens=tokens,
                compute_us=stages["prefill.compute"],
            )
        )
    return window
