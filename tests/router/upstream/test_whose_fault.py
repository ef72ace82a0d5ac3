# SPDX-License-Identifier: Apache-2.0
"""What counts against an instance and what never does: a row of the reference page each."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from attack import faulty_instance

from router import fake_instances, raw_http
from router.fake_instances import InstancePlan
from ttft_otel.router.limits import RouterLimits
from ttft_otel.router.upstream import failures

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "router-failures.md"
LIMITS = RouterLimits(first_byte_timeout=0.5, total_timeout=1.0)


@dataclass(frozen=True, slots=True)
class FailureRow:
    """A row of the page: what happens, how it is made here, and whether it counts.

    fault: of tests/attack/faulty_instance.py, or one of `run_failing`.
    """

    text: str
    fault: str
    counts: bool
    leg: str = "mono"


ROWS = (
    FailureRow("the connection is refused", "refused", True),
    FailureRow(
        "the connection is closed or reset before the first byte", "reset before head", True
    ),
    FailureRow("status 502, 503 or 504", "status 503", True),
    FailureRow("no first byte within `--first-byte-timeout`", "hangs", True),
    FailureRow("the answer breaks off", "half body", True),
    FailureRow("status 500, which media of a client can cause", "status 500", False, "encode"),
    FailureRow("any other status", "status 422", False),
    FailureRow("a head that the router cannot read", "garbage", False),
    FailureRow("a header longer than `--max-answer-header-bytes`", "huge headers", False),
    FailureRow("an encoder's answer that the router cannot use", "nonsense", False, "encode"),
    FailureRow("the router has no file descriptor, port or memory left", "shortage", False),
    FailureRow("the client leaves", "client leaves", False),
    FailureRow(
        "an answer that has begun takes longer than `--total-timeout`",
        "content length too long",
        False,
    ),
    FailureRow(
        "a kept connection is closed just as the request comes", "closes kept connections", False
    ),
)


@contextlib.asynccontextmanager
async def run_failing(fault: str) -> AsyncIterator[str]:
    """The URL of an instance with this fault."""
    if fault == "nonsense":
        async with fake_instances.run_instance(
            InstancePlan({}, answers=lambda _: b"<html>")
        ) as instance:
            yield instance.url
        return
    at_instance = {"client leaves": "hangs", "shortage": ""}.get(fault, fault)
    async with faulty_instance.run_instance(at_instance) as faulty:
        yield faulty.url


def use_up_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every new connection of the router fail as if it had no file descriptor left."""

    async def fail_to_connect(
        _: object, *__: object, req: aiohttp.ClientRequest, **___: object
    ) -> None:
        raise aiohttp.ClientConnectorError(
            req.connection_key, OSError(errno.EMFILE, "Too many open files")
        )

    monkeypatch.setattr(aiohttp.TCPConnector, "_wrap_create_connection", fail_to_connect)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.text)
async def test_what_counts(row: FailureRow, monkeypatch: pytest.MonkeyPatch) -> None:
    """The breaker opens at the first failure, if it is one."""
    async with (
        run_failing(row.fault) as url,
        faulty_instance.run_instance() as well,
        fake_instances.run_router(
            [well.url] if row.leg == "encode" else [url],
            [url] if row.leg == "encode" else [],
            failures=1,
            pause_s=30.0,
            probe_interval_s=60.0,
            limits=LIMITS,
        ) as router,
    ):
        health_monitor = router.app.endpoint.upstream.health_monitor
        await health_monitor.wait_probed()
        await health_monitor.close()  # a probe would take the instance out meanwhile
        (instance,) = router.fleet.get("encode") or tuple(router.fleet)
        router.fleet.mark_healthy(instance)
        if row.fault == "shortage":
            use_up_descriptors(monkeypatch)
        task = asyncio.create_task(router.post_chat("a"))
        if row.fault == "client leaves":
            await asyncio.sleep(0.2)
            task.cancel()
        await asyncio.wait([task])
        if row.fault == "closes kept connections":
            await router.post_chat("a")
        await fake_instances.wait_until(lambda: not router.app.admission.requests_under_way)
        assert instance.breaker.state == ("open" if row.counts else "closed")
        if not row.counts:
            assert (instance.state, instance.breaker.consecutive_failures) == ("healthy", 0)


def test_the_page_has_these_rows() -> None:
    """Nothing counts, or does not, that the page does not tell."""
    section = re.search(r"## Whose fault\n(.*?)(?=\n## )", PAGE.read_text("utf-8"), re.DOTALL)
    assert section is not None
    told = re.findall(r"^\| (.+?) \| (yes|no) \|", section[1], re.MULTILINE)

    assert told == [(row.text, "yes" if row.counts else "no") for row in ROWS]


async def test_a_redirect_with_a_long_location_is_no_failure() -> None:
    """A client's long target comes back in a header; ten of them leave the instance as it is."""

    async def redirect_client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            target = head.split()[1]
            if target.startswith(b"/v1/chat"):
                writer.write(b"HTTP/1.1 307 X\r\nContent-Length: 0\r\n")
                writer.write(b"Location: %b\r\n\r\n" % (target * 20))
            else:
                writer.write(b"HTTP/1.1 200 X\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()

    server = await asyncio.start_server(redirect_client, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with fake_instances.run_router([url], failures=2) as router:
        # 20 times as long in the answer: within the limit, then beyond it
        for length, wanted in ((1000, 307), (5000, 502)):
            for _ in range(5):
                path = f"/v1/chat/completions?{'x' * length}"
                answer = await raw_http.send_bytes(router.url, raw_http.encode_request(path=path))
                assert raw_http.parse_status(answer) == wanted
        (instance,) = router.fleet
        assert (instance.state, instance.breaker.state) == ("healthy", "closed")
    server.close()


async def test_bad_media_are_retried_and_open_no_breaker() -> None:
    """A client's URL that no encoder can read costs two calls, each time, and nobody else anything."""
    plan = InstancePlan({}, status=500)
    async with fake_instances.run_routed_instances(
        [InstancePlan({})], [plan, plan], failures=2
    ) as (router, e1, e2, _):
        for _ in range(4):
            assert (await router.post_chat("http://192.0.2.1/none.png"))[0] == 500
        assert len(e1.received) == len(e2.received) == 4
        e1.plan = e2.plan = InstancePlan({})
        assert (await router.post_chat("http://192.0.2.1/good.png"))[0] == 200


def test_errors_in_logs_are_cut_and_printable() -> None:
    """What an instance sends is quoted in exceptions: no line of a log is made by it."""
    described = failures.describe_error(
        aiohttp.ClientOSError(1, f"a\r\nforged line\x1b[31m{'x' * 10_000}")
    )

    assert described.startswith("ClientOSError: ") and described.isprintable()
    assert len(described) <= failures.MAX_DESCRIPTION_CHARS + 1


async def test_without_file_descriptors_probes_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An instance that could not be asked stays as it was, and the client is told to come back."""
    async with (
        faulty_instance.run_instance() as one,
        fake_instances.run_router([one.url], probe_interval_s=60.0) as router,
    ):
        await router.get_json("/readyz")  # a connection to the router, which is kept
        await router.app.endpoint.upstream.health_monitor.wait_probed()
        (instance,) = router.fleet
        use_up_descriptors(monkeypatch)
        assert not await router.app.endpoint.upstream.health_monitor.probe_instance(instance)
        status, headers, body = await router.post_chat()
        assert (status, headers["Retry-After"]) == (503, "1")
        assert b"no free connection" in body
        assert (instance.state, instance.missed_probes) == ("healthy", 0)


async def test_a_breaker_that_closes_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Warnings are what somebody has to look at."""
    with caplog.at_level(logging.INFO, "ttft_otel"):
        async with (
            fake_instances.run_instance(InstancePlan({}, status=503)) as one,
            fake_instances.run_router([one.url], failures=1, pause_s=0.05) as router,
        ):
            await router.post_chat()
            (instance,) = router.fleet
            await fake_instances.wait_until(lambda: instance.breaker.state == "half-open")
            one.plan = InstancePlan({})
            assert (await router.post_chat())[0] == 200
    (closed,) = [each for each in caplog.records if "circuit breaker closed" in each.getMessage()]
    assert closed.levelno == logging.INFO
