# SPDX-License-Identifier: Apache-2.0
"""Media of any kind reach encoders, and what these announce the leg that prefills; repeated work is told."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest
import tracing_fakes
from hypothesis import given, settings
from hypothesis import strategies as some

from router import fake_instances, media_bodies
from router.fake_instances import TRACEPARENT, InstancePlan, run_routed_instances
from ttft_otel.model.names import header_names, metric_names
from ttft_otel.model.timing import EncoderCacheCounts, format_server_timing
from ttft_otel.router.disagg.encoders import (
    LOG_INTERVAL_US,
    MAX_ENTRIES,
    MAX_NESTING_DEPTH,
    RecomputedMediaLog,
    TransferParams,
    splice_params,
)
from ttft_otel.router.disagg.request_body import CONVERSATION_FIELDS, parse_body
from ttft_otel.router.errors import InvalidAnswer, UpstreamUnavailable
from ttft_otel.router.timeline import Attempt
from ttft_otel.router.types import parse_instance_url

CHAT_PATH = "/v1/chat/completions"
EC_PARAMS_FIELD = "ec_transfer_params"
# As vLLM 0.32's ECCPUConnector announces it, spacing and number formats of some other JSON writer.
ENTRY_JSON = (
    '{"item_indices": [0], "metadata": {"image_grid_thw": [[1, 4, 4.50]]}, '
    '"peer_host": "10.0.0.1",  "peer_port": 5569, "size_bytes": 8192, "shape": [4, 64], "new": {}}'
)


def compute_image_hash(url: str) -> str:
    """The hash that an encoder gives an image of a test: of what is before the query."""
    return hashlib.sha256(url.partition("?")[0].encode()).hexdigest()


def build_announcement(body: bytes, entry: str = ENTRY_JSON) -> bytes:
    """An encoder's answer to a request for one item."""
    (part,) = json.loads(body)["messages"][0]["content"]
    value = part[part["type"]]
    name = compute_image_hash(value.get("url") or value["data"])
    return f'{{"id": "chatcmpl-1", "choices": [], "{EC_PARAMS_FIELD}": {{"{name}": {entry}}}}}'.encode()


def plan_encoder(
    build_answer: Callable[[bytes], bytes] = build_announcement, **more: Any
) -> InstancePlan:
    """An instance that announces what it encodes."""
    return InstancePlan({"encoder.compute": 1}, answers=build_answer, **more)


def expect_params(*urls: str) -> dict[str, Any]:
    """What the next leg has to get."""
    return {compute_image_hash(url): json.loads(ENTRY_JSON) for url in urls}


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_the_next_leg_gets_what_was_announced(stream: bool) -> None:
    """Two images and one of them twice: two entries, byte for byte, after the client's own bytes."""
    plan, chat = plan_encoder(), fake_instances.build_chat("a", "b", "a", stream=stream)
    async with run_routed_instances(encoders=[plan, plan]) as (router, e1, e2, server):
        data = json.dumps(chat, indent=1).encode() + b"\n"
        assert (await router.post_body(CHAT_PATH, data))[0] == 200
        (seen,) = server.received
        assert seen.json.pop(EC_PARAMS_FIELD) == expect_params("a", "b")
        assert seen.body.startswith(data.rstrip()[:-1])
        assert seen.body.count(ENTRY_JSON.encode()) == 2
        assert len(e1.received) == len(e2.received) == 1
        assert EC_PARAMS_FIELD not in e1.received[0].json


async def test_parts_that_differ_may_be_the_same_image() -> None:
    """Two spellings of one image are two encoder calls and one entry."""
    async with run_routed_instances(encoders=[plan_encoder()]) as (router, e, server):
        assert (await router.post_chat("a?1", "a?2"))[0] == 200
        assert len(e.received) == 2
        assert server.received[0].json[EC_PARAMS_FIELD] == expect_params("a")


@pytest.mark.parametrize(
    "answer",
    [
        b'{"choices": []}',
        b'{"ec_transfer_params": null}',
        b'{"ec_transfer_params": {"a": null}}',
    ],
)
async def test_an_encoder_that_announces_nothing_changes_nothing(answer: bytes) -> None:
    """Without parameters (older releases, shared folders) the body is unchanged, the header is set."""
    plan = plan_encoder(lambda _: answer)
    async with run_routed_instances(encoders=[plan]) as (router, e, server):
        data = json.dumps(fake_instances.build_chat("a")).encode()
        assert (await router.post_body(CHAT_PATH, data))[0] == 200
        assert server.received[0].body == data
        assert server.received[0].headers[header_names.MEDIA_ENCODED] == "1"


async def test_clients_own_parameters_are_replaced() -> None:
    """ec_transfer_params of a client are replaced by the encoders', however their name is escaped."""
    async with run_routed_instances(encoders=[plan_encoder()]) as (router, e, server):
        plain = json.dumps(fake_instances.build_chat("a"))[:-1]
        for evil in (f', "{EC_PARAMS_FIELD}": {{"x": {{}}}}}}', ', "ec_transfer\\u005fparams": 7}'):
            assert (await router.post_body(CHAT_PATH, (plain + evil).encode()))[0] == 200
            assert server.received[-1].json[EC_PARAMS_FIELD] == expect_params("a")
        assert not any(EC_PARAMS_FIELD in each.json for each in e.received)


@pytest.mark.parametrize(
    ("mode", "fields", "counts"),
    [
        ("off", {"stream": False}, (1, 1)),
        ("strip", {"stream": True}, (1, 1)),
        # Where a prefill or a decode instance does all of a request, that one has to fetch the encodings.
        ("strip", {"stream": False, "n": 2}, (0, 1)),
        ("strip", {"stream": False, "max_tokens": 1}, (1, 0)),
    ],
)
async def test_whoever_prefills_gets_them(
    mode: str, fields: dict[str, Any], counts: tuple[int, int]
) -> None:
    """With all three legs prefill fetches encodings, and decode fetches blocks; the same for the header."""
    options = {"encoder": plan_encoder(), "first_token": mode}
    async with fake_instances.run_disaggregated(fake_instances.PairModel(), **options) as (
        router,
        e,
        p,
        d,
    ):
        body = fake_instances.build_chat("a", "b") | {"max_tokens": 4} | fields
        assert (await router.post_body(CHAT_PATH, body))[0] == 200
        assert (len(p.received), len(d.received)) == counts
        first, *others = p.received + d.received
        assert first.json[EC_PARAMS_FIELD] == expect_params("a", "b")
        assert first.headers[header_names.MEDIA_ENCODED] == "1"
        assert not any(EC_PARAMS_FIELD in each.json for each in others)
        assert not any(header_names.MEDIA_ENCODED in each.headers for each in others)


async def test_a_decode_that_has_to_prefill_gets_them() -> None:
    """The first decode instance refuses, blocks are lost: the second computes from the encodings."""
    full, other = fake_instances.PairModel(refuses=503), fake_instances.PairModel()
    async with (
        fake_instances.run_instance(plan_encoder()) as e,
        fake_instances.run_server(full, False) as p,
        fake_instances.run_server(full, True) as busy,
        fake_instances.run_server(other, True) as idle,
        fake_instances.run_router(
            [], [e.url], prefills=[p.url], decodes=[busy.url, idle.url]
        ) as router,
    ):
        body = fake_instances.build_chat("a") | {"max_tokens": 4}
        assert (await router.post_body(CHAT_PATH, body))[0] == 200
        assert p.received[0].json[EC_PARAMS_FIELD] == expect_params("a")
        assert EC_PARAMS_FIELD not in busy.received[0].json
        (asked,) = idle.received
        assert asked.json[EC_PARAMS_FIELD] == expect_params("a")
        assert asked.headers[header_names.MEDIA_ENCODED] == "1"
        assert "kv_transfer_params" not in asked.json


async def test_a_retry_keeps_them() -> None:
    """Another backend gets what the first one got, and the encoder is not asked again."""
    async with run_routed_instances([InstancePlan(status=503), None], [plan_encoder()]) as (
        router,
        e,
        busy,
        idle,
    ):
        assert (await router.post_chat("a"))[0] == 200
        assert busy.received[0].body == idle.received[0].body
        assert idle.received[0].json[EC_PARAMS_FIELD] == expect_params("a")
        assert idle.received[0].headers[header_names.MEDIA_ENCODED] == "1"
        assert len(e.received) == 1


def build_nested_answer(depth: int) -> bytes:
    """An answer with one entry of this depth."""
    inner = "[" * (depth - 1) + "]" * (depth - 1)
    return f'{{"{EC_PARAMS_FIELD}": {{"a": {{"x": {inner or 0}}}}}}}'.encode()


HOSTILE_ANSWERS = {
    **{
        name: (answer, "is not JSON")
        for name, answer in {
            "empty": b"",
            "html": b"<html>It works!</html>",
            "cut": b'{"ec_transfer_params": {"a": {"x"',
            "bom": b"\xef\xbb\xbf{}",
            "not UTF-8": b'{"ec_transfer_params": {"a": {"x": "\xff"}}}',
            "NaN": b'{"ec_transfer_params": {"a": {"x": NaN}}}',
            "half a pair": b'{"ec_transfer_params": {"a": {"x": "\\ud800"}}}',
        }.items()
    },
    "1e999": (b'{"ec_transfer_params": {"a": {"x": 1e999}}}', "out of range"),
    "a list": (b"[]", "is not a JSON object"),
    "params a list": (b'{"ec_transfer_params": []}', "is not a JSON object"),
    "params a text": (b'{"ec_transfer_params": "x"}', "is not a JSON object"),
    "an entry a text": (b'{"ec_transfer_params": {"a": "x"}}', "an entry .* is not a JSON object"),
    "deep": (build_nested_answer(MAX_NESTING_DEPTH + 1), "nested too deeply"),
    "deeper": (build_nested_answer(100_000), "nested too deeply"),
    "deep elsewhere": (b'{"x": ' + b"[" * 100_000, "nested too deeply"),
    "many": (
        json.dumps({EC_PARAMS_FIELD: {str(number): {} for number in range(4097)}}).encode(),
        "4096 entries",
    ),
}


@pytest.mark.parametrize("name", HOSTILE_ANSWERS)
def test_a_hostile_answer_is_refused(name: str) -> None:
    """Each for its reason, which names nothing of what it says."""
    answer, why = HOSTILE_ANSWERS[name]
    with pytest.raises(InvalidAnswer, match=why):
        TransferParams().add_answer(answer)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        HOSTILE_ANSWERS["html"],
        (b'{"x": "%b"}' % (b"x" * 10_000_000), "longer than 1048576 bytes"),
    ],
    ids=["html", "long"],
)
async def test_a_hostile_answer_is_a_502(answer: bytes, why: str) -> None:
    """An unusable encoder answer is retried once; then the client gets a 502 with the reason."""
    plan = plan_encoder(lambda _: answer)
    async with run_routed_instances(encoders=[plan, plan]) as (router, e1, e2, server):
        status, headers, data = await router.post_chat("a", traceparent=TRACEPARENT)
        error = json.loads(data)["error"]
        assert (status, headers["Content-Type"]) == (502, "application/json")
        assert error["type"] == "UpstreamError" and error["code"] == 502
        message = error["message"]
        assert message.startswith("The encode instance failed: ") and message.endswith(".")
        assert why in message
        assert len(e1.received) == len(e2.received) == 1 and not server.received
        (record, *_) = await router.wait_for_records(1)
        assert [call.error for call in record.calls] == ["InvalidAnswer"] * 2
        assert record.ttft is not None and record.ttft.died == "router.hop.encode"
        assert record.ttft.unattributed + sum(record.ttft.stages.values()) == record.ttft.end


LEAVES = some.none() | some.booleans() | some.integers() | some.text(max_size=8)
LISTS = some.lists(LEAVES, max_size=3)
JSON = LEAVES | LISTS | some.dictionaries(some.text(max_size=5), LEAVES | LISTS, max_size=3)
OBJECTS = some.dictionaries(some.text(max_size=8) | some.just(EC_PARAMS_FIELD), JSON, max_size=4)


EXAMPLES = settings(max_examples=40, deadline=None, derandomize=True, database=None)


@EXAMPLES
@given(
    OBJECTS,
    some.dictionaries(some.text(max_size=8), OBJECTS, min_size=1, max_size=4),
    some.sampled_from([None, 0, 1]),
    some.text(" \t\r\n", max_size=3),
)
def test_any_object_takes_any_parameters(
    body: dict[str, Any], params: dict[str, Any], indent: int | None, white: str
) -> None:
    """What is read back is the body with the parameters, which win over a member of their name."""
    data = f"{white}{json.dumps(body, indent=indent)}{white}".encode()
    collected = TransferParams()
    collected.add_answer(json.dumps({EC_PARAMS_FIELD: params}, indent=indent).encode())
    made = splice_params(data, collected.to_json())
    assert json.loads(made) == body | {EC_PARAMS_FIELD: params}
    assert made.startswith(data.rstrip()[:-1])


ANSWERS = some.one_of(
    some.binary(max_size=60),
    some.dictionaries(some.sampled_from([EC_PARAMS_FIELD, "a"]), JSON).map(
        lambda made: json.dumps(made).encode()
    ),
    some.tuples(
        OBJECTS.map(lambda made: json.dumps({EC_PARAMS_FIELD: {"a": made}}).encode()),
        some.integers(0, 80),
    ).map(lambda made: made[0][: made[1]]),
    some.sampled_from([answer for answer, _ in HOSTILE_ANSWERS.values() if len(answer) < 1000]),
)


@EXAMPLES
@given(some.lists(ANSWERS, max_size=4))
def test_any_answer_is_taken_or_refused(answers: list[bytes]) -> None:
    """Whatever encoders say, what is made of it is JSON that Python's reader takes, of objects only."""
    collected = TransferParams()
    for answer in answers:
        try:
            collected.add_answer(answer)
        except (InvalidAnswer, UpstreamUnavailable) as error:
            assert str(error)
    entries = json.loads(collected.to_json() or b"{}")
    assert all(isinstance(each, dict) for each in entries.values())


def test_the_fuller_announcement_stays() -> None:
    """Of two entries for one image the one with an address is kept, in either order."""
    answers = [
        b'{"%b": {"a": %b}}' % (EC_PARAMS_FIELD.encode(), each)
        for each in (b'{"metadata":{}}', ENTRY_JSON.encode())
    ]
    for order in (answers, answers[::-1]):
        collected = TransferParams()
        for answer in order:
            collected.add_answer(answer)
        assert json.loads(collected.to_json()) == {"a": json.loads(ENTRY_JSON)}


def test_the_bounds_are_of_all_answers_together() -> None:
    """Size limits hold for all answers of a request together; depth at the limit is accepted."""
    collected = TransferParams()
    collected.add_answer(build_nested_answer(MAX_NESTING_DEPTH))
    entry = json.dumps({"x": "x" * 900_000})
    for number in range(4):
        collected.add_answer(f'{{"{EC_PARAMS_FIELD}": {{"{number}": {entry}}}}}'.encode())
    with pytest.raises(UpstreamUnavailable, match="4194304 bytes"):
        collected.add_answer(f'{{"{EC_PARAMS_FIELD}": {{"more": {entry}}}}}'.encode())


async def test_a_request_with_too_many_items_is_no_encoders_fault() -> None:
    """It gets a 502 that says so; its encoder is not asked again and counts as well."""
    entries = {str(number): {} for number in range(MAX_ENTRIES)}

    full_plan = plan_encoder(lambda _: json.dumps({EC_PARAMS_FIELD: entries}).encode())
    encoders = [full_plan, plan_encoder()]
    async with run_routed_instances(encoders=encoders) as (router, full, e, server):
        status, _, data = await router.post_chat("a", "b")
        assert (status, len(full.received), len(e.received), len(server.received)) == (502, 1, 1, 0)
        assert "answers cannot be used: " in json.loads(data)["error"]["message"]
        assert [each.breaker.consecutive_failures for each in router.fleet.get("encode")] == [0, 0]


@pytest.mark.parametrize("traced", [True, False])
async def test_who_is_told_that_items_are_encoded(traced: bool) -> None:
    """The header is set for the leg after encoders only, with tracing; a client's own is removed then.

    Parameters travel with tracing off, too.
    """
    encoders = [plan_encoder()]
    async with run_routed_instances(encoders=encoders, traced=traced) as (router, e, server):
        told = {"x_ttft_encoded": "yes"} if traced else {}
        for images in (("a",), ()):
            assert (await router.post_chat(*images, **told))[0] == 200
        with_image, without = server.received
        assert with_image.json[EC_PARAMS_FIELD] == expect_params("a")
        assert with_image.headers.get(header_names.MEDIA_ENCODED) == ("1" if traced else None)
        assert header_names.MEDIA_ENCODED not in without.headers
        assert len(e.received) == 1 and header_names.MEDIA_ENCODED not in e.received[0].headers


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "detail": "low"}}
VIDEO = {"type": "video_url", "video_url": {"url": "http://x/v.mp4"}}
INPUT_AUDIO = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
AUDIO_URL = {"type": "audio_url", "audio_url": {"url": "http://x/a.wav"}}
TEXT = {"type": "text", "text": "what is it?"}


async def test_every_item_of_every_message() -> None:
    """Items of all kinds, repeated ones once, are encoded and announced; text and tools stay behind."""
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

    async with run_routed_instances(encoders=[plan_encoder()]) as (router, e, pd):
        data = json.dumps(body, indent=1).encode()
        assert (await router.post_body(CHAT_PATH, data))[0] == 200
        assert len(pd.received[0].json[EC_PARAMS_FIELD]) == 4
        assert pd.received[0].body.startswith(data[:-1])
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

    async with run_routed_instances(encoders=[plan_encoder()]) as (router, e, server):
        data = json.dumps({**body, **hints, "stream": stream}).encode()
        assert (await router.post_body(path, data))[0] == 200
        assert {each.path for each in e.received} == {CHAT_PATH}
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
    pair = fake_instances.run_disaggregated(fake_instances.PairModel(), plan_encoder())
    async with pair as (router, e, p, d):
        assert (await router.post_body(path, EXPECTED_PARTS_BY_PATH[path][0]))[0] == 200
        assert len(d.received) == 1 and EC_PARAMS_FIELD not in d.received[0].json
        assert not e.received and not p.received


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
    path, instance = CHAT_PATH, INSTANCES[number]
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


async def test_what_a_server_encoded_again_is_on_metrics(caplog: pytest.LogCaptureFixture) -> None:
    """By leg and instance, 0 as long as all is well; encoders have no such count."""
    plan = InstancePlan(
        encoder_cache=EncoderCacheCounts(items=3, remote=1, local=0, recomputed=2, bytes=4096)
    )
    async with run_routed_instances([plan, None], [None]) as (router, e, one, two):
        for _ in range(4):
            assert (await router.post_chat("a", traceparent=TRACEPARENT))[0] == 200
        await router.wait_for_records(8)
        lines = router.app.metrics.render_text().decode().splitlines()
        assert [line for line in lines if line.startswith(METRIC_NAME)] == [
            f'{METRIC_NAME}{{instance="{one.url}",leg="prefill_decode"}} 4.0',
            f'{METRIC_NAME}{{instance="{two.url}",leg="prefill_decode"}} 0.0',
        ]
        assert len(caplog.messages) == 1 and one.url in caplog.messages[0]
