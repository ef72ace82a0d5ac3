# SPDX-License-Identifier: Apache-2.0
"""Running sums of engine time by kind of work, at the ends of steps, while traced requests wait.

held_steps.py adds each step at its end, and reads the sums at both ends of the wait of a HeldRequest.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

import msgspec

from ttft_otel.hooks.engine_core.holders import HolderLog, WaitStart
from ttft_otel.hooks.engine_core.queue_reasons import NO_REASON
from ttft_otel.hooks.engine_core.step_work import SCALE, StepWork
from ttft_otel.model.held_waits import split_step
from ttft_otel.tracing.engine_timeline import EngineTimeline

MAX_EDGES: Final = 512  # ends of steps that are kept; of older ones every second is forgotten
MAX_IN_FLIGHT: Final = 8  # scheduled steps that have not ended

Sums = tuple[int, int, int, int]  # microseconds of PREFILL, DECODE, ENCODER, OTHER_RANK
NO_SUMS: Final[Sums] = (0, 0, 0, 0)


class HeldRequest(msgspec.Struct, eq=False, gc=False):
    """A traced request that waits for its first step, or between its prompt's chunks."""

    request_id: str
    timeline: EngineTimeline
    #: The time from which other requests' work counts as holding it up.
    since: int
    #: Steps since its arrival in which the scheduler did not know it.
    misses: int = 0
    start: WaitStart | None = None
    #: When its first step was scheduled, 0 before.
    ended: int = 0
    #: The time up to which `timeline.held` is written, and the log's sums then; 0 while it waits.
    last: int = 0
    sums: Sums = NO_SUMS
    #: The latest step that computed a part of it.
    own: StepWork | None = None
    #: False for one beyond MAX_FOLLOWED, or whose arrival was not seen.
    is_followed: bool = True
    #: vLLM's Request, while it is in the scheduler's queue.
    request: Any = None
    #: Its own reason to wait (queue_reasons), NO_REASON while it shares the queue's.
    reason: int = NO_REASON
    #: From then on the queue's reason is its own; 0 while it has a reason of its own.
    shared_since: int = 0
    #: ID of a request that came later and runs in its place; "" without one.
    overtaker: str = ""

    def add_segment(self, upto: int, sums: Sums) -> None:
        """Write what ran from `last` up to the time `upto` (us), when the log's sums are these."""
        before = self.sums
        self.timeline.held += (
            upto - self.last, sums[0] - before[0], sums[1] - before[1], sums[2] - before[2],
            0, sums[3] - before[3],
        )  # fmt: skip
        self.last = upto
        self.sums = sums


def drop_arrival(arrivals: deque[HeldRequest], timeline: EngineTimeline) -> None:
    """Take the request of `timeline` out of `arrivals`, to which the input thread may append meanwhile."""
    for _ in range(len(arrivals)):
        if (each := arrivals.popleft()).timeline is not timeline:
            arrivals.append(each)


class StepLog:
    """The steps since the first of the waiting requests came."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Empty the log: no traced request waits any more."""
        #: The time up to which `sums` count: the latest step's end, later the next one's begin; 0: no step.
        self.edge = 0
        self.sums = NO_SUMS
        #: The end of the latest step.
        self.step_end = 0
        self.latest: StepWork | None = None
        #: The scheduler was paused or resumed since the latest schedule().
        self.halted = False
        #: How many requests have decoded since the last but one of `times`; 0 if anything else was done.
        self.steady = 0
        #: How many steps only went on with that since the last of `times`: settle() writes their time.
        self.extended = 0
        #: Ends of steps, and the sums at each of them.
        self.times: list[int] = []
        self.all_sums: list[Sums] = []
        self.in_flight: deque[StepWork] = deque(maxlen=MAX_IN_FLIGHT)
        self.holders = HolderLog()
        #: Requests that end with a step in flight.
        self.ending: list[Any] = []

    def begin(self, at: int) -> None:
        """Begin the log at the time `at` (us)."""
        self.edge = at
        self.add_edge(at)

    def add_edge(self, at: int) -> None:
        """Keep the present sums as those at the time `at` (us)."""
        self.steady = 0
        if len(self.times) >= MAX_EDGES:
            # Between two edges the sums are taken to grow evenly: fewer of them change no total.
            half = MAX_EDGES // 2
            self.times[:half] = self.times[:half:2]
            self.all_sums[:half] = self.all_sums[:half:2]
        self.times.append(at)
        self.all_sums.append(self.sums)

    def add_step(self, work: StepWork, now: int, length: int) -> None:
        """Up to `now` (us) the engine was the step's for `length`: it has ended, or its turnaround has."""
        steady = 0
        if length:
            prefill, decode, encoder, other_rank = self.sums
            if not work.total:
                self.sums = (prefill, decode, encoder, other_rank + length * work.is_dummy)
            elif work.decode == work.total:  # most steps
                self.sums = (prefill, decode + length, encoder, other_rank)
                steady = work.decoders
            else:
                shares = split_step(length, work.prefill, work.decode, work.encoder, work.total)
                prefill_us, decode_us, encoder_us = shares
                self.sums = (
                    prefill + prefill_us,
                    decode + decode_us,
                    encoder + encoder_us,
                    other_rank,
                )
            self.add_edge(now)
        self.edge = now
        self.latest = work
        self.steady = steady

    def extend_decoding(self, output: Any, now: int) -> bool:
        """Add the step `output` if it only goes on with what `steady` says; most steps do. Whether it does.

        Its time is not written before settle(): no edge lies between such steps, as time is divided evenly
        between two, which is exact here.
        """
        work = self.in_flight[0] if self.in_flight else None
        if work is None or not work.is_plain or work.output is not output:
            return False
        if work.decoders != self.steady:
            return False
        self.in_flight.popleft()
        self.edge = now
        self.latest = work
        self.extended += 1
        return True

    def settle(self) -> None:
        """Write the steps that extend_decoding() has added; before sums, times or holders are used."""
        if not self.extended or self.latest is None:
            return
        length = self.edge - self.times[-1]
        prefill, decode, encoder, other_rank = self.sums
        self.sums = self.all_sums[-1] = (prefill, decode + length, encoder, other_rank)
        self.times[-1] = self.step_end = self.edge
        self.holders.decoded += (length << SCALE) // self.latest.decoders
        self.holders.decode_steps += self.extended
        self.extended = 0

    def take_step(self, output: Any) -> StepWork | None:
        """The scheduled step `output`; None for one that was scheduled before anybody waited."""
        in_flight = self.in_flight
        if in_flight and in_flight[0].output is output:
            return in_flight.popleft()
        # A step of which nothing came back is left out.
        if any(work.output is output for work in in_flight):
            while (work := in_flight.popleft()).output is not output:
                pass
            return work
        return None
