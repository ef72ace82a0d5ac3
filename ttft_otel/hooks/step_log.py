# SPDX-License-Identifier: Apache-2.0
"""Running sums of engine time by kind of work, at the ends of steps, while traced requests wait.

held_steps.py adds each step at its end, and reads the sums at both ends of a request's wait.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from ttft_otel.hooks.holders import HolderLog
from ttft_otel.hooks.step_work import StepWork

MAX_EDGES: Final = 512  # ends of steps that are kept; of older ones every second is forgotten
MAX_IN_FLIGHT: Final = 8  # scheduled steps that have not ended

Sums = tuple[int, int, int]  # microseconds of PREFILL, DECODE, ENCODER


class StepLog:
    """The steps since the first of the waiting requests came.

    edge: the time up to which `sums` count: the latest step's end, later the next one's begin; 0 without a
    step. step_end: of the latest one. all_sums: the sums at each of `times`. ending: requests that end with
    a step in flight. halted: the scheduler was paused or resumed since the latest schedule().
    """

    __slots__ = (
        *("all_sums", "edge", "ending", "halted", "holders", "in_flight", "latest", "step_end"),
        *("sums", "times"),
    )

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Empty the log: no traced request waits any more."""
        self.edge = self.step_end = 0
        self.halted = False
        self.latest: StepWork | None = None
        self.sums: Sums = (0, 0, 0)
        self.times: list[int] = []
        self.all_sums: list[Sums] = []
        self.in_flight: deque[StepWork] = deque(maxlen=MAX_IN_FLIGHT)
        self.holders = HolderLog()
        self.ending: list[Any] = []

    def begin(self, at: int) -> None:
        """Begin the log at the time `at` (us)."""
        self.edge = at
        self.add_edge(at)

    def add_edge(self, at: int) -> None:
        """Keep the present sums as those at the time `at` (us)."""
        if len(self.times) >= MAX_EDGES:
            # Between two edges the sums are taken to grow evenly: fewer of them change no total.
            half = MAX_EDGES // 2
            self.times[:half] = self.times[:half:2]
            self.all_sums[:half] = self.all_sums[:half:2]
        self.times.append(at)
        self.all_sums.append(self.sums)

    def add_step(self, work: StepWork, now: int, length: int) -> None:
        """Up to `now` (us) the engine was the step's for `length`: it has ended, or its turnaround has."""
        if length:
            prefill, decode, encoder = self.sums
            if work.decode == work.total:  # most steps; also those without work
                self.sums = (prefill, decode + length if work.total else decode, encoder)
            else:
                prefill_us = length * work.prefill // work.total
                encoder_us = length * work.encoder // work.total
                decode_us = length * work.decode // work.total
                # As held_waits.split_length() does it, in a third of the time.
                rest = length - prefill_us - encoder_us - decode_us
                if work.prefill >= work.decode and work.prefill >= work.encoder:
                    prefill_us += rest
                elif work.decode >= work.encoder:
                    decode_us += rest
                else:
                    encoder_us += rest
                self.sums = (prefill + prefill_us, decode + decode_us, encoder + encoder_us)
            self.add_edge(now)
        self.edge, self.latest = now, work

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
