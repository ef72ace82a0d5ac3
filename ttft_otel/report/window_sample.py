# SPDX-License-Identifier: Apache-2.0
"""Choose what is read of a window: all late requests, and a random sample of the others. Pure.

database_reader.py and tempo_source.py count a window's requests by stratum, and read those that SamplePlan
names; explain/window/window_reading.py makes its evidence of them, each with its weight.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from ttft_otel.report.report_types import Request, StoredSpan

LATE_SHARE: Final = 0.01  # the slowest of a window, where no objective says who is late
MIN_LATE: Final = 5
# Strata: with a first token, later than Coverage.late_us or not; without one; refused with 4xx.
LATE, OTHER, LOST, REFUSED = "late", "other", "lost", "refused"
MAX_READ: Final[Mapping[str, int]] = {LATE: 2000, OTHER: 2000, LOST: 500, REFUSED: 0}
THRESHOLD_DIGITS: Final = 14  # of a sampling threshold; trailing zeros are left out
MAX_ADJUSTED: Final = 10_000.0  # requests that one stands for: anybody may send a tracestate
THRESHOLD: Final = re.compile(r"(?:^|,)\s*ot=(?:[^,]*;)?th:([0-9a-f]{1,14})(?=[;,\s]|$)")


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A request that was read, with its `ttft` and `encode` spans and all that are above these."""

    request: Request
    spans: Sequence[StoredSpan]
    weight: float = 1.0  #: how many requests of the window it stands for


@dataclass(frozen=True, slots=True)
class Coverage:
    """What a window has, and what was read of it."""

    counts: Mapping[str, int]  #: requests by stratum
    read: Mapping[str, int]  #: those that were read, likewise
    incomplete: int = 0  #: left out: their outermost span is not stored
    first_ns: int = 0  #: Unix nanoseconds at which the first request began; 0 without any
    last_ns: int = 0  #: likewise the last one
    late_us: int = 0  #: longer TTFTs are late
    foreign: Mapping[str, int] = field(default_factory=dict)  #: left out, by who told them
    sampling: str = (
        ""  #: why the stored requests are not all that there were; "" where nothing says so
    )

    @property
    def requests(self) -> int:
        return sum(self.counts.values()) + self.incomplete

    @property
    def is_whole(self) -> bool:
        """Whether all with a first token were read."""
        return all(self.read[stratum] == self.counts[stratum] for stratum in (LATE, OTHER))


@dataclass(frozen=True, slots=True)
class WindowSample:
    """A window's coverage, and its chosen requests, which are read one after another."""

    coverage: Coverage
    requests: Iterator[ReadRequest]


class SamplePlan:
    """Which requests of each stratum are read, by their position in it, and what each stands for.

    counts: requests by stratum. limits: how many are read of each, MAX_READ by default. The same counts
    give the same positions, so that an answer can be repeated.
    """

    def __init__(self, counts: Mapping[str, int], limits: Mapping[str, int] | None = None) -> None:
        limits = MAX_READ if limits is None else limits
        self.counts = counts
        self.read = {name: min(count, limits[name]) for name, count in counts.items()}

    def choose_positions(self, stratum: str) -> Sequence[int]:
        """The positions that are read, ascending."""
        count, read = self.counts[stratum], self.read[stratum]
        if read == count:
            return range(count)
        return sorted(random.Random(f"{stratum} {count}").sample(range(count), read))

    def choose(self, stratum: str, rows: Iterable[tuple[int]]) -> Iterator[int]:
        """The first columns of the rows at these positions, which are read one after another."""
        left, at = iter(rows), 0
        for position in self.choose_positions(stratum):
            yield next(islice(left, position - at, None))[0]
            at = position + 1

    def get_weight(self, stratum: str) -> float:
        """How many requests each one that is read stands for."""
        return self.counts[stratum] / max(self.read[stratum], 1)


def count_late(count: int) -> int:
    """How many of `count` requests with a first token are late where no objective says so."""
    return min(count, max(MIN_LATE, round(LATE_SHARE * count)))


def read_adjusted_count(trace_state: str) -> float:
    """How many requests one stands for by the sampling threshold of a `tracestate`; 1.0 without one.

    OpenTelemetry's probability sampling, of an SDK or a collector, writes `ot=th:c` where it kept a quarter.
    """
    found = THRESHOLD.search(trace_state)
    rejected = int(found[1].ljust(THRESHOLD_DIGITS, "0"), 16) if found else 0
    whole = 16**THRESHOLD_DIGITS
    return min(whole / (whole - rejected), MAX_ADJUSTED)
