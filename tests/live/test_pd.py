# SPDX-License-Identifier: Apache-2.0
"""KV blocks that come from elsewhere: what moved is told, and from where; who leaves meanwhile died there."""

from __future__ import annotations

from tests.live.bench import (
    LiveDeployment,
    get_trunks_by_role,
    make_parent_header,
    make_trace_id,
    read_breakdown,
)
from tests.live.conftest import BLOCK_TOKENS
from ttft_otel.model import stages
from ttft_otel.model.names import keys, span_names

LEGS = ("prefill", "decode")
TRANSFER = keys.name_stage_attribute("kv.transfer")


def test_what_moved_is_told(pd: LiveDeployment) -> None:
    """Decode tells how many tokens, blocks and bytes were moved; prefill for how long it kept them."""
    trace = make_trace_id()

    first, second = pd.prefill_then_decode(headers=make_parent_header(trace))
    spans = pd.wait_for_roles(trace, *LEGS, also=span_names.KV_KEPT)

    params = first.json()["kv_transfer_params"]
    (blocks,) = params["remote_block_ids"]
    found = get_trunks_by_role(spans)["decode"]
    assert second.status == 200
    assert found[keys.KV_CONNECTOR] == "NixlConnector"
    assert found[keys.KV_TOKENS] == params["remote_num_tokens"]
    assert found[keys.KV_BLOCKS] == len(blocks)
    assert found[keys.KV_BYTES] > 0 and found[keys.KV_BYTES] % len(blocks) == 0
    assert 0 < found[keys.KV_MOVE_US] <= found[TRANSFER]
    (kept,) = [span for span in spans if span["name"] == span_names.KV_KEPT]
    own = kept["attributes"]
    assert (own[keys.KV_TOKENS], own[keys.KV_BLOCKS]) == (found[keys.KV_TOKENS], len(blocks))
    assert keys.ERROR_TYPE not in own
    above = next(span for span in spans if span["span_id"] == kept["parent_id"])
    assert (above["kind"], above["attributes"][keys.ROLE]) == ("server", "prefill")
    assert above["start_ns"] <= kept["start_ns"] <= kept["end_ns"]


def test_one_that_hangs_up_while_blocks_move_died_there(pd: LiveDeployment) -> None:
    """A client that hangs up while decode waits for blocks ends in kv.transfer, and leaves no state."""
    pd.control.set_injections({"kv_wait": 1500})
    trace = make_trace_id()

    _, second = pd.prefill_then_decode(headers=make_parent_header(trace), abort_s=0.6)
    spans = pd.wait_for_trace(trace, lambda found: "decode" in get_trunks_by_role(found))
    pd.control.set_injections()

    assert second.aborted
    found = get_trunks_by_role(spans)["decode"]
    assert found[keys.DIED_IN] == "kv.transfer", found
    assert found[TRANSFER] > 300_000
    assert read_breakdown(pd.prefill_then_decode()[1])[stages.UNATTRIBUTED] == 0


def test_another_instance_is_told(tiers: LiveDeployment) -> None:
    """Of two tiers: blocks from prefill came from an instance, by NIXL, with the bytes of its read."""
    trace = make_trace_id()
    tiers.prefill_then_decode(headers=make_parent_header(trace))
    found = get_trunks_by_role(tiers.wait_for_roles(trace, *LEGS, also=span_names.KV_KEPT))

    own = found["decode"]
    assert own[keys.UNATTRIBUTED_US] == 0 < own[TRANSFER]
    assert own[keys.KV_CONNECTOR].startswith("Nixl") and own[keys.KV_SOURCE] == "p2p"
    assert own[keys.KV_BYTES] > 0 and own[keys.KV_MOVE_US] > 0
    assert keys.KV_SOURCE not in found["prefill"]


def test_cpu_tier_is_told(tiers: LiveDeployment) -> None:
    """Of two tiers: blocks that this instance had offloaded came from its host, by OffloadingConnector."""
    asked = {"prompt": tiers.new_prompt(), "words": 300, "max_tokens": 4, "stream": False}
    prefill = LiveDeployment(tiers.fleet, tiers.control, "prefill")
    for _ in range(2):
        answer, trace = prefill.send_traced(**asked)
        assert answer.status == 200
        prefill.call("/reset_prefix_cache")
    own = tiers.fetch_ttft(trace)

    assert own[keys.UNATTRIBUTED_US] == 0 < own[TRANSFER]
    assert (own[keys.KV_CONNECTOR], own[keys.KV_SOURCE]) == ("OffloadingConnector", "host")
    assert own[keys.KV_TOKENS] == own[keys.CACHED_TOKENS] == own[keys.KV_BLOCKS] * BLOCK_TOKENS
    assert own[keys.KV_BYTES] > 0 and own[keys.KV_MOVE_US] > 0
