# SPDX-License-Identifier: Apache-2.0
"""HOT: give a finished record's bytes to the exporter process, without ever waiting for it.

recorder.py and router/ call `sender().send(record.encode(...))`; exporter/ reads the other end of
the socket pair. The exporter is started by the first send and outlives its host just long enough.
"""

from __future__ import annotations

import atexit
import errno
import mmap
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from multiprocessing import util
from pathlib import Path
from typing import Final

from ttft_otel import guard, names
from ttft_otel.settings import Settings, current

MODULE: Final = "ttft_otel.exporter"
EXIT_WAIT: Final = 2.0  # seconds a host waits at its exit for the drain
PAUSE: Final = 5.0  # seconds between two starts; doubled while exporters keep dying
PAUSE_MOST: Final = 300.0
HEALTHY: Final = 60.0  # an exporter that lived this long resets the pause

# The exporter's counters, in a page shared with its host (exported, failed: spans; else records).
SHARED: Final = ("received", "foreign", "overflowed", "exported", "failed")
LAYOUT: Final = struct.Struct(f"={len(SHARED)}Q")

_FLAGS: Final = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_FULL: Final = frozenset({errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM, errno.EMSGSIZE})
_ROOT: Final = Path(__file__).resolve().parents[1]


class Sender:
    """One process's write end: `sent`, `dropped` and `lost` are records, `restarts` exporters."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.sent = self.dropped = self.lost = self.starts = 0
        self.capacity = 0  # bytes the kernel really granted; known after the first send
        self.closed = False
        self._forget()
        _senders.add(self)

    def _forget(self) -> None:
        self.pid = os.getpid()
        self._socket: socket.socket | None = None
        self._ends: tuple[socket.socket, ...] = ()
        self._page: mmap.mmap | None = None
        self._page_fd = -1
        self._starter: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._pause, self._since, self._next = PAUSE, 0.0, 0.0

    def send(self, data: bytes) -> bool:
        """Hand one record over, or drop and count it; about 2 us, except for the first."""
        if self._starter is not None:
            self._reap()
        end = self._socket or self._start()
        if end is None or not data:
            self.dropped += 1
            return False
        try:
            end.send(data, _FLAGS)
        except OSError as error:
            return self._refused(error, end, data)
        self.sent += 1
        return True

    def close(self, timeout: float = EXIT_WAIT) -> None:
        """End the stream and wait, at most `timeout` seconds, until the exporter has drained."""
        with self._lock:
            end, self._socket, self.closed = self._socket, None, True
        until = time.monotonic() + timeout
        if end is not None:
            try:
                end.settimeout(timeout)
                end.shutdown(socket.SHUT_WR)
                end.recv(1)  # returns at the exporter's end
            except OSError:
                pass  # gone already, or too slow: it goes on without us
            end.close()
        self._reap(max(0.1, until - time.monotonic()))
        self._close_page()

    def counts(self) -> dict[str, int]:
        """What became of this process's records, here and in the exporter."""
        here = {
            "sent": self.sent,
            "dropped": self.dropped,
            "lost": self.lost,
            "restarts": max(0, self.starts - 1),
        }
        return here | dict(zip(SHARED, self._shared(), strict=True))

    def after_fork(self) -> None:
        """In a forked child: let go of the parent's ends, else the exporter sees no end of file."""
        for end in self._ends:
            end.close()
        if self._starter is not None:
            self._starter.returncode = 0  # the parent's to reap, not ours to warn about
        self._close_page()
        self._forget()
        self.sent = self.dropped = self.lost = self.starts = 0

    def _refused(self, error: OSError, end: socket.socket, data: bytes) -> bool:
        if error.errno in _FULL:
            self.dropped += 1
            return False
        with self._lock:  # the exporter is dead; the first to notice clears up
            if self._socket is end:
                self._socket = None
                end.close()
                self.lost = self.sent - self._shared()[0]  # both count from the first exporter on
        fresh = self._start()
        try:
            if fresh is not None:
                fresh.send(data, _FLAGS)
                self.sent += 1
                return True
        except OSError:
            pass
        self.dropped += 1
        return False

    def _start(self) -> socket.socket | None:
        """Start an exporter unless one was started a moment ago; 1-3 ms, never waits for it."""
        with self._lock:
            moment = time.monotonic()
            if self._socket is not None or self.closed or moment < self._next:
                return self._socket
            lived = moment - self._since
            self._pause = PAUSE if lived > HEALTHY else min(self._pause * 2, PAUSE_MOST)
            self._since, self._next = moment, moment + self._pause
            with guard.Guard("handoff.start"):
                self._reap()
                self._socket = self._spawn()
                self.starts += 1
                if self.starts == 1:
                    _close_at_exit()
            return self._socket

    def _spawn(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ends = (ours, theirs)
        try:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.settings.queue)
            # The kernel doubles what it grants, for its own bookkeeping.
            self.capacity = ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2
            page = self._shared_fd()
            self._starter = subprocess.Popen(
                (sys.executable, "-m", MODULE, str(theirs.fileno()), str(page), str(self.pid)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), page),
                env=_environment(self.settings),
                start_new_session=True,  # a terminal's Ctrl-C goes to the group
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return ours

    def _reap(self, timeout: float = 0.0) -> None:
        """Collect the process that detached the exporter; it lives some 50 ms."""
        starter = self._starter
        if starter is None:
            return
        try:
            ended = starter.wait(timeout) if timeout else starter.poll()
        except subprocess.TimeoutExpired:
            return
        if ended is not None:
            self._starter = None

    def _shared_fd(self) -> int:
        if self._page is None:
            self._page_fd = os.memfd_create("ttft-otel")
            os.ftruncate(self._page_fd, mmap.PAGESIZE)
            self._page = mmap.mmap(self._page_fd, mmap.PAGESIZE)
        return self._page_fd

    def _shared(self) -> tuple[int, ...]:
        return LAYOUT.unpack_from(self._page) if self._page else (0,) * len(SHARED)

    def _close_page(self) -> None:
        # The page itself stays mapped, so that counts() still answers; it goes with the Sender.
        if self._page_fd >= 0:
            os.close(self._page_fd)
            self._page_fd = -1


def sender() -> Sender:
    """This process's own Sender, made at first use; a forked child gets another one."""
    global _own
    if _own is None:
        _own = Sender(current())
    return _own


def counts() -> dict[str, int]:
    """Counters of this process's Sender for /metrics; empty before the first use."""
    return {} if _own is None else _own.counts()


_own: Sender | None = None
_senders: weakref.WeakSet[Sender] = weakref.WeakSet()


def _after_fork() -> None:
    global _own
    _own = None
    for inherited in list(_senders):
        inherited.after_fork()


def _close_all() -> None:
    for each in list(_senders):
        if each.pid == os.getpid():
            each.close()


def _close_at_exit() -> None:
    """Once per process. Children that multiprocessing forked leave by os._exit: no atexit there."""
    atexit.unregister(_close_all)
    atexit.register(_close_all)
    util.Finalize(None, _close_all, exitpriority=100)


def _environment(settings: Settings) -> dict[str, str]:
    """The exporter's environment: the host's, with what Settings made of it."""
    env = dict(os.environ)
    for name in (names.ENV_ON, "PYTHONWARNINGS", "PYTHONINSPECT"):
        env.pop(name, None)
    env["PYTHONSAFEPATH"] = "1"  # nothing in the host's working directory shadows our imports
    if "-packages" not in _ROOT.name:  # a checkout: findable for the host, so for the exporter too
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (env.get("PYTHONPATH"), str(_ROOT))))
    env[names.ENV_TRACES_PROTOCOL] = settings.protocol
    if env.get(names.ENV_TRACES_ENDPOINT) != settings.endpoint:
        env.pop(names.ENV_TRACES_ENDPOINT, None)
        env[names.ENV_ENDPOINT] = settings.endpoint
    if settings.service:
        env[names.ENV_SERVICE] = settings.service
    return env


os.register_at_fork(after_in_child=_after_fork)
