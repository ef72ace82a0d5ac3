# SPDX-License-Identifier: Apache-2.0
"""With --encode-once prefill gets references instead of media, or the span says why not."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from router import fake_instances, fake_pair, media_bodies
from router.disagg.test_ec_params import (
    CHAT_PATH,
    EC_PARAMS_FIELD,
    build_announcement,
    compute_image_hash,
    plan_encoder,
)
from router.fake_instances import TRACEPARENT, InstancePlan
from ttft_otel import testing
from ttft_otel.model.names import header_names, keys, metric_names
from ttft_otel.model.timing import EncoderCacheCounts, format_server_timing
from ttft_otel.router.disagg.ec_params import TransferParams
from ttft_otel.router.disagg.encode_once import LOG_INTERVAL_US, RecomputedMediaLog, replace_parts
from ttft_otel.router.errors import MediaRequired
from ttft_otel.router.timeline import Attempt
from ttft_otel.router.types import parse_instance_url

IMAGE_ENTRY_JSON = (
    '{"item_indices": [0], "metadata": {"image_grid_thw": [1, 4, 4]}, '
    '"peer_host": "10.0.0.1", "peer_port": 5569}'
)
AUDIO_ENTRY_JSON = '{"metadata": {"audio_num_tokens": [7]}, "peer_host": "10.0.0.1"}'
EMBEDS_BY_MEDIA_TYPE = {
    "image_url": ("image_embeds", IMAGE_ENTRY_JSON),
    "audio_url": ("audio_embeds", AUDIO_ENTRY_JSON),
    "input_audio": ("audio_embeds", AUDIO_ENTRY_JSON),
    "video_url": (
        "video_embeds",
        '{"metadata": {"video_grid_thw": [2, 4, 4], "timestamps": [0.5, 1.5]}, "peer_host": "e"}',
    ),
}


def answer_announcement(body: bytes) -> bytes:
    """An answer of vLLM's ECCPUConnector to a request for one item."""
    return build_announcement(body, IMAGE_ENTRY_JSON)


def expect_reference(url: str) -> dict[str, Any]:
    """What stands for an image."""
    return {
        "type": "image_embeds",
        "image_embeds": {"image_grid_thw": [1, 4, 4]},
        "uuid": compute_image_hash(url),
    }


def collect_params(
    *items: bytes, entry: str = IMAGE_ENTRY_JSON, name: Callable[[bytes], str] | None = None
) -> TransferParams:
    """What encoders announced of these items."""
    params = TransferParams()
    for item in items:
        mm_hash = (name or (lambda given: given.hex() + "00" * 4))(item)
        answer = {EC_PARAMS_FIELD: {mm_hash: Raw(entry.encode())}}
        params.add_answer(msgspec.json.encode(answer), item)
    return params


def parse_fields(messages: str, more: str = "") -> dict[str, Raw]:
    """A request's members."""
    body = f'{{"model": "tiny", "messages": {messages}{more}}}'
    return msgspec.json.decode(body, type=dict[str, Raw])


def get_refusal_reason(request_fields: dict[str, Raw], params: TransferParams) -> str:
    """Why the media stay."""
    with pytest.raises(MediaRequired) as caught:
        replace_parts(request_fields, params)
    return caught.value.reason


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_the_backend_gets_references_and_where_to_fetch(stream: bool) -> None:
    """Two images, one of them twice, texts around: parts in place, all else as the client wrote it."""
    async with fake_instances.run_routed_instances(
        encoders=[plan_encoder(answer_announcement)], encode_once=True
    ) as (router, e, server):
        sent = fake_instances.build_chat("a", "b", "a", stream=stream)
        sent["messages"].insert(0, {"role": "system", "content": "be brief"})
        sent["messages"][1]["content"].append({"type": "text", "text": "\u00e9 \U0001f600 \\ /"})
        sent |= {"temperature": 0, "seed": 2**63, "top_p": 1.50}
        assert (await router.post_body(CHAT_PATH, sent))[0] == 200
        got = server.received[0].json
        assert set(got.pop(EC_PARAMS_FIELD)) == {compute_image_hash("a"), compute_image_hash("b")}
        places = [part for part in got["messages"][1]["content"] if part["type"] != "text"]
        assert places == [expect_reference("a"), expect_reference("b"), expect_reference("a")]
        for part, url in zip(places, ("a", "b", "a"), strict=True):
            part.clear()
            part |= {"type": "image_url", "image_url": {"url": url}}
        assert got == sent and list(got) == list(sent)
        assert len(e.received) == 2
        assert server.received[0].headers[header_names.MEDIA_ENCODED] == "1"
        (record,) = [each for each in await router.wait_for_records(2) if each.ttft]
        assert record.ttft is not None
        assert record.ttft.attributes[keys.ENCODE_ONCE] is True
        assert keys.ENCODE_ONCE_REASON not in record.ttft.attributes


@pytest.mark.parametrize(("encode_once", "images"), [(False, ["a"]), (True, [])])
async def test_where_nothing_could_be_replaced_nothing_is_told(
    encode_once: bool, images: list[str]
) -> None:
    """Without the flag, and for a request without media, the body stays and no reason is recorded."""
    async with fake_instances.run_routed_instances(
        encoders=[plan_encoder(answer_announcement)], encode_once=encode_once
    ) as (router, e, server):
        sent = fake_instances.build_chat(*images)
        assert (await router.post_body(CHAT_PATH, sent))[0] == 200
        assert server.received[0].json["messages"] == sent["messages"]
        assert images or server.received[0].body == json.dumps(sent).encode()
        (record,) = [each for each in await router.wait_for_records(2) if each.ttft]
        assert record.ttft is not None
        assert keys.ENCODE_ONCE not in record.ttft.attributes


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/v1/messages", media_bodies.MESSAGES_BODY, "path"),
        ("/v1/responses", media_bodies.RESPONSES_BODY, "path"),
        (
            CHAT_PATH,
            {**fake_instances.build_chat("a"), "mm_processor_kwargs": {"fps": 1}},
            "mm_processor_kwargs",
        ),
        (
            CHAT_PATH,
            {**fake_instances.build_chat("a"), "media_io_kwargs": {"image": {}}},
            "media_io_kwargs",
        ),
    ],
)
async def test_media_stay_where_the_request_needs_them(
    path: str, body: dict[str, Any], reason: str
) -> None:
    """Where media cannot be replaced the body is unchanged, and the span has the reason."""
    async with fake_instances.run_routed_instances(
        encoders=[plan_encoder(answer_announcement)], encode_once=True
    ) as (router, e, server):
        data = json.dumps(body, indent=1).encode()
        assert (await router.post_body(path, data))[0] == 200
        assert server.received[0].body.startswith(data[:-1].rstrip(b"\n"))
        assert EC_PARAMS_FIELD in server.received[0].json
        records = [each for each in await router.wait_for_records(1) if each.ttft]
        for record in records:
            assert record.ttft is not None
            assert record.ttft.attributes[keys.ENCODE_ONCE] is False
            assert record.ttft.attributes[keys.ENCODE_ONCE_REASON] == reason
        assert records or path == "/v1/messages"  # no `ttft` span there


@pytest.mark.parametrize("mode", ["off", "strip"])
async def test_prefill_gets_references_and_decode_the_media(mode: str) -> None:
    """With all three legs a decode instance whose blocks are gone can compute the prompt itself."""
    model = fake_pair.PairModel()
    async with fake_pair.run_disaggregated(
        model, encoder=plan_encoder(answer_announcement), first_token=mode, encode_once=True
    ) as (router, e, p, d):
        sent = fake_instances.build_chat("a")
        assert (await router.post_body(CHAT_PATH, {**sent, "max_tokens": 3}))[0] == 200
        assert p.received[0].json["messages"][0]["content"][1] == expect_reference("a")
        assert all(each.json["messages"] == sent["messages"] for each in d.received) and d.received
        assert (await router.post_body(CHAT_PATH, {**sent, "max_tokens": 1}))[0] == 200
        assert p.received[-1].json["messages"][0]["content"][1] == expect_reference("a")
        asked = len(d.received)
        alone = {**sent, "max_tokens": 3, "n": 2}
        assert (await router.post_body(CHAT_PATH, alone))[0] == 200
        assert d.received[asked].json["messages"] == sent["messages"]


@pytest.mark.parametrize("kind", EMBEDS_BY_MEDIA_TYPE)
def test_each_kind_of_media_has_its_reference(kind: str) -> None:
    """Of audio and video too."""
    embeds, entry = EMBEDS_BY_MEDIA_TYPE[kind]
    item = f'{{"type":"{kind}","{kind}":{{"url":"x"}}}}'
    params = collect_params(item.encode(), entry=entry, name=lambda _: "ab" * 32)
    found = json.loads(
        bytes(replace_parts(parse_fields(f'[{{"role":"user","content":[{item}]}}]'), params))
    )
    (part,) = found[0]["content"]
    assert part == {"type": embeds, embeds: json.loads(entry)["metadata"], "uuid": "ab" * 32}


def test_only_media_parts_change() -> None:
    """Odd key order, spaces, numbers and escapes of everything else pass byte for byte."""
    item = '{ "image_url" : {"url": "\\u0061"},  "cache_control": {"n":1.0e0}, "type":"image_url"}'
    text = '{"text":  "\\u00e9", "type": "text" }'
    other = '{"content":"\\/", "role": "assistant",  "n":1.50}'
    message = f'{{"name": 1.0, "content": [{text}, {item}, "plain" , {item}],"role": "user"}}'
    params = collect_params(item.encode(), name=lambda _: "0f" * 32)
    found = bytes(replace_parts(parse_fields(f"[ {other},\n{message}]"), params))
    part = (
        '{"type":"image_embeds","image_embeds":{"image_grid_thw":[1,4,4]},'
        f'"uuid":"{"0f" * 32}","cache_control":{{"n":1.0e0}}}}'
    )
    expected = f'[{other},{{"name":1.0,"content":[{text},{part},"plain",{part}],"role":"user"}}]'
    assert found.decode() == expected


ITEM_JSON = '{"type":"image_url","image_url":{"url":"x"}}'
MESSAGES_JSON = f'[{{"role":"user","content":[{ITEM_JSON}]}}]'


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ('{"metadata": {"image_grid_thw": [1, 4, 4]}}', "address"),
        ('{"metadata": {}, "peer_host": "e"}', "metadata"),
        ('{"peer_host": "e"}', "metadata"),
        ('{"metadata": [], "peer_host": "e"}', "metadata"),
        ('{"metadata": {"image_grid_thw": [[1, 4, 4]]}, "peer_host": "e"}', "metadata"),
        ('{"metadata": {"image_grid_thw": []}, "peer_host": "e"}', "metadata"),
        ('{"metadata": {"image_grid_thw": [true]}, "peer_host": "e"}', "metadata"),
        ('{"metadata": {"image_grid_thw": "x"}, "peer_host": "e"}', "metadata"),
        ("null", "address"),
    ],
)
def test_an_announcement_must_say_where_and_how_large(entry: str, reason: str) -> None:
    """An encoding that was evicted before the answer has no address (vLLM 0.32)."""
    assert (
        get_refusal_reason(
            parse_fields(MESSAGES_JSON), collect_params(ITEM_JSON.encode(), entry=entry)
        )
        == reason
    )


@pytest.mark.parametrize("mm_hash", ["adapter:" + "ab" * 32, "my picture", "", "ab"])
def test_a_hash_that_is_not_the_items_is_not_used(mm_hash: str) -> None:
    """The server would put the LoRA adapter's name before it once more; others are a client's own."""
    params = collect_params(ITEM_JSON.encode(), name=lambda _: mm_hash)
    assert get_refusal_reason(parse_fields(MESSAGES_JSON), params) == "hash"


@pytest.mark.parametrize("count", [0, 2])
def test_an_answer_must_be_about_one_item(count: int) -> None:
    """An answer with no entry or with several is not used: it does not say which is the item's."""
    params = TransferParams()
    entries = {f"{number:064x}": Raw(IMAGE_ENTRY_JSON.encode()) for number in range(count)}
    params.add_answer(msgspec.json.encode({EC_PARAMS_FIELD: entries}), ITEM_JSON.encode())
    assert get_refusal_reason(parse_fields(MESSAGES_JSON), params) == "answer"


@pytest.mark.parametrize(
    "part",
    [
        '{"type":"image_url","image_url":{"url":"y"}}',  # no encoder was asked for it
        '{"type":"image_embeds","image_embeds":null,"uuid":"ab"}',
        '{"type":"input_image","image_url":"x"}',
        '{"image_pil":null}',
        '{"type":"text","text":"a","image_url":"x","uuid":"u"}',
        '{"type":["text"],"text":"a"}',
        "7",
    ],
)
def test_a_part_that_may_hold_other_media_keeps_them_all(part: str) -> None:
    """vLLM refuses raw and encoded images in one request."""
    messages = f'[{{"role":"user","content":[{ITEM_JSON},{part}]}}]'
    assert get_refusal_reason(parse_fields(messages), collect_params(ITEM_JSON.encode())) == "part"


def test_a_part_with_two_kinds_of_media_is_kept() -> None:
    """Which one vLLM takes depends on its other keys."""
    item = '{"type":"image_url","image_url":{"url":"x"},"video_url":{"url":"y"}}'
    messages = f'[{{"role":"user","content":[{item}]}}]'
    assert get_refusal_reason(parse_fields(messages), collect_params(item.encode())) == "part"


def test_items_of_one_modality_need_equal_metadata() -> None:
    """Items of one modality with different metadata keep their media: vLLM merges metadata."""
    other = ITEM_JSON.replace('"x"', '"y"')
    params = collect_params(ITEM_JSON.encode(), name=lambda _: "aa" * 32)
    entry = {"metadata": {"other": [1]}, "peer_host": "e"}
    params.add_answer(msgspec.json.encode({EC_PARAMS_FIELD: {"bb" * 32: entry}}), other.encode())
    messages = f'[{{"role":"user","content":[{ITEM_JSON},{other}]}}]'
    assert get_refusal_reason(parse_fields(messages), params) == "metadata"


METRIC_NAME = f"{metric_names.ROUTER_RECOMPUTED_ITEMS}_total"
INSTANCES = [
    parse_instance_url(f"http://127.0.0.1:{port}", "prefill_decode") for port in range(8001, 8007)
]


def build_attempt(number: int, recomputed: int) -> Attempt:
    """A request that is over, at one of the servers."""
    items = EncoderCacheCounts(4, 4 - recomputed, 0, recomputed, 1000)
    path, instance = "/v1/chat/completions", INSTANCES[number]
    said = format_server_timing({}, 0, 0, ec=items)
    return Attempt(instance.leg, path, instance, "", 0, timing_header=said)


def test_one_line_a_minute(clock: testing.FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    """The first case is logged at once, then one line a minute with sum, instance, likely cause and link."""
    items = RecomputedMediaLog()
    items.record_attempt(build_attempt(0, 0))
    assert not caplog.messages
    items.record_attempt(build_attempt(0, 2))
    (line,) = caplog.messages
    assert "2, in 1 requests" in line and "by http://127.0.0.1:8001 (2). Possible" in line
    assert "docs/router.md" in line and caplog.records[0].levelname == "WARNING"

    for number, recomputed in ((1, 1), (2, 2), (3, 3), (4, 4), (5, 1)):
        clock.tick(10_000_000)
        items.record_attempt(build_attempt(number, recomputed))
    assert len(caplog.messages) == 1
    clock.tick(LOG_INTERVAL_US - 50_000_000)
    items.record_attempt(build_attempt(1, 4))
    assert len(caplog.messages) == 2
    line = caplog.messages[-1]
    assert "15, in 6 requests" in line and line.count("http://") == 4
    assert "http://127.0.0.1:8002 (5), http://127.0.0.1:8005 (4)" in line and " and 1 more." in line


def test_those_that_say_nothing_count_nothing() -> None:
    """Servers that do not report the number, or no timings, count as no item and cause no error."""
    items = RecomputedMediaLog()
    silent, plain = build_attempt(0, 1), build_attempt(0, 1)
    cut_off = build_attempt(0, 1)
    silent.record_server_timing("")
    plain.record_server_timing("ttft;dur=0.000")
    cut_off.record_server_timing(cut_off.timing_header[:-2])
    before = INSTANCES[0].recomputed_items
    for each in (silent, plain, cut_off):
        items.record_attempt(each)
    assert INSTANCES[0].recomputed_items == before


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_what_a_server_encoded_again_is_on_metrics(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """By leg and instance, 0 as long as all is well; encoders have no such count."""
    plan = InstancePlan(
        encoder_cache=EncoderCacheCounts(items=3, remote=1, local=0, recomputed=2, bytes=4096)
    )
    async with fake_instances.run_routed_instances([plan, None], [None]) as (router, e, one, two):
        for _ in range(4):
            assert (await router.post_chat("a", stream=stream, traceparent=TRACEPARENT))[0] == 200
        await router.wait_for_records(8)
        lines = router.app.metrics.render_text().decode().splitlines()
        assert [line for line in lines if line.startswith(METRIC_NAME)] == [
            f'{METRIC_NAME}{{instance="{one.url}",leg="prefill_decode"}} 4.0',
            f'{METRIC_NAME}{{instance="{two.url}",leg="prefill_decode"}} 0.0',
        ]
        assert len(caplog.messages) == 1 and one.url in caplog.messages[0]
