# SPDX-License-Identifier: Apache-2.0
"""`ttft-otel demo`: the shipped requests are whole, the commands that it names answer; a vLLM is told."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner

from ttft_otel.commands import serve
from ttft_otel.commands.main import main

NEEDED_REQUESTS = 56
MAX_RECORDED_BYTES = 150_000


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The three commands that the demo prints, in words, on a database that it wrote."""
    database = tmp_path_factory.mktemp("demo") / "spans.db"
    done = CliRunner().invoke(main, ["demo", "--recorded", "--db", str(database)])
    assert done.exit_code == 0, done.output
    return [shlex.split(line)[1:] for line in done.output.splitlines() if "--db" in line]


def test_recorded() -> None:
    """The file is small, and its requests end when asked; stages add up in each."""
    end_ns = time.time_ns()
    spans = serve.read_recorded(end_ns)
    trunks = [span for span in spans if span.is_ttft_span]

    assert serve.RECORDED.stat().st_size < MAX_RECORDED_BYTES
    assert max(span.end_ns for span in spans) == end_ns
    assert len({span.trace_id for span in trunks}) == NEEDED_REQUESTS
    for attributes in (span.attributes for span in trunks):
        parts = [us for name, us in attributes.items() if serve.keys.parse_stage_attribute(name)]
        assert sum(parts) == attributes[serve.keys.TOTAL_US]


def test_report(told: list[list[str]]) -> None:
    """The first command has all requests, the second explains the slowest, the third compares two halves."""

    def run(*words: str) -> str:
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 0, done.output
        return done.output

    report, explain, diff = told
    answer = run(*explain)
    assert f"{NEEDED_REQUESTS} requests" in run(*report)
    assert json.loads(run(*report, "--json"))["summary"]["closed"]
    # The stage that has its time, and who held it.
    assert explain[-1] in answer and "has 78%" in answer and "Held longest by" in answer
    assert re.search(r"A:\s+28 requests.*B: 28 requests", run(*diff), re.S)


def test_page() -> None:
    """Without --db there is a page on loopback until Ctrl-C, and nothing is left."""
    words = (sys.executable, "-m", "ttft_otel.commands.main", "demo", "--recorded")
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(5)]
        url = re.findall(r"http://127\.0\.0\.1:\d+", lines[-1])
        folder = Path(lines[1].split()[-1]).parent
        try:
            with urllib.request.urlopen(url[0], timeout=60) as answer:
                page = answer.read().decode()
            assert "demo-28" in page and folder.is_dir()
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert not folder.exists()


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without vLLM it says what to do; a file that is there is not touched."""
    (taken := tmp_path / "spans.db").write_bytes(b"mine")
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda _: None)

    refused = CliRunner().invoke(main, ["demo"])
    assert refused.exit_code == 2 and "`ttft-otel demo --recorded`" in refused.output
    monkeypatch.undo()
    assert CliRunner().invoke(main, ["demo", "--recorded", "--db", str(taken)]).exit_code == 2
    assert taken.read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (serve.MODEL, "vLLM downloads it, 1.5 GB, from Hugging Face unless"),
        ("m", "vLLM downloads it from Hugging Face unless"),
        ("/", ""),  # of a folder's model nothing is downloaded
    ],
)
def test_a_server_that_does_not_start(
    model: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it downloads is said before; the end of its log is shown, with what needs no network."""
    monkeypatch.setattr(serve.sys, "executable", str(fake := tmp_path / "python"))
    fake.write_text("#!/bin/sh\necho no such model: $4\nexit 3\n")
    fake.chmod(0o755)
    failed = CliRunner().invoke(main, ["demo", "--model", model, "--db", str(tmp_path / "a.db")])

    assert failed.exit_code == 1
    before, _, after = failed.output.partition("vLLM did not start")
    assert told in before and ("downloads" in before) is bool(told)
    assert f"no such model: {model}" in after
    shown = (before, after) if told else (after,)
    assert all("--model FOLDER" in text and "--recorded" in text for text in shown)
