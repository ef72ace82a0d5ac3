# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode on two servers, KV blocks over NIXL: sums are exact, and decode's wait is
kv.transfer.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.live.bench import (
    LiveDeployment,
    list_trunks,
    make_parent_header,
    make_trace_id,
    read_breakdown,
)
from tests.live.echo_server import EchoServer
from tests.live.test_closing import check_closed
from tests.live.test_injected import check_stage
from tests.live.unaccounted_share import check_unaccounted_share
from ttft_otel.model import stages
from ttft_otel.model.endpoints import COMPLETIONS_PATH
from ttft_otel.model.names import keys, span_names

WAIT_PLACE = "kv_wait"
KINDS: dict[str, dict[str, Any]] = {
    "chat": {},
    "chat plain": {"stream": False},
    "completion": {"path": COMPLETIONS_PATH},
    "completion plain": {"path": COMPLETIONS_PATH, "stream": False},
}
LEGS = ("prefill", "decode")


def get_trunks_by_role(spans: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Attributes of the `ttft` or `encode` span of each role."""
    return {found[keys.ROLE]: found for found in list_trunks(spans)}


def test_each_kind_closes_on_prefill_and_decode(pd: LiveDeployment) -> None:
    """A request through router, prefill and decode leaves one trace: every parent is in it, every sum is
    exact.
    """
    traces = {}
    for kind, fields in KINDS.items():
        prompt = str(pd.new_picture_seed())
        answer, traces[kind] = pd.send_traced(prompt=prompt, words=300, **fields)
        assert answer.status == 200
        timing = read_breakdown(answer)
        assert sum(us for name, us in timing.items() if name != "ttft") == timing["ttft"]
    for trace in traces.values():
        spans = pd.wait_for_roles(trace, "router", *LEGS, also=span_names.KV_KEPT)
        check_closed(spans)
        found = get_trunks_by_role(spans)
        assert found["prefill"][keys.UNATTRIBUTED_US] == found["decode"][keys.UNATTRIBUTED_US] == 0
        assert found["decode"][keys.name_stage_attribute("kv.transfer")] > 0
        # A connector's call that has nothing to do, and whose process had to wait for its core.
        assert found["prefill"].get(keys.name_stage_attribute("kv.transfer"), 0) < 5_000


def test_what_moved_is_told(pd: LiveDeployment) -> None:
    """The span of decode has the number of tokens, blocks and bytes moved; prefill's span says how long
    it kept them.
    """
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
    assert 0 < found[keys.KV_MOVE_US] <= found[keys.name_stage_attribute("kv.transfer")]
    (kept,) = [span for span in spans if span["name"] == span_names.KV_KEPT]
    own = kept["attributes"]
    assert (own[keys.KV_TOKENS], own[keys.KV_BLOCKS]) == (found[keys.KV_TOKENS], len(blocks))
    assert keys.ERROR_TYPE not in own
    above = next(span for span in spans if span["span_id"] == kept["parent_id"])
    assert (above["kind"], above["attributes"][keys.ROLE]) == ("server", "prefill")
    assert above["start_ns"] <= kept["start_ns"] <= kept["end_ns"]


def test_a_late_transfer_shows_in_kv_transfer(pd: LiveDeployment) -> None:
    """A delay of 80 ms until decode knows that prefill's blocks are there shows in decode's kv.transfer and
    nowhere else.

    Through the router, whose breakdown has all stages of both legs.
    """

    asked = {"words": 300, "max_tokens": 2, "stream": False}
    check_stage(
        pd,
        WAIT_PLACE,
        "decode.kv.transfer",
        lambda: pd.read_one(prompt=str(pd.new_picture_seed()), **asked),
    )


@pytest.mark.full
def test_what_no_server_accounts_for_is_little_with_two_legs(
    pd: LiveDeployment, echo: EchoServer
) -> None:
    """hop + unattributed of the router: median <= 5 % of its TTFT beyond an echo's.

    Prompts of ten chunks. A hop costs 2 to 4 ms here, whatever the TTFT: the instance that waits
    polls, on the same core.
    """
    shares = check_unaccounted_share(
        lambda _: pd.send_request(
            pd.front_url, prompt=str(pd.new_picture_seed()), words=5000, max_tokens=2
        ),
        echo,
        min_rounds=8,
    )

    assert len(shares["router"]) >= 8


def test_one_that_hangs_up_while_blocks_move_died_there(pd: LiveDeployment) -> None:
    """A client that hangs up while decode waits for prefill's blocks ends in kv.transfer, and leaves no
    state.
    """
    pd.control.set_injections({WAIT_PLACE: 1500})
    trace = make_trace_id()

    _, second = pd.prefill_then_decode(headers=make_parent_header(trace), abort_s=0.6)
    spans = pd.wait_for_trace(trace, lambda found: "decode" in get_trunks_by_role(found))
    pd.control.set_injections()

    assert second.aborted
    found = get_trunks_by_role(spans)["decode"]
    assert found[keys.DIED_IN] == "kv.transfer", found
    assert found[keys.name_stage_attribute("kv.transfer")] > 300_000
    assert read_breakdown(pd.prefill_then_decode()[1])[stages.UNATTRIBUTED] == 0


def test_closes_on_cudas_runner(newer_pd: LiveDeployment) -> None:
    """With the V2 runner, where a connector works after the sampler, and async scheduling, sums are exact."""
    trace = make_trace_id()

    first, second = newer_pd.prefill_then_decode(headers=make_parent_header(trace))
    spans = newer_pd.wait_for_roles(trace, *LEGS, also=span_names.KV_KEPT)

    assert (
        read_breakdown(first)[stages.UNATTRIBUTED]
        == read_breakdown(second)[stages.UNATTRIBUTED]
        == 0
    )
    assert read_breakdown(second)["kv.transfer"] > 0
    check_closed(spans)


def test_a_late_transfer_shows_in_kv_transfer_on_cudas_runner(newer_pd: LiveDeployment) -> None:
    """With the V2 runner a delay of 80 ms until decode knows of prefill's blocks shows in kv.transfer."""
    check_stage(
        newer_pd,
        WAIT_PLACE,
        "kv.transfer",
        lambda: read_breakdown(newer_pd.prefill_then_decode()[1]),
    )


@pytest.mark.parametrize("kind", ("chat", "chat plain"))
def test_an_image_closes_through_all_three(epd3: LiveDeployment, kind: str) -> None:
    """A request with an image through router, the encoder, prefill and decode leaves one trace in which
    every sum is exact.
    """
    roles = ("router", "encode", *LEGS)
    picture = (epd3.new_picture_seed(),)
    answer, trace = epd3.send_traced(pictures=picture, words=300, **KINDS[kind])
    spans = epd3.wait_for_roles(trace, *roles, also=span_names.KV_KEPT)

    assert answer.status == 200
    check_closed(spans)
    found = get_trunks_by_role(spans)
    assert all(found[role][keys.UNATTRIBUTED_US] == 0 for role in roles[1:])
    assert found["decode"][keys.name_stage_attribute("kv.transfer")] > 0
    assert found["encode"][keys.name_stage_attribute("encoder.compute")] > 0
    assert keys.name_stage_attribute("encoder.compute") not in found["prefill"]


def test_delays_show_in_their_stage_on_all_three(epd3: LiveDeployment) -> None:
    """A delay of the encoder's step or of prefill's blocks shows in the stage of its own leg."""

    once = partial(epd3.read_one, image=True, words=200, max_tokens=2, stream=False)
    check_stage(epd3, "encoder", "encode.encoder.compute", once)
    check_stage(epd3, WAIT_PLACE, "decode.kv.transfer", once)
