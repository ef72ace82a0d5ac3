# SPDX-License-Identifier: Apache-2.0
"""What counts against an instance and what never does: the rows of the reference page."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from attack import test_upstream_faults

from router import fake_instances, raw_http
from router.fake_instances import InstancePlan
from ttft_otel.model.stages import ENCODE, MONO
from ttft_otel.router.upstream import failures

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reference" / "router-failures.md"
ALL_FAULTS = ROOT / "benchmarks" / "results" / "upstream-faults.md"


# Rows of the page: what happens, and the fault on a leg that makes it: of FAULTS, which are tried on all
# legs there, or one of `run_failing`.
ROWS = {
    "the connection is refused": ("refused", MONO),
    "the connection is closed or reset before the first byte": ("reset before head", MONO),
    "status 502, 503 or 504": ("status 503", MONO),
    "no first byte within `--first-byte-timeout`": ("hangs", MONO),
    "the answer breaks off": ("half body", MONO),
    "status 500, which media of a client can cause": ("status 500", ENCODE),
    "any other status": ("status 422", MONO),
    "a head that the router cannot read": ("garbage", MONO),
    "a header longer than `--max-answer-header-bytes`": ("huge headers", MONO),
    "an encoder's answer that the router cannot use": ("nonsense", ENCODE),
    "the router has no file descriptor, port or memory left": ("shortage", MONO),
    "the client leaves": ("client leaves", MONO),
    "an answer that has begun takes longer than `--total-timeout`": (
        "content length too long",
        MONO,
    ),
    "a kept connection is closed just as the request comes": ("closes kept connections", MONO),
}


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
    async with raw_http.run_instance(at_instance) as faulty:
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


@pytest.mark.parametrize(
    ("fault", "leg"), [each for each in ROWS.values() if each[0] not in raw_http.FAULTS]
)
async def test_what_never_counts(fault: str, leg: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The breaker opens at the first failure, and this is none."""
    async with (
        run_failing(fault) as url,
        raw_http.run_instance() as well,
        fake_instances.run_router(
            [well.url] if leg == ENCODE else [url],
            [url] if leg == ENCODE else [],
            failures=1,
            probe_interval_s=60.0,
        ) as router,
    ):
        await router.app.endpoint.upstream.health_monitor.wait_probed()
        (instance,) = router.fleet.get(ENCODE) or tuple(router.fleet)
        if fault == "shortage":
            use_up_descriptors(monkeypatch)
        task = asyncio.create_task(router.post_chat("a"))
        if fault == "client leaves":
            await asyncio.sleep(0.2)
            task.cancel()
        await asyncio.wait([task])
        await fake_instances.wait_until(lambda: not router.app.admission.requests_under_way)
        assert (instance.state, instance.breaker.state) == ("healthy", "closed")
        assert instance.breaker.consecutive_failures == 0


def test_the_page_tells_what_counts() -> None:
    """Each row says of its fault what the page of all faults, or the test above, has found."""
    section = re.search(r"## Whose fault\n(.*?)(?=\n## )", PAGE.read_text("utf-8"), re.DOTALL)
    assert section is not None
    told = dict(re.findall(r"^\| (.+?) \| (yes|no) \|", section[1], re.MULTILINE))
    assert list(told) == list(ROWS)
    found = test_upstream_faults.read_table(ALL_FAULTS.read_text("utf-8"))
    for row, (fault, leg) in ROWS.items():
        counts = any(
            outcome.breaker != "not counted"
            for cell, outcome in found.items()
            if (cell.fault, cell.leg) == (fault, leg)
        )
        assert told[row] == ("yes" if counts else "no"), row


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
        raw_http.run_instance("closes kept connections") as one,
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
