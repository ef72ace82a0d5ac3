# SPDX-License-Identifier: Apache-2.0
"""The command as a process: SIGTERM drains it, SIGHUP changes its fleet, nothing is dropped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from router import fakes
from router.fakes import EVENTS, Plan
from ttft_otel import names

SECONDS = 120  # a process takes its time to start where others are busy
CODE = "from ttft_otel.router.command import command; command()"


class Process:
    """A router's process, who asks it, and what it logs."""

    def __init__(
        self, process: asyncio.subprocess.Process, router: fakes.Router, log: Path
    ) -> None:
        self.process, self.router, self.log = process, router, log

    def tell(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    async def said(self, words: str, times: int = 1) -> None:
        """Wait until its log has these words."""
        while self.log.read_text().count(words) < times:
            await asyncio.sleep(0.02)

    async def answers(self, path: str) -> int:
        """The status of a GET on a connection of its own; 0 when nobody listens."""
        try:
            async with aiohttp.ClientSession() as client:
                async with client.get(f"{self.router.url}{path}") as response:
                    return response.status
        except aiohttp.ClientError:
            return 0


@contextlib.asynccontextmanager
async def started(folder: Path, *flags: str, **env: str) -> AsyncIterator[Process]:
    """The command with these flags, once it answers; killed at the end if it still runs."""
    port = fakes.unused().rpartition(":")[2]
    log = folder / "log"
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", CODE, "--port", port, *flags),
            env={**os.environ, names.ENV_ON: "0", **env},
            stderr=file,
        )
    try:
        async with aiohttp.ClientSession() as client:
            made = Process(process, fakes.Router(client, f"http://127.0.0.1:{port}", []), log)
            while await made.answers("/healthz") != 200:
                assert process.returncode is None, log.read_text()
                await asyncio.sleep(0.1)
            yield made
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def test_drain(tmp_path: Path) -> None:
    """On SIGTERM not ready at once, nothing new, the stream under way whole; then it ends with 0."""

    async def scenario() -> None:
        async with (
            fakes.instance(Plan(gap=1.0)) as one,
            started(tmp_path, "--backend", one.url) as it,
        ):
            stream = asyncio.create_task(it.router.chat())
            while not one.seen:
                await asyncio.sleep(0.01)
            assert await it.answers("/readyz") == 200
            it.tell(signal.SIGTERM)
            await it.said("stopping; 1 requests have 30 s to end")
            assert await it.answers("/readyz") == 503
            assert await it.answers("/healthz") == 200
            await asyncio.sleep(0.2)
            status, headers, body = await it.router.chat()
            assert (status, headers["Retry-After"]) == (503, "1")
            assert "shutting down" in json.loads(body)["error"]["message"]
            assert len(one.seen) == 1
            assert (await stream)[2] == b"".join(EVENTS)
            assert await it.process.wait() == 0

    fakes.run(scenario, SECONDS)


def test_drain_delay(tmp_path: Path) -> None:
    """While the load balancer has not noticed yet, new requests are served, though it is not ready."""

    async def scenario() -> None:
        async with fakes.instance(Plan({})) as one:
            async with started(tmp_path, "--backend", one.url, "--drain-delay", "1.5") as it:
                it.tell(signal.SIGTERM)
                await it.said("stopping")
                assert await it.answers("/readyz") == 503
                assert (await it.router.chat())[0] == 200
                assert await it.process.wait() == 0

    fakes.run(scenario, SECONDS)


@pytest.mark.parametrize("second", [True, False])
def test_drain_timeout(tmp_path: Path, second: bool) -> None:
    """After the time-out, or a second signal, a stream that does not end is cut, at its server too."""

    async def scenario() -> None:
        async with fakes.instance(Plan(gap=25)) as one:
            limit = "60" if second else "0.5"
            async with started(tmp_path, "--backend", one.url, "--drain-timeout", limit) as it:
                stream = asyncio.create_task(it.router.chat())
                while not one.seen:
                    await asyncio.sleep(0.01)
                it.tell(signal.SIGTERM)
                if second:
                    await it.said("stopping")
                    it.tell(signal.SIGTERM)
                assert await it.process.wait() == 0
                with pytest.raises(aiohttp.ClientError):
                    await stream
                await asyncio.sleep(0.1)
                assert one.seen[0].cancelled

    fakes.run(scenario, SECONDS)


def test_reload(tmp_path: Path) -> None:
    """SIGHUP: other instances and keys, the stream under way goes on where it is."""

    async def scenario() -> None:
        file = tmp_path / "router.yaml"
        async with fakes.instance(Plan(gap=0.6)) as a, fakes.instance(Plan({})) as b:
            file.write_text(f"backend: [{a.url}]\nhealth-interval: 0.2\n")
            async with started(tmp_path, "--config", str(file)) as it:
                stream = asyncio.create_task(it.router.chat())
                while not a.seen:
                    await asyncio.sleep(0.01)
                file.write_text(f"backend: [{b.url}]\napi-key: [k]\nmax-body: 9\n")
                it.tell(signal.SIGHUP)
                await it.said(f"added {b.url}; removed {a.url}")
                await it.said("only a restart changes --max-body, --health-interval")
                assert (await it.router.chat())[0] == 401
                assert (await it.router.chat(Authorization="Bearer k"))[0] == 200
                assert (len(a.seen), len(b.seen)) == (1, 1)
                assert (await stream)[2] == b"".join(EVENTS)

    fakes.run(scenario, SECONDS)


def test_a_bad_file_changes_nothing(tmp_path: Path) -> None:
    """The old fleet goes on, and the log says what is wrong and what would be right."""

    async def scenario() -> None:
        file = tmp_path / "router.yaml"
        async with fakes.instance(Plan({})) as a:
            file.write_text(f"backend: [{a.url}]\n")
            async with started(tmp_path, "--config", str(file)) as it:
                wrong = (
                    ("backend: [", "is no YAML"),
                    ("- backend", "write `flag: value`"),
                    ("", "write `flag: value`"),
                    (f"backends: [{a.url}]", "'backends' is not one of admin-port"),
                    (f"backend: {a.url}", f"write `backend: [{a.url}]`"),
                    ("backend: [localhost]", "write it like http://127.0.0.1:8001"),
                    (f"backend: [{a.url}]\nretries: many", "'--retries'"),
                    ("port: 1", "Give either --backend, or --prefill and --decode together"),
                    (
                        f"backend: [{a.url}]\nencoder: [{a.url}]",
                        "the legs were mono and would be encode, prefill_decode",
                    ),
                )
                for number, (text, words) in enumerate(wrong, 1):
                    file.write_text(text)
                    it.tell(signal.SIGHUP)
                    await it.said("nothing is changed", number)
                    assert words in it.log.read_text(), text
                file.unlink()
                it.tell(signal.SIGHUP)
                await it.said("No such file")
                assert (await it.router.chat())[0] == 200
                async with it.router.client.get(f"{it.router.url}/metrics") as response:
                    text = await response.text()
                assert 'ttft_otel_router_reloads_total{result="failed"} 10.0' in text

    fakes.run(scenario, SECONDS)


def test_everything_by_environment(tmp_path: Path) -> None:
    """Variables alone start it; a flag beats its variable, that beats the file."""

    async def scenario() -> None:
        file = tmp_path / "router.yaml"
        file.write_text("backend: [http://127.0.0.1:1]\napi-key: [file]\nport: 1\n")
        async with fakes.instance(Plan({})) as one:
            env = {"CONFIG": str(file), "BACKEND": f"{one.url} {one.url}", "ADMIN_TOKEN": "t"}
            named = {f"TTFT_OTEL_ROUTER_{name}": value for name, value in env.items()}
            admin = fakes.unused()
            flags = ("--admin-port", admin.rpartition(":")[2], "--api-key", "flag")
            async with started(tmp_path, *flags, **named) as it:
                assert (await it.router.chat(Authorization="Bearer file"))[0] == 401
                assert (await it.router.chat(Authorization="Bearer flag"))[0] == 200
                for given, wanted in (({}, 401), ({"Authorization": "Bearer t"}, 200)):
                    url = f"{admin}/instances"
                    async with it.router.client.get(url, headers=given) as response:
                        assert response.status == wanted
                        said = await response.json()
                assert [each["url"] for each in said["instances"]] == [one.url]

    fakes.run(scenario, SECONDS)
