# SPDX-License-Identifier: Apache-2.0
"""However a vLLM server ends, its records arrive, and no exporter outlives it by more than 10 seconds.

Runs last, because it ends the deployment: first the encoder, then the server that fetches from it. The
ways that need no vLLM (SIGTERM, Ctrl-C, process groups) are tested with small hosts in tests/exporter.
"""

from __future__ import annotations

import os
import time

from tests.live.bench import (
    LiveDeployment,
    get_announced_params,
    list_trunks,
    read_breakdown,
)
from tests.live.conftest import DeploymentDeck
from tests.live.test_ec_nixl import ENCODED_HEADERS, ask_alone, read_items
from tests.live.test_faults import list_exporters
from ttft_otel.model import stages
from ttft_otel.model.names import keys

PATIENCE_S = 3.0


def test_an_encoder_killed_after_its_answer_costs_a_wait_and_is_told(newer: LiveDeployment) -> None:
    """PD waits as long as vLLM allows (here 3 s, not 60), then encodes the image, and its span says so."""
    pictures = (newer.new_picture_seed(),)
    plain = ask_alone(newer, pictures)
    first = ask_alone(newer, pictures, max_tokens=1, stream=False)
    newer.control.set_injections(ec_patience_s=PATIENCE_S)
    newer.fleet.servers["encode"].kill()

    answer, trace = newer.send_traced(
        pictures=pictures, headers=ENCODED_HEADERS, extra=get_announced_params(first)
    )
    spans = newer.wait_for_trace(trace, lambda found: bool(list_trunks(found, "prefill_decode")))

    assert (answer.status, answer.text) == (200, plain.text)
    found = read_breakdown(answer)
    assert found[stages.UNATTRIBUTED] == 0
    assert 0 <= found["ec.transfer"] - PATIENCE_S * 1e6 <= 200_000
    assert found["encoder.compute"] > 0
    assert read_items(spans, "prefill_decode")[keys.EC_RECOMPUTED_ITEMS] == 1


def test_a_killed_process_tree_loses_no_record(newer: LiveDeployment, deck: DeploymentDeck) -> None:
    """After SIGKILL to every process of a streaming server, its ttft spans are in the receiver."""
    server = newer.fleet.servers["prefill_decode"]
    # Hung up after the first token: the ttft half of the record is on its way by then.
    traces = [newer.send_traced(max_tokens=2)[1] for _ in range(8)]
    born = list_exporters(server.pid)
    assert born

    server.kill()

    for trace in traces:
        assert newer.fetch_ttft(trace)
    deadline = time.monotonic() + 10
    while any(_is_alive(pid) for pid in born) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not [pid for pid in born if _is_alive(pid)]
    deck.stop_running()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
