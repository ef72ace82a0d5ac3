# SPDX-License-Identifier: Apache-2.0
"""`ttft-otel stack`: the folder that it writes, what it asks of docker, and what it says when docker cannot.

No daemon runs where these tests do: a script in docker's place notes what it is asked and answers like it.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lab.http_servers import HttpServerThread, SilentHandler
from ttft_otel.commands.stack import stack
from ttft_otel.stack import stack_folder, stack_queries

RUNNING = (
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
def folder(tmp_path: Path) -> Path:
    """A folder that `init` has written."""
    stack_folder.write_folder(tmp_path / "stack")
    return tmp_path / "stack"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command with a stub of `docker`, whose last command line is in `notes`.

    refused: the word at which the stub exits with an error. services: what it says is running.
    """
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text(DOCKER, "utf-8")
    docker.chmod(0o755)
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    monkeypatch.setenv("SERVICES", str(tmp_path / "services"))
    monkeypatch.setenv("PATH", f"{docker.parent}:/usr/bin:/bin")
    # Not the ports of whatever runs beside this test.
    monkeypatch.setattr(stack_folder, "PORTS", {})

    def run_stack(
        *words: str | Path, refused: str = "-", services: tuple[dict[str, str], ...] = ()
    ) -> Result:
        (tmp_path / "services").write_text("\n".join(json.dumps(each) for each in services))
        monkeypatch.setenv("REFUSED", refused)
        return CliRunner().invoke(stack, [str(word) for word in words])

    return run_stack


def test_up_ports(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that another program has is named before containers are started; those of the stack are not."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setattr(stack_folder, "PORTS", {port: "stack"})
        taken = run("up", folder)
        again = run("up", folder, services=RUNNING)

    assert 1 == taken.exit_code and f"ports in use: {port} (stack)" in taken.output
    assert 0 == again.exit_code


def test_status(run: Run, folder: Path) -> None:
    """A container whose health check has not passed is not ready; one without a check is when it runs."""
    done = run("status", folder, "--json", services=RUNNING)
    found = json.loads(done.output)

    assert 1 == done.exit_code
    assert found["ready"] is False and found["outdated"] == found["edited"] == []
    assert found["parts"] == {"collector": True, "tempo": False}
    assert "Nothing runs" in run("status", folder).output


@pytest.mark.parametrize(
    ("refused", "reported"),
    [
        ("version", "docker compose is missing; install Docker with its compose plugin"),
        ("info", "the Docker daemon does not answer"),
        ("up", "up --detach --wait` failed"),
    ],
)
def test_refused(run: Run, folder: Path, refused: str, reported: str) -> None:
    """When docker refuses, one line says what is missing and names a way without docker."""
    done = run("up", folder, refused=refused)

    assert 1 == done.exit_code
    assert reported in done.output
    assert ("scripts/stack up" in done.output) == (refused != "up")


@pytest.mark.parametrize("command", ["up", "down", "status"])
def test_no_folder(run: Run, tmp_path: Path, command: str) -> None:
    """A folder that `init` did not write is refused, with the command that writes it."""
    done = run(command, tmp_path)

    assert 1 == done.exit_code
    assert f"ttft-otel stack init {tmp_path}" in done.output


def test_versions(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version of the package is told by `status`; `init` replaces its files, not those edited."""
    edited, renewed = folder / ".env", folder / "docker-compose.yml"
    edited.write_text("TTFT_SLO_MS=200\n", "utf-8")
    stamp = json.loads((folder / stack_folder.STAMP_FILE).read_text("utf-8"))
    renewed.write_text("# of another version\n", "utf-8")
    stamp["files"]["docker-compose.yml"] = stack_folder.compute_digest(renewed)
    gone = folder / "grafana" / "prometheus" / "rules" / "gone.yml"
    gone.write_text("groups: []\n", "utf-8")
    stamp["files"]["grafana/prometheus/rules/gone.yml"] = stack_folder.compute_digest(gone)
    stamp["version"] = "0.0.9"
    (folder / stack_folder.STAMP_FILE).write_text(json.dumps(stamp), "utf-8")

    before = run("status", folder)
    written = run("init", folder)
    after = run("status", folder)

    assert "files are of ttft-otel 0.0.9, and 2 differ" in before.output
    assert "kept, because it was edited: .env" in written.output
    assert edited.read_text("utf-8") == "TTFT_SLO_MS=200\n" and not gone.exists()
    assert renewed.read_bytes() == (stack_folder.find_root() / "docker-compose.yml").read_bytes()
    assert "differ" not in after.output
    assert 0 == run("init", folder, "--force").exit_code
    assert "TTFT_SLO_MS=200" not in edited.read_text("utf-8")


def test_foreign_files(run: Run, tmp_path: Path) -> None:
    """Files that `init` did not write are not touched, unless --force says so."""
    (tmp_path / "README.md").write_text("mine\n", "utf-8")
    done = run("init", tmp_path)

    assert 1 == done.exit_code and "README.md" in done.output
    assert (tmp_path / "README.md").read_text("utf-8") == "mine\n"
    assert not (tmp_path / "docker-compose.yml").exists()


def test_mounts(folder: Path) -> None:
    """Every file that a compose file of the folder mounts or builds from is in the folder."""
    texts = [path.read_text("utf-8") for path in folder.rglob("docker-compose*.yml")]
    mounted = {name for text in texts for name in re.findall(r"- (\./[^:]+):", text)}
    built = {name for text in texts for name in re.findall(r"dockerfile: ([^\s}]+)", text)}

    assert len(texts) == 4 and len(mounted) > 10 and built
    assert not [name for name in {*mounted, *built} if not (folder / name).exists()]


def test_smoke(run: Run) -> None:
    """Smoke without a stack names the first hop that fails and where to look."""
    nobody = "http://127.0.0.1:9"
    done = run("smoke", "--timeout", "0", "--otlp", nobody, "--grafana", nobody)

    assert 1 == done.exit_code
    assert "ttft-otel stack status" in done.output and "Errno" not in done.output
    assert isinstance(done.exception, SystemExit)


def test_up_and_down(run: Run, folder: Path, tmp_path: Path) -> None:
    """Up starts containers with the profiles and overlays asked for; down stops all, and keeps volumes."""
    notes, compose = tmp_path / "notes", f"compose --file {folder}/docker-compose.yml"
    done = run("up", folder, "--profile", "sampling", "--with", "alerts")

    assert 0 == done.exit_code, done.output
    overlay = folder / "deploy" / "docker-compose.alerts.yml"
    words = f"{compose} --file {overlay} --profile sampling up --detach --wait"
    assert notes.read_text("utf-8").splitlines()[-1] == words and overlay.is_file()
    assert "http://127.0.0.1:3000" in done.output
    assert 0 == run("down", folder).exit_code
    words = f"{compose} --profile * down --remove-orphans"
    assert notes.read_text("utf-8").splitlines()[-1] == words


@pytest.fixture
def redirecting() -> Iterator[SimpleNamespace]:
    """A server that sends who asks /first on to another name of this host; `seen`: credentials by path."""
    made = SimpleNamespace(seen={}, place="")

    class Redirecting(SilentHandler):
        def do_GET(self) -> None:
            made.seen[self.path] = self.headers.get("authorization", "")
            if self.path == "/first":
                self.send_answer(302, location=f"http://localhost:{server.server_port}/second")
            else:
                self.send_answer(200, b"[]")

        do_POST = do_GET

    with HttpServerThread(Redirecting) as server:
        made.place = server.url.removeprefix("http://")
        yield made


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    "user, token", [("", "secret"), ("admin@", "secret"), ("admin:secret@", "")]
)
def test_credentials_stay(redirecting: Any, user: str, token: str, method: str) -> None:
    """A Grafana that leads elsewhere does not lead the token or password there."""
    url = f"http://{user}{redirecting.place}/first"
    body = b"{}" if method == "POST" else None
    found = stack_queries.send_body(url, body, "application/json", method, token)

    assert found == b"[]" and redirecting.seen["/first"] and not redirecting.seen["/second"]
