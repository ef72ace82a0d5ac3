# SPDX-License-Identifier: Apache-2.0
"""However a vLLM server ends, what it handed off arrives, and no exporter outlives it by 10 seconds.

Runs last: it takes the deployment down. The ways that need no vLLM (SIGTERM, Ctrl-C, process groups)
are tested on small hosts in tests/exporter.
"""

from __future__ import annotations

import os
import time

from tests.live.bench import Bench
from tests.live.conftest import Deck
from tests.live.test_faults import exporters
from ttft_otel import names
from ttft_otel.lab import processes


def test_a_killed_process_tree_loses_no_record(newer: Bench, deck: Deck) -> None:
    """SIGKILL to every process of the server while it streams: its ttft spans are in the receiver."""
    server = newer.fleet.servers["mono"]
    traces = [os.urandom(16).hex() for _ in range(8)]
    for trace in traces:
        header = {names.TRACEPARENT: f"00-{trace}-{'c' * 16}-01"}
        # Hung up after the first token: the ttft half of the record is on its way by then.
        newer.ask(newer.front, max_tokens=2, headers=header)
    born = exporters(server.pid)
    assert born

    processes.kill(processes.of_session(server.pid))

    for trace in traces:
        spans = newer.trace(trace, lambda found: any(span["name"] == "ttft" for span in found))
        assert spans
    deadline = time.monotonic() + 10
    while any(_alive(pid) for pid in born) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not [pid for pid in born if _alive(pid)]
    deck.stop()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
