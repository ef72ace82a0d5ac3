# SPDX-License-Identifier: Apache-2.0
"""Instances that send interim answers (100, 103) or statuses that are none: the client gets a clear 502."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging

import pytest
from router import fake_instances, raw_http

EARLY = b"HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n"
HEAVY = b"HTTP/1.1 103 Early Hints\r\nlink: " + b"a" * 30_000 + b"\r\n\r\n"
GOOD = raw_http.encode_head(200, len(raw_http.ANSWER_BODY)) + raw_http.ANSWER_BODY


class ScriptedInstance:
    """Answers a POST with `answer`, or with `part` without end if that is given."""

    def __init__(self, answer: bytes, part: bytes = b"") -> None:
        self.answer, self.part, self.sent_bytes = answer, part, 0

    async def handle_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve one request."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            is_get = (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET")
            if is_get:
                body = raw_http.MODELS_BODY
                writer.write(raw_http.encode_head(200, len(body)) + body)
            else:
                writer.write(self.answer)
                while self.part:
                    writer.write(self.part)
                    await writer.drain()
                    self.sent_bytes += len(self.part)
            await writer.drain()
        writer.close()


async def ask(instance: ScriptedInstance) -> tuple[int, bytes, int]:
    """Status and body that a client gets, and the failures that the instance's breaker has counted."""
    async with raw_http.listen(instance.handle_connection) as url:
        async with fake_instances.run_router([url], probe_interval_s=60.0, failures=100) as router:
            status, _, body = await asyncio.wait_for(router.post_chat(), 20)
            (found,) = router.fleet
            return status, body, found.breaker.consecutive_failures


@pytest.mark.parametrize("part", [EARLY * 1000, EARLY, HEAVY, EARLY.replace(b"link: a\r\n", b"")])
async def test_endless(part: bytes) -> None:
    """Endless interim answers are 502 at once, and count against the instance, which can send little."""
    instance = ScriptedInstance(b"", part)
    status, body, failures = await ask(instance)
    assert (status, failures) == (502, 1)
    assert json.loads(body)["error"]["message"] == "The mono instance failed: ClientPayloadError."
    assert instance.sent_bytes < 16 << 20


@pytest.mark.parametrize("interim", [b"", EARLY, EARLY * 16, HEAVY * 2])
async def test_a_few(interim: bytes) -> None:
    """The control: a few of them, and large ones, are passed over, and the answer is the client's."""
    status, body, failures = await ask(ScriptedInstance(interim + GOOD))
    assert (status, failures) == (200, 0)
    assert body == raw_http.ANSWER_BODY


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (b"HTTP/1.1 000 X\r\nContent-Length: 2\r\n\r\n{}", 502),
        (b"HTTP/1.1 099 X\r\nContent-Length: 2\r\n\r\n{}", 502),
        (b"HTTP/1.1 101 X\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", 502),
        (b"HTTP/1.1 600 X\r\nContent-Length: 2\r\n\r\n{}", 502),
        (b"HTTP/1.1 999 X\r\nContent-Length: 2\r\n\r\n{}", 502),
        (b"HTTP/1.1 304 X\r\nContent-Length: 2\r\n\r\n", 502),
        (b"HTTP/1.1 204 X\r\nContent-Length: 2\r\n\r\n", 502),
        (b"HTTP/1.1 599 X\r\nContent-Length: 2\r\n\r\n{}", 599),
        (b"HTTP/1.1 304 X\r\n\r\n", 304),
        (b"HTTP/1.1 204 X\r\nContent-Length: 0\r\n\r\n", 204),
    ],
)
async def test_statuses(head: bytes, expected: int, caplog: pytest.LogCaptureFixture) -> None:
    """What is no status, or has a length but no body, is 502 and counted; others are the client's."""
    with caplog.at_level(logging.WARNING):
        status, _, failures = await ask(ScriptedInstance(head))
    assert (status, failures) == (expected, int(expected == 502))
    assert not any(record.exc_info for record in caplog.records)
