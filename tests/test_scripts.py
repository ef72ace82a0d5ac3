# SPDX-License-Identifier: Apache-2.0
"""The scripts that README and CI name: there, sound, and (marked full) doing what they say."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import file_schedule
import jsonschema
import pytest
import tomllib

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(path for path in (ROOT / "scripts").iterdir() if path.suffix != ".txt")
SHELL = [*SCRIPTS, ROOT / ".ci" / "run"]
DEMO = (sys.executable, "-m", "lab.demo")
# Every process that a test starts inherits this variable, however deep and however detached.
MARK = "TTFT_OTEL_TEST_RUN"
GONE_S = 20.0


def test_scheduled_files() -> None:
    """Every file that the schedule names is there: one that was renamed would begin last."""
    named = (*itertools.chain(*file_schedule.SHARING_FILES), *file_schedule.LONG_FILES)
    assert [path for path in named if not (ROOT / path).is_file()] == []


def test_shell() -> None:
    """Each can be executed, has a license, says what it is for, and stops at the first error."""
    for path in SHELL:
        text = path.read_text("utf-8")
        assert os.access(path, os.X_OK), path
        assert text.startswith("#!/usr/bin/env bash\n# SPDX-License-Identifier: Apache-2.0\n# ")
        assert "set -euo pipefail" in text or path.name == "run", path
        assert subprocess.run(["bash", "-n", path], check=False).returncode == 0


def test_readme() -> None:
    """Every script that the README names is there, and so are the two that everybody needs."""
    named = set(re.findall(r"scripts/(\w+)", (ROOT / "README.md").read_text("utf-8")))

    assert {"demo", "test", *named} <= {path.name for path in SCRIPTS}


def test_ci() -> None:
    """CI calls scripts/test and nothing else."""
    lines = (ROOT / ".ci" / "run").read_text("utf-8").splitlines()
    commands = [line for line in lines if line and not line.startswith("#")]

    assert len(commands) == 1
    assert "scripts/test" in commands[0]


BUG = {"id": "CVE-1", "fix_versions": ["2"], "aliases": [], "description": ""}
AIOHTTP = {"name": "aiohttp", "version": "1"}
OWN = {"name": "ttft-otel", "skip_reason": "not found"}
# Does what scripts/sbom asks of uv, with what the test wants said.
FAKE_UV = """#!/usr/bin/env bash
case "$1 $2" in
  "venv "*) mkdir -p "${!#}/lib/python3.1/site-packages" ;;
  "pip "*) exit "$FAKE_INSTALL" ;;
esac
case "$*" in *pip-audit*) [ -z "$FAKE_REPORT" ] || printf %s "$FAKE_REPORT" >"${!#}" ;; esac
"""


@pytest.mark.parametrize(
    ("asked", "installed", "code", "words"),
    [
        ([AIOHTTP | {"vulns": []}, OWN], 0, 0, "1 of 1 packages audited, 0 advisories"),
        ([AIOHTTP | {"vulns": [BUG]}, OWN], 0, 1, "aiohttp 1: CVE-1, mended in 2"),
        ([AIOHTTP | {"skip_reason": "not found"}, OWN], 0, 3, "0 of 1 packages audited"),
        (None, 0, 3, "not audited, pip-audit has no data here"),
        ([], 1, 2, "is the package index reached?"),
    ],
)
def test_what_sbom_says_of_advisories(
    asked: list[object] | None, installed: int, code: int, words: str, tmp_path: Path
) -> None:
    """pip-audit ends well, with "none found", where it could ask about nothing: scripts/sbom does not."""
    program = tmp_path / "uv"
    program.write_text(FAKE_UV)
    program.chmod(0o755)
    done = subprocess.run(
        (ROOT / "scripts" / "sbom", "router", tmp_path / "sbom.json"),
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "FAKE_INSTALL": str(installed),
            "FAKE_REPORT": "" if asked is None else json.dumps({"dependencies": asked}),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    assert words in done.stdout + done.stderr


@pytest.mark.full
def test_sbom(tmp_path: Path) -> None:
    """It has all that the extras name and what these need, each with its version, in one graph."""
    target = tmp_path / "sbom.json"
    done = subprocess.run(
        (ROOT / "scripts" / "sbom", "router,serve", target), capture_output=True, text=True
    )
    if done.returncode == 2:
        pytest.skip(done.stderr)
    assert done.returncode in (0, 3), done.stdout
    bill = json.loads(target.read_text("utf-8"))
    assert (bill["bomFormat"], bill["metadata"]["component"]["name"]) == ("CycloneDX", "ttft-otel")
    parts = {each["bom-ref"]: each for each in bill["components"]}
    names = {ref: re.sub(r"[-_.]+", "-", each["name"]).lower() for ref, each in parts.items()}
    for ref, each in parts.items():
        assert each["purl"] == f"pkg:pypi/{names[ref]}@{each['version']}"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = {
        re.split(r"[\[>=; ]", each)[0]
        for each in (*project["dependencies"], *extras["router"], *extras["serve"])
    }
    assert wanted <= set(names.values())
    needs = {each["ref"]: each.get("dependsOn", []) for each in bill["dependencies"]}
    reached, waiting = set[str](), [bill["metadata"]["component"]["bom-ref"]]
    while waiting:
        ref = waiting.pop()
        if ref not in reached:
            reached.add(ref)
            waiting += needs[ref]
    assert parts.keys() <= reached


@pytest.mark.parametrize("module", ["demo", "compat"])
def test_help(module: str) -> None:
    """--help answers at once, with examples."""
    command = (sys.executable, "-m", f"lab.{module}", "--help")
    reported = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60
    ).stdout

    assert f"scripts/{module}" in reported
    assert "Examples:" in reported
    assert "Exit code" in reported


@pytest.fixture
def marked_environment() -> Iterator[dict[str, str]]:
    """An environment by which a test's processes are found; whatever is left fails the test."""
    run = uuid.uuid4().hex
    yield {**os.environ, MARK: run}
    deadline = time.monotonic() + GONE_S
    while (left := find_marked(run)) and time.monotonic() < deadline:
        time.sleep(0.5)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert left == {}


def find_marked(run: str) -> dict[int, str]:
    """Processes that carry the mark: pid -> command line."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if (
                entry.name.isdigit()
                and f"{MARK}={run}".encode() in (entry / "environ").read_bytes()
            ):
                line = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
                if line:  # a zombie has none
                    found[int(entry.name)] = line
    return found


@pytest.mark.full
@pytest.mark.live
@pytest.mark.timeout(900)
def test_demo(tmp_path: Path, marked_environment: dict[str, str]) -> None:
    """The demo closes every request, writes a report of the published shape, and leaves nothing."""
    done = subprocess.run(
        [*DEMO, "--json", "--out", tmp_path],
        env=marked_environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]

    # What users have, not what a CPU adds to each step: prompts that wait behind long ones.
    assert re.search("Where the time went: prefill.(queue|compute) ", done.stderr), done.stderr

    report = json.loads((tmp_path / "report.json").read_text("utf-8"))
    schema = json.loads((ROOT / "tests" / "golden" / "report.schema.json").read_text("utf-8"))
    jsonschema.validate(report, schema)
    assert json.loads(done.stdout) == report
    assert len(report["requests"]) >= 24
    for row in report["requests"]:
        assert row["closed"]
        total = sum(round(ms * 1000) for ms in row["stages"].values())
        assert total + round(row["unattributed_ms"] * 1000) == round(row["ttft_ms"] * 1000)
        legs = [*row["legs"].values(), *row["encode_all"]]
        assert not any(leg["unattributed_ms"] for leg in legs)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("report.json", "report.html", "spans.db", "logs")
    }


@pytest.mark.full
@pytest.mark.live
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(
    tmp_path: Path, marked_environment: dict[str, str], number: signal.Signals
) -> None:
    """Ctrl-C (or SIGTERM) while servers start ends all of them."""
    with subprocess.Popen(
        [*DEMO, "--out", tmp_path],
        env=marked_environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        try:
            wait_until(lambda: "vllm" in " ".join(find_marked(marked_environment[MARK]).values()))
            time.sleep(5)  # well into vLLM's imports, with children of its own
            process.send_signal(number)
            process.communicate(timeout=60)
        finally:
            process.kill()

    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]


def wait_until(true: Callable[[], bool], bound: float = 120.0) -> None:
    """Wait until something is the case."""
    deadline = time.monotonic() + bound
    while not true():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.2)
