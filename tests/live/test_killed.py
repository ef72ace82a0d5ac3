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
    make_parent_header,
    make_trace_id,
    read_breakdown,
)
from tests.live.conftest import DeploymentDeck
from tests.live.test_ec_nixl import ask_alone, list_role_attributes, read_items
from tests.live.test_faults import list_exporters
from ttft_otel.model import stages
from ttft_otel.model.names import header_names, keys

PATIENCE_S = 3.0


def test_an_encoder_killed_after_its_answer_costs_a_wait_and_is_told(newer: LiveDeployment) -> None:
    """PD waits as long as vLLM allows (here 3 s, not 60), then encodes the image, and its span says so."""
    pictures, trace = (newer.new_picture_seed(),), make_trace_id()
    plain = ask_alone(newer, pictures)
    first = ask_alone(newer, pictures, max_tokens=1, stream=False)
    newer.control.set_injections(ec_patience_s=PATIENCE_S)
    newer.fleet.servers["encode"].kill()

    headers = {
        **make_parent_header(trace),
        header_names.LEG: "prefill_decode",
        header_names.MEDIA_ENCODED: "1",
    }
    extra = get_announced_params(first)
    answer = newer.send_request(newer.front_url, pictures=pictures, headers=headers, extra=extra)
    spans = newer.wait_for_trace(
        trace, lambda found: bool(list_role_attributes(found, "prefill_decode"))
    )

    assert (answer.status, answer.text) == (200, plain.text)
    found = read_breakdown(answer)
    assert found[stages.UNATTRIBUTED] == 0
    assert 0 <= found["ec.transfer"] - PATIENCE_S * 1e6 <= 200_000
    assert found["encoder.compute"] > 0
    assert read_items(spans, "prefill_decode")[keys.EC_RECOMPUTED_ITEMS] == 1


def test_a_killed_process_tree_loses_no_record(newer: LiveDeployment, deck: DeploymentDeck) -> None:
    """After SIGKILL to every process of a streaming server, its ttft spans are in the receiver."""
    server = newer.fleet.servers["prefill_decode"]
    traces = [os.urandom(16).hex() for _ in range(8)]
    for trace in traces:
        header = make_parent_header(trace)
        # Hung up after the first token: the ttft half of the record is on its way by then.
        newer.send_request(newer.front_url, max_tokens=2, headers=header)
    born = list_exporters(server.pid)
    assert born

    server.kill()

    for trace in traces:
        spans = newer.wait_for_trace(
            trace, lambda found: any(span["name"] == "ttft" for span in found)
        )
        assert spans
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
