# SPDX-License-Identifier: Apache-2.0
"""The router command as a process: SIGTERM drains it, SIGHUP reloads its instances, no request is cut."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from router import fake_instances
from router.fake_instances import STREAM_EVENTS, InstancePlan

from ttft_otel.model.names import env_names

START_TIMEOUT_S = 120  # a process takes its time to start where others are busy
COMMAND_CODE = "from ttft_otel.commands.router.command import command; command()"


class CommandProcess:
    """A router's process, who asks it, and what it logs; `admin` is the URL of its admin port."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        router: fake_instances.RunningRouter,
        admin: str,
        log: Path,
    ) -> None:
        self.process, self.router, self.admin, self.log = process, router, admin, log
        self.send_signal = process.send_signal

    def list_workers(self) -> list[int]:
        """Its children that run now."""
        pid = self.process.pid
        return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split())]

    async def wait_for_log(self, text: str, times: int = 1) -> None:
        """Wait until its log has these words."""
        while self.log.read_text().count(text) < times:
            await asyncio.sleep(0.02)

    async def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, bytes]:
        """Status and body of a GET, or a POST of `body`, on a connection of its own, so by any worker.

        path: with its host, if that is not the router's own port. The status is 0 for an answer that is cut
        and where nobody listens.
        """
        url = path if path.startswith("http:") else self.router.url + path
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            async with (
                aiohttp.ClientSession(headers=named) as client,
                client.request("GET" if body is None else "POST", url, json=body) as response,
            ):
                return response.status, await response.read()
        except aiohttp.ClientError:
            return 0, b""

    async def get_status(self, path: str) -> int:
        """The status of a GET."""
        return (await self.ask(path))[0]

    async def list_instances(self) -> dict[str, Any]:
        """The admin API's instances by URL."""
        _, body = await self.ask(f"{self.admin}/instances")
        return {each["url"]: each for each in json.loads(body)["instances"]}

    async def wait_for_all(
        self, count: int, is_right: Callable[[Any], object], answers: int = 10
    ) -> None:
        """Wait until `is_right` of the instances that so many workers show.

        Connections are spread by chance: `answers` in a row for each of them miss one once in millions.
        """
        right = 0
        while right < answers * count:
            right = right + 1 if is_right(await self.list_instances()) else 0
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def run_command(folder: Path, *flags: str, **env: str) -> AsyncIterator[CommandProcess]:
    """The command with these flags, once it answers; killed at the end if it still runs."""
    url, admin = fake_instances.find_unused_url(), fake_instances.find_unused_url()
    ports = ("--port", url.rpartition(":")[2], "--admin-port", admin.rpartition(":")[2])
    log = folder / "log"
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", COMMAND_CODE, *ports, *flags),
            env={**os.environ, env_names.TTFT_OTEL: "0", **env},
            stderr=file,
        )
    try:
        async with aiohttp.ClientSession() as client:
            made = CommandProcess(
                process, fake_instances.RunningRouter(client, url, []), admin, log
            )
            while await made.get_status("/healthz") != 200:
                assert process.returncode is None, log.read_text()
                await asyncio.sleep(0.1)
            yield made
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_drain(tmp_path: Path) -> None:
    """After SIGTERM /readyz fails, new requests get 503, the open stream is completed, exit status is 0."""
    async with (
        fake_instances.run_instance(InstancePlan(gap_s=1.0)) as one,
        run_command(tmp_path, "--backend", one.url) as it,
    ):
        stream = asyncio.create_task(it.router.post_chat())
        while not one.received:
            await asyncio.sleep(0.01)
        assert await it.get_status("/readyz") == 200
        assert not it.list_workers(), "one process needs no other"
        it.send_signal(signal.SIGTERM)
        await it.wait_for_log("shutting down: 1 requests in flight may finish within 30 s")
        assert await it.get_status("/readyz") == 503
        assert await it.get_status("/healthz") == 200
        await asyncio.sleep(0.2)
        status, headers, body = await it.router.post_chat()
        assert (status, headers["Retry-After"]) == (503, "1")
        assert "shutting down" in json.loads(body)["error"]["message"]
        assert len(one.received) == 1
        assert (await stream)[2] == b"".join(STREAM_EVENTS)
        assert await it.process.wait() == 0


async def test_drain_delay(tmp_path: Path) -> None:
    """During --drain-delay new requests are served, while /readyz already fails."""
    async with fake_instances.run_instance(InstancePlan({})) as one:
        async with run_command(tmp_path, "--backend", one.url, "--drain-delay", "1.5") as it:
            it.send_signal(signal.SIGTERM)
            await it.wait_for_log("shutting down")
            assert await it.get_status("/readyz") == 503
            assert (await it.router.post_chat())[0] == 200
            assert await it.process.wait() == 0


@pytest.mark.parametrize("second", [True, False])
async def test_drain_timeout(tmp_path: Path, second: bool) -> None:
    """After --drain-timeout, or a second signal, open streams are cut, at the instance as well."""
    async with fake_instances.run_instance(InstancePlan(gap_s=25)) as one:
        limit = "60" if second else "0.5"
        async with run_command(tmp_path, "--backend", one.url, "--drain-timeout", limit) as it:
            stream = asyncio.create_task(it.router.post_chat())
            while not one.received:
                await asyncio.sleep(0.01)
            it.send_signal(signal.SIGTERM)
            if second:
                await it.wait_for_log("shutting down")
                it.send_signal(signal.SIGTERM)
            assert await it.process.wait() == 0
            with pytest.raises(aiohttp.ClientError):
                await stream
            await asyncio.sleep(0.1)
            assert one.received[0].cancelled_us


async def test_reload(tmp_path: Path) -> None:
    """SIGHUP applies other instances and keys; an open stream goes on at its instance."""
    file = tmp_path / "router.yaml"
    async with (
        fake_instances.run_instance(InstancePlan(gap_s=0.6)) as a,
        fake_instances.run_instance(InstancePlan({})) as b,
    ):
        file.write_text(f"backend: [{a.url}]\nhealth-interval: 0.2\n")
        async with run_command(tmp_path, "--config", str(file)) as it:
            stream = asyncio.create_task(it.router.post_chat())
            while not a.received:
                await asyncio.sleep(0.01)
            file.write_text(f"backend: [{b.url}]\napi-key: [k]\nmax-body: 9\n")
            it.send_signal(signal.SIGHUP)
            await it.wait_for_log(f"added {b.url}; removed {a.url}")
            await it.wait_for_log(
                "restart the router to apply the new --max-body, --health-interval"
            )
            assert (await it.router.post_chat())[0] == 401
            assert (await it.router.post_chat(Authorization="Bearer k"))[0] == 200
            assert (len(a.received), len(b.received)) == (1, 1)
            assert (await stream)[2] == b"".join(STREAM_EVENTS)


async def test_a_bad_file_changes_nothing(tmp_path: Path) -> None:
    """A file with an error leaves the configuration as it was; the log names the error and its remedy."""
    file = tmp_path / "router.yaml"
    async with fake_instances.run_instance(InstancePlan({})) as a:
        file.write_text(f"backend: [{a.url}]\n")
        async with run_command(tmp_path, "--config", str(file)) as it:
            wrong = (
                ("backend: [", "is not valid YAML"),
                ("- backend", "write one `flag: value` per line"),
                ("", "write one `flag: value` per line"),
                (f"backends: [{a.url}]", "'backends' is not one of admin-host"),
                (f"backend: {a.url}", f"write `backend: [{a.url}]`"),
                ("backend: [localhost]", "write it like http://127.0.0.1:8001"),
                (f"backend: [{a.url}]\nretries: many", "'--retries'"),
                (f"backend: [{a.url}]\nhost: 0.0.0.0", "can be reached from other machines"),
                ("port: 1", "Give either --backend, or --prefill and --decode together"),
                (
                    f"backend: [{a.url}]\nencoder: [{a.url}]",
                    "change the legs from mono to encode, prefill_decode",
                ),
            )
            for number, (text, words) in enumerate(wrong, 1):
                file.write_text(text)
                it.send_signal(signal.SIGHUP)
                await it.wait_for_log("configuration reload failed", number)
                assert words in it.log.read_text(), text
            file.unlink()
            it.send_signal(signal.SIGHUP)
            await it.wait_for_log("No such file")
            assert (await it.router.post_chat())[0] == 200
            assert (
                b'ttft_otel_router_reloads_total{result="failed"} 11.0'
                in (await it.ask("/metrics"))[1]
            )


async def test_everything_by_environment(tmp_path: Path) -> None:
    """Environment variables alone start the router; flags override them, and they override the file."""
    file = tmp_path / "router.yaml"
    file.write_text("backend: [http://127.0.0.1:1]\napi-key: [file]\nport: 1\n")
    async with fake_instances.run_instance(InstancePlan({})) as one:
        env = {"CONFIG": str(file), "BACKEND": f"{one.url} {one.url}", "ADMIN_TOKEN": "t"}
        named = {f"TTFT_OTEL_ROUTER_{name}": value for name, value in env.items()}
        async with run_command(tmp_path, "--api-key", "flag", **named) as it:
            assert (await it.router.post_chat(Authorization="Bearer file"))[0] == 401
            assert (await it.router.post_chat(Authorization="Bearer flag"))[0] == 200
            instances = f"{it.admin}/instances"
            assert await it.get_status(instances) == 401
            status, said = await it.ask(instances, Authorization="Bearer t")
            assert status == 200
            assert [each["url"] for each in json.loads(said)["instances"]] == [one.url]


async def test_wrong_telemetry_serves(tmp_path: Path) -> None:
    """What of OpenTelemetry's variables cannot be followed is told once each, and requests are served."""
    wrong = {"OTEL_TRACES_EXPORTER": "console", "OTEL_TRACES_SAMPLER_ARG": "half"}
    traced = {env_names.TTFT_OTEL: "1", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    async with fake_instances.run_instance(InstancePlan({})) as one:
        flags = ("--backend", one.url, "--workers", "2")
        async with run_command(tmp_path, *flags, **traced, **wrong) as it:
            assert (await it.router.post_chat())[0] == 200
            log = it.log.read_text()
            assert log.count("OTEL_TRACES_EXPORTER names console") == 1
            assert log.count("OTEL_TRACES_SAMPLER_ARG='half' is not a ratio") == 1
