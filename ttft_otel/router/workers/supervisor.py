# SPDX-License-Identifier: Apache-2.0
"""The parent of the workers: starts them, replaces those that die, passes signals on; serves nothing.

commands/router/command.py gives it the function that a worker runs. It forks before there is an
event loop or a thread, so that a successor needs milliseconds, not the seconds that imports take. What
workers share, memory and sockets, is made before that; worker.py uses it.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import multiprocessing
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import ForkProcess
from typing import Any, Final

from ttft_otel.router.workers.messages import SocketPair, make_socket_pairs
from ttft_otel.tracing import clock

WATCHED_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
# Beyond the drain timeout: for cancelled responses to end and the last records to leave.
END_GRACE_S: Final = 10.0

CHECK_INTERVAL_S: Final = 1.0  # seconds between two looks at the workers' heartbeats
# Looks in a row at which a worker's event loop has not run since the one before: then it hangs. Looks and not
# seconds, because a paused container stops this process, too.
MAX_SILENT_CHECKS: Final = 30
STEADY_S: Final = 10.0  # seconds after which a process that dies is replaced at once
FIRST_PAUSE_S: Final = 0.5  # before one that died sooner is replaced; doubled while it goes on
MAX_PAUSE_S: Final = 30.0
SILENCE_US: Final = 5_000_000  # microseconds after which nothing counts as under way at a worker

log: Final = logging.getLogger("ttft_otel")


class SlotNumbers(ctypes.Structure):
    """What one worker shows the others in numbers, on a cache line of its own, so that none slows another.

    heartbeat: when its event loop ran last, in microseconds; 0 while it does not serve yet. orders: that it
    and its predecessors have given to the others. version: of its metrics. lengths: bytes of these on either
    page.
    """

    heartbeat: int
    orders: int
    version: int
    lengths: list[int]
    _fields_ = (
        ("heartbeat", ctypes.c_int64),
        ("orders", ctypes.c_int64),
        ("version", ctypes.c_int64),
        ("lengths", ctypes.c_int64 * 2),
        ("_rest", ctypes.c_int64 * 3),
    )


class SharedMemory:
    """What each worker shows the others, in memory that forked processes share: numbers and its metrics.

    Nothing is locked: each slot has one writer, no number is seen in halves, and metrics are written where
    nobody reads, as a whole before they are shown, so that no total ever falls: a counter that falls is a
    restart to Prometheus.
    """

    def __init__(self, slots: int) -> None:
        numbers = SlotNumbers * slots
        self.numbers = numbers.from_buffer(mmap.mmap(-1, ctypes.sizeof(numbers)))  # by slot
        # Files without a name, in memory: two for each slot, written in turn.
        self._pages = [
            [os.memfd_create("ttft-otel-metrics") for _ in range(2)] for _ in range(slots)
        ]

    def write_metrics(self, slot: int, data: bytes) -> None:
        """Replace a slot's metrics, which outlive its worker. Raises OSError if there is no memory."""
        numbers = self.numbers[slot]
        version = numbers.version + 1
        os.pwrite(self._pages[slot][version % 2], data, 0)
        numbers.lengths[version % 2] = len(data)
        numbers.version = version

    def read_metrics(self, slot: int) -> bytes:
        """What a slot's worker, or a predecessor, has written last; empty before that."""
        numbers = self.numbers[slot]
        while True:
            version = numbers.version
            data = os.pread(self._pages[slot][version % 2], numbers.lengths[version % 2], 0)
            # Else this page may be the one that is being written by now.
            if version == numbers.version:
                return data

    def is_silent(self, slot: int) -> bool:
        """Whether the worker's event loop has not run for SILENCE_US, or it does not serve yet."""
        return clock.now_us() - self.numbers[slot].heartbeat > SILENCE_US


@dataclass(frozen=True, slots=True)
class WorkerSlot:
    """One worker's place among all."""

    number: int
    sockets: tuple[SocketPair, ...]  # of all workers
    shared: SharedMemory
    lifeline_fd: int  # at its end of file the supervisor is gone
    is_successor: bool  # another worker died on this slot
    replica: str  # names this router among its replicas


@dataclass(slots=True)
class ChildProcess:
    """A process that the supervisor runs and replaces when it dies; times are monotonic seconds."""

    process: ForkProcess | None = None
    started_s: float = 0.0
    restart_at_s: float = 0.0  # 0 while it is not to be replaced
    pause_s: float = 0.0  # before the latest start
    heartbeat: int = 0  # that was seen last, 0 before the worker serves
    silent_checks: int = 0  # looks at which it was the same
    has_served: bool = False  # this process, or one before it


class WorkerSupervisor:
    """Keeps `count` workers running.

    Args:
        count: How many workers.
        run_worker: What each process does, given its slot.
        drain_timeout_s: Seconds that workers have to end after SIGTERM.
        reload: Called at SIGHUP, so that workers that start later have the new configuration.
    """

    def __init__(
        self,
        count: int,
        run_worker: Callable[[WorkerSlot], None],
        drain_timeout_s: float,
        reload: Callable[[], None],
    ) -> None:
        self.run_worker = run_worker
        self.drain_timeout_s = drain_timeout_s
        self.reload = reload
        self._replica = secrets.token_hex(8)
        # Before the first fork: successors have them, too.
        self._shared = SharedMemory(count)
        self._sockets = make_socket_pairs(count)
        self._states = [ChildProcess() for _ in range(count)]
        # Not spawn: a worker would import everything again, and share no memory.
        self._context = multiprocessing.get_context("fork")
        # Nobody writes to it: its end of file tells workers that this process is gone.
        self._lifeline = os.pipe()
        self._kill_at_s = 0.0  # monotonic seconds, once a signal has asked for the end
        self._checked_s = 0.0
        self._exit_code = 0

    def run(self) -> int:
        """Supervise until a signal ends it and all workers have ended; returns the exit code."""
        # Blocked, they are taken one after the other by sigtimedwait: no handler interrupts a fork.
        signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED_SIGNALS)
        try:
            for number in range(len(self._states)):
                self._start_worker(number)
            while not self._kill_at_s or self._list_running():
                arrived = signal.sigtimedwait(WATCHED_SIGNALS, self._choose_wait_s())
                if arrived is not None and arrived.si_signo == signal.SIGHUP:
                    self.reload()
                    self._signal_workers(signal.SIGHUP)
                # That of a child is only to end the wait: _reap_workers() looks at every process.
                elif arrived is not None and arrived.si_signo != signal.SIGCHLD:
                    self._begin_stop()
                self._reap_workers()
                self._kill_hung()
                self._restart_due()
        finally:
            # Workers are left only after an exception here.
            for process in self._list_running():
                process.kill()
        return self._exit_code

    def _start_worker(self, number: int) -> None:
        state, is_successor = self._states[number], self._has_served(number)
        self._shared.numbers[number].heartbeat = 0
        lifeline_fd, replica = self._lifeline[0], self._replica
        slot = WorkerSlot(number, self._sockets, self._shared, lifeline_fd, is_successor, replica)
        state.process = self._context.Process(
            target=self._enter_worker, args=(slot,), name=f"ttft-otel-worker-{number}"
        )
        state.started_s, state.restart_at_s = time.monotonic(), 0.0
        state.heartbeat = state.silent_checks = 0
        state.process.start()

    def _enter_worker(self, slot: WorkerSlot) -> None:
        """In the new process: leave what is the supervisor's, and do its work."""
        # Or a worker would itself keep the lifeline from ending.
        os.close(self._lifeline[1])
        # Ctrl-C signals the terminal's process group: one signal, the supervisor's, is to arrive.
        os.setpgrp()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED_SIGNALS)
        self.run_worker(slot)

    def _has_served(self, number: int) -> bool:
        state = self._states[number]
        state.has_served = state.has_served or self._shared.numbers[number].heartbeat > 0
        return state.has_served

    def _list_running(self) -> list[ForkProcess]:
        return [each.process for each in self._states if each.process is not None]

    def _choose_wait_s(self) -> float:
        """Seconds until something is due; a signal ends the wait sooner."""
        moment = time.monotonic()
        due_s = [each.restart_at_s for each in self._states if each.restart_at_s]
        if self._kill_at_s:
            due_s = [self._kill_at_s]
        return max(0.0, min((*due_s, moment + CHECK_INTERVAL_S)) - moment)

    def _begin_stop(self) -> None:
        """Drain all workers; at a second signal each of them ends at once."""
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
            if state.process is not None and state.process.exitcode is not None:
                self._note_end(number, state, state.process)
        if self._kill_at_s and time.monotonic() >= self._kill_at_s:
            for process in self._list_running():
                log.error("ttft-otel: worker process %d does not end: it is killed", process.pid)
                process.kill()
                self._exit_code = 1
            # Once more later, as a process inside a system call may take its time.
            self._kill_at_s = time.monotonic() + END_GRACE_S

    def _note_end(self, number: int, state: ChildProcess, process: ForkProcess) -> None:
        """A worker has ended: because of a signal to this process, or it is to be replaced."""
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
        code = process.exitcode or 0
        state.process, moment = None, time.monotonic()
        state.pause_s = choose_pause_s(state.pause_s, moment - state.started_s)
        state.restart_at_s = moment + state.pause_s
        log.error(
            "ttft-otel: worker %d (process %s) %s: its requests are lost, those of the others are not; "
            "it is replaced %s",
            number,
            process.pid,
            # Negative after a signal.
            f"was ended by {signal.Signals(-code).name}"
            if code < 0
            else f"ended with exit code {code}",
            f"in {state.pause_s:g} s" if state.pause_s else "at once",
        )

    def _kill_hung(self) -> None:
        """Kill workers whose event loop does not run: they are replaced, and what they had is lost anyway."""
        moment = time.monotonic()
        if self._kill_at_s or moment - self._checked_s < CHECK_INTERVAL_S / 2:
            return
        self._checked_s = moment
        for number, state in enumerate(self._states):
            heartbeat = self._shared.numbers[number].heartbeat
            is_silent = heartbeat and heartbeat == state.heartbeat
            state.silent_checks = state.silent_checks + 1 if is_silent else 0
            state.heartbeat = heartbeat
            if state.process is not None and state.silent_checks >= MAX_SILENT_CHECKS:
                log.error(
                    "ttft-otel: worker %d (process %s) hangs, its event loop has not run for %d s: "
                    "it is killed",
                    number,
                    state.process.pid,
                    round(state.silent_checks * CHECK_INTERVAL_S),
                )
                state.silent_checks = 0
                # Not terminate(): a process that is stopped would not see it.
                state.process.kill()

    def _restart_due(self) -> None:
        if self._kill_at_s:
            return
        for number, state in enumerate(self._states):
            if state.process is None and 0 < state.restart_at_s <= time.monotonic():
                self._start_worker(number)


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
        # As asyncio does: the same host may have an IPv4 address too.
        if kind[0] == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
        bound.setblocking(False)
        sockets.append(bound)
    return sockets


def resolve_host(host: str, port: int) -> list[tuple[tuple[int, int, int], Any]]:
    """For each address of `host`, family, type and protocol of a socket, and what to bind it to."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return [((family, kind, protocol), address) for family, kind, protocol, _, address in found]


def choose_pause_s(last_pause_s: float, lived_s: float) -> float:
    """Seconds before a process is replaced that lived `lived_s` seconds after `last_pause_s` of waiting."""
    if lived_s >= STEADY_S:
        return 0.0
    return min(max(last_pause_s * 2, FIRST_PAUSE_S), MAX_PAUSE_S)
