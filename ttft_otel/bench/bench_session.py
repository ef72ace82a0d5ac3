# SPDX-License-Identifier: Apache-2.0
"""Run a LoadPlan against one or two targets: warm-up and alternating rounds, until done or stopped.

commands/bench.py passes plan and targets; result_document.py describes the LoadRuns. Breakdowns that
responses did not carry, because a proxy has removed Server-Timing, come from the router's newest reports.
"""

from __future__ import annotations

import asyncio
import gc
import json
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from time import monotonic, monotonic_ns
from types import FrameType
from typing import Any, Final

from ttft_otel.bench.http_exchange import (
    HTTP_OK,
    BenchTarget,
    RawResponse,
    keep_timestamps_enabled,
    perform_exchange,
)
from ttft_otel.bench.load_driver import LoadDriver, LoadRun, RequestResult
from ttft_otel.bench.load_plan import LoadFunction, LoadPlan
from ttft_otel.bench.request_factory import BenchRequest, RequestFactory
from ttft_otel.bench.terminal_report import ProgressLine
from ttft_otel.model.timing import ServerTiming
from ttft_otel.model.ttft_report import STAGES_KEY, TTFT_MS_KEY, UNATTRIBUTED_MS_KEY

PROGRESS_INTERVAL_S: Final = 0.5  # between two updates of the progress line
STOP_POLL_S: Final = 0.001  # given to the event loop while prompts are made, to notice a stop
RUN_LOOKUP_TIMEOUT_S: Final = 60.0  # for fetching breakdowns that responses did not carry
STOPPED_LOOKUP_TIMEOUT_S: Final = 3.0  # the same after Ctrl-C
REPORT_PATH: Final = "/ttft_report/"
# A server that does not know this many of its newest requests has no reports: stop asking.
MAX_UNKNOWN_REPORTS: Final = 3
# Few: the router may be serving others.
MAX_CONCURRENT_LOOKUPS: Final = 8
LOOKUP_TIMEOUT_S: Final = 5.0


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
    asyncio.run(_run_until_stopped(plan, sides, progress, interrupts))


async def _run_until_stopped(
    plan: LoadPlan, sides: Sequence[BenchSide], progress: ProgressLine, interrupts: InterruptCounter
) -> None:
    stop = asyncio.Event()
    # A signal handler runs between any two bytecodes; only this call may wake the loop from there.
    interrupts.on_interrupt = partial(asyncio.get_running_loop().call_soon_threadsafe, stop.set)
    try:
        await _run_rounds(plan, sides, progress, stop)
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


async def _run_round(
    plan: LoadPlan,
    side: BenchSide,
    seed: int,
    stop: asyncio.Event,
    progress: ProgressLine,
    title: str,
) -> None:
    """A warm-up and a run on one side."""
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
    )
    # Breakdowns are an extra: a router that is slow to tell them must not cost the measured times.
    with suppress(asyncio.TimeoutError):
        lookups = fetch_missing_breakdowns(side.target, driver.run.results)
        await asyncio.wait_for(
            lookups, STOPPED_LOOKUP_TIMEOUT_S if stop.is_set() else RUN_LOOKUP_TIMEOUT_S
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
) -> None:
    """Send one run's load; a stop cancels it."""
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
            stop_task.cancel()
            # False if the load had ended by itself: then an exception of it is raised below.
            driver.run.stopped = load_task.cancel()
            await asyncio.gather(load_task, return_exceptions=driver.run.stopped)


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


async def fetch_missing_breakdowns(target: BenchTarget, results: Iterable[RequestResult]) -> None:
    """Set the breakdown of successful `results` that have none, by the router's GET /ttft_report/<id>."""
    missing = [result for result in results if not result.error and result.timing is None]
    # The newest first: a router keeps only its newest reports.
    missing.reverse()
    for result in missing[:MAX_UNKNOWN_REPORTS]:
        # One by one, to stop early where there is no such endpoint.
        result.timing = await _fetch_breakdown(target, result.request_id)
    if not any(result.timing for result in missing[:MAX_UNKNOWN_REPORTS]):
        return
    remaining = iter(missing[MAX_UNKNOWN_REPORTS:])  # shared: each worker takes the next one
    await asyncio.gather(
        *(_fetch_breakdowns(target, remaining) for _ in range(MAX_CONCURRENT_LOOKUPS))
    )


async def _fetch_breakdowns(target: BenchTarget, results: Iterable[RequestResult]) -> None:
    for result in results:
        result.timing = await _fetch_breakdown(target, result.request_id)


async def _fetch_breakdown(target: BenchTarget, request_id: str) -> ServerTiming | None:
    message = target.encode_request(REPORT_PATH + request_id, b"", {}, "GET")
    response = await perform_exchange(target, message, monotonic_ns(), LOOKUP_TIMEOUT_S)
    return _parse_report(response) if response.status == HTTP_OK and not response.error else None


def _parse_report(response: RawResponse) -> ServerTiming | None:
    """The stages of the whole request; None when it is not a TTFT report, or does not add up."""
    try:
        report: Any = json.loads(b"".join(piece for _, piece in response.pieces))["combined"]
        parts = {str(name): _to_microseconds(ms) for name, ms in report[STAGES_KEY].items()}
        unattributed_us, ttft_us = (
            _to_microseconds(report[UNATTRIBUTED_MS_KEY]),
            _to_microseconds(report[TTFT_MS_KEY]),
        )
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    return (
        # Must add up to the microsecond, as in every other answer; else it is of something else.
        ServerTiming(parts, unattributed_us, ttft_us)
        if sum(parts.values()) + unattributed_us == ttft_us
        else None
    )


def _to_microseconds(ms: float) -> int:
    # Reports have milliseconds with three decimals: rounding gives the exact microseconds back.
    return round(ms * 1000)


def _do_nothing() -> None:
    """The handler outside of a run."""
