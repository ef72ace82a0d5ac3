# SPDX-License-Identifier: Apache-2.0
"""`scripts/stack up --native`, status, smoke and down, as an operator runs them, on real programs."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from click.testing import CliRunner

from tests.stack.bench import until
from ttft_otel.lab import processes
from ttft_otel.lab.stack import grafana, native, state
from ttft_otel.lab.stack.binaries import Binaries
from ttft_otel.lab.stack.command import main
from ttft_otel.lab.stack.parts import Addresses

STACK: Final = (sys.executable, "-m", "ttft_otel.lab.stack")
PARTS: Final = ("prometheus", "tempo", "collector")
# Spans become metrics when the collector flushes: not fifteen seconds for a test.
ENV: Final = {**os.environ, "TTFT_METRICS_INTERVAL": "1s"}


class Terminal:
    """One `up --native` that runs; `out` is the file that holds what it printed."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.out = data.parent / f"{data.name}.out"
        with self.out.open("wb") as sink:
            words = (*STACK, "up", "--native", "--free-ports", "--data", str(data))
            self.process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=ENV
            )

    def said(self) -> str:
        """All that it has printed."""
        return self.out.read_text("utf-8")

    def ready(self) -> Terminal:
        """Wait until everything is up."""
        until(lambda: "Ctrl-C stops everything" in self.said() or self.process.poll(), 150)
        assert self.process.poll() is None, self.said()
        return self

    def programs(self) -> dict[str, int]:
        """Name -> process id, from the state file, once it is written."""
        found = until(lambda: state.read(self.data), 60)
        assert found
        return {name: pid for name, (pid, _) in found.programs.items()}

    def ended(self) -> int:
        """Wait for its end; its exit code."""
        return self.process.wait(60)


@contextmanager
def terminal(data: Path) -> Iterator[Terminal]:
    """A stack that is gone at the end, whatever the test did to it."""
    made = Terminal(data)
    try:
        yield made
    finally:
        if made.process.poll() is None:
            made.process.terminate()
            made.process.wait(60)


@pytest.fixture(scope="module")
def up(binaries: Binaries, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    """A native stack on free ports, ready."""
    with terminal(tmp_path_factory.mktemp("native") / "data") as made:
        yield made.ready()


@pytest.fixture
def asked(up: Terminal) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run another command of scripts/stack on the same data, from another terminal."""

    def ask(*words: str) -> subprocess.CompletedProcess[str]:
        command = (*STACK, *words, "--data", str(up.data))
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)

    return ask


Asked = Callable[..., "subprocess.CompletedProcess[str]"]


def test_ready(up: Terminal) -> None:
    """The terminal tells of each part where it is and how long it took, and what to do next."""
    told = up.said()

    for part in PARTS:
        assert re.search(rf"^{part} +http://127.0.0.1:\d+ +ready after \d", told, re.M)
    assert "scripts/stack smoke" in told
    assert "Dashboards: http://" in told or grafana.REMEDY in told


def test_status(up: Terminal, asked: Asked) -> None:
    """Status says the same to people and to programs."""
    done = asked("status", "--json")
    found: dict[str, Any] = json.loads(done.stdout)

    assert 0 == done.returncode
    assert ("native", True) == (found["mode"], found["ready"])
    assert {*PARTS} <= {part["name"] for part in found["parts"]}
    assert all(part["ready"] for part in found["parts"])
    assert all(part in asked("status").stdout for part in PARTS)


def test_smoke(up: Terminal, asked: Asked) -> None:
    """One trace goes through every hop, and each says so."""
    done = asked("smoke", "--json", "--timeout", "30")
    verdicts = {each["hop"]: each for each in json.loads(done.stdout)}

    assert 0 == done.returncode, verdicts
    assert {
        "collector takes OTLP",
        "Tempo finds it by TraceQL",
        "Prometheus has its TTFT",
    } <= verdicts.keys()


def test_loopback(up: Terminal) -> None:
    """Nothing of it listens anywhere but on the loopback."""
    heard = {
        name: [address for pid in processes.of_session(leader) for address in listening(pid)]
        for name, leader in up.programs().items()
    }

    assert all(heard.values())
    assert {"127.0.0.1"} == {address for each in heard.values() for address in each}


def test_twice(up: Terminal) -> None:
    """A second stack on the same data is refused, with the remedy."""
    words = (*STACK, "up", "--native", "--data", str(up.data))
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)

    assert 1 == done.returncode
    assert "scripts/stack down stops it" in done.stderr
    assert up.process.poll() is None


def test_lost(up: Terminal, asked: Asked) -> None:
    """While a part hangs, status and smoke name it and say what to do."""
    stopped = up.programs()["tempo"]
    os.kill(stopped, signal.SIGSTOP)
    try:
        hung = asked("smoke", "--timeout", "1")
    finally:
        os.kill(stopped, signal.SIGCONT)

    assert 1 == hung.returncode
    assert re.search(r"FAIL +Tempo finds it.*collector's log", hung.stdout)
    assert re.search(r"ok +collector takes OTLP", hung.stdout)


def test_down(up: Terminal, asked: Asked) -> None:
    """Down stops it from another terminal: no process, no port and no state is left."""
    leaders = [up.process.pid, *up.programs().values()]
    done = asked("down")

    assert (0, "The native stack is down.\n") == (done.returncode, done.stdout)
    assert 143 == up.ended()
    assert [] == [pid for leader in leaders[1:] for pid in processes.of_session(leader)]
    assert 1 == asked("status").returncode
    assert "no native stack" in asked("down").stdout


def test_interrupt(binaries: Binaries, tmp_path: Path) -> None:
    """Ctrl-C while it starts leaves nothing behind, and is no error."""
    with terminal(tmp_path / "data") as started:
        leaders = list(started.programs().values())
        started.process.send_signal(signal.SIGINT)
        code = started.ended()

    assert 0 == code
    assert "Stopped." in started.said()
    assert [] == [pid for leader in leaders for pid in processes.of_session(leader)]
    assert state.read(tmp_path / "data") is None


def test_died(binaries: Binaries, tmp_path: Path) -> None:
    """When a part ends, all end, and the terminal shows that part's last words."""
    log = tmp_path / "data" / "logs" / "collector.log"
    with terminal(tmp_path / "data") as started:
        leaders = started.programs()
        until(lambda: log.exists() and "Starting" in log.read_text("utf-8"), 60)
        os.kill(leaders["collector"], signal.SIGKILL)
        code = started.ended()

    assert 1 == code
    assert re.search(
        r"collector ended with code -9 after(.|\n)*collector.log(.|\n)*Starting", started.said()
    )
    assert [] == [pid for leader in leaders.values() for pid in processes.of_session(leader)]


def test_crash(binaries: Binaries, tmp_path: Path) -> None:
    """What a killed `up` left running is stopped by `down`."""
    with terminal(tmp_path / "data") as started:
        leaders = list(started.programs().values())
        started.process.kill()
        started.ended()
    left = [pid for leader in leaders for pid in processes.of_session(leader)]
    subprocess.run((*STACK, "down", "--data", str(tmp_path / "data")), check=True, timeout=60)

    assert len(left) >= len(PARTS)
    until(lambda: not [pid for leader in leaders for pid in processes.of_session(leader)], 10)


def test_profile(binaries: Binaries, tmp_path: Path) -> None:
    """Without containers there is tail sampling, by the collector's overlay, and no other profile."""
    words = ["up", "--native", "--free-ports", "--data", str(tmp_path), "--profile"]
    refused = CliRunner().invoke(main, [*words, "demo"])
    commands = native.plan(Addresses.free(), tmp_path, sampling=True, say=str)
    collector = next(each for each in commands if each.name == "collector")

    assert 1 == refused.exit_code
    assert "no profile demo without containers; only sampling" in refused.output
    assert any(word.endswith("/sampling.yaml") for word in collector.argv)


def test_taken(binaries: Binaries, tmp_path: Path) -> None:
    """A port that somebody else has is named, before anything is started."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 4318))
        other.listen()
        words = (*STACK, "up", "--native", "--data", str(tmp_path / "data"))
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)

    assert 1 == done.returncode
    assert "4318 (collector_http)" in done.stderr
    assert "--free-ports" in done.stderr


def listening(pid: int) -> list[str]:
    """Addresses on which a process listens, from /proc."""
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
    own = {link[8:-1] for link in links if link.startswith("socket:[")}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in own:
                found.append(readable(words[1].partition(":")[0]))
    return found


def readable(digits: str) -> str:
    """An address of /proc/net: words of four bytes, the lowest first."""
    octets = [str(byte) for byte in reversed(bytes.fromhex(digits))]
    return ".".join(octets) if len(octets) == 4 else digits
