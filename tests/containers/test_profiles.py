# SPDX-License-Identifier: Apache-2.0
"""Every profile of docker-compose.yml in containers: healthy, a trace through each hop, limits at work."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.container_engine import ContainerEngine
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
