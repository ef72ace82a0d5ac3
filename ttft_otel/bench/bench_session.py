# SPDX-License-Identifier: Apache-2.0
"""Run LoadPlans: warm-up and alternating rounds, or rounds of a search, until done or stopped by Ctrl-C.

commands/bench.py makes the sides; result_document.py describes their LoadRuns.
"""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from time import monotonic
from types import FrameType
from typing import Any, Final, TypeVar

from ttft_otel.bench.http_exchange import keep_timestamps_enabled
from ttft_otel.bench.limit_search import LimitSearch, is_overloaded, list_waits
from ttft_otel.bench.load_driver import LoadRun
from ttft_otel.bench.load_plan import BenchSide
from ttft_otel.bench.request_factory import BenchRequest
from ttft_otel.bench.terminal_report import ProgressLine
from ttft_otel.model.statistics import compute_quantile

PROGRESS_INTERVAL_S: Final = 0.5  # between two updates of the progress line
Sent = TypeVar("Sent")
# Share of a round by which its last request may leave late; beyond it the rate was not kept.
MAX_LATENESS: Final = 0.05
STOP_POLL_S: Final = 0.001  # given to the event loop while prompts are made, to notice a stop


class BenchSession:
    """Sends the load of sides, shows the progress, and counts Ctrl-C instead of being ended by it."""

    def __init__(self, progress: ProgressLine) -> None:
        self.progress = progress
        self.interrupts = 0
        self._stop = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    @contextmanager
    def count_interrupts(self) -> Iterator[None]:
        """Replace the handler of SIGINT while the block runs, so that it cannot truncate a result file."""
        # asyncio.run() installs its own handler only over Python's default one, so this one stays.
        before = signal.signal(signal.SIGINT, self._record_interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _record_interrupt(self, number: int, frame: FrameType | None) -> None:
        self.interrupts += 1
        # A signal handler runs between any two bytecodes; only this call may wake the loop from there.
        if self._loop:
            self._loop.call_soon_threadsafe(self._stop.set)

    def run(self, sending: Coroutine[Any, Any, Sent]) -> Sent:
        """Run one of the coroutines below, which end early after Ctrl-C."""

        async def send() -> Sent:
            self._loop = asyncio.get_running_loop()
            try:
                return await sending
            finally:
                self._loop = None  # it closes

        return asyncio.run(send())

    async def send_rounds(self, sides: Sequence[BenchSide]) -> None:
        """Send all rounds of the sides in turn, and append the results to their runs."""
        repeat = sides[0].plan.repeat
        for number in range(repeat):
            # Alternate the order, so that a drift of the machine affects all sides alike.
            for side in sides if number % 2 == 0 else reversed(sides):
                rate = f" at {side.rate:g}" if side.rate else ""
                title = f"round {number + 1}/{repeat}{rate} {side.target.url}"
                # Other prompts in each round, since those of the round before are cached.
                await self._send_round(side, side.plan.seed + number, title)
                if self._stop.is_set():
                    return

    async def send_search(self, side: BenchSide, search: LimitSearch) -> list[BenchSide]:
        """Send rounds at the rates that `search` names, until it is over; a side for each rate."""
        probes: dict[float, BenchSide] = {}
        while not search.ended:
            count, rate = search.count_requests(), search.rate
            paced = {"concurrency": int(rate)} if search.is_whole else {"rate": rate}
            plan = replace(side.plan, request_count=count, **paced)
            probe = probes.setdefault(rate, replace(side, plan=plan, runs=[]))
            title = f"round {search.rounds + 1}, {rate:g} {probe.unit} {side.target.url}"
            watch = partial(is_overloaded, conditions=search.conditions, planned=count)
            await self._send_round(probe, plan.seed + search.rounds, title, watch)
            if self._stop.is_set():
                search.ended = "Ctrl-C"
                break
            run = probe.runs[-1]
            # Requests that left too late are another load than the one asked for.
            if not search.is_whole and _find_lateness(run) > MAX_LATENESS:
                search.ended = f"this process cannot send {rate:g} {probe.unit} in time"
                break
            waits = {each.metric: list_waits(run, each.metric) for each in search.conditions}
            search.record_round(waits, count if run.overloaded else run.started)
        return [probes[rate] for rate in sorted(probes)]

    async def _send_round(
        self,
        side: BenchSide,
        seed: int,
        title: str,
        is_enough: Callable[[LoadRun], bool] = lambda _: False,
    ) -> None:
        """A warm-up and a run on one side. is_enough: ends the run early when it says so."""
        plan = side.plan
        if plan.warmup:
            # A run of its own: its results are in no figure.
            warmup = LoadRun(side.target, plan.timeout_s)
            await self._watch_run(warmup, plan.send_warmup(warmup, seed, side.factory), title)
        requests = await self._prepare_requests(side, seed, title)
        if self._stop.is_set():
            return
        run = LoadRun(side.target, plan.timeout_s)
        # Before the load, so that an interrupted run is in the results as far as it got.
        side.runs.append(run)
        await self._watch_run(run, plan.send_load(run, seed, requests), title, is_enough)

    async def _prepare_requests(self, side: BenchSide, seed: int, title: str) -> list[BenchRequest]:
        """Build the bodies of a run's requests, up to a minute for a long trace; fewer after a stop."""
        requests: list[BenchRequest] = []
        next_report = monotonic() + PROGRESS_INTERVAL_S
        for request in side.plan.generate_requests(side.factory, seed):
            requests.append(request)
            if monotonic() >= next_report:
                self.progress.report_prepared(title, len(requests), side.plan.count_requests())
                # Making prompts never awaits: without this a Ctrl-C would wait for the last one.
                await asyncio.sleep(STOP_POLL_S)
                if self._stop.is_set():
                    break
                next_report = monotonic() + PROGRESS_INTERVAL_S
        return requests

    async def _watch_run(
        self,
        run: LoadRun,
        sending: Coroutine[Any, Any, None],
        title: str,
        is_enough: Callable[[LoadRun], bool] = lambda _: False,
    ) -> None:
        """Send a run's load; a stop, or `is_enough`, cancels it."""
        with _pause_garbage_collection(), keep_timestamps_enabled():
            # Throughout the load: a stall between two sends delays the reading of answers as well.
            lag_task = asyncio.create_task(run.sample_loop_lag())
            load_task, stop_task = map(asyncio.create_task, (sending, self._stop.wait()))
            while not (load_task.done() or stop_task.done() or run.overloaded):
                await asyncio.wait(
                    {load_task, stop_task},
                    timeout=PROGRESS_INTERVAL_S,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                self.progress.report_sent(title, run)
                run.overloaded = is_enough(run)
            lag_task.cancel()
            stop_task.cancel()
            # False if the load had ended by itself: then an exception of it is raised below.
            was_cancelled = load_task.cancel()
            run.overloaded &= was_cancelled
            run.stopped = was_cancelled and not run.overloaded
            await asyncio.gather(load_task, return_exceptions=was_cancelled)


def _find_lateness(run: LoadRun) -> float:
    """How late the last requests of `run` left (median), as a share of the time planned for all."""
    responses = sorted((each.response for each in run.results), key=lambda each: each.due_ns)
    if not responses:
        return 0.0
    last = responses[-max(1, len(responses) // 4) :]
    late_ns = compute_quantile((each.sent_ns - each.due_ns for each in last), 0.5)
    return late_ns / max(1, responses[-1].due_ns - responses[0].due_ns)


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
