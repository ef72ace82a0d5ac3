# SPDX-License-Identifier: Apache-2.0
"""Clients' bodies: memory in proportion to their bytes, large ones in a thread, none beyond the limits."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import tracemalloc
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from msgspec.structs import replace

from ttft_otel.model.endpoints import CHAT_PATH
from ttft_otel.router.disagg import request_body, request_plan
from ttft_otel.router.disagg.request_body import (
    MAX_STRUCTURE,
    BodyParser,
    JsonStructure,
    RequestBody,
    count_structure,
    parse_body,
)
from ttft_otel.router.types import MODE_STRIP

T = TypeVar("T")
TEXT = b'{"model": "tiny", "stream": true, "input": "%b"}'
IDS = b'{"model": "tiny", "prompt": [%b1]}'


@pytest.mark.parametrize(
    ("data", "is_heavy"),
    [
        (TEXT % b"a", False),
        (TEXT % (b"a" * 900_000), False),
        (TEXT % (b"a" * 1_100_000), True),
        (IDS % (b"1," * 20_000), False),
        (IDS % (b"1," * 300_000), True),
        (b"[" + b"[]," * 300_000 + b"1]", False),
        (b"-----multipart" * 300_000, False),
    ],
    ids=["small", "text", "large text", "few ids", "ids", "no object", "no JSON"],
)
async def test_heavy_bodies(data: bytes, is_heavy: bool) -> None:
    """The result is that of parse_body(), whichever thread it comes from."""
    assert await BodyParser().parse(data) == replace(parse_body(data), is_heavy=is_heavy)


@pytest.mark.parametrize(
    "inner",
    [
        b"[]," * (MAX_STRUCTURE.parts + 1),
        b'"",' * (MAX_STRUCTURE.quotes // 2 + 1),
        b"1,  " * (MAX_STRUCTURE.outside_bytes // 4 + 1),
        b'"%b",' % (b"\\n" * (MAX_STRUCTURE.escapes + 1)),
    ],
    ids=["parts", "strings", "outside", "escapes"],
)
async def test_too_much(inner: bytes) -> None:
    """A body beyond any of the limits is not parsed and counts as unreadable."""
    assert "The body has more than" in (await BodyParser().parse(IDS % inner)).problem
    text = inner.replace(b"\\", b"").replace(b'"', b"")
    assert not (await BodyParser().parse(TEXT % text)).problem


async def test_thread() -> None:
    """What parses a heavy body once more runs in the thread, too; for others there is none."""
    parser, light, heavy = BodyParser(), RequestBody(b"{}"), RequestBody(b"{}", is_heavy=True)
    assert await parser.run_on(light, threading.current_thread) is threading.current_thread()
    thread = await parser.run_on(heavy, threading.current_thread)
    assert thread.name.startswith("ttft-otel-json")


async def test_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose client disconnected while it waited for the parser is not parsed any more."""
    begun, may_end, parsed, parser = threading.Event(), threading.Event(), [], BodyParser()

    def parse_slowly(data: bytes, path: str) -> RequestBody:
        begun.set()
        may_end.wait(30)
        parsed.append(data)
        return RequestBody(data)

    monkeypatch.setattr(request_body, "_parse_heavy", parse_slowly)
    first = asyncio.create_task(parser.parse(IDS % (b"1," * 600_000)))
    await asyncio.to_thread(begun.wait, 30)
    second = asyncio.create_task(parser.parse(IDS % (b"2," * 600_000)))
    await asyncio.sleep(0.01)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    may_end.set()
    await first
    await parser.run_on(RequestBody(b"", is_heavy=True), len, b"")
    assert len(parsed) == 1


NO_LIMIT = JsonStructure(1 << 60, 1 << 60, 1 << 60, 1 << 60)
TEXTS = ("", "a", "\\", '"', "\\\\", '\\"', "{[:", "ä\n", "\\" * 7 + '"', "漢" * 9)


def build_value(chance: random.Random, depth: int) -> Any:
    """A JSON value whose texts look like structure."""
    kind = chance.randrange(5 if depth else 3)
    if kind == 0:
        return chance.randrange(1000)
    if kind < 3:
        return "".join(chance.choices(TEXTS, k=chance.randrange(4)))
    items = [build_value(chance, depth - 1) for _ in range(chance.randrange(5))]
    return items if kind == 3 else {f"{each}{chance.choice(TEXTS)}": each for each in items if each}


def count_by_parsing(value: Any) -> tuple[int, int]:
    """Parts and strings of a parsed value."""
    if isinstance(value, str):
        return 0, 1
    if isinstance(value, list):
        counts = [count_by_parsing(each) for each in value]
        return 1 + sum(each[0] for each in counts), sum(each[1] for each in counts)
    if isinstance(value, dict):
        counts = [count_by_parsing(each) for each in value.values()]
        parts = 1 + len(value) + sum(each[0] for each in counts)
        return parts, len(value) + sum(each[1] for each in counts)
    return 0, 0


@pytest.mark.parametrize("window_bytes", [1, 2, 3, 7, 1 << 17])
def test_counts(monkeypatch: pytest.MonkeyPatch, window_bytes: int) -> None:
    """As many parts, strings and escapes as a parser finds, with any windows."""
    monkeypatch.setattr(request_body, "_WINDOW_BYTES", window_bytes)
    chance = random.Random(13)
    for _ in range(300):
        value = build_value(chance, 4)
        data = json.dumps(value, ensure_ascii=chance.random() < 0.5).encode()
        found = count_structure(data, NO_LIMIT)
        assert (found.parts, found.quotes / 2) == count_by_parsing(value)
        assert found.escapes == data.count(b"\\")
        assert (found.outside_bytes == len(data)) == (found.quotes == 0)


def test_outside() -> None:
    """What is between strings is outside, their quotes are not."""
    assert count_structure(b' {"a": "b"} ', NO_LIMIT) == JsonStructure(6, 2, 4, 0)


def test_early_end() -> None:
    """Counting ends in the window in which a limit is exceeded."""
    data = b"[" * (1 << 20)
    found = count_structure(data, JsonStructure(1 << 60, 10, 1 << 60, 1 << 60))
    assert 10 < found.parts < len(data) / 4


MANY_LISTS = b"[" + b",".join([b"[]"] * 300_000) + b"]"  # 0.9 MB, and as objects 20 times as much


def measure_peak_bytes(parse: Callable[..., T], *args: Any) -> tuple[T, int]:
    """What `parse` gives, and the memory that it took."""
    tracemalloc.start()
    try:
        return parse(*args), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "member",
    [
        b'"kv_transfer_params": %b',
        b'"ec_transfer_params": null, "vllm_xargs": %b',
        b'"vllm_xargs": {"mine": %b, "kv_transfer_params": 1}',
        b'"model": %b',
        b'"stream": %b',
        b'"other": %b, "kv_transfer_params": 1',
    ],
)
def test_values_stay_raw(member: bytes) -> None:
    """No objects are built of a value, also when transfer parameters are removed."""
    data = b'{"model": "tiny", ' + member % MANY_LISTS + b"}"

    parsed, peak_bytes = measure_peak_bytes(parse_body, data, CHAT_PATH)

    assert not parsed.problem and peak_bytes < 4 * len(data)
    assert b"_transfer_params" not in parsed.data and json.loads(parsed.data)["model"]


def test_json_that_only_python_reads_is_bounded() -> None:
    """NaN is accepted in a small body; a large one is refused before it is built."""
    data = b'{"top_p": NaN, "a": ' + MANY_LISTS + b"}"
    parsed, peak_bytes = measure_peak_bytes(parse_body, data, CHAT_PATH)
    assert "NaN" in parsed.problem and peak_bytes < 2 * len(MANY_LISTS)

    small = parse_body(b'{"model": "tiny", "top_p": NaN, "kv_transfer_params": {}}', CHAT_PATH)
    assert (small.problem, small.model, small.data) == ("", "tiny", b'{"model":"tiny","top_p":NaN}')


@pytest.mark.parametrize("name", ["tools", "response_format", "stop", "prompt", "logit_bias"])
def test_legs_are_planned_on_raw_values(name: str) -> None:
    """No objects are built to see whether a field is set."""
    fields = {b"prompt": b'"x"', name.encode(): MANY_LISTS}
    data = b'{"model": "tiny", ' + b", ".join(b'"%b": %b' % each for each in fields.items()) + b"}"
    args = "/v1/completions", data, True, MODE_STRIP
    plan, peak_bytes = measure_peak_bytes(request_plan.plan_legs, *args)
    assert plan.legs and peak_bytes < 4 * len(data)


@pytest.mark.parametrize(
    ("value", "priority"),
    [
        (b"5", 5),
        (b"-3", -3),
        (b'"7"', 7),
        (b"5.0", 5),
        (b"null", 0),
        (b"[1]", 0),
        (b"1.5", 0),
        (b"9" * 30, 0),
        (b'3, "seed": NaN', 3),
    ],
)
def test_priority(value: bytes, priority: int) -> None:
    """The priority is read as vLLM reads it; what is none vLLM refuses; the body stays as it is."""
    body = b'{"model": "tiny", "priority": ' + value + b"}"
    parsed = parse_body(body)
    assert (parsed.priority, parsed.data) == (priority, body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"kv_transfer_params":{"do_\x88":true},"model":"m"}',
        b'{"model":"\x88","kv_transfer_params":{},"model":"m"}',
        b'{"vllm_xargs":{"ec_transfer_params":"\x88"},"model":"m"}',
    ],
)
def test_leaving_something_out_mends_no_body(body: bytes) -> None:
    """What vLLM refuses, because it is not UTF-8, is not made valid by leaving its bad part out."""
    parsed = request_body.parse_body(body)
    assert parsed.problem and parsed.data == body
