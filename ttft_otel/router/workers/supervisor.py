# SPDX-License-Identifier: Apache-2.0
"""The parent of the workers: starts them, replaces those that die, passes signals on; serves nothing.

With an index of KV events it runs the process that keeps it for all of them, too (index_keeper.py).

cli/worker_processes.py gives it the function that a worker runs. It forks before there is an event loop or
a thread, so that a successor needs milliseconds, not the seconds that imports take.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import secrets
import shutil
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, Final

from ttft_otel.router.workers.child_process import ChildProcess, describe_end
from ttft_otel.router.workers.load_counts import LoadCounts
from ttft_otel.router.workers.load_rings import LoadRings
from ttft_otel.router.workers.private_folder import make_private_folder

WATCHED_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
# Beyond the drain timeout: for cancelled responses to end and the last records to leave.
END_GRACE_S: Final = 10.0

log: Final = logging.getLogger("ttft_otel")


@dataclass(frozen=True, slots=True)
class WorkerSeat:
    """One worker's place among `count`. folder: private, with the sockets and files of all.

    rings, counts: memory that all share. lifeline_fd: at its end of file the supervisor is gone.
    is_successor: another worker died on this seat. replica: names this router among its replicas.
    """

    number: int
    count: int
    folder: Path
    rings: LoadRings
    counts: LoadCounts
    lifeline_fd: int
    is_successor: bool = False
    replica: str = ""


class WorkerSupervisor:
    """Keeps `count` workers running. run_worker: what each process does, given its seat.

    drain_timeout_s: seconds that workers have to end after SIGTERM. reload: called at SIGHUP, so that
    workers that start later have the new configuration. run_keeper: what the process does that keeps the
    index of KV events, given folder and lifeline; None where there is no such index.
    """

    def __init__(
        self,
        count: int,
        run_worker: Callable[[WorkerSeat], None],
        drain_timeout_s: float,
        reload: Callable[[], None],
        run_keeper: Callable[[Path, int], None] | None = None,
    ) -> None:
        self.run_keeper = run_keeper
        self.run_worker, self.drain_timeout_s, self.reload = run_worker, drain_timeout_s, reload
        self.folder = make_private_folder()
        self._replica = secrets.token_hex(8)
        # Before the first fork: successors have it, too.
        self._rings, self._counts = LoadRings(count), LoadCounts(count)
        self._states = [ChildProcess() for _ in range(count)]
        self._keeper = ChildProcess()
        # Not spawn: a worker would import everything again, and share no memory.
        self._context = multiprocessing.get_context("fork")
        # Nobody writes to it: its end of file tells workers that this process is gone.
        self._lifeline = os.pipe()
        self._kill_at_s = 0.0  # once it was told to stop
        self._exit_code = 0

    def run(self) -> int:
        """Supervise until a signal ends it and all workers have ended; returns the exit code."""
        # Blocked, they are taken one after the other by sigtimedwait: no handler interrupts a fork.
        signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED_SIGNALS)
        try:
            self._start_keeper()
            for number in range(len(self._states)):
                self._start_worker(number)
            while not self._kill_at_s or self._list_running():
                arrived = signal.sigtimedwait(WATCHED_SIGNALS, self._choose_wait_s())
                if arrived is not None:
                    self._handle_signal(signal.Signals(arrived.si_signo))
                self._reap_workers()
                self._restart_due()
        finally:
            # Workers are left only after an exception here; the keeper served them to the end.
            for process in (*self._list_running(), self._keeper.process):
                if process is not None:
                    process.kill()
            shutil.rmtree(self.folder, ignore_errors=True)
        return self._exit_code

    def _start_worker(self, number: int) -> None:
        state, is_successor = self._states[number], self._has_served(number)
        shared = (self.folder, self._rings, self._counts, self._lifeline[0])
        seat = WorkerSeat(number, len(self._states), *shared, is_successor, self._replica)
        enter = functools.partial(self._enter_child, functools.partial(self.run_worker, seat))
        state.start(self._context, enter, f"ttft-otel-worker-{number}")

    def _start_keeper(self) -> None:
        if self.run_keeper is not None:
            keep = functools.partial(self.run_keeper, self.folder, self._lifeline[0])
            enter = functools.partial(self._enter_child, keep)
            self._keeper.start(self._context, enter, "ttft-otel-index")

    def _enter_child(self, run: Callable[[], None]) -> None:
        """In the new process: leave what is the supervisor's, and do its work."""
        # Or a worker would itself keep the lifeline from ending.
        os.close(self._lifeline[1])
        # Ctrl-C signals the terminal's process group: one signal, the supervisor's, is to arrive.
        os.setpgrp()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED_SIGNALS)
        run()

    def _has_served(self, number: int) -> bool:
        # Written by a worker that has started; it outlives the worker.
        return (self.folder / f"worker-{number}.metrics").exists()

    def _list_running(self) -> list[ForkProcess]:
        return [each.process for each in self._states if each.process is not None]

    def _choose_wait_s(self) -> float:
        """Seconds until something is due; a signal ends the wait sooner."""
        moment = time.monotonic()
        children = (*self._states, self._keeper)
        due_s = [each.restart_at_s for each in children if each.restart_at_s]
        if self._kill_at_s:
            due_s = [self._kill_at_s]
        return max(0.0, min(due_s, default=moment + 1.0) - moment)

    def _handle_signal(self, number: signal.Signals) -> None:
        if number == signal.SIGCHLD:
            # Only to end the wait: _reap_workers() looks at every process.
            return
        if number == signal.SIGHUP:
            self.reload()
            self._signal_workers(signal.SIGHUP)
            return
        self._begin_stop()

    def _begin_stop(self) -> None:
        """Drain all workers; told a second time, each of them ends at once."""
        if not self._kill_at_s:
            self._kill_at_s = time.monotonic() + self.drain_timeout_s + END_GRACE_S
        self._signal_workers(signal.SIGTERM)

    def _signal_workers(self, number: signal.Signals) -> None:
        for process in self._list_running():
            # Not to one that was reaped: its number may be another process's by now.
            if process.pid is not None and process.exitcode is None:
                os.kill(process.pid, number)

    def _reap_workers(self) -> None:
        for number, state in enumerate(self._states):
            if state.process is not None and state.has_ended():
                self._note_end(number, state, state.process)
        if self._keeper.process is not None and self._keeper.has_ended():
            self._note_keeper_end(self._keeper.process)
        if self._kill_at_s and time.monotonic() >= self._kill_at_s:
            for process in self._list_running():
                log.error("ttft-otel: worker process %d does not end: it is killed", process.pid)
                process.kill()
                self._exit_code = 1
            # Once more later, as a process inside a system call may take its time.
            self._kill_at_s = time.monotonic() + END_GRACE_S

    def _note_end(self, number: int, state: ChildProcess, process: ForkProcess) -> None:
        """A worker has ended: as it was told, or it is to be replaced."""
        if self._kill_at_s:
            state.process = None
            self._exit_code = self._exit_code or abs(process.exitcode or 0)
            return
        # It would fail in the same way again: a port or an option is wrong.
        if not self._has_served(number):
            state.process = None
            log.error("ttft-otel: worker %d could not start, see above: the router ends", number)
            self._exit_code = abs(process.exitcode or 0) or 1
            self._begin_stop()
            return
        log.error(
            "ttft-otel: worker %d (process %s) %s: its requests are lost, those of the others are not; "
            "it is replaced %s",
            number,
            process.pid,
            describe_end(process.exitcode or 0),
            state.plan_restart(),
        )

    def _note_keeper_end(self, process: ForkProcess) -> None:
        """The index is lost, and fills anew in a successor; nothing that clients see ends with it."""
        if self._kill_at_s:
            self._keeper.process = None
            return
        log.error(
            "ttft-otel: the process that keeps the index of KV events (%s) %s: workers estimate cached "
            "prefixes from the prompts sent until its successor has the events; it is replaced %s",
            process.pid,
            describe_end(process.exitcode or 0),
            self._keeper.plan_restart(),
        )

    def _restart_due(self) -> None:
        if self._kill_at_s:
            return
        for number, state in enumerate(self._states):
            if state.is_due():
                self._start_worker(number)
        if self._keeper.is_due():
            self._start_keeper()


def reserve_port(host: str, port: int) -> tuple[int, list[socket.socket]]:
    """Reserve a port for all workers, by sockets that do not listen; returns its number, chosen for 0.

    Raises OSError if anything else listens there.
    """
    # Not with SO_REUSEPORT at first: another router's workers would share the port with ours unnoticed.
    with socket.socket(*resolve_host(host, port)[0][0]) as probe:
        # Connections of the router before us, in TIME_WAIT, are no other server.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(resolve_host(host, port)[0][1])
        port = probe.getsockname()[1]
    return port, bind_shared_port(host, port)


def bind_shared_port(host: str, port: int) -> list[socket.socket]:
    """Sockets on a port that other workers are bound to as well: the kernel spreads connections over them."""
    sockets = []
    for kind, address in resolve_host(host, port):
        bound = socket.socket(*kind)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if (
            kind[0] == socket.AF_INET6
        ):  # as asyncio does: the same host may have an IPv4 address too
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
        bound.setblocking(False)
        sockets.append(bound)
    return sockets


def resolve_host(host: str, port: int) -> list[tuple[tuple[int, int, int], Any]]:
    """For each address of `host`, family, type and protocol of a socket, and what to bind it to."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return [((family, kind, protocol), address) for family, kind, protocol, _, address in found]
