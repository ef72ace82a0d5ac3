# SPDX-License-Identifier: Apache-2.0
"""Large bodies are parsed in a thread; those beyond the limits are not parsed at all."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from ttft_otel.router.disagg import body_parser
from ttft_otel.router.disagg.body_parser import MAX_STRUCTURE, BodyParser
from ttft_otel.router.disagg.request_body import RequestBody, parse_body

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

    monkeypatch.setattr(body_parser, "_parse_heavy", parse_slowly)

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
