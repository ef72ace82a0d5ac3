# SPDX-License-Identifier: Apache-2.0
"""The router command: flags, environment and YAML file become RouterOptions, or an error with its remedy.

As a process: SIGTERM drains it, SIGHUP reloads its instances, no request is cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import click
import pytest
from click.testing import CliRunner
from router import fake_instances
from router.fake_instances import STREAM_EVENTS, InstancePlan

from ttft_otel.commands.router import router_options
from ttft_otel.commands.router.command import command
from ttft_otel.model.names import env_names

INSTANCE_URL = "http://127.0.0.1:1"


def read_options(*flags: str) -> router_options.RouterOptions:
    """The options that these flags give; nothing is started."""
    return router_options.RouterOptions.from_flags(
        command.make_context("router", list(flags)).params
    )


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """Where a configuration may be written."""
    return tmp_path / "router.yaml"


def test_topologies() -> None:
    """The given --backend, --prefill, --decode and --encoder decide the legs; duplicates count once."""
    plain, d, p, e = (
        ["--backend", INSTANCE_URL],
        ["--decode", INSTANCE_URL],
        ["--prefill", INSTANCE_URL],
        ["--encoder", INSTANCE_URL],
    )
    assert list(read_options(*plain).build_instances()) == ["mono"]
    assert list(read_options(*plain, *e).build_instances()) == ["encode", "prefill_decode"]
    assert list(read_options(*p, *d).build_instances()) == ["prefill", "decode"]
    assert list(read_options(*e, *p, *d).build_instances()) == ["encode", "prefill", "decode"]
    assert (
        len(read_options(*plain, *plain, "--backend", INSTANCE_URL + "/").build_instances()["mono"])
        == 1
    )
    for wrong in ([], p, d, e, [*plain, *d], [*plain, *p, *d]):
        with pytest.raises(click.UsageError, match="either --backend, or --prefill and --decode"):
            read_options(*wrong).build_instances()


def test_order(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag takes precedence over its environment variable, that over the file, that over the default.

    Variables alone suffice; their lists are separated by blanks.
    """
    config_file.write_text(
        "retries: 1\nmax_body: 1\nreports: 1\ndrain-delay: 0.5\nbackend: [http://127.0.0.1:2]\n"
    )
    env = {"CONFIG": str(config_file), "RETRIES": "2", "MAX_BODY": "2", "ADMIN_TOKEN": "t"}
    for name, value in (env | {"BACKEND": f"{INSTANCE_URL} {INSTANCE_URL}"}).items():
        monkeypatch.setenv(f"TTFT_OTEL_ROUTER_{name}", value)
    made = read_options("--max-body", "3")
    assert (made.reports, made.retries, made.limits.max_body) == (1, 2, 3)
    assert (made.drain_delay, made.port, made.admin_token) == (0.5, 8000, "t")
    assert [each.url for each in made.build_instances()["mono"]] == [INSTANCE_URL]


def test_file_speaks_yaml(config_file: Path) -> None:
    """In the file lists are lists, keys may be numbers, and `off` is the text off, not false."""
    config_file.write_text(
        f"backend: [{INSTANCE_URL}]\nfirst-token: off\napi-key: [1234]\ntrust-trace-headers: yes"
    )
    made = read_options("--config", str(config_file))
    assert (made.backend, made.first_token) == ((INSTANCE_URL,), "off")
    assert (made.api_key, made.trust_trace_headers) == (("1234",), True)
    for text in ("admin-port: 70000", "port: x", "drain-timeout: -1", "first-token: maybe"):
        config_file.write_text(text)
        with pytest.raises(click.UsageError) as wrong:
            read_options("--config", str(config_file))
        assert f"'--{text.partition(':')[0]}'" in wrong.value.format_message()


def test_an_empty_key_opens_nothing(config_file: Path) -> None:
    """An empty --api-key, as from an unset variable, is refused; it would accept every client."""
    config_file.write_text("api-key: [null]")
    for flags in (["--api-key", ""], ["--api-key", " x"], ["--config", str(config_file)]):
        with pytest.raises(click.BadParameter, match="a key is empty"):
            read_options(*flags)
    assert read_options("--api-key", "x").api_key == ("x",)


def test_one_value_is_no_list(config_file: Path) -> None:
    """A list for an option with one value is reported in one sentence, at the start and at SIGHUP."""
    for text in ("retries: [1]", "retries: {a: 1}", "admin-token: [x]"):
        config_file.write_text(text)
        with pytest.raises(click.UsageError, match="is one value"):
            read_options("--config", str(config_file))


def test_numbers(config_file: Path) -> None:
    """Values that are no finite time or no whole number are refused, neither rounded nor kept."""
    for word in ("nan", "inf", "-inf"):
        with pytest.raises(click.BadParameter):
            read_options("--routing-logic", "ttft", "--slo-ttft-ms", word)
    for text in ("kv-aware-threshold: 1.5", "retries: 1.5", "slo-ttft-ms: .nan"):
        config_file.write_text(text)
        with pytest.raises(
            click.UsageError, match="not a whole number|not a finite number of milliseconds"
        ):
            read_options("--config", str(config_file))
    config_file.write_text("kv-aware-threshold: 15\nslo-ttft-ms: 1.5\nrouting-logic: kvaware")
    made = read_options("--config", str(config_file))
    assert (made.kv_aware_threshold, made.slo_ttft_ms) == (15, 1.5)


@pytest.mark.parametrize("name", ["a b", " a", "a\n", "a\r\nb", "a\0"])
def test_a_session_key_is_a_name(name: str) -> None:
    """A --session-key that cannot be a header name is refused: no request could have it."""
    with pytest.raises(click.BadParameter, match="leave out its blanks"):
        read_options("--routing-logic", "session", "--session-key", name)


def test_trust_has_both_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers' sampled flags are honoured only if the router's own or the general variable says so."""
    assert not read_options().trust_trace_headers
    monkeypatch.setenv(env_names.TTFT_OTEL_TRUST_SAMPLED, "1")
    assert read_options().trust_trace_headers
    monkeypatch.setenv("TTFT_OTEL_ROUTER_TRUST_TRACE_HEADERS", "0")
    assert not read_options().trust_trace_headers


def test_a_port_that_others_reach_needs_a_key() -> None:
    """Without a key the router listens on loopback only, unless --insecure is given."""
    backend = ("--backend", INSTANCE_URL)
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        read_options(*backend, "--host", host).check_exposure()
    for host in ("0.0.0.0", "::", "10.0.0.1", "router.example", ""):
        flags = (*backend, "--host", host)
        with pytest.raises(click.UsageError, match=r"needs --api-key KEY, or --insecure"):
            read_options(*flags).check_exposure()
        read_options(*flags, "--api-key", "k").check_exposure()
        read_options(*flags, "--insecure").check_exposure()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--host", "0.0.0.0"], "it needs --api-key KEY, or --insecure"),
        (["--admin-port", "1", "--admin-host", "0.0.0.0"], "it needs --admin-token TOKEN"),
        (["--discover", "dns://vllm"], "dns://SERVICE:PORT"),
        (["--discover", "k8s://prod/app=x"], "kubectl proxy"),
        (["--upstream-ca", "/none"], "/none: [Errno 2] No such file"),
        (["--upstream-ca", __file__], "these have to be PEM files"),
        (["--upstream-cert-key", "tls.key"], "needs --upstream-cert"),
        (["--shared-state", "http://store"], "write redis://"),
        (["--shared-state", "redis://:secret@"], "write redis://"),
        (["--shared-state", "redis://store/index"], "write redis://"),
        (["--shared-state", "rediss://store?ssl_cert_reqs=none"], "only ssl_ca_certs"),
        (["--shared-state", "rediss://store?ssl_ca_certs=/none"], "/none cannot be read"),
        (["--shared-state", "redis://store", "--shared-state-password-file", "/none"], "be read"),
        (["--shared-state-prefix", "mine"], "need --shared-state"),
    ],
)
def test_what_is_wrong_is_said(
    flags: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything listens, and without a password that may be in a URL."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    refused = CliRunner().invoke(command, ["--backend", INSTANCE_URL, *flags])
    assert refused.exit_code == 2 and words in " ".join(refused.output.split())
    assert "secret" not in refused.output


def test_the_client_of_a_store_is_not_imported() -> None:
    """It costs a router that shares nothing neither time nor memory."""
    code = (
        "import sys; from ttft_otel.commands.router.command import command\n"
        f"try: command(['--backend', {INSTANCE_URL!r}, '--host', '192.0.2.1', '--insecure'])\n"
        "finally: print('redis' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "False", done.stderr


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
    """SIGHUP applies other instances and keys; orders need the token; an open stream goes on where it is."""
    file = tmp_path / "router.yaml"
    async with (
        fake_instances.run_instance(InstancePlan(gap_s=0.6)) as a,
        fake_instances.run_instance(InstancePlan({})) as b,
    ):
        file.write_text(f"backend: [{a.url}]\nhealth-interval: 0.2\n")
        token = {"TTFT_OTEL_ROUTER_ADMIN_TOKEN": "t"}
        async with run_command(tmp_path, "--config", str(file), **token) as it:
            assert await it.get_status(f"{it.admin}/instances") == 401
            assert (await it.ask(f"{it.admin}/instances", Authorization="Bearer t"))[0] == 200
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
