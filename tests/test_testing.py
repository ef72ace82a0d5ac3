# SPDX-License-Identifier: Apache-2.0
"""The public fakes do what they say, and put back what they replaced."""

from __future__ import annotations

import subprocess
import sys

from ttft_otel import handoff, recorder, testing
from ttft_otel.context import start
from ttft_otel.settings import Settings
from ttft_otel.trip import Trip


def test_captured() -> None:
    """Records stay in memory, no exporter is started, and the real sender comes back."""
    before = handoff._own
    with testing.captured() as records:
        made = Trip(1, start("", "", Settings()), asked=False)
        recorder.fail(made, 5)
        recorder.hand(made, handoff.sender(), server=True)
        assert [record.ttft is not None for record in records.kept] == [True]
        assert {span.name for span in records.spans()} >= {"ttft", "receive"}
        assert records.counts()["sent"] == 1 and records.starts == 0

    assert handoff._own is before


def test_full() -> None:
    """A sender that refuses counts what it refused."""
    records = testing.Records()
    records.full = True

    assert not records.send(b"x")
    assert (records.dropped, records.kept) == (1, [])


def test_sizes() -> None:
    """State of requests under way is counted where it is kept."""
    made = Trip(1, start("", "", Settings()), asked=False)
    recorder.register(made, "e")
    during = testing.sizes()
    recorder.forget(made)

    assert during["recorder.awaiting"] == 1
    assert not any(testing.sizes().values())


def test_sizes_import_nothing() -> None:
    """Asking for sizes brings no hooks into a process that has none."""
    code = (
        "import sys\nfrom ttft_otel import testing\n"
        "assert set(testing.sizes().values()) == {0}\n"
        "assert 'ttft_otel.hooks' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
