# SPDX-License-Identifier: Apache-2.0
"""Start, watch and stop local servers (server_commands.ServerCommand), with all their children."""

from __future__ import annotations

import atexit
import contextlib
import http.client
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lab import session_processes
from lab.server_commands import ServerCommand
from lab.tiny_models import get_cache_root

if TYPE_CHECKING:
    from typing_extensions import Self

# A line of a log that names a Python exception.
EXCEPTION_LINE = re.compile(r"\b[A-Z]\w*(Error|Exception): ")
# Seconds: vLLM ends its own children within this time or not at all.
ORPHAN_GRACE_S = 2.0

# Called about once a second while waiting: server name, seconds so far, last line of its log.
ProgressCallback = Callable[[str, float, str], None]

# Weak, so that this set keeps no server alive.
running_servers: weakref.WeakSet[LocalServer] = weakref.WeakSet()


class LocalServerError(RuntimeError):
    """A server did not come up; the message holds the end of its log."""


class LocalServer:
    """One server process with all its children, in a session of its own.

    A session of its own means that Ctrl-C reaches only the caller, which then stops the server.
    """

    def __init__(self, command: ServerCommand, log: Path | None = None) -> None:
        """Prepare without starting; `log` takes stdout and stderr (default: in the lab's cache)."""
        self.command = command
        # The port in the name: servers of parallel tests write different files.
        self.log_path = log or get_cache_root() / "logs" / f"{command.name}-{command.port}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.started_at = 0.0
        # Device and inode of what its processes have in /dev/shm: nothing tells it once they are gone.
        self.shared_files: set[tuple[int, int]] = set()

    @property
    def name(self) -> str:
        """Its role, from the command."""
        return self.command.name

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"http://{self.command.host}:{self.command.port}"

    @property
    def pid(self) -> int:
        """The first process, which leads the session."""
        if self.process is None:
            raise LocalServerError(f"{self.name} was not started")
        return self.process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the first process runs."""
        return self.process is not None and self.process.poll() is None

    def start(self) -> Self:
        """Start it and return at once."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        env = {**os.environ, **self.command.env}
        self.started_at = time.monotonic()
        with self.log_path.open("wb") as sink:
            self.process = subprocess.Popen(
                self.command.argv,
                env=env,
                # No terminal: a program that asks something must fail instead of waiting.
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        running_servers.add(self)
        return self

    def wait_until_ready(
        self, timeout: float = 300.0, progress: ProgressCallback | None = None
    ) -> Self:
        """Wait until its health check succeeds. Raises LocalServerError after `timeout` seconds."""
        pause = 0.2
        while not self.is_healthy():
            spent = time.monotonic() - self.started_at
            if not self.is_alive or spent > timeout:
                raise LocalServerError(self.describe_failure(spent))
            if progress:
                progress(self.name, spent, self.read_log_tail(1))
            time.sleep(pause)
            # A router answers within a second, vLLM within half a minute: short pauses first.
            pause = min(1.0, pause * 1.5)
        return self

    def is_healthy(self) -> bool:
        """Whether the health check answers 200 now."""
        connection = http.client.HTTPConnection(self.command.host, self.command.port, timeout=5)
        try:
            connection.request("GET", self.command.health_path)
            # A connection per check: the one before may belong to a process that has ended.
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def read_log_tail(self, lines: int = 40) -> str:
        """The last lines of its log."""
        return "\n".join(self.read_log()[-lines:])

    def read_log(self) -> list[str]:
        """The end of its log, some hundred lines."""
        try:
            with self.log_path.open("rb") as source:
                # vLLM at debug level writes megabytes; the end has the reason.
                source.seek(max(0, self.log_path.stat().st_size - 262144))
                return source.read().decode(errors="replace").rstrip().splitlines()
        except FileNotFoundError:
            return []

    def describe_failure(self, spent_s: float) -> str:
        """Why waiting ended, and where to read more."""
        code = self.process.poll() if self.process else None
        what = "was not ready" if code is None else f"ended with code {code}"
        # vLLM's own last error only points at an earlier one, so the first ones come first.
        errors = [line for line in self.read_log() if EXCEPTION_LINE.search(line)][:4]
        story = "\n".join([*errors, "...", self.read_log_tail(12)])
        return f"{self.name} {what} after {spent_s:.0f} s; from {self.log_path}:\n{story}"

    def kill(self) -> None:
        """Kill all its processes at once, for tests; what they leave in /dev/shm stop() removes."""
        pids = session_processes.list_session_pids(self.pid)
        self.shared_files |= list_mapped_files(pids)
        session_processes.kill_processes(pids)

    def stop(self, timeout_s: float = 15.0) -> None:
        """Ask it to end, then kill what is left of its session; safe to call twice.

        timeout_s: for the first process; its children get ORPHAN_GRACE_S more, once it is gone.
        """
        if self.process is None:
            return
        leader = self.process.pid
        pids = session_processes.list_session_pids(leader)
        self.shared_files |= list_mapped_files(pids)
        # A process that has ended without being collected is a zombie, and poll() collects it.
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                # Only the leader: vLLM then ends its engine core and workers in order.
                os.kill(leader, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
            session_processes.wait_for_session_end(leader, ORPHAN_GRACE_S)
        # Whatever is left: workers whose leader was killed would hold ports and memory.
        session_processes.kill_processes(session_processes.list_session_pids(leader))
        self.process.wait(60)  # a process that writes to a busy disk dies when that is done
        session_processes.wait_for_session_end(leader, ORPHAN_GRACE_S)
        remove_left_files(self.shared_files)
        running_servers.discard(self)

    def __enter__(self) -> Self:
        """Start and wait."""
        self.start()
        try:
            return self.wait_until_ready()
        # Ctrl-C while waiting, too: nobody else would stop the server.
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *exception: object) -> None:
        """Stop."""
        self.stop()


@contextlib.contextmanager
def run_servers(
    *commands: ServerCommand,
    timeout: float = 300.0,
    progress: ProgressCallback | None = None,
    logs: Path | None = None,
) -> Iterator[list[LocalServer]]:
    """Start servers in parallel; ready when the block begins, stopped when it ends, however it ends.

    timeout: seconds until each is ready. logs: folder of their logs.
    """
    folder = logs or get_cache_root() / "logs"
    servers = [LocalServer(each, folder / f"{each.name}-{each.port}.log") for each in commands]
    # Also under `kill`, as a job's time limit sends it.
    with exit_on_sigterm():
        try:
            # All are started before any is waited for: most of a start is one core's work.
            for server in servers:
                server.start()
            for server in servers:
                server.wait_until_ready(timeout, progress)
            yield servers
        finally:
            stop_servers(servers)


def stop_servers(servers: Sequence[LocalServer], timeout_s: float = 15.0) -> None:
    """Stop all of them at the same time; `timeout_s` as in LocalServer.stop."""
    # At the same time: each may need its whole `timeout_s`.
    threads = [threading.Thread(target=server.stop, args=(timeout_s,)) for server in servers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, so that `finally` blocks run; only the main thread can."""
    # signal.signal() raises ValueError in any other thread.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # 143 is what a shell reports of a process that SIGTERM has ended: 128 + 15.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@atexit.register
def stop_leftovers() -> None:
    """Last resort for servers that were started without a `with` block."""
    for server in list(running_servers):
        server.stop(timeout_s=5.0)


SHARED_MEMORY = Path("/dev/shm")
# What multiprocessing names its shared memory and its semaphores.
SHARED_MEMORY_PREFIXES = ("psm_", "sem.mp-")


def list_mapped_files(pids: Iterable[int]) -> set[tuple[int, int]]:
    """Device and inode of all files of SHARED_MEMORY that these processes have mapped."""
    found: set[tuple[int, int]] = set()
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
        # It has ended, or belongs to another user.
        except OSError:
            continue
        for line in lines:
            if f" {SHARED_MEMORY}/" in line:
                device, inode = line.split(None, 5)[3:5]
                major, minor = (int(number, 16) for number in device.split(":"))
                found.add((os.makedev(major, minor), int(inode)))
    return found


def remove_left_files(mapped: set[tuple[int, int]]) -> None:
    """Remove those of `mapped` that are there still and that no living process has mapped."""
    left = {}
    for path in SHARED_MEMORY.iterdir():
        if path.name.startswith(SHARED_MEMORY_PREFIXES):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            if (status.st_dev, status.st_ino) in mapped:
                left[status.st_dev, status.st_ino] = path
    if left:
        everybody = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
        for key in left.keys() - list_mapped_files(everybody):
            left[key].unlink(missing_ok=True)
