# SPDX-License-Identifier: Apache-2.0
"""Encodings over NIXL: no image is encoded twice, and waiting for an encoding is ec.transfer.

ECCPUConnector on real vLLM, through our router; a plugin replaces the copies between device and host.
Not shown here because it needs a GPU: an encoder as `ec_producer`, and copies on streams of their own.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest

from lab import ttft_client
from lab.evidence import Errors, ErrorTolerance, measure_until_decided
from lab.ttft_client import TimedRequest, TimedResponse
from tests.live.bench import (
    LiveDeployment,
    list_trunks,
    make_parent_header,
    make_trace_id,
    read_breakdown,
)
from tests.live.test_closing import check_closed
from tests.live.test_injected import Injection, check_stage
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
# What is delayed, and the stage of the router's sum in which it is waited for.
WAITS = {
    # The producer says "not ready" for so long, to who asks again every few ms.
    "ec_asked": (Injection("ec_asked", 400.0, 50.0), "prefill_decode.ec.transfer"),
    # prefill_decode copies what it has fetched.
    "ec_load": (Injection("ec_load"), "prefill_decode.ec.transfer"),
    # The encoder starts its copy: this much its answer waits for.
    "ec_save": (Injection("ec_save"), "encode.ec.transfer"),
}
ENCODED_HEADERS = {header_names.LEG: "prefill_decode", header_names.MEDIA_ENCODED: "1"}
AT_ONCE = 50
LATE = 400.0  # ms
LEGS = ("encode", "prefill_decode")
ROLES = ("router", *LEGS)


def read_items(spans: list[dict[str, Any]], role: str) -> dict[str, int]:
    """The counts of a request's media items by source, from the consumer's span."""
    (own,) = list_trunks(spans, role)
    item_keys = (keys.EC_ITEMS, keys.EC_REMOTE_ITEMS, keys.EC_LOCAL_ITEMS, keys.EC_RECOMPUTED_ITEMS)
    return {key: own[key] for key in item_keys}


def find_wait(spans: list[dict[str, Any]]) -> dict[str, Any]:
    """The span in which prefill_decode waited for its encodings; loading them is a separate span, inside
    the step.
    """
    wanted = {keys.ROLE: "prefill_decode", keys.STAGE: "ec.transfer"}
    found = [span for span in spans if wanted.items() <= span["attributes"].items()]
    return min(found, key=lambda span: int(span["start_ns"]))


def ask_alone(bench: LiveDeployment, pictures: tuple[int, ...], **fields: Any) -> TimedResponse:
    """The same request to one server without the router; the encoder has all weights here and caches no
    prompts.
    """
    return bench.send_request(bench.fleet.get_url("encode"), pictures=pictures, **fields)


@pytest.mark.parametrize("kind", KINDS)
def test_no_image_is_encoded_twice(nixl: LiveDeployment, kind: str) -> None:
    """prefill_decode fetches what the encoder encoded and encodes nothing; sums are exact, and the
    answers equal one server's.
    """
    numbers, new, fields = KINDS[kind]
    before, *fresh = (nixl.new_picture_seed() for _ in range(3))
    nixl.send_request(nixl.front_url, pictures=(before,), max_tokens=1)
    pictures = tuple(before if number < 0 else fresh[number] for number in numbers)

    prompt = f"{nixl.new_picture_seed()}"
    answer, trace = nixl.send_traced(prompt=prompt, pictures=pictures, **fields)
    spans = nixl.wait_for_roles(trace, *ROLES, *["encode"] * (len(set(pictures)) - 1))

    assert answer.status == 200
    check_closed(spans)
    assert all(
        each[keys.UNATTRIBUTED_US] == 0 for role in LEGS for each in list_trunks(spans, role)
    )
    assert sum(each.get(keys.ENCODER_OWN_ITEMS, 0) for each in list_trunks(spans, "encode")) == new
    (consumer,) = list_trunks(spans, "prefill_decode")
    assert consumer.get(keys.ENCODER_OWN_ITEMS, 0) == 0
    assert keys.name_stage_attribute("encoder.compute") not in consumer
    items = read_items(spans, "prefill_decode")
    assert items[keys.EC_RECOMPUTED_ITEMS] == 0
    assert items[keys.EC_REMOTE_ITEMS] == new
    assert items[keys.EC_REMOTE_ITEMS] + items[keys.EC_LOCAL_ITEMS] == len(pictures)
    if new:
        assert consumer[keys.name_stage_attribute("ec.transfer")] > 0
        assert consumer[keys.EC_BYTES] > 0
        assert consumer[keys.EC_CONNECTOR] == "ECCPUConnector"
    assert answer.text == ask_alone(nixl, pictures, prompt=prompt, **fields).text


def test_fifty_at_once_are_encoded_once_each(nixl: LiveDeployment) -> None:
    """With 50 requests at once every sum is exact and every image is encoded once, by the encoder."""
    traces = [make_trace_id() for _ in range(AT_ONCE)]
    many = [
        TimedRequest(
            pictures=(nixl.new_picture_seed(),), max_tokens=2, headers=make_parent_header(trace)
        )
        for trace in traces
    ]

    answers = ttft_client.send_timed_requests(nixl.front_url, many)

    assert {answer.status for answer in answers} == {200}
    for trace in traces:
        spans = nixl.wait_for_roles(trace, *ROLES)
        check_closed(spans)
        (encoder,), (consumer,) = (list_trunks(spans, role) for role in LEGS)
        assert (encoder[keys.ENCODER_OWN_ITEMS], consumer.get(keys.ENCODER_OWN_ITEMS, 0)) == (1, 0)
        assert read_items(spans, "prefill_decode")[keys.EC_REMOTE_ITEMS] == 1
        assert consumer[keys.UNATTRIBUTED_US] == encoder[keys.UNATTRIBUTED_US] == 0


def test_an_image_encoded_twice_is_told(nixl: LiveDeployment) -> None:
    """Without the encoder's parameters prefill_decode encodes the image again, and its span says so."""
    pictures = (nixl.new_picture_seed(),)
    ask_alone(nixl, pictures, max_tokens=1, stream=False)

    answer, trace = nixl.send_traced(
        nixl.fleet.get_url("prefill_decode"), pictures=pictures, headers=ENCODED_HEADERS
    )
    spans = nixl.wait_for_trace(trace, lambda found: bool(list_trunks(found, "prefill_decode")))

    assert read_items(spans, "prefill_decode")[keys.EC_RECOMPUTED_ITEMS] == 1
    assert (
        'ec;desc="items=1 remote=0 local=0 recomputed=1'
        in answer.headers[header_names.SERVER_TIMING]
    )
    assert read_breakdown(answer)["encoder.compute"] > 0


@pytest.mark.parametrize("place", WAITS)
def test_late_encodings_show_in_ec_transfer(nixl: LiveDeployment, place: str) -> None:
    """A known delay before an encoding can be read, loaded or saved shows in ec.transfer and nowhere else."""
    injection, stage = WAITS[place]

    once = partial(nixl.read_one, image=True, max_tokens=1, stream=False)
    check_stage(nixl, injection, stage, once)


def test_a_copy_that_ends_after_the_answer_is_told(nixl: LiveDeployment) -> None:
    """The encoder answers while it still copies: `ttft.ec.ready_us` says until when, and prefill_decode
    waits for that.

    The scheduler hears of the copy's end with its step's output; then prefill_decode asks again, reads and
    loads.
    """
    limits = {"ready": ErrorTolerance(0, 10, LATE / 4), "waited": ErrorTolerance(0, 100, LATE / 2)}
    nixl.control.set_injections({"ec_copy": LATE})
    try:
        measure_until_decided(lambda: measure_late_copy(nixl), lambda name: limits[name])
    finally:
        nixl.control.set_injections()


def measure_late_copy(bench: LiveDeployment) -> Errors:
    """One request: time from the copy's end until it is reported as ready, and until prefill_decode's
    wait ends; ms.
    """
    to_wall_ns = time.time_ns() - time.monotonic_ns()
    began_ns = time.monotonic_ns()
    answer, trace = bench.send_traced(pictures=(bench.new_picture_seed(),), max_tokens=1)
    spans = bench.wait_for_roles(trace, *ROLES, also=span_names.EC_KEPT)
    (delay,) = bench.control.read_delays(began_ns)
    (kept,) = [span for span in spans if span["name"] == span_names.EC_KEPT]
    ready_ns = kept["start_ns"] + kept["attributes"][keys.EC_READY_US] * 1000
    assert read_breakdown(answer)["encode.ec.transfer"] < LATE * 100
    return {
        "ready": (ready_ns - delay.end_ns - to_wall_ns) / 1e6,
        "waited": (find_wait(spans)["end_ns"] - ready_ns) / 1e6,
    }


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ("one image", "plain", "two images"))
def test_an_image_closes_through_all_three_over_nixl(nixl3: LiveDeployment, kind: str) -> None:
    """With the encoder, prefill and decode, encodings and KV blocks over NIXL, sums are exact and nothing
    is encoded twice.
    """
    numbers, new, fields = KINDS[kind]
    fresh = [nixl3.new_picture_seed() for _ in range(2)]
    pictures = tuple(fresh[number] for number in numbers)

    answer, trace = nixl3.send_traced(pictures=pictures, **fields)
    spans = nixl3.wait_for_roles(trace, "router", "prefill", "decode", *["encode"] * new)

    assert answer.status == 200
    check_closed(spans)
    for role in ("encode", "prefill", "decode"):
        assert all(each[keys.UNATTRIBUTED_US] == 0 for each in list_trunks(spans, role))
    items = read_items(spans, "prefill")
    assert items[keys.EC_RECOMPUTED_ITEMS] == 0
    assert items[keys.EC_REMOTE_ITEMS] == new
    (consumer,), (decoder,) = (list_trunks(spans, role) for role in ("prefill", "decode"))
    assert consumer[keys.name_stage_attribute("ec.transfer")] > 0
    assert keys.name_stage_attribute("encoder.compute") not in {*consumer, *decoder}
    assert decoder[keys.name_stage_attribute("kv.transfer")] > 0
    assert answer.text == ask_alone(nixl3, pictures, **fields).text
