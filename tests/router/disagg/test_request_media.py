# SPDX-License-Identifier: Apache-2.0
"""Media of any kind, anywhere in a conversation, reach the encoders; what is encoded twice is told."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tracing_fakes

from router import fake_instances, fake_pair, media_bodies
from router.disagg.test_ec_params import EC_PARAMS_FIELD, build_announcement
from router.fake_instances import TRACEPARENT, InstancePlan
from ttft_otel.model.names import metric_names
from ttft_otel.model.timing import EncoderCacheCounts, format_server_timing
from ttft_otel.router.disagg.encoders import LOG_INTERVAL_US, RecomputedMediaLog
from ttft_otel.router.disagg.request_body import parse_body
from ttft_otel.router.disagg.request_media import CONVERSATION_FIELDS
from ttft_otel.router.timeline import Attempt
from ttft_otel.router.types import parse_instance_url

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "detail": "low"}}
VIDEO = {"type": "video_url", "video_url": {"url": "http://x/v.mp4"}}
INPUT_AUDIO = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
AUDIO_URL = {"type": "audio_url", "audio_url": {"url": "http://x/a.wav"}}
TEXT = {"type": "text", "text": "what is it?"}


async def test_every_item_of_every_message() -> None:
    """Several items in a message, several messages, repeated ones once; text and tools stay behind."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [IMAGE, TEXT, VIDEO]},
        {"role": "assistant", "content": "a cat"},
        {"role": "user", "content": [INPUT_AUDIO, AUDIO_URL, IMAGE, TEXT]},
    ]
    body = {
        "model": "tiny",
        "messages": messages,
        "stream": True,
        "tools": [{"type": "function"}],
        "mm_processor_kwargs": {"max_pixels": 99},
        "temperature": 0.5,
    }

    async with fake_instances.run_routed_instances(encoders=[None]) as (router, e, pd):
        data = json.dumps(body, indent=1).encode()
        status, _, _ = await router.post_body("/v1/chat/completions", data)
        assert status == 200 and pd.received[0].body == data
        asked = [each.json for each in e.received]
        assert all(len(each["messages"]) == 1 for each in asked)
        items = [each["messages"][0]["content"] for each in asked]
        assert sorted(items, key=str) == sorted(
            [[IMAGE], [VIDEO], [INPUT_AUDIO], [AUDIO_URL]], key=str
        )
        for each in asked:
            assert each["mm_processor_kwargs"] == {"max_pixels": 99}
            assert not {"tools", "temperature"} & set(each)


def build_image_part(url: str) -> dict[str, Any]:
    """An image of a chat message."""
    return {"type": "image_url", "image_url": {"url": url}}


PNG_PART, URL_PART = (
    build_image_part("data:image/png;base64,iVBORw0="),
    build_image_part('http://x/a\u00e9.png?b="1"'),
)
UNTYPED_PART = build_image_part('data:image/jpeg;base64,/9j/4\u00e9"\\')
# In the order in which vLLM puts them into the prompt: what tools returned before a message's own.
EXPECTED_PARTS_BY_PATH = {
    "/v1/messages": (
        media_bodies.MESSAGES_BODY,
        [PNG_PART, URL_PART, URL_PART, PNG_PART, UNTYPED_PART],
    ),
    "/v1/responses": (
        media_bodies.RESPONSES_BODY,
        [
            build_image_part("data:image/png;base64,AA=="),
            build_image_part('http://x/\u00e9"'),
            build_image_part("http://x/tool"),
        ],
    ),
}


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("path", EXPECTED_PARTS_BY_PATH)
def test_other_paths_items_are_parts_of_chat_messages(path: str, ascii_only: bool) -> None:
    """As vLLM converts them, distinct ones once, with their place among all; escapes as they came."""
    body, parts = EXPECTED_PARTS_BY_PATH[path]
    found = parse_body(json.dumps(body, ensure_ascii=ascii_only).encode(), path)
    distinct = [each for number, each in enumerate(parts) if each not in parts[:number]]
    assert [json.loads(each) for each in found.media_items] == distinct
    assert found.item_positions == tuple(
        map(parts.index, distinct)
    ) and found.media_part_count == len(parts)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("path", EXPECTED_PARTS_BY_PATH)
async def test_other_paths_items_go_to_encoders(path: str, stream: bool) -> None:
    """Each by a chat completion, with what decides about their hash there; the answers' parameters follow."""
    body, parts = EXPECTED_PARTS_BY_PATH[path]
    hints = {
        "mm_processor_kwargs": {"max_pixels": 99},
        "media_io_kwargs": {"image": {}},
        "chat_template": "x",
        "chat_template_kwargs": {"a": 1},
    }
    # what vLLM does not read on a path must not change what the encoder makes of it
    unread = {
        "/v1/messages": {*hints} - {"chat_template_kwargs"},
        "/v1/responses": {"chat_template"},
    }

    async with fake_instances.run_routed_instances(
        encoders=[InstancePlan({}, answers=build_announcement)]
    ) as (router, e, server):
        data = json.dumps({**body, **hints, "stream": stream}).encode()
        assert (await router.post_body(path, data))[0] == 200
        assert {each.path for each in e.received} == {"/v1/chat/completions"}
        asked = [each.json for each in e.received]
        items = [json.dumps(each["messages"][0]["content"]) for each in asked]
        assert sorted(items) == sorted({json.dumps([each]) for each in parts})
        for each in asked:
            assert {*hints} & {*each} == {*hints} - unread[path]
        assert server.received[0].path == path
        assert len(server.received[0].json[EC_PARAMS_FIELD]) == len(items)
        assert server.received[0].body.startswith(data[:-1])


@pytest.mark.parametrize("path", EXPECTED_PARTS_BY_PATH)
async def test_with_decode_apart_other_paths_skip_encoders(path: str) -> None:
    """There decode serves them alone, and encodes them itself: nobody does it before for nothing."""
    model = fake_pair.PairModel()
    async with fake_pair.run_disaggregated(
        model, encoder=InstancePlan({}, answers=build_announcement)
    ) as (router, e, p, d):
        assert (await router.post_body(path, EXPECTED_PARTS_BY_PATH[path][0]))[0] == 200
        assert len(d.received) == 1 and EC_PARAMS_FIELD not in d.received[0].json
        assert not e.received and not p.received


async def test_video_and_audio_are_announced_like_images() -> None:
    """Whatever kind an item is of, the next leg gets the encoder's entry for it."""
    async with fake_instances.run_routed_instances(
        encoders=[InstancePlan({}, answers=build_announcement)]
    ) as (router, e, server):
        content = [VIDEO, TEXT, INPUT_AUDIO, AUDIO_URL, IMAGE]
        body = {"model": "tiny", "messages": [{"role": "user", "content": content}]}
        assert (await router.post_body("/v1/chat/completions", body))[0] == 200
        assert len(e.received) == len(server.received[0].json[EC_PARAMS_FIELD]) == 4


ODD_MESSAGES = [
    b"null",
    b"3",
    b'"x"',
    b"[3]",
    b'[{"role": "user", "content": 3}]',
    b'[{"role": "user", "content": [null, 3, []]}]',
    b'[{"role": "user", "content": [{"type": "image"}, {"type": "input_image"}]}]',
    b'[{"role": "user", "content": [{"type": "image", "source": []}]}]',
    b'[{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": ""}}]}]',
    b'[{"role": "user", "content": [{"type": "image", "source": {"data": 3}}]}]',
    b'[{"role": "user", "content": [{"type": "image", "source": {"data": "x", "media_type": 3}}]}]',
    b'[{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]',
    b'[{"role": "system", "content": [{"type": "image", "source": {"data": "AA"}}]}]',
    b'[{"role": "assistant", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]}]',
    b'[{"role": "user", "content": [{"type": "input_image", "image_url": null, "file_id": "f"}]}]',
    b'[{"role": "user", "content": [{"type": "input_image", "image_url": {"url": "a"}}]}]',
    b'[{"type": "function_call_output", "output": "x"}]',
    b'[{"role": "user", "content": [{"type": "\xff", "image_url": {"url": "a"}}]}]',
    b'[{"role": "user", "content": [{"type": "input_image", "image_url": '
    + b'{"a":' * 3000
    + b"1"
    + b"}" * 3000
    + b"}]}]",
]


@pytest.mark.parametrize("path", CONVERSATION_FIELDS)
@pytest.mark.parametrize("conversation", ODD_MESSAGES)
def test_what_is_no_item_is_left_to_the_server(conversation: bytes, path: str) -> None:
    """Malformed or empty parts, and those that vLLM ignores, cause no encoder call and no error."""
    data = b'{"model": "tiny", "%b": %b}' % (CONVERSATION_FIELDS[path].encode(), conversation)
    found = parse_body(data, path)
    assert (found.data, found.media_items, found.media_part_count) == (data, (), 0)


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


def test_one_line_a_minute(
    clock: tracing_fakes.FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
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


@pytest.mark.parametrize(
    "stream", [pytest.param(False, marks=pytest.mark.full), True], ids=["plain", "stream"]
)
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


async def test_without_encoders_there_is_no_such_count() -> None:
    """Nothing can be encoded twice where nobody encodes ahead."""
    async with fake_instances.run_routed_instances() as (router, one):
        text = router.app.metrics.render_text().decode()
        assert metric_names.ROUTER_ATTEMPTS in text and f"{METRIC_NAME}{{" not in text
