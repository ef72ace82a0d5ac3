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
from functools import partial
from time import monotonic
from types import FrameType
from typing import Final, Protocol

from ttft_otel.bench import arrival, lookup
from ttft_otel.bench.ask import Ask, Form
from ttft_otel.bench.drive import Driver, Run
from ttft_otel.bench.plan import Load, Plan
from ttft_otel.bench.wire import Target

SHOWN: Final = 0.5  # seconds between two looks at the progress
HEARD: Final = 0.001  # seconds in which a stop is heard
PATIENCE: Final = 60.0  # for breakdowns that have to be looked up after a run
HURRY: Final = 3.0


class Watch(Protocol):
    """Who shows how far it is."""

    def made(self, title: str, count: int, of: int) -> None:
        """So many of a run's prompts are made."""
        ...

    def sent(self, title: str, run: Run) -> None:
        """A run is so far."""
        ...


@dataclass(slots=True)
class Side:
    """A target with the form of its requests and its runs so far."""

    target: Target
    form: Form
    runs: list[Run] = field(default_factory=list)


class Interrupts:
    """Ctrl-C, counted while a block runs; it breaks off nothing by itself."""

    def __init__(self) -> None:
        """None has come yet."""
        self.count = 0
        self.tell: Callable[[], object] = _silent

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Count them for as long as the block runs."""
        before = signal.signal(signal.SIGINT, self._note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def ignore(self) -> None:
        """From here to the block's end they do nothing: one may cut off what is being written."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.tell()


def check(plan: Plan, sides: Sequence[Side]) -> None:
    """Raises Unfit and Unreadable before anything is sent to any side."""
    for place, side in enumerate(sides):
        plan.check(side.form, place)


def play(plan: Plan, sides: Sequence[Side], watch: Watch, interrupts: Interrupts) -> None:
    """Fill each side's runs, those of a plan that was checked; Ctrl-C ends it early."""
    asyncio.run(_told(plan, sides, watch, interrupts))


async def _told(plan: Plan, sides: Sequence[Side], watch: Watch, interrupts: Interrupts) -> None:
    stop = asyncio.Event()
    interrupts.tell = partial(asyncio.get_running_loop().call_soon_threadsafe, stop.set)
    try:
        await _play(plan, sides, watch, stop)
    finally:
        interrupts.tell = _silent  # the loop closes


async def _play(plan: Plan, sides: Sequence[Side], watch: Watch, stop: asyncio.Event) -> None:
    for number in range(plan.repeat):
        # Turn about, so that neither side always comes first.
        for side in sides if number % 2 == 0 else reversed(sides):
            seed = plan.seed_of(number, sides.index(side))
            title = f"round {number + 1}/{plan.repeat} {side.target.url}"
            await _round(plan, side, seed, stop, watch, title)
            if stop.is_set():
                return


async def _round(
    plan: Plan, side: Side, seed: int, stop: asyncio.Event, watch: Watch, title: str
) -> None:
    """A warm-up and a run on one side."""
    if plan.warmup:
        warm = Driver(side.target, plan.timeout, plan.most)
        await _run(plan.warm(side.form, seed), warm, stop)
    asks = await _made(plan, side.form, seed, stop, partial(watch.made, title))
    if stop.is_set():
        return
    driver = Driver(side.target, plan.timeout, plan.most)
    side.runs.append(driver.run)
    await _run(plan.load(side.form, seed, asks), driver, stop, partial(watch.sent, title))
    with suppress(asyncio.TimeoutError):
        wanted = lookup.complete(side.target, driver.run.results)
        await asyncio.wait_for(wanted, HURRY if stop.is_set() else PATIENCE)


async def _made(
    plan: Plan, form: Form, seed: int, stop: asyncio.Event, show: Callable[[int, int], None]
) -> list[Ask]:
    """A run's bodies; those of a long trace take a minute. A stop leaves out the rest."""
    found: list[Ask] = []
    whole, next_look = plan.count(), monotonic() + SHOWN
    for ask in plan.asks(form, seed):
        found.append(ask)
        if monotonic() >= next_look:
            show(len(found), whole)
            await asyncio.sleep(HEARD)
            if stop.is_set():
                break
            next_look = monotonic() + SHOWN
    return found


async def _run(
    load: Load, driver: Driver, stop: asyncio.Event, show: Callable[[Run], None] | None = None
) -> None:
    """One run; a stop cancels it."""
    with _quiet(), arrival.noting():
        async with driver.beating():
            work = asyncio.ensure_future(load(driver))
            end = asyncio.create_task(stop.wait())
            while not (work.done() or end.done()):
                await asyncio.wait({work, end}, timeout=SHOWN, return_when=asyncio.FIRST_COMPLETED)
                if show:
                    show(driver.run)
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


def _silent() -> None:
    """Tell nobody."""
