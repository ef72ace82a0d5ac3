# SPDX-License-Identifier: Apache-2.0
"""One clock for all processes of a host; clocks of several: no duration is longer than the request."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import tracing_fakes
from hypothesis import given, settings
from hypothesis import strategies as st

from ttft_otel.model.breakdown import CODE_EC_TRANSFER, CODE_ENCODER, CODE_FORWARD, Breakdown
from ttft_otel.model.names import keys
from ttft_otel.tracing import asgi, carrier, clock, recorder
from ttft_otel.tracing.carrier import EngineDetails, EngineTimeline
from ttft_otel.tracing.context import start_context
from ttft_otel.tracing.request_trace import RequestTrace
from ttft_otel.tracing.settings import Settings


def test_now() -> None:
    """Marks are microseconds of the system's monotonic clock, the same in another process."""
    code = "from ttft_otel.tracing import clock; print(clock.now_us(), clock.get_boot_number())"
    before = clock.now_us()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    theirs, boot = map(int, done.stdout.split())

    assert before < theirs < clock.now_us()
    assert boot == clock.get_boot_number() != 0


def test_calibration() -> None:
    """A mark's wall time is that of the system, and lies where the mark lies."""
    mark = clock.now_us()

    assert abs(time.time_ns() - clock.to_wall_ns(mark)) < 1_000_000_000
    assert clock.to_wall_ns(mark + 1_000_000) - clock.to_wall_ns(mark) > 999_000_000


def test_time_namespaces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Processes of one host whose time namespaces differ have different clocks, and boot numbers."""
    offsets = tmp_path / "timens_offsets"
    monkeypatch.setattr(clock, "_OFFSETS_FILE", str(offsets))
    numbers = []
    for line in ("monotonic           0         0", "monotonic      864000         0"):
        offsets.write_text(f"{line}\nboottime            0         0\n")
        numbers.append(clock.get_boot_number.__wrapped__())
    offsets.unlink()  # a kernel without them

    assert clock.get_boot_number.__wrapped__() == numbers[0] != numbers[1]


BASE_US = 10**13  # so that no reading is 0, which means that a mark is missing
TEN_DAYS_US = 864_000_000_000
OWN_BOOT = clock.get_boot_number()

# A request of 63 ms, in microseconds after its arrival, by the true time.
TRUE_TIMES = {
    "render": 1_000,
    "assign": 5_000,
    "added": 5_400,
    "asked": 7_000,
    "available": 12_000,
    "scheduled": 15_000,
    "encoder": 17_000,
    "encoded": 27_000,
    "forward": 28_000,
    "computed": 57_000,
    "sampled": 59_000,
    "entered": 60_000,
    "received": 60_700,
    "output": 61_000,
    "egress": 63_000,
}
TRUE_STAGES_US = {
    "receive": 1_000,
    "preprocess": 4_000,
    "ipc": 400,
    "encoder.queue": 4_600,
    "ec.transfer": 5_000,
    "dispatch": 3_000,
    "encoder.compute": 10_000,
    "prefill.compute": 29_000,
    "sample": 2_000,
    "output": 2_000,
    "egress": 2_000,
}


@dataclass(frozen=True)
class ProcessClock:
    """A process's clock: `offset` from the true time, and from `step_at` on `step` more, all in us."""

    offset: int = 0
    step_at: int = 0
    step: int = 0
    boot: int = OWN_BOOT

    def read(self, true_us: int) -> int:
        """What it shows at `true_us`."""
        return BASE_US + true_us + self.offset + (self.step if true_us >= self.step_at else 0)


@pytest.fixture(autouse=True)
def no_bounds() -> Iterator[None]:
    """No engine core is known yet."""
    clock._bounds.clear()
    yield
    clock._bounds.clear()


def trace_request(
    api: ProcessClock,
    core: ProcessClock,
    worker: ProcessClock,
    begin: int = 0,
    is_aborted: bool = False,
) -> tuple[RequestTrace, Breakdown]:
    """One request through API server, engine core and worker, each with its own clock.

    begin: true time of its arrival. is_aborted: it ends at the true time of its first token, without it.
    """
    at = {name: begin + time for name, time in TRUE_TIMES.items()}
    trace = RequestTrace(api.read(begin), start_context("", "", Settings(on=True)), True)
    trace.render, trace.assign_times = api.read(at["render"]), {"e": api.read(at["assign"])}
    recorder.register_engine_request(trace, "e")
    timeline = EngineTimeline(
        added=core.read(at["added"]),
        scheduled=core.read(at["scheduled"]),
        entered=core.read(at["entered"]),
        complete=True,
    )
    waits = [CODE_EC_TRANSFER, core.read(at["asked"]), core.read(at["available"])]
    timeline.details = EngineDetails(encoder_first=True, waits=waits)
    intervals = (
        *(CODE_ENCODER, worker.read(at["encoder"]), worker.read(at["encoded"])),
        *(CODE_FORWARD, worker.read(at["forward"]), worker.read(at["computed"])),
    )
    timeline.add_step((worker.boot, worker.read(at["sampled"]), 0, *intervals))
    with mock.patch.object(clock, "get_boot_number", return_value=core.boot):
        marks = carrier.encode_timeline(timeline)
    if is_aborted:
        recorder.forget_trace(trace)
        return trace, recorder.fail_trace(trace, api.read(at["egress"]), marks)
    recorder.record_first_output("e", marks, api.read(at["received"]), api.read(at["output"]))
    cut = recorder.close_ttft(trace, api.read(at["egress"]))
    recorder.forget_trace(trace)
    return trace, cut


def check_closed(trace: RequestTrace, cut: Breakdown) -> None:
    """Stages and remainder add up to the total; nothing is negative, or longer than the total."""
    total = cut.end - cut.start
    assert sum(cut.stages.values()) + cut.unattributed == total
    assert all(0 <= length <= total for length in (*cut.stages.values(), cut.unattributed))
    assert all(cut.start <= low <= high <= cut.end for _, low, high in (*cut.pieces, *trace.parts))


OFFSETS = st.integers(-BASE_US // 4, BASE_US // 4) | st.integers(-100_000, 100_000)
CLOCKS = st.builds(
    ProcessClock,
    offset=OFFSETS,
    step_at=st.integers(-1_000, 70_000),
    step=OFFSETS,
    boot=st.sampled_from((OWN_BOOT, 1, 2, 0)),
)
STEADY_CLOCKS = st.builds(ProcessClock, offset=OFFSETS)


@settings(max_examples=5 * settings.default.max_examples, deadline=None)
@given(api=STEADY_CLOCKS, core=CLOCKS, worker=CLOCKS, is_aborted=st.booleans())
def test_no_duration_is_longer_than_the_request(
    api: ProcessClock, core: ProcessClock, worker: ProcessClock, is_aborted: bool
) -> None:
    """Any offset of an engine core and a worker, and any step of theirs: the request stays as long."""
    trace, cut = trace_request(api, core, worker, is_aborted=is_aborted)

    check_closed(trace, cut)
    assert cut.end - cut.start == TRUE_TIMES["egress"]
    assert {name: cut.stages[name] for name in ("receive", "preprocess")} == {
        "receive": 1_000,
        "preprocess": 4_000,
    }


@settings(max_examples=5 * settings.default.max_examples, deadline=None)
@given(api=CLOCKS, core=CLOCKS, worker=CLOCKS, is_aborted=st.booleans())
def test_a_step_of_the_api_servers_clock(
    api: ProcessClock, core: ProcessClock, worker: ProcessClock, is_aborted: bool
) -> None:
    """The measured total is wrong then, but nothing in it is longer, and it adds up."""
    check_closed(*trace_request(api, core, worker, is_aborted=is_aborted))


@pytest.mark.parametrize("boot", [7, OWN_BOOT])
@pytest.mark.parametrize("offset", [TEN_DAYS_US, -TEN_DAYS_US, 4_000, -90_000])
def test_an_engine_core_on_another_host(boot: int, offset: int) -> None:
    """Its marks are placed by an estimated offset, whose error is on the span and bounds each stage's.

    The same where the kernel does not tell that the clock is another one (`boot` is ours).
    """
    remote = ProcessClock(offset, boot=boot)
    trace, cut = trace_request(ProcessClock(), remote, remote)

    check_closed(trace, cut)
    assert cut.unattributed == 0 and cut.end - cut.start == TRUE_TIMES["egress"]
    assert 0 < trace.clock_error <= 550  # half of ipc and of the way back
    for name, length in TRUE_STAGES_US.items():
        assert abs(cut.stages[name] - length) <= trace.clock_error, name
    for name in ("dispatch", "encoder.compute", "prefill.compute", "sample"):
        assert cut.stages[name] == TRUE_STAGES_US[name]  # both ends are the remote host's


def test_requests_narrow_the_offset(records: tracing_fakes.MemorySender) -> None:
    """Each request bounds the offset; what is known of it is better than any one of them knows."""
    api, remote = ProcessClock(), ProcessClock(TEN_DAYS_US, boot=7)
    first, _ = trace_request(api, remote, remote)
    with mock.patch.dict(TRUE_TIMES, added=5_010, received=60_990):
        second, _ = trace_request(api, remote, remote, 100_000)
    third, cut = trace_request(api, remote, remote, 200_000)
    recorder.send_known_halves(third, records, server=False)

    # 355, and what the clocks can have drifted apart in the meantime.
    assert (first.clock_error, second.clock_error, third.clock_error) == (550, 358, 358)
    assert records.kept[0].ttft is not None
    assert records.kept[0].ttft.attributes[keys.CLOCK_ERROR_US] == 358
    assert abs(cut.stages["ipc"] - 400) <= 358
    late, _ = trace_request(api, remote, remote, 300_000 + clock.MAX_BOUND_AGE_US)
    assert late.clock_error == 550  # older bounds are forgotten, as clocks drift


def test_a_step_between_two_requests() -> None:
    """What was known of an offset is dropped when it is no longer true."""
    api, core = ProcessClock(), ProcessClock(5_000, 100_000, -3_600_000_000, boot=7)
    trace_request(api, core, core)
    trace, cut = trace_request(api, core, core, 200_000)

    check_closed(trace, cut)
    assert cut.unattributed == 0 and 0 < trace.clock_error <= 550


def test_a_step_within_a_request() -> None:
    """No offset fits all marks then: the engine's time is unattributed, the API server's stages stay."""
    core = ProcessClock(0, 20_000, 3_600_000_000)
    trace, cut = trace_request(ProcessClock(), core, core)

    assert cut.stages == {"receive": 1_000, "preprocess": 4_000, "egress": 2_000}
    assert cut.unattributed == 56_000 and trace.clock_error == 0


def test_an_aborted_request_on_another_host() -> None:
    """Where it died is told by a remote engine core, too."""
    remote = ProcessClock(TEN_DAYS_US, boot=7)
    trace, cut = trace_request(ProcessClock(), remote, remote, is_aborted=True)

    check_closed(trace, cut)
    assert trace.failed_stage == "output" and cut.stages["prefill.compute"] == 29_000
    assert cut.end - cut.start == TRUE_TIMES["egress"]


@pytest.mark.parametrize(("offset", "is_told"), [(TEN_DAYS_US, True), (-TEN_DAYS_US, False)])
def test_kept_blocks_on_another_host(
    records: tracing_fakes.MemorySender, offset: int, is_told: bool
) -> None:
    """How long blocks were kept is placed by the request's offset, and dropped where that is wrong."""
    remote = ProcessClock(TEN_DAYS_US, boot=7)
    trace, _ = trace_request(ProcessClock(), remote, remote)
    engine = ProcessClock(offset, boot=7)
    kept = carrier.KeptBlocks(engine.read(70_000), engine.read(90_000), 12, 2, False)
    with tracing_fakes.frozen_clock(BASE_US + 100_000):
        told = asgi.send_kept_span(
            trace, carrier.KEPT_BLOCKS_QUERY, carrier.encode_answer(kept), records
        )

    assert told == is_told
    for record in records.kept:
        (piece,) = record.late
        assert piece.end - piece.start == 20_000
        assert abs(piece.start - 70_000) <= trace.clock_error


def test_clocks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engine cores that come and go leave no state without end."""
    monkeypatch.setattr(clock, "MAX_CLOCKS", 3)
    for boot in range(10):
        remote = ProcessClock(TEN_DAYS_US, boot=boot + 1)
        for number in range(100):
            trace_request(ProcessClock(), remote, remote, number)

    assert len(clock._bounds) == 3
    assert {len(bounds) for bounds in clock._bounds.values()} == {clock.MAX_BOUNDS}
