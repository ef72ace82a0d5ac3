# SPDX-License-Identifier: Apache-2.0
"""Requests to vLLM's real AsyncLLM without a server: traced, and their sums are what the caller's clock says.

It starts an engine of its own and runs only with `scripts/test --full`.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from lab import tiny_models
from lab.local_deployment import build_receiver_command
from lab.local_servers import LocalServer
from lab.server_commands import VllmOptions, build_vllm_environment

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
PROGRAM = Path(__file__).with_name("async_llm_calls.py")
ANSWERS = 8
WARM_UP = 2  # requests of which vLLM's and our first ones take longer


@pytest.fixture(scope="module")
def called(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[dict[str, str], dict[str, Any]]]:
    """What the program printed, by request, and what the receiver says of each request."""
    folder = tmp_path_factory.mktemp("direct")
    with LocalServer(build_receiver_command(folder / "spans.db")) as receiver:
        receiver.wait_until_ready()
        model = tiny_models.build_model(tiny_models.TEXT_RECIPE)
        environment = {
            **os.environ,
            **build_vllm_environment(VllmOptions(model)),
            "TTFT_OTEL": "1",
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url,
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        }
        done = subprocess.run(
            [sys.executable, str(PROGRAM), str(model), str(ANSWERS)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        lines = [line.split() for line in done.stdout.splitlines() if line.startswith("request ")]
        answer = httpx.get(f"{receiver.url}/api/requests", timeout=10)
        answer.raise_for_status()
        reports = {each["request_id"]: each for each in answer.json()}
        yield {name: text for _, name, text in lines}, reports


def test_sums(called: tuple[dict[str, str], dict[str, Any]]) -> None:
    """Stages add up, without those of HTTP; what the caller's clock has more is its own wake-up."""
    printed, reports = called
    beyond = []
    for number in range(WARM_UP, ANSWERS):
        report = reports[f"r-{number}"]
        stages = report["stages"]
        assert not {"receive", "egress"} & set(stages)
        assert report["unattributed_ms"] == 0.0
        assert sum(stages.values()) == pytest.approx(report["ttft_ms"], abs=0.01)
        beyond.append(int(printed[f"r-{number}"]) / 1000 - report["ttft_ms"])
    assert min(beyond) > 0  # the caller cannot have it before it was processed
    assert statistics.median(beyond) < statistics.median(
        reports[f"r-{number}"]["ttft_ms"] for number in range(WARM_UP, ANSWERS)
    )


def test_left(called: tuple[dict[str, str], dict[str, Any]]) -> None:
    """A request whose caller left is told as cancelled, and in which stage."""
    _, reports = called
    left = reports["left"]
    assert left["error"] == "cancelled"
    assert left["died_in"]
