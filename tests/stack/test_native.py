# SPDX-License-Identifier: Apache-2.0
"""`scripts/stack up`, status, smoke and down, as an operator runs them, on real programs."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, Self

import pytest

from lab import session_processes
from lab.stack import grafana_server, native_stack, native_state
from lab.stack.binaries import StackBinaries
from lab.stack.stack_parts import StackAddresses
from tests.stack.running_stack import wait_until

STACK: Final = (sys.executable, "-m", "lab.stack")
LOOPBACK: Final = "0100007F"  # 127.0.0.1, the lowest byte first
PARTS: Final = ("prometheus", "tempo", "collector")
# Spans become metrics when the collector flushes: not fifteen seconds for a test.
ENV: Final = {**os.environ, "TTFT_METRICS_INTERVAL": "1s"}


class StackTerminal:
    """A running `up --native`, stopped at the end of the block whatever the test did to it.

    out: the file with its output.
    """

    def __init__(self, data: Path) -> None:
        self.data = data
        self.out = data.parent / f"{data.name}.out"
        with self.out.open("wb") as sink:
            words = (*STACK, "up", "--free-ports", "--data", str(data))
            self.process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=ENV
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)

    def read_output(self) -> str:
        """All that it has printed."""
        return self.out.read_text("utf-8")

    def run_command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run another command of scripts/stack on the same data folder, as from a second terminal."""
        command = (*STACK, *words, "--data", str(self.data))
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)

    def read_programs(self) -> dict[str, int]:
        """Name -> process id, from the state file, once it is written."""
        found = wait_until(lambda: native_state.read_state(self.data), 60)
        assert found
        return {name: pid for name, (pid, _) in found.programs.items()}


def list_processes(leaders: Iterable[int]) -> list[int]:
    """Process ids of programs and of their children that run."""
    return [pid for leader in leaders for pid in session_processes.list_session_pids(leader)]


def list_listening_addresses(leader: int) -> set[str]:
    """Addresses on which a program and its children listen, as /proc writes them."""
    found = set()
    for pid in list_processes([leader]):
        links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
        own = {link[8:-1] for link in links if link.startswith("socket:[")}
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and words[9] in own:
                    found.add(words[1].partition(":")[0])
    return found


@pytest.fixture(scope="module")
def up(
    binaries: StackBinaries, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StackTerminal]:
    """A native stack on free ports, ready."""
    with StackTerminal(tmp_path_factory.mktemp("native") / "data") as made:
        ended = made.process.poll
        wait_until(lambda: "Ctrl-C stops everything" in made.read_output() or ended(), 150)
        assert ended() is None, made.read_output()
        yield made


def test_up(up: StackTerminal) -> None:
    """Its terminal and `status` show each part, ready, on the loopback alone; a second `up` is refused."""
    reported = up.read_output()
    for part in PARTS:
        assert re.search(rf"^{part} +http://127.0.0.1:\d+ +ready after \d", reported, re.M)
    assert "scripts/stack smoke" in reported
    assert "Dashboards: http://" in reported or grafana_server.GRAFANA_REMEDY in reported

    status = up.run_command("status", "--json")
    found: dict[str, Any] = json.loads(status.stdout)
    assert status.returncode == 0 and found["ready"] is True
    assert {*PARTS} <= {part["name"] for part in found["parts"]}
    assert all(part["ready"] for part in found["parts"])

    for leader in up.read_programs().values():
        assert list_listening_addresses(leader) == {LOOPBACK}

    again = up.run_command("up")
    assert again.returncode == 1
    assert "scripts/stack down stops it" in again.stderr
    assert up.process.poll() is None


def test_smoke(up: StackTerminal) -> None:
    """One trace goes through every hop, and each says so."""
    done = up.run_command("smoke", "--json", "--timeout", "30")
    verdicts = {each["hop"]: each for each in json.loads(done.stdout)}

    assert 0 == done.returncode, verdicts
    assert {
        "collector takes OTLP",
        "Tempo finds it by TraceQL",
        "Prometheus has its TTFT",
    } <= verdicts.keys()


@pytest.mark.full
def test_lost(up: StackTerminal) -> None:
    """While a part does not answer, status and smoke name it and its remedy."""
    stopped = up.read_programs()["tempo"]
    os.kill(stopped, signal.SIGSTOP)
    try:
        hung = up.run_command("smoke", "--timeout", "1")
    finally:
        os.kill(stopped, signal.SIGCONT)

    assert 1 == hung.returncode
    assert re.search(r"FAIL +Tempo finds it.*collector's log", hung.stdout)
    assert re.search(r"ok +collector takes OTLP", hung.stdout)


def test_down(up: StackTerminal) -> None:
    """Down stops it from another terminal, also what a killed `up` left: no process, port or state."""
    leaders = up.read_programs().values()
    up.process.kill()
    up.process.wait(60)
    assert len(list_processes(leaders)) >= len(PARTS)
    done = up.run_command("down")

    assert (0, "The stack is down.\n") == (done.returncode, done.stdout)
    wait_until(lambda: not list_processes(leaders), 10)
    assert 1 == up.run_command("status").returncode
    assert "no stack on these data" in up.run_command("down").stdout


def test_interrupt(binaries: StackBinaries, tmp_path: Path) -> None:
    """Ctrl-C during the start stops everything and is not an error."""
    with StackTerminal(tmp_path / "data") as started:
        leaders = started.read_programs()
        started.process.send_signal(signal.SIGINT)
        code = started.process.wait(60)

    assert 0 == code
    assert "Stopped." in started.read_output()
    assert not list_processes(leaders.values())
    assert native_state.read_state(tmp_path / "data") is None


@pytest.mark.full
def test_died(binaries: StackBinaries, tmp_path: Path) -> None:
    """When a part ends, all parts are stopped, and the terminal shows that part's last output."""
    log = tmp_path / "data" / "logs" / "collector.log"
    with StackTerminal(tmp_path / "data") as started:
        leaders = started.read_programs()
        wait_until(lambda: log.exists() and "Starting" in log.read_text("utf-8"), 60)
        os.kill(leaders["collector"], signal.SIGKILL)
        code = started.process.wait(60)

    assert 1 == code
    assert re.search(
        r"collector ended with code -9 after(.|\n)*collector.log(.|\n)*Starting",
        started.read_output(),
    )
    assert not list_processes(leaders.values())


def test_sampling(binaries: StackBinaries, tmp_path: Path) -> None:
    """Tail sampling is the collector's overlay."""
    commands = native_stack.build_native_commands(
        StackAddresses.choose_free(), tmp_path, sampling=True, say=str
    )
    collector = next(each for each in commands if each.name == "collector")

    assert any(word.endswith("/sampling.yaml") for word in collector.argv)


def test_taken(binaries: StackBinaries, tmp_path: Path) -> None:
    """A port that somebody else has is named, before anything is started."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 4318))
        other.listen()
        words = (*STACK, "up", "--data", str(tmp_path / "data"))
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)

    assert 1 == done.returncode
    assert "4318 (collector_http)" in done.stderr
    assert "--free-ports" in done.stderr
