# SPDX-License-Identifier: Apache-2.0
"""Starting and stopping servers, with small scripts in place of vLLM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from lab import free_ports, local_servers, session_processes
from lab.local_servers import LocalServer, LocalServerError, run_servers
from lab.server_commands import ServerCommand

# Answers its health check, has a child that ignores SIGTERM, and may ignore it itself.
SERVER_SCRIPT = """
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
# Prints the names of a segment and a semaphore of its own, and maps the segment named by its third argument.
SHARING_SCRIPT = """
import multiprocessing, sys
from multiprocessing.shared_memory import SharedMemory
own, lock = SharedMemory(create=True, size=4096), multiprocessing.get_context("spawn").Lock()
of_others = SharedMemory(sys.argv[3])
print(own.name, lock._semlock.name.replace("/", "sem."), flush=True)
"""


def build_command(mood: str = "gentle", script: str = SERVER_SCRIPT) -> ServerCommand:
    """A ServerCommand for the script above."""
    port = free_ports.find_free_port()
    return ServerCommand("fake", (sys.executable, "-c", script, str(port), mood), {}, port)


@pytest.mark.parametrize("mood", ["gentle", "stubborn"])
def test_stop(tmp_path: Path, mood: str) -> None:
    """Nothing of a server is left, not even children that ignore SIGTERM."""
    server = LocalServer(build_command(mood), tmp_path / "log").start().wait_until_ready(30)
    before = session_processes.list_session_pids(server.pid)
    server.stop(timeout_s=0.5)
    server.stop()

    assert 2 == len(before)
    assert [] == session_processes.list_session_pids(server.pid)


def test_what_a_killed_server_shared_is_removed(tmp_path: Path) -> None:
    """Its segments and semaphores are gone once it is stopped; one that another process has mapped stays."""
    ours = SharedMemory(create=True, size=4096)
    try:
        command = build_command(script=SHARING_SCRIPT + SERVER_SCRIPT)
        command = replace(command, argv=(*command.argv, ours.name))
        server = LocalServer(command, tmp_path / "log").start().wait_until_ready(30)
        left = [local_servers.SHARED_MEMORY / name for name in server.read_log()[0].split()]
        # Or the resource tracker removes them before it is killed itself, where this process has to wait.
        for pid in session_processes.list_session_pids(server.pid):
            os.kill(pid, signal.SIGSTOP)
        server.kill()
        session_processes.wait_for_session_end(server.pid, 30)
        assert [True, True] == [path.exists() for path in left]
        server.stop()

        assert [False, False] == [path.exists() for path in left]
        assert (local_servers.SHARED_MEMORY / ours.name).exists()
    finally:
        ours.close()
        ours.unlink()


def test_running(tmp_path: Path) -> None:
    """Several servers are up inside the block and gone after it, also when the block fails."""
    pids = []
    with (
        pytest.raises(KeyError),
        run_servers(build_command(), build_command(), logs=tmp_path) as servers,
    ):
        pids = [server.pid for server in servers]
        assert all(server.is_healthy() for server in servers)
        for server in servers:
            os.kill(server.pid, signal.SIGKILL)
        raise KeyError

    assert [[], []] == [session_processes.list_session_pids(pid) for pid in pids]


def test_failure(tmp_path: Path) -> None:
    """A server that dies at start says why, at once, with the end of its log."""
    dying = build_command(script="import sys; print('no such model'); sys.exit(3)")
    server = LocalServer(dying, tmp_path / "log").start()

    with pytest.raises(LocalServerError, match=r"ended with code 3(.|\n)*no such model"):
        server.wait_until_ready(30)
    server.stop()


def test_timeout(tmp_path: Path) -> None:
    """A server that never gets ready is reported after the time allowed, with progress before."""
    seen: list[str] = []
    sleeping = build_command(script="import time; print('loading', flush=True); time.sleep(600)")
    server = LocalServer(sleeping, tmp_path / "log").start()

    with pytest.raises(LocalServerError, match="was not ready"):
        server.wait_until_ready(1.0, lambda name, spent, line: seen.append(line))
    server.stop()

    assert "loading" in seen


def test_signal(tmp_path: Path) -> None:
    """A caller that gets SIGTERM stops its servers."""
    fake = build_command()
    caller = (
        "import sys; from pathlib import Path\n"
        "from lab.server_commands import ServerCommand; from lab.local_servers import run_servers\n"
        f"fake = ServerCommand('fake', {fake.argv!r}, {{}}, {fake.port})\n"
        f"with run_servers(fake, logs=Path({str(tmp_path)!r})) as up:\n"
        # Short sleeps: a signal that comes just before one is seen only after it.
        "    print(up[0].pid, flush=True); import time\n"
        "    while True:\n"
        "        time.sleep(0.1)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", caller], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        leader = int(process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        process.wait(60)

    assert [] == session_processes.list_session_pids(leader)


def test_ports() -> None:
    """A port is given out once, and lies below the range of outgoing connections."""
    chosen = [free_ports.find_free_port() for _ in range(50)]

    assert 50 == len(set(chosen))
    assert max(chosen) < free_ports.MAX_PORT
