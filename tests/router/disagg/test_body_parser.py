# SPDX-License-Identifier: Apache-2.0
"""Large bodies are parsed in a thread; those beyond the limits are not parsed at all."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from ttft_otel.router.disagg import request_body
from ttft_otel.router.disagg.request_body import (
    MAX_STRUCTURE,
    BodyParser,
    JsonStructure,
    RequestBody,
    count_structure,
    parse_body,
)

T = TypeVar("T")
TEXT = b'{"model": "tiny", "stream": true, "input": "%b"}'
IDS = b'{"model": "tiny", "prompt": [%b1]}'


def run_parser(work: Callable[[BodyParser], Awaitable[T]]) -> T:
    """What `work` with a new parser gives."""

    async def run_work() -> T:
        return await work(BodyParser())

    return asyncio.run(run_work())


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
def test_heavy_bodies(data: bytes, is_heavy: bool) -> None:
    """The result is that of parse_body(), whichever thread it comes from."""
    parsed = run_parser(lambda parser: parser.parse(data))
    assert parsed.is_heavy == is_heavy
    expected = parse_body(data)
    expected.is_heavy = is_heavy
    assert parsed == expected


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
def test_too_much(inner: bytes) -> None:
    """A body beyond any of the limits is not parsed and counts as unreadable."""
    parsed = run_parser(lambda parser: parser.parse(IDS % inner))
    assert "The body has more than" in parsed.problem
    text = inner.replace(b"\\", b"").replace(b'"', b"")
    assert not run_parser(lambda parser: parser.parse(TEXT % text)).problem


def test_thread() -> None:
    """What parses a heavy body once more runs in the thread, too; for others there is none."""

    async def find_threads(parser: BodyParser) -> list[str]:
        bodies = [RequestBody(b"{}", is_heavy=is_heavy) for is_heavy in (False, True)]
        return [(await parser.run_on(each, threading.current_thread)).name for each in bodies]

    threads = run_parser(find_threads)
    assert threads[0] == threading.current_thread().name
    assert threads[1].startswith("ttft-otel-json")


def test_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose client disconnected while it waited for the parser is not parsed any more."""
    begun, may_end, parsed = threading.Event(), threading.Event(), []

    def parse_slowly(data: bytes, path: str) -> RequestBody:
        begun.set()
        may_end.wait(30)
        parsed.append(data)
        return RequestBody(data)

    monkeypatch.setattr(request_body, "_parse_heavy", parse_slowly)

    async def leave(parser: BodyParser) -> None:
        first = asyncio.create_task(parser.parse(IDS % (b"1," * 600_000)))
        await asyncio.to_thread(begun.wait, 30)
        second = asyncio.create_task(parser.parse(IDS % (b"2," * 600_000)))
        await asyncio.sleep(0.01)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        may_end.set()
        await first
        await parser.run_on(RequestBody(b"", is_heavy=True), len, b"")

    run_parser(leave)
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
