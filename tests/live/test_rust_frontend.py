# SPDX-License-Identifier: Apache-2.0
"""vLLM's Rust front-end before a real engine core: the core's own spans, alone and behind our router.

Runs with `scripts/test --full` where there is a binary: `vllm-rs` of the wheel `vllm`, whose path is in
VLLM_RUST_FRONTEND_PATH. It may be of another release than the engine core.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from lab import server_commands, tiny_models
from lab.local_deployment import build_receiver_command, build_router_command
from lab.local_servers import LocalServer, run_servers
from lab.server_commands import VllmOptions
from ttft_otel.hooks import target_check

BINARY = os.environ.get("VLLM_RUST_FRONTEND_PATH", "")
pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not os.access(BINARY, os.X_OK),
        reason="no VLLM_RUST_FRONTEND_PATH: python3 -m pip download 'vllm==0.32.*' --no-deps, then "
        "python3 -m zipfile -e vllm-*.whl /tmp/vllm-wheel; chmod +x /tmp/vllm-wheel/vllm/vllm-rs; "
        "run this test with VLLM_RUST_FRONTEND_PATH=/tmp/vllm-wheel/vllm/vllm-rs",
    ),
]
BODY = {"model": "tiny", "prompt": "hello world " * 40, "max_tokens": 4, "stream": True}
ARRIVAL_S = 20.0  # until a span must have come


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LocalServer]]:
    """A receiver, vLLM with the Rust front-end, and our router before it."""
    folder = tmp_path_factory.mktemp("rust")
    receiver = build_receiver_command(folder / "spans.db")
    env = {
        "TTFT_OTEL": "1",
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{receiver.host}:{receiver.port}",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
    }
    rust = {target_check.RUST_FRONTEND: "1", "VLLM_RUST_FRONTEND_PATH": BINARY}
    model = tiny_models.build_model(tiny_models.TEXT_RECIPE)
    vllm = server_commands.build_mono_command(VllmOptions(model, env={**env, **rust}))
    router = build_router_command({"mono": [f"http://{vllm.host}:{vllm.port}"]}, env)
    with run_servers(receiver, vllm, router, timeout=600, logs=folder / "logs") as started:
        yield {each.name: each for each in started}


def ask(url: str, **headers: str) -> float:
    """Milliseconds until the answer's first bytes."""
    # A client's own start, with TLS, takes longer than the request.
    with httpx.Client(timeout=60) as client:
        begun, first = time.monotonic(), 0.0
        with client.stream("POST", f"{url}/v1/completions", json=BODY, headers=headers) as got:
            assert got.status_code == 200, got.read()
            for _ in got.iter_raw():
                first = first or time.monotonic() - begun
    return first * 1000


def find_reports(servers: dict[str, LocalServer], count: int) -> list[dict[str, Any]]:
    """The receiver's requests, once there are `count` of them."""
    until = time.monotonic() + ARRIVAL_S
    while time.monotonic() < until:
        answer = httpx.get(f"{servers['receiver'].url}/api/requests", timeout=10)
        answer.raise_for_status()
        found = answer.json()
        if len(found) >= count:
            return list(found)
        time.sleep(0.2)
    raise AssertionError(f"{len(found)} of {count} requests: {found}")


def test_engine_core_alone(servers: dict[str, LocalServer]) -> None:
    """Of a request to the front-end: the engine core's stages, within what the client has waited."""
    waited_ms = ask(servers["mono"].url, **{"x-request-id": "alone"})
    (report,) = find_reports(servers, 1)

    assert "alone" in report["request_id"]
    assert {"prefill.queue", "prefill.compute", "sample", "output"} <= set(report["stages"])
    assert not {"receive", "preprocess", "ipc", "egress"} & set(report["stages"])
    total = sum(report["stages"].values()) + report["unattributed_ms"]
    assert total == pytest.approx(report["ttft_ms"], abs=0.01)
    assert report["ttft_ms"] < waited_ms


def test_behind_our_router(servers: dict[str, LocalServer]) -> None:
    """One request, whose sum is the client's, with the engine core's stages in it."""
    before = len(find_reports(servers, 1))
    waited_ms = ask(servers["router"].url)
    time.sleep(3)  # the engine core's span and the router's come by two exporters
    found = find_reports(servers, before + 1)
    assert len(found) == before + 1, found
    report = next(each for each in found if "router" in each["roles"])

    assert {"router.route", "mono.prefill.queue", "mono.prefill.compute"} <= set(report["stages"])
    total = sum(report["stages"].values()) + report["unattributed_ms"]
    assert total == pytest.approx(report["ttft_ms"], abs=0.01)
    assert 0 < report["unattributed_ms"] < report["ttft_ms"] < waited_ms


def test_said_at_the_start(servers: dict[str, LocalServer]) -> None:
    """In the server's log: once what is not seen, and once who sends."""
    text = servers["mono"].log_path.read_text(errors="replace")

    assert text.count(f"{target_check.RUST_FRONTEND} is set") == 1
    assert text.count("front-end without its hooks") == 1
