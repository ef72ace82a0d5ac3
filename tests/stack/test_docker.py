# SPDX-License-Identifier: Apache-2.0
"""`scripts/stack` with containers: what it asks of docker, and what it says when docker cannot.

No daemon runs where these tests do: a script in docker's place notes what it is asked and answers like it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lab.stack.command import main
from lab.stack.program_pins import CHECKOUT

FILE = str(CHECKOUT / "docker-compose.yml")
SERVICES = (
    {"Service": "collector", "State": "running", "Health": "", "Status": "Up 2 minutes"},
    {"Service": "tempo", "State": "running", "Health": "starting", "Status": "Up 2 seconds"},
)
DOCKER = """#!/bin/sh
echo "$@" >> "$NOTES"
case " $* " in
  *" $REFUSED "*) echo "no such thing" >&2; exit 1;;
  *" ps "*) cat "$SERVICES";;
esac
"""

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run scripts/stack with a stub of `docker`.

    refused: the word at which the stub exits with an error.
    """
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text(DOCKER, "utf-8")
    docker.chmod(0o755)
    services = tmp_path / "services"
    services.write_text("\n".join(json.dumps(each) for each in SERVICES), "utf-8")
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    monkeypatch.setenv("SERVICES", str(services))

    def run_stack(*words: str, refused: str = "-", path: str = "") -> Result:
        monkeypatch.setenv("PATH", path or f"{docker.parent}:/usr/bin:/bin")
        monkeypatch.setenv("REFUSED", refused)
        return CliRunner().invoke(main, [*words, "--data", str(tmp_path / "data")])

    return run_stack


def read_docker_call(tmp_path: Path) -> str:
    """The last command line that the stub got."""
    return (tmp_path / "notes").read_text("utf-8").splitlines()[-1]


def test_up(run: Run, tmp_path: Path) -> None:
    """Up starts the compose file's containers, with the profiles asked for, and waits for them."""
    done = run("up", "--profile", "sampling")

    assert 0 == done.exit_code
    assert f"compose --file {FILE} --profile sampling up --detach --wait" == read_docker_call(
        tmp_path
    )
    assert "http://127.0.0.1:3000" in done.output


def test_down(run: Run, tmp_path: Path) -> None:
    """Down stops the containers of every profile and keeps their volumes."""
    assert 0 == run("down").exit_code
    assert f"compose --file {FILE} --profile * down" == read_docker_call(tmp_path)


def test_status(run: Run) -> None:
    """A container whose health check has not passed is not ready; one without a check is when it runs."""
    done = run("status", "--json")
    found = json.loads(done.output)

    assert 1 == done.exit_code
    assert ("containers", False) == (found["mode"], found["ready"])
    assert [("collector", True), ("tempo", False)] == [
        (part["name"], part["ready"]) for part in found["parts"]
    ]


@pytest.mark.parametrize(
    ("refused", "reported"),
    [
        ("version", "docker compose is missing; install Docker with its compose plugin"),
        ("info", "the Docker daemon does not answer"),
        ("up", f"`docker compose --file {FILE} up --detach --wait` failed"),
    ],
)
def test_refused(run: Run, refused: str, reported: str) -> None:
    """When docker refuses, one line says what is missing and names a way without docker."""
    done = run("up", refused=refused)

    assert 1 == done.exit_code
    assert reported in done.output
    assert ("scripts/stack up --native" in done.output) == (refused != "up")


def test_absent(run: Run, tmp_path: Path) -> None:
    """Without docker `up` names the remedy, and `down` and `status` report that nothing runs."""
    nothing = str(tmp_path / "data")

    assert "scripts/stack up --native" in run("up", path=nothing).output
    assert "Nothing to stop" in run("down", path=nothing).output
    assert "Nothing runs" in run("status", path=nothing).output


def test_smoke(run: Run) -> None:
    """Smoke without a stack names the first hop that fails and where to look."""
    done = run("smoke", "--timeout", "0")

    assert 1 == done.exit_code
    assert "scripts/stack status" in done.output
    assert isinstance(done.exception, SystemExit)


@pytest.mark.parametrize("command", ["", "build", "up", "down", "status", "smoke"])
def test_help(command: str) -> None:
    """--help answers at once and says what the command does; examples where there are options to combine."""
    reported = (
        CliRunner().invoke(main, [*command.split(), "--help"], prog_name="scripts/stack").output
    )

    assert f"Usage: scripts/stack {command}".strip() in reported
    assert ("Examples:" in reported) == (command in ("", "build", "up", "smoke"))
