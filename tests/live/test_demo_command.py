# SPDX-License-Identifier: Apache-2.0
"""`ttft-otel demo` with a real vLLM: ten traced requests in a database, and nothing left running."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from lab import tiny_models
from lab.server_commands import VllmOptions, build_vllm_environment
from ttft_otel.commands.demo import REQUESTS
from ttft_otel.commands.main import main
from ttft_otel.report.store.database_reader import RequestFilter, open_reader


@pytest.mark.full  # a server of its own
@pytest.mark.timeout(900)
def test_ten_requests_of_ones_own(tmp_path: Path) -> None:
    """It starts vLLM, some of ten requests wait for a place, sums are exact; the slowest one is named."""
    model = tiny_models.build_model(tiny_models.TEXT_RECIPE)
    mark = f"OF_THIS_TEST={tmp_path}"  # inherited by whatever it starts
    env = {
        **os.environ,
        **dict([mark.split("=")]),
        **build_vllm_environment(VllmOptions(model=model, runner="v1")),
    }
    database = tmp_path / "spans.db"
    words = [*("demo", "--model", str(model), "--db", str(database)), "--", "--enforce-eager"]
    done = subprocess.run(
        [sys.executable, "-m", "ttft_otel.commands.main", *words],
        env=env,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    with open_reader(database) as reader:
        found = reader.list_latest(RequestFilter())
    asked = [each for each in found if each.request_id.startswith("demo-")]
    slowest = max(asked, key=lambda each: each.ttft_us)

    assert len(asked) == REQUESTS and all(each.closed for each in found)
    assert any(dict(each.list_wait_reasons("prefill.queue")).get("max_num_seqs") for each in asked)
    (asking,) = re.findall(r"ttft-otel (explain .*)$", done.stdout, re.M)
    assert asking.split()[-1] == slowest.request_id
    answered = CliRunner().invoke(main, asking.split())
    assert answered.exit_code == 0 and "prefill.queue has" in answered.output, answered.output
    assert not list_processes(mark)


def list_processes(mark: str) -> list[str]:
    """Processes that have this line in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended
            if mark.encode() in path.read_bytes():
                found.append(path.parent.name)
    return found
