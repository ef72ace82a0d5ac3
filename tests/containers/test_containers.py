# SPDX-License-Identifier: Apache-2.0
"""deploy/'s compose files and images on a real Docker engine: profiles, overlays, restarts, injection."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.certificates import make_certificate
from lab.container_engine import ContainerEngine, EngineError
from lab.container_images import list_named_images
from lab.stack.program_pins import CHECKOUT
from tests.containers.conftest import GRAFANA, ContainerStack, wait_for

pytestmark = pytest.mark.full

SERVICES = {
    "plain": {"collector"},
    "sampling": {"collector-sampling"},
    "scale-out": {"collector-tier1", "collector-a", "collector-b"},
}
STORES = {"tempo", "prometheus", "grafana"}
# An instance for the demo's router, on every address of the engine's network, until its input ends.
INSTANCE = """
import asyncio, sys
sys.path.insert(0, "tests")
from router.fake_instances import run_instance
async def main():
    async with run_instance(host="0.0.0.0") as instance:
        print(instance.url.rpartition(":")[2], flush=True)
        await asyncio.to_thread(sys.stdin.read)
asyncio.run(main())
"""


@pytest.mark.parametrize("profile", SERVICES)
def test_each_profile(stack: ContainerStack, profile: str, dashboards: dict[str, str]) -> None:
    """Up, healthy, a smoke trace passes every hop, and Grafana has each dashboard."""
    stack.start(profile)

    assert set(stack.list_services()) == SERVICES[profile] | STORES
    stack.check_smoke()
    for uid, title in dashboards.items():
        assert stack.fetch(f"{GRAFANA}/api/dashboards/uid/{uid}")["dashboard"]["title"] == title


def test_what_is_written_is_enforced(stack: ContainerStack) -> None:
    """Users, memory, capabilities and read-only file systems are the kernel's, and ports are on loopback."""
    stack.start("plain")
    expected = {"collector": "10001", "tempo": "10001", "prometheus": "65534", "grafana": "472"}
    for service, user in expected.items():
        pid = stack.inspect_container(service, "{{.State.Pid}}")
        status = dict(
            line.split(":\t", 1)
            for line in Path(f"/proc/{pid}/status").read_text("utf-8").splitlines()
            if ":\t" in line
        )
        assert status["Uid"].split()[0] == user, service
        assert int(status["CapEff"], 16) == 0, service
        assert status["NoNewPrivs"] == "1", service
        assert int(stack.inspect_container(service, "{{.HostConfig.Memory}}")) > 0
        assert stack.inspect_container(service, "{{.HostConfig.ReadonlyRootfs}}") == "true"
        mounts = Path(f"/proc/{pid}/mounts").read_text("utf-8").splitlines()
        (root,) = [line.split() for line in mounts if line.split()[1] == "/"]
        assert "ro" in root[3].split(","), service
    reported = stack.engine.run_inside("ss", "-Hltn")
    places = {line.split()[3] for line in reported.splitlines()}
    assert {"127.0.0.1:3000", "127.0.0.1:4317", "127.0.0.1:4318"} <= places
    assert not any(place.startswith(("0.0.0.0:", "*:", "[::]:")) for place in places)


def test_data_outlive_the_containers(stack: ContainerStack) -> None:
    """Down removes containers and keeps volumes: the trace and the metric of before are there afterwards."""
    stack.start("plain")
    stack.check_smoke()
    series = 'last_over_time(ttft_duration_seconds{job="ttft-smoke"}[1h])'
    traces = stack.find_traces("{}")
    assert traces and stack.count_series(series)
    stack.stop()
    assert not stack.list_services()
    stack.start("plain")

    wait_for(lambda: traces <= stack.find_traces("{}"))
    assert wait_for(lambda: stack.count_series(series))


def test_traces_are_found_soon(stack: ContainerStack) -> None:
    """Seconds after their end, 28 by Tempo's defaults; a Tempo without work logs no error."""
    stack.start("plain")
    seconds = []
    for _ in range(3):
        trace_id = stack.send_smoke_trace()
        sent = time.monotonic()
        wait_for(lambda trace_id=trace_id: trace_id in stack.find_traces("{}"))
        seconds.append(time.monotonic() - sent)
    # By default it would have asked for work in vain once, in 15 s.
    time.sleep(20)

    assert min(seconds) < 5 and max(seconds) < 15, seconds
    assert "level=error" not in stack.run_compose("logs", "--no-color", "tempo")


@pytest.fixture
def backend(engine: ContainerEngine) -> Iterator[str]:
    """The port of an instance beside the containers."""
    with subprocess.Popen(
        engine.enter_network((sys.executable, "-c", INSTANCE)),
        cwd=CHECKOUT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin and process.stdout
        yield process.stdout.readline().strip()
        process.stdin.close()


def test_demo(stack: ContainerStack, backend: str) -> None:
    """The router's image is built; a request through it is answered, and its trace arrives."""
    stack.start("demo", env={"TTFT_DEMO_BACKEND": f"http://host.docker.internal:{backend}"})
    assert stack.inspect_container("router", "{{.Config.User}}") == "10001:10001"
    wait_for(lambda: stack.fetch("http://127.0.0.1:8000/readyz"))
    model = stack.fetch("http://127.0.0.1:8000/v1/models")["data"][0]["id"]
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "hi"}]})
    stack.fetch(
        "http://127.0.0.1:8000/v1/chat/completions",
        "-H", "content-type: application/json", "-d", body,
    )  # fmt: skip

    assert wait_for(lambda: stack.find_traces('{ resource.service.name = "ttft-otel-router" }'))


SECURE = "deploy/docker-compose.secure.yml"
ADMIN = "deploy/docker-compose.admin.yml"
TOKEN = "a-token-for-tests"
PASSWORD = "a-password-for-tests"
SPAN = {
    "traceId": "5b8efff798038103d269b633813fc60c",
    "spanId": "eee19b7ec3c1b174",
    "name": "secured",
    "kind": 2,
    "startTimeUnixNano": "1",
    "endTimeUnixNano": "2",
}


@pytest.fixture
def secrets_env(tmp_path: Path) -> dict[str, str]:
    """The variables of the secure overlay, with files that the collector's user may read."""
    certificate, key = make_certificate(tmp_path, "IP:127.0.0.1,DNS:collector")
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n", "utf-8")
    for path in (certificate, key, token):
        path.chmod(0o644)
    return {
        "TTFT_OTLP_CERT": str(certificate),
        "TTFT_OTLP_KEY": str(key),
        "TTFT_OTLP_TOKEN": str(token),
        "TTFT_BIND": "0.0.0.0",
    }


@pytest.mark.parametrize("profile", ["plain", "sampling", "scale-out"])
def test_secure(stack: ContainerStack, secrets_env: dict[str, str], profile: str) -> None:
    """On every address the collector asks for TLS and the token, and the dashboards stay on loopback."""
    stack.start(profile, SECURE, env=secrets_env)
    places = {line.split()[3] for line in stack.engine.run_inside("ss", "-Hltn").splitlines()}
    assert {"0.0.0.0:4317", "0.0.0.0:4318", "127.0.0.1:3000"} <= places
    assert "0.0.0.0:3000" not in places

    def send_span(token: str, certificate: str) -> str:
        body = {"resourceSpans": [{"scopeSpans": [{"spans": [SPAN]}]}]}
        return stack.engine.run_inside(
            "curl", "-sS", "-o", "/dev/null", "-w", "%{http_code}", *certificate.split(),
            "-H", f"Authorization: Bearer {token}", "-H", "Content-Type: application/json",
            "-d", json.dumps(body), "https://127.0.0.1:4318/v1/traces",
        )  # fmt: skip

    trusted = f"--cacert {secrets_env['TTFT_OTLP_CERT']}"
    assert wait_for(lambda: send_span(TOKEN, trusted)) == "200"
    assert send_span("another", trusted) == "401"
    with pytest.raises(EngineError, match="certificate"):
        send_span(TOKEN, "")
    with pytest.raises(EngineError):
        stack.engine.run_inside(
            "curl", "-sS", "--fail", "http://127.0.0.1:4318/v1/traces", "-d", "{}"
        )


def test_admin(stack: ContainerStack, tmp_path: Path) -> None:
    """The password is that of the file, and what he changes outlives the containers."""
    secret = tmp_path / "password"
    secret.write_text(PASSWORD, "utf-8")
    secret.chmod(0o644)
    env = {"TTFT_GRAFANA_PASSWORD": str(secret)}
    stack.start("plain", ADMIN, env=env)
    jar = tmp_path / "cookies"

    def log_in(password: str) -> str:
        body = json.dumps({"user": "admin", "password": password})
        return stack.engine.run_inside(
            "curl", "-sS", "-o", "/dev/null", "-w", "%{http_code}", "-c", str(jar),
            "-H", "Content-Type: application/json", "-d", body, f"{GRAFANA}/login",
        )  # fmt: skip

    assert log_in("admin") == "401"
    assert log_in(PASSWORD) == "200"
    folder = json.dumps({"uid": "mine", "title": "Mine"})
    options = ("-b", str(jar), "-H", "Content-Type: application/json")
    stack.fetch(f"{GRAFANA}/api/folders", *options, "-d", folder)
    stack.stop()
    stack.start("plain", ADMIN, env=env)

    assert wait_for(lambda: log_in(PASSWORD)) == "200"
    assert stack.fetch(f"{GRAFANA}/api/folders/mine", *options)["title"] == "Mine"


PLAIN = ("collector", "tempo", "prometheus", "grafana")


def test_each_killed_container_comes_back(stack: ContainerStack) -> None:
    """kill -9 of one after the other; then a trace passes every hop again."""
    stack.start("plain")
    for service in PLAIN:
        pid = int(stack.inspect_container(service, "{{.State.Pid}}"))
        os.kill(pid, signal.SIGKILL)
        wait_for(
            lambda service=service, pid=pid: (
                stack.inspect_container(service, "{{.State.Pid}}") not in ("0", str(pid))
            )
        )
        assert stack.inspect_container(service, "{{.RestartCount}}") == "1"
        stack.wait_until_up(PLAIN)
    stack.check_smoke()


def test_the_collectors_queue_outlives_its_kill(stack: ContainerStack) -> None:
    """Traces that Tempo has not taken yet are on the volume: a killed collector sends them later."""
    stack.start("plain")
    stack.run_compose("stop", "--timeout", "5", "tempo")
    trace_id = stack.send_smoke_trace()
    # Written to disk before it is confirmed; a moment for the batch to get there.
    time.sleep(3)
    pid = int(stack.inspect_container("collector", "{{.State.Pid}}"))
    os.kill(pid, signal.SIGKILL)
    stack.run_compose("start", "tempo")
    stack.wait_until_up(PLAIN)

    wait_for(lambda: trace_id in stack.find_traces("{}"), 150)


def test_an_engine_that_restarts(stack: ContainerStack) -> None:
    """What ran before runs again, with its data, and without anybody's help."""
    stack.start("plain")
    stack.check_smoke()
    traces = stack.find_traces("{}")
    assert traces
    stack.engine.stop_engine()
    stack.engine.start()
    stack.wait_until_up(PLAIN)

    stack.check_smoke()
    wait_for(lambda: traces <= stack.find_traces("{}"))


IMAGE, VOLUME = "ttft-otel-inject", "injected"
# As vLLM does it in every process; ttft-otel itself is found where the plugin put it.
LOAD_PLUGIN = """
import importlib.metadata, json
(point,) = importlib.metadata.entry_points(group="vllm.general_plugins")
point.load()()
import ttft_otel
print(json.dumps({"plugin": point.name, "file": ttft_otel.__file__}))
"""


@pytest.fixture(scope="module")
def injected(engine: ContainerEngine) -> Iterator[str]:
    """A volume that an init container has filled, as any user."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    engine.run_docker(
        "build", "-f", "deploy/inject.Dockerfile", "--build-arg", f"PYTHONS={version}",
        "-t", IMAGE, ".",
    )  # fmt: skip
    engine.run_docker("volume", "create", VOLUME)
    # emptyDir belongs to everybody; a volume of Docker to root.
    engine.run_docker(
        "run", "--rm", "--user", "0", "-v", f"{VOLUME}:/v", "busybox:1.37.0", "chmod", "777", "/v"
    )
    engine.run_docker("run", "--rm", "--user", "4711:4711", "-v", f"{VOLUME}:/ttft-otel", IMAGE)
    yield VOLUME
    engine.run_docker("volume", "rm", VOLUME)


def test_the_switch(engine: ContainerEngine, injected: str) -> None:
    """A Python that never heard of us loads the plugin with two variables; read-only suffices."""
    (python,) = [name for name in list_named_images() if name.startswith("python:")]
    words = ("run", "--rm", "--read-only", "--tmpfs", "/tmp", "-v", f"{injected}:/ttft-otel:ro")
    reported = engine.run_docker(
        *words, "-e", "PYTHONPATH=/ttft-otel", "-e", "TTFT_OTEL=1", python,
        "python", "-c", LOAD_PLUGIN,
    )  # fmt: skip
    found = json.loads(reported.splitlines()[-1])

    assert found["plugin"] == "ttft_otel"
    assert found["file"].startswith("/ttft-otel/python")


def test_only_what_is_needed(engine: ContainerEngine) -> None:
    """The image has neither vLLM nor torch, and runs as a user without rights."""
    reported = engine.run_docker("run", "--rm", IMAGE, "ls", "/autoinstrumentation")
    (folder,) = [name for name in reported.split() if name.startswith("python3")]
    packages = engine.run_docker(
        "run", "--rm", IMAGE, "ls", f"/autoinstrumentation/{folder}"
    ).split()

    assert "ttft_otel" in packages
    assert not {"vllm", "torch"} & set(packages)
    assert "10001" in engine.run_docker("inspect", "--format", "{{.Config.User}}", IMAGE)
