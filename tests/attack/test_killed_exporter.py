# SPDX-License-Identifier: Apache-2.0
"""Exporters that are killed, as by the kernel for their memory: every record that they held is counted."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable

from full_record import make_short_record

from lab.session_processes import find_exporters
from ttft_otel.model.record import encode_record
from ttft_otel.tracing.handoff import RecordSender
from ttft_otel.tracing.settings import Settings

RECORDS = 150  # a batch and some that wait
WAIT_S = 30


def wait_until(is_so: Callable[[], object]) -> None:
    """Wait until it is."""
    until_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.02)


def test_what_a_killed_exporter_held_is_counted() -> None:
    """Sent is what was finished, dropped from the full queue, and lost: also after several deaths."""
    # Who listens here takes what is sent, and never answers.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        sender = RecordSender(Settings(endpoint=url))
        record = encode_record(make_short_record())
        for death in (1, 2):
            sender._next_start_at = 0.0  # as if the last start had been long ago
            for _ in range(RECORDS):
                assert sender.send(record)
            due = death * RECORDS
            wait_until(lambda due=due: sender.get_counts()["received"] == due)
            (victim,) = find_exporters([os.getpid()])
            os.kill(victim, signal.SIGKILL)
            sender._next_start_at = float("inf")
            wait_until(lambda: not sender.send(record))
            counts = sender.get_counts()
            # One more may have been sent until its end of the socket was closed.
            assert counts["lost"] == counts["sent"] - counts["finished"] >= due
        sender.close()
