# SPDX-License-Identifier: Apache-2.0
"""HOT: send a finished record's bytes to the exporter process, without ever waiting for it.

recorder.py and router/ call `get_sender().send(encode_record(...))`; exporter/ reads the other end
of a socket pair. The first send starts the exporter; it ends once its host is gone and the queue is
drained. docs/adr/002-exporter-process.md explains why it is a process.
"""

from __future__ import annotations

import atexit
import errno
import json
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

from ttft_otel.model.names import env_names
from ttft_otel.tracing import guard
from ttft_otel.tracing.settings import Settings, get_settings, replace_variables

# `python -m` looks for modules in the working directory first, before Python 3.11 also with PYTHONSAFEPATH:
# whoever may write there would run code in the child.
_START: Final = (
    "import sys; sys.path[:] = [path for path in sys.path if path]; import runpy; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)

EXPORTER_MODULE: Final = "ttft_otel.exporter"
EXIT_WAIT_S: Final = 2.0  # seconds a host waits at its exit for the drain
RESTART_PAUSE_S: Final = 5.0  # seconds between two starts; doubled while exporters keep dying
MAX_RESTART_PAUSE_S: Final = 300.0
HEALTHY_LIFETIME_S: Final = 60.0  # an exporter that lived this long resets the pause

# The exporter's counters, unsigned 64 bit in a memory page shared with its host, so that they survive
# a killed exporter. `exported` and `failed` count spans, `counted` what metrics counted (a stream twice),
# `merged` values of them that lost their labels, because there were too many series; the others records, of
# which `finished` were exported, or failed.
SHARED_COUNTERS: Final = (
    "received",
    "foreign",
    "overflowed",
    "exported",
    "failed",
    "counted",
    "merged",
    "finished",
)
SHARED_LAYOUT: Final = struct.Struct(f"={len(SHARED_COUNTERS)}Q")

# keys.ENGINE_SETTINGS of this process, which become resource attributes of its spans; hooks fill it
# before the first request, and the exporter gets it when it is started.
engine_settings: Final[dict[str, int]] = {}

# Never block the request, and no SIGPIPE in the host when the exporter is gone.
_SEND_FLAGS: Final = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_FULL_ERRNOS: Final = frozenset({errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM, errno.EMSGSIZE})
_IMPORT_ROOT: Final = Path(__file__).resolve().parents[2]


def build_child_command(module: str, *arguments: str) -> tuple[str, ...]:
    """Run `module` like `python -m`, but without the working directory on its import path."""
    return (sys.executable, "-c", _START, module, *arguments)


class RecordSender:
    """A process's write end of the socket pair, and the exporter behind it.

    Counters: sent; dropped (not sent); lost (its exporter died with them); all in
    records. capacity: bytes of the send buffer that the kernel granted, 0 before the first send.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.sent = self.dropped = self.lost = self.exporter_starts = 0
        self.capacity = 0
        self.closed = False
        self._reset_state()
        _senders.add(self)

    def _reset_state(self) -> None:
        self.pid = os.getpid()
        self._socket: socket.socket | None = None
        self._socket_pair: tuple[socket.socket, ...] = ()
        self._page: mmap.mmap | None = None
        self._page_fd = -1
        self._starter: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._restart_pause_s, self._started_at, self._next_start_at = RESTART_PAUSE_S, 0.0, 0.0

    def send(self, data: bytes) -> bool:
        """Send one record, or drop and count it (False).

        In a loop it takes 2 us, at a server's pace 10, and several times that where it wakes the exporter.

        data: the record's bytes; one send is one message of the socket (SOCK_SEQPACKET).
        """
        if self._starter is not None:  # until its short-lived process has ended
            self._reap_starter()
        end = self._socket or self.start_exporter()
        if end is None or not data:
            self.dropped += 1
            return False
        try:
            end.send(data, _SEND_FLAGS)
        except OSError as error:
            return self._retry_send(error, end, data)
        self.sent += 1
        return True

    def close(self, timeout: float = EXIT_WAIT_S) -> None:
        """Close the stream and wait, at most `timeout` seconds, until the exporter has drained it."""
        with self._lock:
            end, self._socket, self.closed = self._socket, None, True
        until = time.monotonic() + timeout
        if end is not None:
            try:
                end.settimeout(timeout)
                end.shutdown(socket.SHUT_WR)
                end.recv(1)  # returns at the exporter's end
            except OSError:
                pass  # gone already, or too slow: it finishes after us, by itself
            end.close()
        self._reap_starter(max(0.1, until - time.monotonic()))
        self._close_page()

    def get_counts(self) -> dict[str, int]:
        """Counters of this process's records: sent, dropped, lost, restarts, and SHARED_COUNTERS."""
        own_counts = {
            "sent": self.sent,
            "dropped": self.dropped,
            "lost": self.lost,
            "restarts": max(0, self.exporter_starts - 1),
        }
        return own_counts | dict(zip(SHARED_COUNTERS, self._read_shared(), strict=True))

    def reset_after_fork(self) -> None:
        """Close the inherited ends in a forked child, else the exporter never sees the end of file."""
        for end in self._socket_pair:
            end.close()
        if self._starter is not None:
            self._starter.returncode = 0  # the parent's to reap, not ours to warn about
        self._close_page()
        self._reset_state()
        self.sent = self.dropped = self.lost = self.exporter_starts = 0

    def _retry_send(self, error: OSError, end: socket.socket, data: bytes) -> bool:
        if error.errno in _FULL_ERRNOS:  # the buffer is full, or the record larger than it
            self.dropped += 1
            return False
        with self._lock:  # the exporter is dead; the first thread to notice closes the socket
            if self._socket is end:
                self._socket = None
                end.close()
                # Of all exporters of this process: neither finished nor dropped from the full queue.
                counts = dict(zip(SHARED_COUNTERS, self._read_shared(), strict=True))
                self.lost = self.sent - counts["finished"] - counts["overflowed"]
        new_end = self.start_exporter()
        try:
            if new_end is not None:
                new_end.send(data, _SEND_FLAGS)
                self.sent += 1
                return True
        except OSError:
            pass
        self.dropped += 1
        return False

    def start_exporter(self) -> socket.socket | None:
        """Start an exporter unless the pause since the last start is not over; takes 1-3 ms.

        None while there is no exporter. Does not wait until it is ready: the socket buffers records.
        """
        with self._lock:
            moment = time.monotonic()
            if self._socket is not None or self.closed or moment < self._next_start_at:
                return self._socket
            lived = moment - self._started_at
            self._restart_pause_s = (
                RESTART_PAUSE_S
                if lived > HEALTHY_LIFETIME_S
                else min(self._restart_pause_s * 2, MAX_RESTART_PAUSE_S)
            )
            self._started_at = moment
            self._next_start_at = moment + self._restart_pause_s
            with guard.Guard("handoff.start"):
                self._reap_starter()
                self._socket = self._spawn_exporter()
                self.exporter_starts += 1
                if self.exporter_starts == 1:
                    _close_at_exit()
            return self._socket

    def _spawn_exporter(self) -> socket.socket:
        host_end, exporter_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket_pair = (host_end, exporter_end)
        try:
            host_end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.settings.queue_bytes)
            # The kernel doubles what it grants, for its own bookkeeping.
            self.capacity = host_end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2
            if self._page is None:
                self._page_fd = os.memfd_create("ttft-otel")
                os.ftruncate(self._page_fd, mmap.PAGESIZE)
                self._page = mmap.mmap(self._page_fd, mmap.PAGESIZE)
            page = self._page_fd
            self._starter = subprocess.Popen(
                build_child_command(
                    EXPORTER_MODULE,
                    *(str(exporter_end.fileno()), str(page), str(self.pid)),
                    json.dumps(engine_settings),
                ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(exporter_end.fileno(), page),
                env=_build_environment(self.settings),
                start_new_session=True,  # Ctrl-C signals the terminal's process group, the host's
            )
        except BaseException:
            host_end.close()
            raise
        finally:
            exporter_end.close()
        return host_end

    def _reap_starter(self, timeout: float = 0.0) -> None:
        """Reap the short-lived parent (50 ms) that forks the exporter and detaches it from the host."""
        starter = self._starter
        if starter is None:
            return
        try:
            ended = starter.wait(timeout) if timeout else starter.poll()
        except subprocess.TimeoutExpired:
            return
        if ended is not None:
            self._starter = None

    def _read_shared(self) -> tuple[int, ...]:
        return SHARED_LAYOUT.unpack_from(self._page) if self._page else (0,) * len(SHARED_COUNTERS)

    def _close_page(self) -> None:
        # The page itself stays mapped until this object is freed, so that get_counts() still works.
        if self._page_fd >= 0:
            os.close(self._page_fd)
            self._page_fd = -1


def get_sender() -> RecordSender:
    """This process's RecordSender, created at first use; a forked child gets its own."""
    global _process_sender
    if _process_sender is None:
        _process_sender = RecordSender(get_settings())
    return _process_sender


def get_counts() -> dict[str, int]:
    """Counters of this process's RecordSender for /metrics; empty before its first use."""
    return {} if _process_sender is None else _process_sender.get_counts()


_process_sender: RecordSender | None = None
_senders: weakref.WeakSet[RecordSender] = weakref.WeakSet()


def _reset_after_fork() -> None:
    global _process_sender
    _process_sender = None
    for inherited in list(_senders):
        inherited.reset_after_fork()


def _close_senders() -> None:
    for sender in list(_senders):
        if sender.pid == os.getpid():
            sender.close()


def _close_at_exit() -> None:
    """Close senders when the process ends; registered once.

    atexit covers ordinary processes; util.Finalize covers children that multiprocessing has forked,
    which leave by os._exit() without running atexit handlers.
    """
    atexit.unregister(_close_senders)
    atexit.register(_close_senders)
    util.Finalize(None, _close_senders, exitpriority=100)


def _build_environment(settings: Settings) -> dict[str, str]:
    """The exporter's environment: the host's, with the validated `settings` in it."""
    env = dict(replace_variables(os.environ, settings.variables))
    # ENV_ON: the exporter must not trace itself. The others could make it fail, or not end.
    for name in (env_names.TTFT_OTEL, "PYTHONWARNINGS", "PYTHONINSPECT"):
        env.pop(name, None)
    if "-packages" not in _IMPORT_ROOT.name:  # a checkout: make it importable for the exporter too
        env["PYTHONPATH"] = os.pathsep.join(
            filter(None, (env.get("PYTHONPATH"), str(_IMPORT_ROOT)))
        )
    env[env_names.OTEL_EXPORTER_OTLP_TRACES_PROTOCOL] = settings.protocol
    if env.get(env_names.OTEL_EXPORTER_OTLP_TRACES_ENDPOINT) != settings.endpoint:
        env.pop(env_names.OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, None)
        env[env_names.OTEL_EXPORTER_OTLP_ENDPOINT] = settings.endpoint
    env[env_names.TTFT_OTEL_METRICS] = "1" if settings.metrics else "0"
    env[env_names.OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE] = settings.temporality
    if settings.service:
        env[env_names.OTEL_SERVICE_NAME] = settings.service
    return env


os.register_at_fork(after_in_child=_reset_after_fork)
