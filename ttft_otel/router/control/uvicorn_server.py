# SPDX-License-Identifier: Apache-2.0
"""Run the router under uvicorn, within its memory limit; SIGTERM drains it, SIGHUP reloads its options.

A client's connection is the bounded one of http/, with the router's deadlines and refusals; the application
gets the requests. The data path writes through the ClientOutput of proxy/client_stream.py, which it finds in
the scope.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import resource
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from types import FrameType
from typing import Any, Final, cast

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from ttft_otel.http.bounded_connection import BODY, REQUEST, BoundedConnection
from ttft_otel.http.head_checks import CallerRules, HeadLimits, HeadRefused
from ttft_otel.model.names import header_names
from ttft_otel.router.control.app import RouterApp
from ttft_otel.router.errors import RequestRejected
from ttft_otel.router.limits import RouterLimits
from ttft_otel.router.proxy.client_stream import OUTPUT_EXTENSION, ClientOutput, render_error
from ttft_otel.router.time_limits import DeadlineQueue, end_with_host

IDLE_S: Final = 5.0  # seconds for which a connection stays open after an answer, as uvicorn's do
MAX_LINGER_S: Final = 30.0  # seconds for which bytes after a refusal are read and thrown away
# By status of a refused head: the reason that is counted.
_REASONS: Final = {
    400: "http",
    403: "origin",
    414: "target",
    421: "host",
    429: "pipelining",
    431: "headers",
}
MAX_USED_SHARE: Final = 0.9  # of the container's memory; beyond it new requests are refused
# Of control groups of version 2 and 1: folder, limit, memory in use, and what of that can be dropped.
_VERSIONS: Final = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
UNFINISHED_MESSAGE: Final = "ASGI callable returned without completing response."
CANCEL_GRACE_S: Final = 1  # seconds for cancelled responses to end
# Objects, then rounds, between two collections of a generation.
GC_THRESHOLDS: Final = (20_000, 20, 20)
RESERVED_FILES: Final = 64  # file descriptors that no client's connection may take
MAX_FILES: Final = 1 << 20  # file descriptors wanted where the system allows any number

log: Final = logging.getLogger("ttft_otel")


class ClientConnections:
    """What all connections of clients share: limits, deadlines and counts of refusals.

    Args:
        limits: Of one connection.
        refusal_counts: Refusals by reason.
        max_connections: Beyond it connections are refused, and beyond some more closed without an answer.
        callers: Which Host and which web pages are answered.
    """

    def __init__(
        self,
        limits: RouterLimits,
        refusal_counts: Counter[str],
        max_connections: int,
        callers: CallerRules,
    ) -> None:
        self.callers = callers
        self.head_limits = HeadLimits(
            limits.max_target, limits.max_headers, limits.max_header_bytes
        )
        self.refusal_counts = refusal_counts
        self.max_connections = max_connections
        # Some sockets more, so that the first ones beyond the limit can be answered why.
        self.max_open_sockets = max_connections + max(1, max_connections // 8)
        self.awaited_heads: DeadlineQueue[ClientConnection] = DeadlineQueue(limits.head_timeout)
        # What waits to be read by a client would hold its request, and its instance's, without end.
        self.unread: DeadlineQueue[ClientConnection] = DeadlineQueue(
            limits.send_timeout, methodcaller("end_unread")
        )
        # Time for a client to read its refusal while it still sends a body.
        self.lingering: DeadlineQueue[ClientConnection] = DeadlineQueue(MAX_LINGER_S)
        self.idle_clients: DeadlineQueue[ClientConnection] = DeadlineQueue(
            IDLE_S,
            methodcaller("timeout_keep_alive_handler"),  # uvicorn's, of HttpToolsProtocol
        )

    def forget(self, connection: ClientConnection) -> None:
        for queue in (self.awaited_heads, self.lingering, self.idle_clients, self.unread):
            queue.forget(connection)


class ClientConnection(BoundedConnection):
    """A connection that is ended when its head, or what it waits for, does not come in time.

    current_cycle: the request that is being answered; later ones wait in `pipeline`.
    refusal: why this connection ends; what arrives after it is thrown away.
    """

    def __init__(self, *args: Any, shared: ClientConnections, **kwargs: Any) -> None:
        super().__init__(*args, head_limits=shared.head_limits, callers=shared.callers, **kwargs)
        self.shared = shared
        self.current_cycle: RequestResponseCycle | None = None
        self.refusal: RequestRejected | None = None
        self._unread_bytes = 0

    # Events of the socket.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request, or refuse the connection if there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self.shared.max_open_sockets:
            self.shared.refusal_counts["connections"] += 1
            transport.abort()
        elif len(self.connections) > self.shared.max_connections:
            text = "The router has too many connections."
            self._refuse(RequestRejected(503, text, reason="connections"))
        else:
            end_with_host(transport.get_extra_info("socket"))
            self.shared.awaited_heads.watch(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the request that is being answered; uvicorn tells the last one that was read."""
        self.shared.forget(self)
        self.pipeline.clear()
        cycle = self.current_cycle
        super().connection_lost(exc)
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            cast(ClientOutput, cycle.transport).report_lost()

    def data_received(self, data: bytes) -> None:
        if self.is_refused:
            return
        self._unset_keepalive_if_required()
        if self.parse_data(data) and self.current_cycle is None and self.phase != BODY:
            self.shared.awaited_heads.watch(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_unread()
        if self.current_cycle is not None:
            cast(ClientOutput, self.current_cycle.transport).pause_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.shared.unread.forget(self)
        if self.current_cycle is not None:
            cast(ClientOutput, self.current_cycle.transport).resume_reader()

    def close_if_idle(self) -> None:
        """Close the connection unless a request is under way or has begun to arrive."""
        if self.current_cycle is None and self.phase == REQUEST and self.refusal is None:
            self.transport.close()

    def _watch_unread(self) -> None:
        self._unread_bytes = self.transport.get_write_buffer_size()
        if self._unread_bytes:
            self.shared.unread.watch(self)

    def end_unread(self) -> None:
        """Called when something has waited for the client: the connection ends if it read nothing."""
        if self.transport.get_write_buffer_size() == self._unread_bytes:
            self.shared.refusal_counts["send_timeout"] += 1
            self.transport.abort()
        else:
            self._watch_unread()

    def time_out(self) -> None:
        """Called when no head has come in time, or what follows a refusal has not ended."""
        if self.refusal is not None or self.phase == BODY:
            self.transport.abort()
        elif self.phase == REQUEST:
            self.transport.close()
        else:
            text = "The head of the request did not arrive in time."
            self._refuse(RequestRejected(408, text, reason="head_timeout"))

    # Events of the parser.

    def start_request(self) -> None:
        """The head is complete: the request starts, or waits for those before it."""
        super().start_request()
        # Parts are pushed as chunks, of which HTTP/1.0 knows nothing.
        output: Any = ClientOutput(self.transport, self.flow, self.scope["http_version"] == "1.1")
        self.cycle.transport = output
        # The cycle's task starts later, and finds it there; uvicorn knows its own extensions only.
        self.scope["extensions"] = {OUTPUT_EXTENSION: output}
        self.shared.awaited_heads.forget(self)
        if not self.pipeline:
            self.current_cycle = self.cycle

    def on_message_complete(self) -> None:
        was_in_body = self.phase == BODY
        super().on_message_complete()
        # It was answered before its body was here.
        if was_in_body and self.current_cycle is None:
            self.shared.lingering.forget(self)

    def on_response_complete(self) -> None:
        """A request is answered: the next one of the pipeline starts, or a refusal is sent."""
        if self.pipeline:
            self.current_cycle = self.pipeline[-1][0]
            super().on_response_complete()
            return
        # As uvicorn does it, but for a timer, of which one for each answer costs 2 us.
        self.current_cycle = None
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        self._watch_unread()
        self.shared.idle_clients.watch(self)
        if self.refusal is not None:
            self._send_refusal(self.refusal)
        elif self.phase == BODY:
            self.shared.lingering.watch(self)

    def _unset_keepalive_if_required(self) -> None:
        """A request begins, or none will."""
        self.shared.idle_clients.forget(self)

    # Refusals.

    def refuse(self, error: HeadRefused) -> None:
        reason = _REASONS[error.status]
        # A 429 has Retry-After by default: what was pipelined would be refused a second later, too.
        self._refuse(RequestRejected(error.status, str(error), reason, retry_after_s=0))

    def _refuse(self, error: RequestRejected) -> None:
        """End the connection with `error`, after the answers to requests before it."""
        cycle = self.cycle
        self.is_refused = True
        self.refusal = error
        self.shared.refusal_counts[error.reason] += 1
        self.shared.awaited_heads.forget(self)
        is_in_body = self.phase == BODY and cycle is not None
        if is_in_body and self.pipeline and self.pipeline[0][0] is cycle:
            self.pipeline.popleft()
        elif is_in_body and (cycle.response_started or cycle.response_complete):
            # Its answer is out, or on its way: there is no second one.
            cycle.keep_alive = False
            if cycle.response_complete:
                self._begin_linger()
            return
        elif is_in_body:
            self.current_cycle = None
            cycle.disconnected = True
            cycle.waiting_for_100_continue = False  # which uvicorn would write after the refusal
            cycle.message_event.set()
        if self.current_cycle is None:
            self._send_refusal(error)

    def _send_refusal(self, error: RequestRejected) -> None:
        if self.transport.is_closing():
            return
        headers, data = render_error(error)
        lines = [STATUS_LINE[error.status], b"connection: close\r\n"]
        lines += [b"%b: %b\r\n" % header for header in headers]
        self.transport.write(b"".join([*lines, b"\r\n", data]))
        self._begin_linger()

    def _begin_linger(self) -> None:
        """Say that no more will come, and read on: closing at once would cost the client the answer."""
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        self.transport.write_eof()
        self.shared.lingering.watch(self)


class MemoryLimit:
    """Of a control group; max_bytes is 0 where there is none.

    root: where the file systems of control groups are. membership: the file that names this process's.
    """

    def __init__(
        self, root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
    ) -> None:
        self.max_bytes = 0
        for line in _read_text(membership).splitlines():
            _, controllers, path = line.split(":", 2)
            folder, limit, *names = _VERSIONS.get(controllers, ("", ""))
            # A container may see its own group as the root, whatever its name.
            for group in (root / folder / path.lstrip("/"), root / folder):
                text = _read_text(group / limit).strip() if names else ""
                # "max", or in version 1 a number that no machine has.
                if text.isdigit() and len(text) < 19 and not self.max_bytes:
                    self._group, self._names, self.max_bytes = group, names, int(text)

    def measure_share(self) -> float:
        """The share of the limit that is in use, without what the kernel would drop; 0 without a limit."""
        if not self.max_bytes:
            return 0.0
        used, dropped = self._names
        lines = _read_text(self._group / "memory.stat").splitlines()
        statistics = dict(line.split(" ", 1) for line in lines)
        used_bytes = int(_read_text(self._group / used) or 0)
        return (used_bytes - int(statistics.get(dropped, 0))) / self.max_bytes


def _read_text(path: Path) -> str:
    try:
        return path.read_text("ascii")
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """Where a router listens, and how it ends.

    drain_delay_s: seconds after the signal in which requests are accepted. drain_timeout_s: seconds after it
    in which requests may finish. reload: called at SIGHUP.
    """

    host: str
    port: int
    drain_delay_s: float
    drain_timeout_s: float
    reload: Callable[[], None]


class DrainingServer(uvicorn.Server):
    """uvicorn's server, which keeps listening while it drains: /readyz turns 503, and new requests
    get an error response instead of a refused connection."""

    def __init__(self, app: RouterApp, plan: ServerPlan) -> None:
        super().__init__(build_uvicorn_config(app, plan.host, plan.port))
        self.admission = app.admission
        self.plan = plan
        self.stop_requested_s = 0.0
        self._memory = MemoryLimit()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening on `sockets`, and handle SIGHUP from then on."""
        # uvicorn handles SIGINT and SIGTERM only; SIGHUP was ignored until here.
        await super().startup(sockets)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.plan.reload)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.stop_requested_s:
            # uvicorn waits this long for responses before it cancels them.
            self.config.timeout_graceful_shutdown = 0
            self.should_exit = True
            return
        self.stop_requested_s = time.monotonic()
        self.admission.is_draining = True
        log.warning(
            "ttft-otel: shutting down: %d requests in flight may finish within %g s, "
            "a second signal ends them at once",
            self.admission.requests_under_way,
            self.plan.drain_timeout_s,
        )

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second; returns whether to stop."""
        if counter % 10 == 0 and self._memory.max_bytes:
            share = self._memory.measure_share()
            # Short until some is free, so that it is not said each second.
            is_short = share > MAX_USED_SHARE - 0.05 * self.admission.is_memory_short
            if is_short and not self.admission.is_memory_short:
                log.warning(
                    "ttft-otel: %.0f %% of this container's %d MiB are used: requests are refused while "
                    "others are under way; give it more, or lower --max-bodies",
                    share * 100,
                    self._memory.max_bytes >> 20,
                )
            self.admission.is_memory_short = is_short
        if self.stop_requested_s:
            elapsed_s = time.monotonic() - self.stop_requested_s
            # Until then requests pass, while balancers see /readyz and turn elsewhere.
            if not self.admission.is_shut and elapsed_s >= self.plan.drain_delay_s:
                self.admission.is_shut = True
                # A request on one of these would be refused; on a new connection it goes elsewhere.
                for connection in list(self.server_state.connections):
                    cast(ClientConnection, connection).close_if_idle()
            if (
                self.admission.is_shut and not self.admission.requests_under_way
            ) or elapsed_s >= self.plan.drain_timeout_s:
                self.should_exit = True
        return await super().on_tick(counter)


def run_router_server(
    app: RouterApp,
    plan: ServerPlan,
    build_server: Callable[[RouterApp, ServerPlan], DrainingServer] = DrainingServer,
    sockets: list[socket.socket] | None = None,
) -> None:
    """Serve `app` as `plan` says until a signal stops it.

    build_server, sockets: of a worker, which has bound its own sockets to the port.
    """
    raise_file_limit()
    # Before and after uvicorn's own handler: exit normally, so that atexit sends the last records.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    # Until there is a handler: the default action would end the process.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # Imported objects stay, so collections can skip them; requests leave few reference cycles.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    build_server(app, plan).run(sockets)


def raise_file_limit() -> None:
    """Raise the soft limit of file descriptors to the hard one: 1024 is the usual soft one, for select().

    Without descriptors no instance can be reached, however healthy it is.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        log.warning("ttft-otel: the limit of file descriptors stays at %d: %s", soft, error)


def count_client_sockets() -> int:
    """How many clients may be connected: half of the file descriptors, as each needs an instance too."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    number = MAX_FILES if soft == resource.RLIM_INFINITY else soft
    return max(1, (number - RESERVED_FILES) // 2)


def build_uvicorn_config(app: RouterApp, host: str = "127.0.0.1", port: int = 0) -> uvicorn.Config:
    """The uvicorn configuration; Date and Server headers are those of the instances."""
    limits = app.endpoint.limits
    shared = ClientConnections(
        limits,
        app.admission.refusal_counts,
        min(limits.max_connections, count_client_sockets()),
        CallerRules(host, app.allowed_hosts, app.cors_origins),
    )
    config = uvicorn.Config(
        _allow_origins(app) if app.cors_origins else app,
        host=host,
        port=port,
        loop="uvloop",
        http=cast(type[asyncio.Protocol], functools.partial(ClientConnection, shared=shared)),
        # WebSockets are not routed, and uvicorn would look for a library.
        ws="none",
        access_log=False,
        log_level="warning",
        date_header=False,
        server_header=False,
        # Nothing is decided by a client's address, so no header has to tell it.
        proxy_headers=False,
        timeout_graceful_shutdown=CANCEL_GRACE_S,
    )
    # A response that breaks off upstream is aborted on purpose: it is counted, not logged each time.
    logging.getLogger("uvicorn.error").addFilter(lambda record: record.msg != UNFINISHED_MESSAGE)
    return config


def _allow_origins(app: RouterApp) -> CORSMiddleware:
    return CORSMiddleware(
        app,
        allow_origins=app.cors_origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=[header_names.REQUEST_ID, header_names.SERVER_TIMING, "Retry-After"],
    )
