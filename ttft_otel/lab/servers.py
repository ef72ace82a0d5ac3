# SPDX-License-Identifier: Apache-2.0
"""Start, watch and stop local servers from recipes.py's Commands; leave no process behind."""

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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ttft_otel.lab import processes
from ttft_otel.lab.models import cache_root
from ttft_otel.lab.recipes import Command

if TYPE_CHECKING:
    from typing import Self

# A line of a log that names a Python exception.
ERROR = re.compile(r"\b[A-Z]\w*(Error|Exception): ")
# vLLM ends its own children within this or not at all.
ORPHANED = 2.0

# Called about once a second while waiting: server name, seconds so far, last line of its log.
Progress = Callable[[str, float, str], None]

running_servers: weakref.WeakSet[Server] = weakref.WeakSet()


class ServerError(RuntimeError):
    """A server did not come up; the message holds the end of its log."""


class Server:
    """One server process with all its children, in a session of its own.

    A session of its own means that Ctrl-C reaches only the caller, which then stops the server.
    """

    def __init__(self, command: Command, log: Path | None = None) -> None:
        """Prepare; `log` is where stdout and stderr go (default: the laboratory's cache)."""
        self.command = command
        self.log = log or cache_root() / "logs" / f"{command.name}-{command.port}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.started = 0.0

    @property
    def name(self) -> str:
        """The role that the recipe gave it."""
        return self.command.name

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://{self.command.host}:{self.command.port}"

    @property
    def pid(self) -> int:
        """The first process, which leads the session."""
        if self.process is None:
            raise ServerError(f"{self.name} was not started")
        return self.process.pid

    @property
    def alive(self) -> bool:
        """Whether the first process runs."""
        return self.process is not None and self.process.poll() is None

    def start(self) -> Self:
        """Start it and return at once."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        env = {**os.environ, **self.command.env}
        self.started = time.monotonic()
        with self.log.open("wb") as sink:
            self.process = subprocess.Popen(
                self.command.argv,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        running_servers.add(self)
        return self

    def wait(self, timeout: float = 300.0, progress: Progress | None = None) -> Self:
        """Return once it answers its health check; raise ServerError with the log's tail if not."""
        pause = 0.2
        while not self.healthy():
            spent = time.monotonic() - self.started
            if not self.alive or spent > timeout:
                raise ServerError(self.obituary(spent))
            if progress:
                progress(self.name, spent, self.tail(1))
            time.sleep(pause)
            pause = min(1.0, pause * 1.5)
        return self

    def healthy(self) -> bool:
        """Whether the health check answers 200 now."""
        connection = http.client.HTTPConnection(self.command.host, self.command.port, timeout=5)
        try:
            connection.request("GET", self.command.health)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def tail(self, lines: int = 40) -> str:
        """The last lines of its log."""
        return "\n".join(self.read_log()[-lines:])

    def read_log(self) -> list[str]:
        """The end of its log, some hundred lines."""
        try:
            with self.log.open("rb") as source:
                source.seek(max(0, self.log.stat().st_size - 262144))
                return source.read().decode(errors="replace").rstrip().splitlines()
        except FileNotFoundError:
            return []

    def obituary(self, spent: float) -> str:
        """Why waiting ended, and where to read more."""
        code = self.process.poll() if self.process else None
        what = "was not ready" if code is None else f"ended with code {code}"
        # vLLM's own last error only points at an earlier one, so the first ones come first.
        errors = [line for line in self.read_log() if ERROR.search(line)][:4]
        story = "\n".join([*errors, "...", self.tail(12)])
        return f"{self.name} {what} after {spent:.0f} s; from {self.log}:\n{story}"

    def stop(self, bound: float = 15.0) -> None:
        """Ask it to end, then kill what is left of its session; safe to call twice.

        bound: seconds for the first process; its children get ORPHANED more, once it is gone.
        """
        if self.process is None:
            return
        leader = self.process.pid
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(leader, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(bound)
            processes.await_end(leader, ORPHANED)
        processes.kill(processes.of_session(leader))
        self.process.wait(60)  # a process that writes to a busy disk dies when that is done
        processes.await_end(leader, ORPHANED)
        running_servers.discard(self)

    def __enter__(self) -> Self:
        """Start and wait."""
        self.start()
        try:
            return self.wait()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *exception: object) -> None:
        """Stop."""
        self.stop()


@contextlib.contextmanager
def running(
    *commands: Command,
    timeout: float = 300.0,
    progress: Progress | None = None,
    logs: Path | None = None,
) -> Iterator[list[Server]]:
    """Run several servers at once: up when the block begins, gone when it ends, however it ends."""
    folder = logs or cache_root() / "logs"
    servers = [Server(each, folder / f"{each.name}-{each.port}.log") for each in commands]
    with terminable():
        try:
            for server in servers:
                server.start()
            for server in servers:
                server.wait(timeout, progress)
            yield servers
        finally:
            stop_all(servers)


def stop_all(servers: Sequence[Server], bound: float = 15.0) -> None:
    """Stop all of them at the same time; `bound` as in Server.stop."""
    threads = [threading.Thread(target=server.stop, args=(bound,)) for server in servers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, so that `finally` blocks run; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@atexit.register
def stop_leftovers() -> None:
    """Last resort for servers that were started without a `with` block."""
    for server in list(running_servers):
        server.stop(bound=5.0)
