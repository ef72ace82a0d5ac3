# SPDX-License-Identifier: Apache-2.0
"""Play a Plan against one or two targets: warm-up, rounds in turn, until done or told to stop.

command.py gives plan and targets; document.py gets the Runs.
"""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

from ttft_otel.bench import arrival, lookup
from ttft_otel.bench.ask import Form
from ttft_otel.bench.drive import Driver, Run
from ttft_otel.bench.plan import Load, Plan
from ttft_otel.bench.wire import Target

SHOWN: Final = 0.5  # seconds between two looks at the progress
PATIENCE: Final = 60.0  # for breakdowns that have to be looked up after a run
HURRY: Final = 3.0

Watch = Callable[[str, Run], None]


@dataclass(slots=True)
class Side:
    """A target with the form of its requests and its runs so far."""

    target: Target
    form: Form
    runs: list[Run] = field(default_factory=list)


def play(plan: Plan, sides: Sequence[Side], watch: Watch) -> bool:
    """Fill each side's runs; False when Ctrl-C ended it early (what there is stays).

    Raises Unfit and Unreadable before anything is sent to any side.
    """
    for place, side in enumerate(sides):
        plan.check(side.form, place)
    return asyncio.run(_play(plan, sides, watch))


async def _play(plan: Plan, sides: Sequence[Side], watch: Watch) -> bool:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    for number in range(plan.repeat):
        # Turn about, so that neither side always comes first.
        for side in sides if number % 2 == 0 else reversed(sides):
            seed = plan.seed_of(number, sides.index(side))
            if plan.warmup:
                warm = Driver(side.target, plan.timeout, plan.most)
                await _run(plan.warm(side.form, seed), warm, stop, _silent, "")
            if stop.is_set():
                return False
            driver = Driver(side.target, plan.timeout, plan.most)
            side.runs.append(driver.run)
            title = f"round {number + 1}/{plan.repeat} {side.target.url}"
            await _run(plan.load(side.form, seed), driver, stop, watch, title)
            with suppress(asyncio.TimeoutError):
                wanted = lookup.complete(side.target, driver.run.results)
                await asyncio.wait_for(wanted, HURRY if stop.is_set() else PATIENCE)
    return not stop.is_set()


async def _run(load: Load, driver: Driver, stop: asyncio.Event, watch: Watch, title: str) -> None:
    """One run; a stop cancels it."""
    with _quiet(), arrival.noting():
        async with driver.beating():
            work = asyncio.ensure_future(load(driver))
            end = asyncio.create_task(stop.wait())
            while not (work.done() or end.done()):
                await asyncio.wait({work, end}, timeout=SHOWN, return_when=asyncio.FIRST_COMPLETED)
                watch(title, driver.run)
            end.cancel()
            driver.run.stopped = work.cancel()
            await asyncio.gather(work, return_exceptions=driver.run.stopped)


@contextmanager
def _quiet() -> Iterator[None]:
    """No garbage collection while times are taken: a full one stops the process for long."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _silent(title: str, run: Run) -> None:
    """Show nothing."""
