# SPDX-License-Identifier: Apache-2.0
"""The public fakes do what they say, and put back what they replaced."""

from __future__ import annotations

import subprocess
import sys

from ttft_otel import testing
from ttft_otel.tracing import handoff, recorder
from ttft_otel.tracing.context import start_context
from ttft_otel.tracing.request_trace import RequestTrace
from ttft_otel.tracing.settings import Settings


def test_captured() -> None:
    """Records stay in memory, no exporter is started, and the real sender comes back."""
    before = handoff._process_sender
    with testing.captured_records() as records:
        made = RequestTrace(1, start_context("", "", Settings()), timing_requested=False)
        recorder.fail_trace(made, 5)
        recorder.send_known_halves(made, handoff.get_sender(), server=True)
        assert [record.ttft is not None for record in records.kept] == [True]
        assert {span.name for span in records.build_spans()} >= {"ttft", "receive"}
        assert records.get_counts()["sent"] == 1 and records.exporter_starts == 0

    assert handoff._process_sender is before


def test_full() -> None:
    """A sender that refuses counts what it refused."""
    records = testing.MemorySender()
    records.full = True

    assert not records.send(b"x")
    assert (records.dropped, records.kept) == (1, [])


def test_sizes() -> None:
    """State of requests under way is counted where it is kept."""
    made = RequestTrace(1, start_context("", "", Settings()), timing_requested=False)
    recorder.register_engine_request(made, "e")
    during = testing.state_sizes()
    recorder.forget_trace(made)

    assert during["recorder.awaiting"] == 1
    assert not any(testing.state_sizes().values())


def test_sizes_import_nothing() -> None:
    """Asking for sizes brings no hooks into a process that has none."""
    code = (
        "import sys\nfrom ttft_otel import testing\n"
        "assert set(testing.state_sizes().values()) == {0}\n"
        "assert 'ttft_otel.hooks' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
