# SPDX-License-Identifier: Apache-2.0
"""Starting and stopping servers, with small scripts in place of vLLM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ttft_otel.lab import ports, processes
from ttft_otel.lab.recipes import Command
from ttft_otel.lab.servers import Server, ServerError, running

# Answers its health check, has a child that ignores SIGTERM, and may ignore it itself.
SCRIPT = """
import http.server, signal, subprocess, sys
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", child])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def command(mood: str = "gentle", script: str = SCRIPT) -> Command:
    """A Command for the script above."""
    port = ports.free()
    return Command("fake", (sys.executable, "-c", script, str(port), mood), {}, port)


@pytest.mark.parametrize("mood", ["gentle", "stubborn"])
def test_stop(tmp_path: Path, mood: str) -> None:
    """Nothing of a server is left, not even children that ignore SIGTERM."""
    server = Server(command(mood), tmp_path / "log").start().wait(30)
    before = processes.of_session(server.pid)
    server.stop(bound=0.5)
    server.stop()

    assert 2 == len(before)
    assert [] == processes.of_session(server.pid)


def test_running(tmp_path: Path) -> None:
    """Several servers are up inside the block and gone after it, also when the block fails."""
    pids = []
    with pytest.raises(KeyError), running(command(), command(), logs=tmp_path) as servers:
        pids = [server.pid for server in servers]
        assert all(server.healthy() for server in servers)
        for server in servers:
            os.kill(server.pid, signal.SIGKILL)
        raise KeyError

    assert [[], []] == [processes.of_session(pid) for pid in pids]


def test_failure(tmp_path: Path) -> None:
    """A server that dies at start says why, at once, with the end of its log."""
    dying = command(script="import sys; print('no such model'); sys.exit(3)")
    server = Server(dying, tmp_path / "log").start()

    with pytest.raises(ServerError, match=r"ended with code 3(.|\n)*no such model"):
        server.wait(30)
    server.stop()


def test_timeout(tmp_path: Path) -> None:
    """A server that never gets ready is reported after the time allowed, with progress before."""
    seen: list[str] = []
    sleeping = command(script="import time; print('loading', flush=True); time.sleep(600)")
    server = Server(sleeping, tmp_path / "log").start()

    with pytest.raises(ServerError, match="was not ready"):
        server.wait(1.0, lambda name, spent, line: seen.append(line))
    server.stop()

    assert "loading" in seen


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal(tmp_path: Path, number: signal.Signals) -> None:
    """A caller that is terminated or interrupted takes its servers with it."""
    fake = command()
    caller = (
        "import sys; from pathlib import Path\n"
        "from ttft_otel.lab.recipes import Command; from ttft_otel.lab.servers import running\n"
        f"fake = Command('fake', {fake.argv!r}, {{}}, {fake.port})\n"
        f"with running(fake, logs=Path({str(tmp_path)!r})) as up:\n"
        "    print(up[0].pid, flush=True); import time; time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", caller], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        leader = int(process.stdout.readline())
        process.send_signal(number)
        process.wait(60)

    assert [] == processes.of_session(leader)


def test_ports() -> None:
    """A port is given out once, and lies below the range of outgoing connections."""
    chosen = [ports.free() for _ in range(50)]

    assert 50 == len(set(chosen))
    assert max(chosen) < ports.HIGHEST


def test_gone() -> None:
    """Killing a process that has gone is no error."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    processes.kill([process.pid])

    assert time.monotonic() > 0
