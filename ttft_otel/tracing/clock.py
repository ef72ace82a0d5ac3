# SPDX-License-Identifier: Apache-2.0
"""HOT: the clock of all marks, CLOCK_MONOTONIC in integer microseconds; conversions to it and to wall time.

recorder.py passes the Marks of each first output. An engine core on another host (data parallel over
hosts), in another time namespace, or after a step has a clock that differs from ours by an unknown
offset. A request that was sent before the core's first mark, and whose output arrived after the last
one, bounds the offset from both sides; the bounds of recent requests are intersected.
"""

from __future__ import annotations

import functools
import resource
import time
import zlib
from collections import OrderedDict, deque
from time import monotonic_ns as monotonic_ns  # hooks of each step divide it in line
from typing import Final

from ttft_otel.model.breakdown import EngineStep, Marks

# Nanoseconds between the two monotonic reads around a wall-clock read, at most; 100 ns when the
# process is not preempted in between.
MAX_BRACKET_NS: Final = 20_000
MAX_READS: Final = 5
# Error bound of to_wall_ns(): half a bracket, plus the rounding of a mark to one microsecond. A read
# that was preempted is repeated; on an overloaded machine one of five was always undisturbed.
WALL_ERROR_US: Final = MAX_BRACKET_NS // 2000 + 1
# Which clock placed a worker's marks; the words for them are keys.CLOCK_WORDS.
CLOCK_HOST: Final = 0
CLOCK_DEVICE: Final = 1  # the device's events, placed on the host's time
CLOCK_LENGTHS: Final = 2  # the device's events, of which only the lengths are known
CLOCK_NONE: Final = 3  # the platform has no timing events
_BOOT_FILE: Final = "/proc/sys/kernel/random/boot_id"
_OFFSETS_FILE: Final = "/proc/self/timens_offsets"  # of this process's time namespace


def now_us() -> int:
    """CLOCK_MONOTONIC in microseconds; comparable between all processes of this host."""
    return monotonic_ns() // 1000


def count_switches() -> int:
    """How often the calling thread has gone to sleep (voluntary context switches), 0.3 us."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def to_wall_ns(mark: int) -> int:
    """Unix time in nanoseconds of `mark` (microseconds of now_us()).

    The offset is measured at each call, so that steps of the wall clock (NTP) are followed: the wall clock
    is read between two monotonic reads, and of MAX_READS such brackets the tightest counts.
    """
    offset = 0
    tightest = 1 << 62
    for _ in range(MAX_READS):
        before = monotonic_ns()
        wall = time.time_ns()
        after = monotonic_ns()
        if after - before < tightest:
            tightest = after - before
            offset = wall - (before + after) // 2
            if tightest <= MAX_BRACKET_NS:  # nearly always the first
                break
    return mark * 1000 + offset


@functools.lru_cache(maxsize=1)
def get_boot_number() -> int:
    """A 32-bit number that identifies this boot of this host, and the offset of this process's time
    namespace; 0 where the kernel does not give it. The same in all children that it forks.

    Marks of processes with different boot numbers are not comparable: CLOCK_MONOTONIC starts at boot.
    """
    try:
        with open(_BOOT_FILE, "rb") as file:
            boot = file.read().strip()
    except OSError:
        return 0
    try:
        with open(_OFFSETS_FILE, "rb") as file:
            offsets = b" ".join(file.readline().split())  # "monotonic <seconds> <nanoseconds>"
    except OSError:  # a kernel without time namespaces
        offsets = b""
    return zlib.crc32(boot + (b"" if offsets in (b"", b"monotonic 0 0") else offsets))


MAX_BOUNDS: Final = 64  # kept per engine core
# Two quartz clocks drift apart by this share of the time, at most; bounds widen with their age by as much.
# Where NTP disciplines both it is a hundredth of that.
DRIFT_SHARE: Final = 50e-6
# An older one has widened to what is known from a request alone.
MAX_BOUND_AGE_US: Final = 10_000_000
MAX_CLOCKS: Final = 1024  # engine cores whose bounds are kept

# (boot number, data-parallel rank) -> (our time, lowest offset, highest offset), oldest first.
_bounds: OrderedDict[tuple[int, int], deque[tuple[int, int, int]]] = OrderedDict()


def align_marks(marks: Marks, boot: int, rank: int, arrived: int) -> None:
    """Convert the engine core's marks in `marks` to this process's clock, or remove them.

    They are removed, so that their time becomes unattributed, when no offset can be right: when the
    core's clock has stepped within the request. Sets `clock_offset` and `clock_error` of `marks`.
    boot, rank: identify the engine core. arrived: our time when its output, or the end, was here.
    """
    # The latest mark before the engine core had it: the later, the narrower is the bound.
    sent = marks.assign or marks.render or marks.arrive
    if boot == get_boot_number() and _is_in_order(marks, sent, arrived):
        return  # one host, and a request with its first token: the usual case costs no more than this
    _check_worker(marks)
    times = _list_core_times(marks)
    if not times:
        return
    low, high = max(times) - arrived, min(times) - sent
    # On one clock the marks lie between sending and arrival, and the offset 0 is exact.
    if boot == get_boot_number() and low <= 0 <= high:
        return
    if low > high:
        _remove_core_marks(marks)
        return
    low, high = _narrow_bounds((boot, rank), arrived, low, high)
    marks.clock_offset = (low + high) // 2
    marks.clock_error = (high - low + 1) // 2
    _shift_core_marks(marks, marks.clock_offset)


def _is_in_order(marks: Marks, sent: int, arrived: int) -> bool:
    """Whether all marks are there, and each lies where it does on one clock."""
    if not 0 < sent <= marks.added <= marks.scheduled <= marks.entered <= arrived:
        return False
    if marks.foreign or not marks.steps:
        return not marks.steps
    step = marks.steps[-1]
    if len(step.pairs) == 1:  # the usual case, without a list
        last = max(step.sampled, step.pairs[0][2])
    else:
        last = max(_list_step_times(step))
    return marks.scheduled <= last <= marks.entered


def _check_worker(marks: Marks) -> None:
    """Set `foreign` also where a worker's times do not fit between those of the engine core."""
    times = [time for step in marks.steps for time in _list_step_times(step)]
    if times and not marks.foreign:
        last = max(times)
        marks.foreign = last < marks.scheduled or 0 < marks.entered < last


def _list_step_times(step: EngineStep) -> list[int]:
    return [step.sampled, *(end for _, _, end in step.pairs)]


def _list_core_times(marks: Marks) -> list[int]:
    """All times on the engine core's clock; a worker's only where it shares that clock."""
    times = [marks.added, marks.scheduled, marks.entered, marks.moving, marks.asking]
    for _, start, end in marks.waits:
        times += (start, end)
    if not marks.foreign:
        for step in marks.steps:
            times += _list_step_times(step)
    return [time for time in times if time]


def _narrow_bounds(key: tuple[int, int], now: int, low: int, high: int) -> tuple[int, int]:
    """Intersect these bounds of an offset with those of the engine core's recent requests."""
    recent = _bounds.setdefault(key, deque(maxlen=MAX_BOUNDS))
    _bounds.move_to_end(key)
    if len(_bounds) > MAX_CLOCKS:
        _bounds.popitem(last=False)
    while recent and now - recent[0][0] > MAX_BOUND_AGE_US:
        recent.popleft()
    narrowed_low, narrowed_high = low, high
    for at, earlier_low, earlier_high in recent:
        drift = int(abs(now - at) * DRIFT_SHARE) + 1
        narrowed_low = max(narrowed_low, earlier_low - drift)
        narrowed_high = min(narrowed_high, earlier_high + drift)
    if narrowed_low > narrowed_high:  # the clock has stepped since: what was known is wrong now
        recent.clear()
        narrowed_low, narrowed_high = low, high
    recent.append((now, low, high))
    return narrowed_low, narrowed_high


def _shift_core_marks(marks: Marks, offset: int) -> None:
    marks.added, marks.scheduled, marks.entered, marks.moving, marks.asking = (
        time and time - offset
        for time in (marks.added, marks.scheduled, marks.entered, marks.moving, marks.asking)
    )
    marks.previous = marks.previous and marks.previous - offset
    marks.waits = [(stage, start - offset, end - offset) for stage, start, end in marks.waits]
    marks.reasons = [(since - offset, code) for since, code in marks.reasons]
    marks.turns = [
        (ended - offset, others - offset if others else 0) for ended, others in marks.turns
    ]
    marks.held = [each - offset for each in marks.held[:1]] + marks.held[1:]
    if marks.foreign:
        return
    marks.steps = [_shift_step(step, offset) for step in marks.steps]


def _shift_step(step: EngineStep, offset: int) -> EngineStep:
    times = (step.sampled, step.taken, step.launched, step.sent, step.draft_start, step.draft_end)
    sampled, *others = [time and time - offset for time in (*times, step.sync_start, step.sync_end)]
    pairs = [(code, start - offset, end - offset) for code, start, end in step.pairs]
    return EngineStep(pairs, sampled, step.lost, *others)


def _remove_core_marks(marks: Marks) -> None:
    marks.added = marks.scheduled = marks.entered = marks.moving = marks.asking = 0
    marks.previous = 0
    marks.waits, marks.reasons, marks.held, marks.steps, marks.turns = [], [], [], [], []
