# SPDX-License-Identifier: Apache-2.0
"""A real `vllm bench serve` through our router, and its result joined with our traces.

The instance is a stand-in that streams words: the load generator and the router are what is tried.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from lab import tiny_models
from lab.fake_vllm import word_server
from lab.local_deployment import build_receiver_command, build_router_command
from lab.local_servers import run_servers
from ttft_otel.commands.main import main
from ttft_otel.model.names import env_names

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]
REQUESTS = 12
ARRIVAL_S = 30.0  # until all spans must have come


@pytest.fixture
def router_url(tmp_path: Path) -> Iterator[str]:
    """A traced router; its spans are in spans.db."""
    server = word_server.StreamServer(("127.0.0.1", 0), word_server.StreamHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    instance = f"http://127.0.0.1:{server.server_address[1]}"
    with run_servers(build_receiver_command(tmp_path / "spans.db")) as (receiver,):
        sink = {env_names.TTFT_OTEL: "1", env_names.OTEL_EXPORTER_OTLP_ENDPOINT: receiver.url}
        with run_servers(build_router_command({"mono": [instance]}, sink)) as (router,):
            yield router.url
    server.shutdown()
    server.server_close()


def test_vllm_bench(router_url: str, tmp_path: Path) -> None:
    """Every request of the run is found, and its stages add up to the TTFT that vLLM's client measured."""
    named = {
        "backend": "openai-chat",
        "base-url": router_url,
        "endpoint": "/v1/chat/completions",
        "model": "tiny",
        "tokenizer": str(tiny_models.build_model(tiny_models.TEXT_RECIPE)),
        "dataset-name": "random",
        "random-input-len": 16,
        "random-output-len": 4,
        "num-prompts": REQUESTS,
        "max-concurrency": 3,
        "ready-check-timeout-sec": 0,
        "request-id-prefix": "joined-",
        "result-dir": tmp_path,
        "result-filename": "result.json",
    }
    words = [word for name, value in named.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", *words]
    subprocess.run(
        [*command, "--save-result", "--save-detailed", "--disable-tqdm"],
        check=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TTFT_OTEL": "0"},
    )
    asked = ["report", "--db", str(tmp_path / "spans.db"), "--join", str(tmp_path / "result.json")]
    # The router's exporter sends within a second, and more on a busy machine.
    until_s = time.monotonic() + ARRIVAL_S
    while True:
        done = CliRunner().invoke(main, [*asked, "--join-prefix", "joined-", "--json"])
        found = json.loads(done.stdout)
        if found.get("join", {}).get("joined") == REQUESTS or time.monotonic() > until_s:
            break
        time.sleep(0.5)
    assert done.exit_code == 0, done.output
    assert found["join"] == {"in_file": REQUESTS, "joined": REQUESTS, "not_in_file": 0}
    ttfts = json.loads((tmp_path / "result.json").read_text())["ttfts"]
    for each in found["requests"]:
        client_ms = 1000 * ttfts[int(each["request_id"].removeprefix("joined-"))]
        assert each["ttft_ms"] == pytest.approx(client_ms, abs=0.001)
        assert sum(each["stages"].values()) + each["unattributed_ms"] == pytest.approx(
            client_ms, abs=0.001
        )
        assert each["stages"]["outside"] >= -0.5, "a client waits for at least what the router took"
