# SPDX-License-Identifier: Apache-2.0
"""Figures of the benchmarks: goals are for ratios to a reference of the same run, never for a time.

Those of parts compare like with like, and stop where something is lost or refused. The GPU's jobs run on a
simulated device and simulated servers.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hooks.device.accelerator import SimulatedDevice, SimulatedEvent, SimulatedHost, SimulatedStream
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from benchmarks import (
    bare_transport,
    collector,
    exporter,
    gpu_clock,
    gpu_serve,
    gpu_servers,
    index,
    receiver,
    router,
    router_latency,
    sdk_exporter,
    sending,
    serving,
)
from benchmarks.exporter_records import SPANS_PER_REQUEST, build_request_spans
from benchmarks.figures import Figure, build_figure, divide_rounds, report_figures
from benchmarks.gpu_servers import ServeAnswer
from benchmarks.peer_clients import (
    OUTPUT_TOKENS,
    Load,
    Reading,
    measure_errors,
    play_client,
    start_truth_server,
    take_notes,
)
from benchmarks.process_cpu import read_process_cpu_s
from benchmarks.router import RouterSubject
from benchmarks.router_latency import LatencySamples, StampedClient
from benchmarks.routing import decision_cost
from benchmarks.serving import move_to_cores
from benchmarks.serving_load import LoadResult
from lab import tiny_models
from lab.session_processes import find_exporters
from ttft_otel.hooks.worker import device
from ttft_otel.report.receive import otlp_decoder
from ttft_otel.tracing import clock, handoff
from ttft_otel.tracing.handoff import RecordSender
from ttft_otel.tracing.settings import Settings

ROOT = Path(__file__).parents[2]


def build_router_figures(traced_us: float = 155.0, speed: float = 1.0) -> dict[str, Figure]:
    """Figures of routers that take microseconds as given, on a machine `speed` times as fast."""
    cost_us = {"traced": traced_us, "untraced": 150.0, "rust": 160.0, "fastapi": 310.0}
    cost_us["traced P/D"] = 1.5 * traced_us
    routers = []
    for name, us in cost_us.items():
        subject = RouterSubject(name, (), 0)
        for rounds in subject.cpu_us_by_case.values():
            rounds += [us / speed, us * 1.1 / speed, us * 0.9 / speed]
        routers.append(subject)
    return router.compute_router_figures(routers, 0.0)


def build_collector_figures(config_us: float = 9.0, speed: float = 1.0) -> dict[str, Figure]:
    """Figures of three configurations, the first of them the reference."""
    cost_us = {"passed on": 5.5, "config.yaml": config_us, "with sampling.yaml": 8.0}
    return collector.judge_collector_figures({name: us / speed for name, us in cost_us.items()})


def build_index_figures(lookup_us: float = 11.0, speed: float = 1.0) -> dict[str, Figure]:
    """Figures of one size of fleet."""
    values = {"MB": 180.0, "dictionary MB": 120.0}
    times = {"lookup": lookup_us, "stored": 5.0, "removed": 6.0, "filling": 2.0, "clearing": 3.0}
    times |= {"dictionary lookup": 3.6, "dictionary growth": 30.0}
    return index.build_index_figures(
        values | {name: value / speed for name, value in times.items()}, "2 instances"
    )


def build_serving_figures(p99: float = 1000.0, speed: float = 1.0) -> dict[str, Figure]:
    """Figures of servers without, with our and with vLLM's own tracing, and of one without again."""
    throughputs_p99s = {
        "off": (20.0, 1000.0),
        "on": (19.9, p99),
        "own": (19.2, 1001.0),
        "again": (20.1, 999.0),
    }
    return serving.compute_serving_figures(
        serving.MODES,
        {
            name: [
                LoadResult(
                    count * speed,
                    *(us / speed for us in (last, 500.0, 80.0)),
                    {"python": 900.0 / speed},
                )
            ]
            * 3
            for name, (count, last) in throughputs_p99s.items()
        },
    )


def test_more_cpu_time_by_process() -> None:
    """What a request takes more than in the base's round, in each process that both rounds have."""
    base, more = (
        LoadResult(20.0, 1.0, 1.0, 80.0, {"python": api_us, "worker": 500.0, name: 1.0})
        for api_us, name in ((300.0, "left"), (340.0, "came"))
    )
    figures = serving.compare_processes("on", [more] * 7, [base] * 7)

    assert {name: figure["value"] for name, figure in figures.items()} == {
        "on_more_cpu_us_in_python": 40.0,
        "on_more_cpu_us_in_worker": 0.0,
    }


def build_decision_figures(decision_us: float = 90.0, speed: float = 1.0) -> dict[str, Figure]:
    """Figures of the fleet that has a goal."""
    costs = {"lookup": 34.0, "decision": decision_us, "decision, trapezoid": 62.0, "accounts": 45.0}
    passes = [{name: us / speed for name, us in costs.items()}]
    return decision_cost.build_decision_figures(passes, 128)


BUILDERS: Mapping[str, tuple[Callable[..., dict[str, Figure]], float]] = {
    # The builder, and a first argument that misses a goal.
    "router": (build_router_figures, 400.0),
    "collector": (build_collector_figures, 12.0),
    "index": (build_index_figures, 80.0),
    "serving": (build_serving_figures, 1100.0),
    "decision": (build_decision_figures, 120.0),
}


def list_judgements(figures: Mapping[str, Figure]) -> dict[str, tuple[float, bool]]:
    """Figures that have a goal: value and whether it is met."""
    return {
        name: (figure["value"], figure["met"])
        for name, figure in figures.items()
        if figure["goal"] is not None
    }


@pytest.mark.parametrize("name", BUILDERS)
def test_machine_does_not_matter(name: str) -> None:
    """On a machine of half the speed every figure with a goal has the same value; times double."""
    build, _ = BUILDERS[name]
    usual, slow = build(), build(speed=0.5)

    assert list_judgements(usual) == list_judgements(slow) != {}
    assert all(figure["met"] for figure in usual.values())
    assert usual != slow, "no time is shown"


@pytest.mark.parametrize("name", BUILDERS)
def test_goals_can_be_missed(name: str) -> None:
    """What costs more than the goal allows is not met."""
    build, missing = BUILDERS[name]

    assert not all(met for _, met in list_judgements(build(missing)).values())


def test_hook_figures() -> None:
    """Each case of the hooks has a ratio with a goal, and two times without one.

    In a process of its own: the benchmark replaces the sender and patches its hosts for good.
    """
    code = (
        "import json; from benchmarks import hooks\n"
        "print(json.dumps(hooks.measure_hook_figures(rounds=1)))"
    )
    command = (sys.executable, "-c", code)
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=60)
    figures: dict[str, Figure] = json.loads(done.stdout)
    ratios = {name for name, figure in figures.items() if figure["goal"] is not None}
    cases = {name.partition("_per_")[0] for name in ratios}

    assert cases >= {"api_request", "core_request", "decode_step", "decode_step_connector"}
    assert ratios == {name for name in figures if "_per_" in name}
    times = {f"{case}{end}" for case in cases for end in ("_us", "_reference_us")}
    assert set(figures) == ratios | times
    assert all(figures[f"{case}_reference_us"]["value"] > 0 for case in cases)


def test_added_latency() -> None:
    """Percentiles of a router less those of the instance itself, first and later tokens apart."""
    direct = LatencySamples([100.0] * 100, [50.0] * 100)
    router_samples = LatencySamples([180.0] * 98 + [1100.0] * 2, [70.0] * 100)
    added_us = router_latency.compare_samples({"": direct, "ours": router_samples}, "50%")

    assert added_us == {
        "50%: TTFT p50 added by ours, us": 80.0,
        "50%: TTFT p99 added by ours, us": 1000.0,
        "50%: token p50 added by ours, us": 20.0,
        "50%: token p99 added by ours, us": 20.0,
    }


def test_stamps_are_read_whatever_arrives_together() -> None:
    """An event that comes in two pieces has the time of the second one; the end frees the connection."""
    samples, idle = LatencySamples(), list[StampedClient]()
    client = StampedClient(samples, idle)
    stamped = bare_transport.EVENT_CHUNK.replace(bare_transport.STAMP_PLACE, b"%020d" % 1)
    answer = bare_transport.STREAM_START + stamped + stamped + bare_transport.DONE_CHUNK
    for piece in (answer[:-300], answer[-300:-2], answer[-2:]):
        client.data_received(piece)

    assert (len(samples.first), len(samples.later)) == (1, 2)
    assert idle == [client]


def test_ratios_pair_rounds() -> None:
    """A round is divided by its own reference, so what both had to bear does not count."""
    assert divide_rounds([2.0, 20.0], [1.0, 10.0]) == [2.0, 2.0]
    with pytest.raises(ValueError):
        divide_rounds([1.0], [1.0, 2.0])


def test_agreement_needs_a_tokenizer() -> None:
    """Without --tokenizer the remedy is said, instead of a peer that looks for a tokenizer "None"."""
    command = [sys.executable, str(ROOT / "benchmarks" / "agreement.py")]
    command += ["--url", "http://127.0.0.1:1", "--model", "m"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)

    assert done.returncode == 2
    assert "needs --tokenizer" in done.stderr


def test_clients_are_held_against_the_truth() -> None:
    """What a client says is compared with the notes of its own requests, all of which are found."""
    note = {"came": 1_000_000, "tokens": [21_000_000, 31_000_000, 43_000_000]}
    errors = measure_errors(Reading([21.5, 20.5], [11.0, 13.0]), [note, note])
    with start_truth_server(None) as url:
        reading, notes, _ = play_client("ttft-otel bench", Load(url, "", 100.0, 20))

    assert (errors["ttft_ms mean"], errors["itl_ms mean"], errors["missing"]) == (1.0, 1.0, 0)
    assert len(reading.ttft_ms) == len(notes) == 20
    assert {len(each["tokens"]) for each in notes} == {OUTPUT_TOKENS}


def test_a_real_server_is_noted_from_outside() -> None:
    """With an upstream each request is noted before it is passed on, and each token after it has come."""
    with start_truth_server(None) as upstream, start_truth_server(upstream) as url:
        reading, notes, _ = play_client("ttft-otel bench", Load(url, "", 100.0, 20))
        truths = take_notes(upstream)

    assert len(reading.ttft_ms) == len(notes) == len(truths) == 20
    assert {len(each["tokens"]) for each in notes} == {OUTPUT_TOKENS}
    came, true_came = (sorted(each["came"] for each in some) for some in (notes, truths))
    assert all(one <= other for one, other in zip(came, true_came, strict=True))
    told, true = (sorted(t for each in some for t in each["tokens"]) for some in (notes, truths))
    assert all(one >= other for one, other in zip(told, true, strict=True))


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file holds what was judged; a missed goal is marked and is the exit code."""
    met, missed = build_figure([1.0], 2.0), build_figure([1.0, 3.0, 5.0], 2.0)
    file = tmp_path / "figures.json"

    assert report_figures({"a ratio": met}, None) == 0
    assert report_figures({"a ratio": met, "another": missed}, file) == 1
    assert json.loads(file.read_text("utf-8")) == {"a ratio": met, "another": missed}
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.split() == ["another", "3", "[1,", "5]", "goal", "2", "MISSED"]


def _describe_span(span: ReadableSpan, names_by_id: Mapping[int, str]) -> tuple[object, ...]:
    parent = names_by_id.get(span.parent.span_id) if span.parent else None
    times = (span.start_time, span.end_time)
    return span.name, parent, span.kind, times, span.status.status_code, dict(span.attributes or {})


def _describe_spans(spans: list[ReadableSpan]) -> list[tuple[object, ...]]:
    names_by_id = {span.context.span_id: span.name for span in spans}
    return [_describe_span(span, names_by_id) for span in spans]


def test_reference_makes_same_spans() -> None:
    """The SDK's tracer makes the spans that the exporter makes: names, parents, kinds, times, attributes."""
    templates = build_request_spans(1)
    memory = InMemorySpanExporter()
    provider = sdk_exporter.build_provider(memory)
    sdk_exporter.make_spans(provider.get_tracer("test"), templates)
    provider.shutdown()
    made = _describe_spans(list(memory.get_finished_spans()))
    assert len(made) == SPANS_PER_REQUEST
    assert made == _describe_spans(templates)


def test_cpu_of_other_process() -> None:
    """The CPU clock that is read by process ID is the one that the kernel accounts."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    measured = read_process_cpu_s(os.getpid())
    after = resource.getrusage(resource.RUSAGE_SELF)
    # Accounted in ticks of up to 10 ms, where the clock counts nanoseconds.
    assert before.ru_utime + before.ru_stime - 0.02 <= measured
    assert measured <= after.ru_utime + after.ru_stime + 0.02


@pytest.mark.parametrize("counter", ["dropped", "overflowed", "failed", "foreign"])
def test_loss_ends_measurement(counter: str) -> None:
    """A lost record or span is no cheaper span: the benchmark stops."""

    class LosingSender:
        def get_counts(self) -> dict[str, Any]:
            counts = dict.fromkeys((*handoff.SHARED_COUNTERS, "dropped"), 0)
            return counts | {counter: 1}

    with pytest.raises(RuntimeError, match="lost"):
        exporter.wait_until_exported(LosingSender(), 1)  # type: ignore[arg-type]


def test_bodies() -> None:
    """All spans of each request are there once, and some requests' halves are in different bodies."""
    exports = [
        otlp_decoder.decode_export(body).spans for body in receiver.build_export_bodies(1, 200)
    ]
    sizes = Counter(span.trace_id for spans in exports for span in spans)
    assert len(sizes) == 200 and set(sizes.values()) == {SPANS_PER_REQUEST}
    places = [{span.trace_id for span in spans} for spans in exports]
    assert places[0] & places[1]


@pytest.mark.parametrize("protocol", ["http", pytest.param("grpc", marks=pytest.mark.full)])
def test_whole_round(tmp_path: Path, protocol: str) -> None:
    """A round with a real receiver gives all figures; a body that it refuses ends the benchmark."""
    costs = receiver.ReceiverCosts()
    with (
        receiver.run_receiver(tmp_path / "spans.db") as (pid, http_port, grpc_port),
        receiver.connect(protocol, http_port, grpc_port) as send,
    ):
        assert receiver.measure_round(pid, send, 1, 50.0, 0.4, costs) == 41
        figures = receiver.build_receiver_figures(protocol, costs)
        assert all(figure["value"] >= 0 for figure in figures.values())
        assert figures[f"{protocol}_flood_request_us"]["value"] > 0
        with pytest.raises(Exception, match=r"refused|INVALID_ARGUMENT"):
            send(b"no protobuf")


def wait_for_exporter(sender: RecordSender) -> int:
    """The exporter's process, once the short-lived one that forks it has ended."""
    found: list[int] = []
    for _ in range(1000):
        sender.send(b"x")
        found = find_exporters([os.getpid()])
        with contextlib.suppress(OSError):  # it ended meanwhile
            if len(found) == 1 and read_parent(found[0]) != os.getpid():
                return found[0]
        time.sleep(0.02)
    raise AssertionError(f"no exporter, or more than one: {found}")


def read_parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_exporter_is_moved() -> None:
    """The exporter of this process is found, no other process is, and all of its threads are moved."""
    before = os.sched_getaffinity(0)
    sender = RecordSender(Settings(on=True))
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        exporter = wait_for_exporter(sender)
        assert find_exporters([other.pid]) == []
        move_to_cores([exporter], {max(before)})
        threads = [int(task.name) for task in Path(f"/proc/{exporter}/task").iterdir()]
        assert {frozenset(os.sched_getaffinity(thread)) for thread in threads} == {
            frozenset({max(before)})
        }
        assert os.sched_getaffinity(0) == os.sched_getaffinity(other.pid) == before
    finally:
        sender.close()
        other.communicate(b"\n")


def burn_cpu(seconds: float) -> None:
    """Compute for so much CPU time."""
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        pass


def test_times() -> None:
    """Waiting is wall time alone, computing both; the pauses between records are neither."""
    waiting, computing = sending.PacedTimes(), sending.PacedTimes()
    waiting.add_round([b""] * 3, lambda _: time.sleep(0.003), 0.006)
    computing.add_round([b""] * 3, lambda _: burn_cpu(0.003), 0.006)
    assert waiting.wall_us[0] >= 3000 > waiting.cpu_us[0]
    assert computing.wall_us[0] >= computing.cpu_us[0] >= 3000 > computing.cpu_us[0] / 2


GRAPH_US = 10_000


class SimulatedGpu:
    """What gpu_clock.py asks of a device, simulated."""

    def __init__(self, host: SimulatedHost, drift_ppm: float) -> None:
        self.host = host
        self.device = SimulatedDevice(host, drift_ppm)
        self.copy_stream = SimulatedStream(self.device)
        self.make_event = self.device.make_event
        self.is_idle = self.device.is_idle

    def queue_work(self, us: float) -> None:
        """Host work and device work."""
        self.host.work(300)
        self.device.main.queue_work(us)

    def queue_copy(self) -> Callable[[], None]:
        """A copy behind the work."""
        self.copy_stream.wait_stream(self.device.main)
        event = self.device.make_event()
        _, event.at = self.copy_stream.queue_work(12)
        return event.synchronize

    def synchronize(self) -> None:
        """Wait for the stream; a spinning host wakes up at once."""
        self.host.sleep(max(0.0, self.device.main.busy_until - self.host.at) + 3)

    @contextlib.contextmanager
    def forbid_waits(self) -> Iterator[None]:
        """Nobody may sleep until an event has happened."""

        def refuse(event: object) -> None:
            raise RuntimeError("called a synchronizing operation")

        with mock.patch.object(SimulatedEvent, "synchronize", refuse):
            yield

    def queue_graph(self) -> tuple[Callable[[], None], float]:
        """A replay of known length."""

        def replay() -> None:
            self.device.main.queue_work(GRAPH_US)

        return replay, float(GRAPH_US)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimulatedGpu:
    """A device whose clock is 20 ppm fast."""
    host = SimulatedHost()
    monkeypatch.setattr(clock, "now_us", host)
    monkeypatch.setattr(clock, "count_switches", host.count_switches)
    return SimulatedGpu(host, 20.0)


def test_figures(gpu: SimulatedGpu) -> None:
    """Drift and places come out as they are; every goal is met."""
    figures = gpu_clock.measure_clock_figures(gpu)

    assert figures["drift_ppm"]["value"] == pytest.approx(20, abs=8)
    assert {name for name, figure in figures.items() if figure["goal"] is not None} == {
        "place_error_idle_p99_us",
        *(f"place_error_busy_{ms}_ms_p99_us" for ms in (1, 10, 40)),
        "graph_length_error_us",
        "steps_that_wait",
        "marked_step_us",
    }
    assert all(figure["met"] for figure in figures.values()), figures
    assert figures["stamp_us"]["value"] > 0


def test_wrong_places(gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a look before the wait, places under load are wrong, and the benchmark says so."""

    def look_away(self: device.DeviceClock, stamps: Any, awaited: int) -> bool:
        return False

    monkeypatch.setattr(device.DeviceClock, "note_pending", look_away)
    gpu.is_idle = lambda: False  # type: ignore[method-assign]
    figures = gpu_clock.measure_clock_figures(gpu)

    assert not figures["place_error_busy_40_ms_p99_us"]["met"]


def test_a_clock_that_waits(gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that synchronizes is found out."""
    place = device.DeviceClock.place_stamps

    def wait_and_place(self: device.DeviceClock, stamps: Any) -> device.Placement:
        stamps[-1][0].synchronize()
        return place(self, stamps)

    assert gpu_clock.count_waits(gpu)["met"]
    monkeypatch.setattr(device.DeviceClock, "place_stamps", wait_and_place)

    assert gpu_clock.count_waits(gpu)["value"] == gpu_clock.WAIT_STEPS


STAGES = ("queue", "dispatch", "encoder.compute", "prefill.compute", "sample", "output")


class SimulatedServer:
    """One request at a time on a device; `told_in`: a stage that gets what another one took.

    unattributed_ms: of every answer; lost_by_sleep_ms: more of it after a sleep.
    """

    lost_by_sleep_ms = 0.0

    def __init__(self, told_in: str = "", unattributed_ms: float = 0.0) -> None:
        self.told_in = told_in
        self.unattributed_ms = unattributed_ms
        self.delays: dict[str, float] = {}
        self.chance = random.Random(5)
        self.streams = 0

    def ask(self, seed: int, image: bool = False, tokens: int = 8) -> ServeAnswer:
        """Every stage takes about a millisecond, and its delay."""
        return self._answer(seed, image, tokens, waited_ms=0.0)

    def ask_many(
        self, seeds: Sequence[int], image: bool = False, tokens: int = 8
    ) -> list[ServeAnswer]:
        """They wait for each other."""
        step_ms = 1 + sum(self.delays.values())
        return [
            self._answer(seed, image, tokens, place * step_ms) for place, seed in enumerate(seeds)
        ]

    def _answer(self, seed: int, image: bool, tokens: int, waited_ms: float) -> ServeAnswer:
        stages = {name: self.chance.uniform(0.8, 1.2) for name in STAGES}
        if not image:
            del stages["encoder.compute"]
        stages["dispatch"] += waited_ms
        for place, ms in self.delays.items():
            own = gpu_serve.STAGE_BY_PLACE[place]
            if own in stages:
                stages[self.told_in or own] += ms
        gaps = tuple(self.chance.randrange(990, 1010) for _ in range(tokens - 1))
        return ServeAnswer(stages, self.unattributed_ms, f"answer to {seed}", gaps)

    def sleep_and_wake(self) -> None:
        """After that something may be lost."""
        self.unattributed_ms += self.lost_by_sleep_ms

    @contextlib.contextmanager
    def delay_device(self, place: str, ms: float) -> Iterator[None]:
        """For the block."""
        self.delays = {place: ms}
        yield
        self.delays = {}

    @contextlib.contextmanager
    def stream_beside(self, count: int) -> Iterator[None]:
        """For the block."""
        self.streams = count
        yield
        self.streams = 0


def measure(traced: SimulatedServer, encoder: SimulatedServer) -> dict[str, bool]:
    """Which goals are met."""
    servers = gpu_serve.ServerSet(traced, SimulatedServer(), encoder)
    figures = gpu_serve.measure_servers(servers)
    return {name: figure["met"] for name, figure in figures.items() if figure["goal"] is not None}


def test_right() -> None:
    """Servers that tell the truth meet every goal; there is one for each sentence of the job."""
    met = measure(SimulatedServer(), SimulatedServer())

    assert all(met.values()), met
    places = [f"{place}{beside}" for place in gpu_serve.STAGE_BY_PLACE
              for beside in ("", "_beside_32_streams")]  # fmt: skip
    assert met.keys() == {
        *("closed_share", "encoder_only_closed_share", "equal_texts_share", "token_gap_ratio"),
        "closed_after_sleep_share",
        *("saturated_wait_ms", "saturated_output_share"),
        *(f"{place}_{kind}_ms" for place in places for kind in ("error", "elsewhere")),
    }


def test_told_elsewhere() -> None:
    """A delay that shows in another stage misses both goals of its place."""
    met = measure(SimulatedServer(told_in="output"), SimulatedServer())

    assert not met["forward_error_ms"] and not met["forward_elsewhere_ms"]
    assert not met["sample_beside_32_streams_elsewhere_ms"]
    assert met["closed_share"]


def test_open() -> None:
    """Unattributed time misses the goals of closing."""
    met = measure(SimulatedServer(unattributed_ms=0.001), SimulatedServer(unattributed_ms=0.001))

    assert not met["closed_share"] and not met["encoder_only_closed_share"]
    assert met["forward_error_ms"]


def test_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is lost once a server has slept misses the goal after it, and not the one before."""
    monkeypatch.setattr(SimulatedServer, "lost_by_sleep_ms", 1.0)
    met = measure(SimulatedServer(), SimulatedServer())

    assert met["closed_share"] and not met["closed_after_sleep_share"]


def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Command lines and environments: graphs as wanted, nothing of a CPU build, delays only if traced."""
    monkeypatch.setattr(tiny_models, "build_model", lambda recipe: tmp_path)
    traced = gpu_servers.build_gpu_command("a", "v2", False, tmp_path / "control.json")
    untraced = gpu_servers.build_gpu_command("b", "v1", True, None)
    encode = gpu_servers.build_encode_command("v1", True, tmp_path)

    at = traced.argv.index("--compilation-config")
    assert json.loads(traced.argv[at + 1])["cudagraph_mode"] == "FULL_DECODE_ONLY"
    assert "--enforce-eager" not in traced.argv and "TRITON_ATTN" not in traced.argv
    assert traced.env["VLLM_USE_V2_MODEL_RUNNER"] == "1" and traced.env["TTFT_OTEL"] == "1"
    assert "inject" in traced.env["PYTHONPATH"]
    assert "TTFT_OTEL" not in untraced.env and "inject" not in untraced.env["PYTHONPATH"]
    assert "TRITON_ATTN" in untraced.argv and "TORCH_SDPA" in untraced.argv
    assert "ec_producer" in " ".join(encode.argv)
