# SPDX-License-Identifier: Apache-2.0
"""Run a LoadPlan against one or two targets: warm-up and alternating rounds, until done or stopped.

commands/bench.py passes plan and targets; result_document.py describes the LoadRuns.
"""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic
from types import FrameType
from typing import Final

from ttft_otel.bench.http_exchange import BenchTarget, keep_timestamps_enabled
from ttft_otel.bench.limit_search import LimitSearch
from ttft_otel.bench.load_driver import LoadDriver, LoadRun
from ttft_otel.bench.load_plan import LoadFunction, LoadPlan
from ttft_otel.bench.request_factory import BenchRequest, RequestFactory
from ttft_otel.bench.request_statistics import find_lateness, is_overloaded, list_waits
from ttft_otel.bench.terminal_report import ProgressLine

PROGRESS_INTERVAL_S: Final = 0.5  # between two updates of the progress line
# Share of a round by which its last request may leave late; beyond it the rate was not kept.
MAX_LATENESS: Final = 0.05
STOP_POLL_S: Final = 0.001  # given to the event loop while prompts are made, to notice a stop


@dataclass(slots=True)
class BenchSide:
    """A target, how to build requests for it, and its finished and current runs."""

    target: BenchTarget
    factory: RequestFactory
    runs: list[LoadRun] = field(default_factory=list)


class InterruptCounter:
    """Counts Ctrl-C while a block runs, instead of raising KeyboardInterrupt.

    on_interrupt: called at each of them.
    """

    def __init__(self) -> None:
        self.count = 0
        self.on_interrupt: Callable[[], object] = _do_nothing

    @contextmanager
    def count_interrupts(self) -> Iterator[None]:
        """Replace the handler of SIGINT while the block runs."""
        # asyncio.run() installs its own handler only over Python's default one, so this one stays.
        before = signal.signal(signal.SIGINT, self._record_interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def ignore_interrupts(self) -> None:
        """Ignore Ctrl-C until the block ends, so that it cannot truncate a result file."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _record_interrupt(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.on_interrupt()


def check_plan(plan: LoadPlan, sides: Sequence[BenchSide]) -> None:
    """Check `plan` before anything is sent. Raises BenchInputError."""
    for target_index, side in enumerate(sides):
        # Both targets before either is loaded: half of a comparison is worth nothing.
        plan.check_context(side.factory, target_index)


def run_plan(
    plan: LoadPlan, sides: Sequence[BenchSide], progress: ProgressLine, interrupts: InterruptCounter
) -> None:
    """Run a checked `plan` and append its results to each side's runs; Ctrl-C ends it early."""
    asyncio.run(_run_until_stopped(partial(_run_rounds, plan, sides, progress), interrupts))


def run_search(
    plan: LoadPlan,
    side: BenchSide,
    search: LimitSearch,
    progress: ProgressLine,
    interrupts: InterruptCounter,
) -> dict[float, BenchSide]:
    """Send rounds of `plan` at the rates that `search` names, until it is over; Ctrl-C ends it early.

    Returns the runs at each rate.
    """
    probes: dict[float, BenchSide] = {}
    asyncio.run(
        _run_until_stopped(partial(_probe_rates, plan, side, search, probes, progress), interrupts)
    )
    return probes


async def _run_until_stopped(
    run_all: Callable[[asyncio.Event], Awaitable[None]], interrupts: InterruptCounter
) -> None:
    stop = asyncio.Event()
    # A signal handler runs between any two bytecodes; only this call may wake the loop from there.
    interrupts.on_interrupt = partial(asyncio.get_running_loop().call_soon_threadsafe, stop.set)
    try:
        await run_all(stop)
    finally:
        interrupts.on_interrupt = _do_nothing  # the loop closes


async def _run_rounds(
    plan: LoadPlan, sides: Sequence[BenchSide], progress: ProgressLine, stop: asyncio.Event
) -> None:
    for round_index in range(plan.repeat):
        # Alternate the order, so that a drift of the machine affects both sides alike.
        for side in sides if round_index % 2 == 0 else reversed(sides):
            seed = plan.compute_seed(round_index, sides.index(side))
            title = f"round {round_index + 1}/{plan.repeat} {side.target.url}"
            await _run_round(plan, side, seed, stop, progress, title)
            if stop.is_set():
                return


async def _probe_rates(
    plan: LoadPlan,
    side: BenchSide,
    search: LimitSearch,
    probes: dict[float, BenchSide],
    progress: ProgressLine,
    stop: asyncio.Event,
) -> None:
    while not search.ended:
        count = search.count_requests()
        round_plan = replace(
            plan,
            shape=replace(plan.shape, request_count=count),
            trace=replace(plan.trace, max_requests=count),
            rate=None if search.is_whole else search.rate,
            concurrency=int(search.rate) if search.is_whole else None,
        )
        probe = probes.setdefault(search.rate, BenchSide(side.target, side.factory))
        title = f"round {search.rounds + 1}, {search.rate:g} {search.unit} {side.target.url}"
        watch = partial(is_overloaded, conditions=search.conditions, planned=count)
        await _run_round(
            round_plan, probe, plan.compute_seed(search.rounds, 0), stop, progress, title, watch
        )
        if stop.is_set():
            search.ended = "Ctrl-C"
            return
        run = probe.runs[-1]
        # Requests that left too late are another load than the one asked for.
        if not search.is_whole and find_lateness(run) > MAX_LATENESS:
            search.ended = f"this process cannot send {search.rate:g} {search.unit} in time"
            return
        planned = count if run.overloaded else run.started
        search.record_round(list_waits(run, search.conditions), planned)


async def _run_round(
    plan: LoadPlan,
    side: BenchSide,
    seed: int,
    stop: asyncio.Event,
    progress: ProgressLine,
    title: str,
    is_enough: Callable[[LoadRun], bool] | None = None,
) -> None:
    """A warm-up and a run on one side. is_enough: ends the run early when it says so."""
    if plan.warmup:
        # A driver of its own: its results are in no figure.
        warmup_driver = LoadDriver(side.target, plan.timeout_s, plan.max_unfinished)
        await _run_load(plan.build_warmup(side.factory, seed), warmup_driver, stop)
    requests = await _prepare_requests(
        plan, side.factory, seed, stop, partial(progress.report_prepared, title)
    )
    if stop.is_set():
        return
    driver = LoadDriver(side.target, plan.timeout_s, plan.max_unfinished)
    # Before the load, so that an interrupted run is in the results as far as it got.
    side.runs.append(driver.run)
    await _run_load(
        plan.build_load(side.factory, seed, requests),
        driver,
        stop,
        partial(progress.report_sent, title),
        is_enough,
    )


async def _prepare_requests(
    plan: LoadPlan,
    factory: RequestFactory,
    seed: int,
    stop: asyncio.Event,
    show_progress: Callable[[int, int], None],
) -> list[BenchRequest]:
    """Build the bodies of a run's requests, up to a minute for a long trace; fewer after a stop."""
    requests: list[BenchRequest] = []
    total, next_report = plan.count_requests(), monotonic() + PROGRESS_INTERVAL_S
    for request in plan.generate_requests(factory, seed):
        requests.append(request)
        if monotonic() >= next_report:
            show_progress(len(requests), total)
            # Making prompts never awaits: without this a Ctrl-C would wait for the last one.
            await asyncio.sleep(STOP_POLL_S)
            if stop.is_set():
                break
            next_report = monotonic() + PROGRESS_INTERVAL_S
    return requests


async def _run_load(
    load: LoadFunction,
    driver: LoadDriver,
    stop: asyncio.Event,
    show_progress: Callable[[LoadRun], None] | None = None,
    is_enough: Callable[[LoadRun], bool] | None = None,
) -> None:
    """Send one run's load; a stop, or `is_enough`, cancels it."""
    with _pause_garbage_collection(), keep_timestamps_enabled():
        # Around the whole load: a stall between two sends delays the reading of answers as well.
        async with driver.measure_loop_lag():
            load_task = asyncio.ensure_future(load(driver))
            stop_task = asyncio.create_task(stop.wait())
            while not (load_task.done() or stop_task.done()):
                await asyncio.wait(
                    {load_task, stop_task},
                    timeout=PROGRESS_INTERVAL_S,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if show_progress:
                    show_progress(driver.run)
                if is_enough and is_enough(driver.run):
                    driver.run.overloaded = True
                    break
            stop_task.cancel()
            # False if the load had ended by itself: then an exception of it is raised below.
            was_cancelled = load_task.cancel()
            driver.run.overloaded &= was_cancelled
            driver.run.stopped = was_cancelled and not driver.run.overloaded
            await asyncio.gather(load_task, return_exceptions=was_cancelled)


@contextmanager
def _pause_garbage_collection() -> Iterator[None]:
    """Disable garbage collection while times are measured: a full one stops the process for long."""
    # Garbage that is there now would else be frozen and kept for the whole run.
    gc.collect()
    gc.freeze()  # objects that exist now, such as all prompts, are not scanned until unfreeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _do_nothing() -> None:
    """The handler outside of a run."""
