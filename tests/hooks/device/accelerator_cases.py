# SPDX-License-Identifier: Apache-2.0
"""The cases in which the device clock is judged, each over both runners and vLLM's step loops.

accelerator_loops.py judges one run, test_accelerator.py runs all and compares the table of their errors in
benchmarks/results/device-clock.md. To write it anew, in tests/:

    ../.venv/bin/python -m hooks.device.accelerator_cases
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from hooks.device.accelerated_runners import (
    AcceleratedEcConnector,
    AcceleratedKvConnector,
    AcceleratedRunner,
    StepWork,
    wrap_accelerated_classes,
)
from hooks.device.accelerator import SimulatedDevice, SimulatedHost
from hooks.device.accelerator_loops import (
    LOOPS,
    Judgement,
    judge_encoder_runs,
    judge_outcomes,
    make_step,
)
from hooks.process import WORKER, drop_state, wrap_ec_connector
from ttft_otel.hooks.worker import device
from ttft_otel.model import breakdown


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
    make_encoder_case(
        "idle",
        gap_us=50_000,
    ),
    make_encoder_case(
        "saturated",
        gap_us=15_000,
    ),
    make_encoder_case(
        "overloaded for 30 s",
        steps=1000,
        gap_us=28_000,
    ),
    make_encoder_case(
        "connector waits",
        connector="ec, synchronizing",
    ),
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
