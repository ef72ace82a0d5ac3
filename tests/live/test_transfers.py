# SPDX-License-Identifier: Apache-2.0
"""What moves between instances: encodings over NIXL and KV blocks. No image is encoded twice, waiting for an
encoding is ec.transfer; what moved is told, and from where; who leaves meanwhile died there.

ECCPUConnector on real vLLM, through our router; a plugin replaces the copies between device and host.
Not shown here because it needs a GPU: an encoder as `ec_producer`, and copies on streams of their own.
Delays before an encoding can be read, loaded or saved: test_injected.py.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from lab import ttft_client
from lab.evidence import Errors, ErrorTolerance, measure_until_decided
from lab.ttft_client import TimedRequest, TimedResponse
from tests.live.bench import (
    LiveDeployment,
    check_closed,
    get_announced_params,
    get_trunks_by_role,
    list_trunks,
    make_parent_header,
    make_trace_id,
    read_breakdown,
)
from tests.live.conftest import BLOCK_TOKENS
from tests.live.test_closing import TEXTS
from ttft_otel.model import stages
from ttft_otel.model.names import header_names, keys, span_names

# Kind of request -> its pictures, as numbers of new ones; how many of them are new to the encoder.
KINDS: dict[str, tuple[tuple[int, ...], int, dict[str, Any]]] = {
    "one image": ((0,), 1, {}),
    "plain": ((0,), 1, {"stream": False}),
    "two images": ((0, 1), 2, {}),
    "equal images": ((0, 0), 1, {}),
    "an image and one that came before": ((0, -1), 1, {}),
    "an image that came before": ((-1,), 0, {}),
}
ENCODED_HEADERS = {header_names.LEG: "prefill_decode", header_names.MEDIA_ENCODED: "1"}
AT_ONCE = 50
LATE = 400.0  # ms
PATIENCE_S = 3.0
ROLES = ("router", "encode", "prefill_decode")
COMPUTED = keys.name_stage_attribute("encoder.compute")
EC_TRANSFER = keys.name_stage_attribute("ec.transfer")


def check_items(consumer: dict[str, Any], remote: int, all_items: int) -> None:
    """A consumer's span says that it has fetched so many of its items, and encoded none."""
    assert consumer[keys.EC_RECOMPUTED_ITEMS] == consumer.get(keys.ENCODER_OWN_ITEMS, 0) == 0
    assert consumer[keys.EC_REMOTE_ITEMS] == remote
    assert remote + consumer[keys.EC_LOCAL_ITEMS] == all_items
    assert COMPUTED not in consumer
    if remote:
        assert consumer[EC_TRANSFER] > 0 and consumer[keys.EC_BYTES] > 0
        assert consumer[keys.EC_CONNECTOR] == "ECCPUConnector"


def ask_alone(bench: LiveDeployment, pictures: tuple[int, ...], **fields: Any) -> TimedResponse:
    """A request to the encoder without the router; it has all weights here and caches no prompts."""
    return bench.send_request(bench.fleet.get_url("encode"), pictures=pictures, **fields)


@pytest.mark.parametrize("kind", KINDS)
def test_no_image_is_encoded_twice(nixl: LiveDeployment, kind: str) -> None:
    """prefill_decode fetches what the encoder encoded; sums are exact, and answers equal one server's."""
    numbers, new, fields = KINDS[kind]
    before, *fresh = (nixl.new_picture_seed() for _ in range(3))
    nixl.send_request(nixl.front_url, pictures=(before,), max_tokens=1)
    pictures = tuple(before if number < 0 else fresh[number] for number in numbers)

    prompt = nixl.new_prompt()
    answer, trace = nixl.send_traced(prompt=prompt, pictures=pictures, **fields)
    spans = nixl.wait_for_roles(trace, *ROLES, *["encode"] * (len(set(pictures)) - 1))

    assert answer.status == 200
    check_closed(spans)
    assert sum(each.get(keys.ENCODER_OWN_ITEMS, 0) for each in list_trunks(spans, "encode")) == new
    (consumer,) = list_trunks(spans, "prefill_decode")
    check_items(consumer, new, len(pictures))
    assert answer.text == ask_alone(nixl, pictures, prompt=prompt, **fields).text


def test_fifty_at_once_are_encoded_once_each(nixl: LiveDeployment) -> None:
    """With 50 requests at once every sum is exact and every image is encoded once, by the encoder."""
    traces = {make_trace_id(): nixl.new_picture_seed() for _ in range(AT_ONCE)}
    many = [
        TimedRequest(pictures=(picture,), max_tokens=2, headers=make_parent_header(trace))
        for trace, picture in traces.items()
    ]

    answers = ttft_client.send_timed_requests(nixl.front_url, many)

    assert {answer.status for answer in answers} == {200}
    for trace in traces:
        spans = nixl.wait_for_roles(trace, *ROLES)
        check_closed(spans)
        found = get_trunks_by_role(spans)
        assert found["encode"][keys.ENCODER_OWN_ITEMS] == 1
        check_items(found["prefill_decode"], 1, 1)


def test_an_image_encoded_twice_is_told(nixl: LiveDeployment) -> None:
    """Without the encoder's parameters prefill_decode encodes the image again, and its span says so."""
    pictures = (nixl.new_picture_seed(),)
    ask_alone(nixl, pictures, max_tokens=1, stream=False)

    answer, trace = nixl.send_traced(
        nixl.fleet.get_url("prefill_decode"), pictures=pictures, headers=ENCODED_HEADERS
    )

    assert nixl.fetch_ttft(trace, "prefill_decode")[keys.EC_RECOMPUTED_ITEMS] == 1
    told = 'ec;desc="items=1 remote=0 local=0 recomputed=1'
    assert told in answer.headers[header_names.SERVER_TIMING]
    assert read_breakdown(answer)["encoder.compute"] > 0


def test_a_copy_that_ends_after_the_answer_is_told(nixl: LiveDeployment) -> None:
    """The encoder answers while it still copies: `ttft.ec.ready_us` says until when, and prefill_decode
    waits for that.

    The scheduler hears of the copy's end with its step's output; then prefill_decode asks again, reads and
    loads.
    """
    limits = {"ready": ErrorTolerance(0, 10, LATE / 4), "waited": ErrorTolerance(0, 100, LATE / 2)}

    def measure_round() -> Errors:
        to_wall_ns = time.time_ns() - time.monotonic_ns()
        began_ns = time.monotonic_ns()
        answer, trace = nixl.send_traced(pictures=(nixl.new_picture_seed(),), max_tokens=1)
        spans = nixl.wait_for_roles(trace, *ROLES, also=span_names.EC_KEPT)
        (delay,) = nixl.control.read_delays(began_ns)
        (kept,) = [span for span in spans if span["name"] == span_names.EC_KEPT]
        ready_ns = kept["start_ns"] + kept["attributes"][keys.EC_READY_US] * 1000
        # Loading them is a later span, inside the step.
        own = {keys.ROLE: "prefill_decode", keys.STAGE: "ec.transfer"}
        waits = [span for span in spans if own.items() <= span["attributes"].items()]
        wait = min(waits, key=lambda span: int(span["start_ns"]))
        assert read_breakdown(answer)["encode.ec.transfer"] < LATE * 100
        # From the copy's end until it is told as ready, and from then until prefill_decode's wait ends.
        return {
            "ready": (ready_ns - delay.end_ns - to_wall_ns) / 1e6,
            "waited": (wait["end_ns"] - ready_ns) / 1e6,
        }

    with nixl.control.inject_delay("ec_copy", LATE):
        measure_until_decided(measure_round, lambda name: limits[name])


def test_an_encoder_killed_after_its_answer_costs_a_wait_and_is_told(newer: LiveDeployment) -> None:
    """PD waits as long as vLLM allows (here 3 s, not 60), then encodes the image, and its span says so.

    vLLM may also notice that the read has failed, and then waits no longer: its log says which it was.
    """
    pictures = (newer.new_picture_seed(),)
    plain = ask_alone(newer, pictures)
    first = ask_alone(newer, pictures, max_tokens=1, stream=False)
    newer.control.set_injections(ec_patience_s=PATIENCE_S)
    newer.fleet.servers["encode"].kill()

    answer, trace = newer.send_traced(
        pictures=pictures, headers=ENCODED_HEADERS, extra=get_announced_params(first)
    )

    assert (answer.status, answer.text) == (200, plain.text)
    found = read_breakdown(answer)
    assert found[stages.UNATTRIBUTED] == 0 < found["encoder.compute"]
    log = newer.fleet.servers["prefill_decode"].log_path.read_text(errors="replace")
    is_whole_wait = "the remote wait exceeded" in log
    assert is_whole_wait or "the remote read failed" in log
    assert PATIENCE_S * is_whole_wait <= found["ec.transfer"] / 1e6 <= PATIENCE_S + 0.2
    assert newer.fetch_ttft(trace, "prefill_decode")[keys.EC_RECOMPUTED_ITEMS] == 1


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ("one image", "plain", "two images"))
def test_an_image_closes_through_all_three(nixl3: LiveDeployment, kind: str) -> None:
    """With the encoder, prefill and decode sums are exact, and nothing is encoded twice."""
    numbers, new, fields = KINDS[kind]
    fresh = [nixl3.new_picture_seed() for _ in range(2)]
    pictures = tuple(fresh[number] for number in numbers)

    answer, trace = nixl3.send_traced(pictures=pictures, **fields)
    roles = ("router", "prefill", "decode", *["encode"] * new)
    spans = nixl3.wait_for_roles(trace, *roles, also=span_names.KV_KEPT)

    assert answer.status == 200
    check_closed(spans)
    found = get_trunks_by_role(spans)
    check_items(found["prefill"], new, new)
    # Of two images one step may encode both.
    assert any(each.get(COMPUTED, 0) > 0 for each in list_trunks(spans, "encode"))
    assert COMPUTED not in found["decode"]
    assert found["decode"][keys.name_stage_attribute("kv.transfer")] > 0
    assert answer.text == ask_alone(nixl3, pictures, **fields).text


LEGS = ("prefill", "decode")
KV_TRANSFER = keys.name_stage_attribute("kv.transfer")


def test_each_kind_closes_on_prefill_and_decode(pd: LiveDeployment) -> None:
    """A request through router, prefill and decode leaves one whole trace, with its wait for KV blocks."""
    traces = {}
    for kind, fields in TEXTS.items():
        answer, traces[kind] = pd.send_traced(prompt=pd.new_prompt(), words=300, **fields)
        assert answer.status == 200
        timing = read_breakdown(answer)
        assert sum(us for name, us in timing.items() if name != "ttft") == timing["ttft"]
    for trace in traces.values():
        spans = pd.wait_for_roles(trace, "router", "prefill", "decode", also=span_names.KV_KEPT)
        check_closed(spans)
        found = get_trunks_by_role(spans)
        assert found["decode"][keys.name_stage_attribute("kv.transfer")] > 0
        # A connector's call that has nothing to do, and whose process had to wait for its core.
        assert found["prefill"].get(keys.name_stage_attribute("kv.transfer"), 0) < 5_000


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
    assert 0 < found[keys.KV_MOVE_US] <= found[KV_TRANSFER]
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
    assert found[KV_TRANSFER] > 300_000
    assert read_breakdown(pd.prefill_then_decode()[1])[stages.UNATTRIBUTED] == 0


def test_another_instance_is_told(tiers: LiveDeployment) -> None:
    """Of two tiers: blocks from prefill came from an instance, by NIXL, with the bytes of its read."""
    trace = make_trace_id()
    tiers.prefill_then_decode(headers=make_parent_header(trace))
    found = get_trunks_by_role(tiers.wait_for_roles(trace, *LEGS, also=span_names.KV_KEPT))

    own = found["decode"]
    assert own[keys.UNATTRIBUTED_US] == 0 < own[KV_TRANSFER]
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

    assert own[keys.UNATTRIBUTED_US] == 0 < own[KV_TRANSFER]
    assert (own[keys.KV_CONNECTOR], own[keys.KV_SOURCE]) == ("OffloadingConnector", "host")
    assert own[keys.KV_TOKENS] == own[keys.CACHED_TOKENS] == own[keys.KV_BLOCKS] * BLOCK_TOKENS
    assert own[keys.KV_BYTES] > 0 and own[keys.KV_MOVE_US] > 0
