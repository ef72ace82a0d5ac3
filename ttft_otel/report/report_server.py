# SPDX-License-Identifier: Apache-2.0
"""Run `ttft-otel serve`: HTTP and gRPC servers around one store, until SIGINT or SIGTERM.

Spans that were accepted are on disk before it ends.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any, Final, cast

import grpc
import uvicorn

from ttft_otel.http.bounded_connection import BoundedConnection
from ttft_otel.http.head_checks import CallerRules, HeadLimits
from ttft_otel.report import app
from ttft_otel.report.breakdown_source import ServeOptions
from ttft_otel.report.receive.receiver import Receiver, create_grpc_server
from ttft_otel.report.store.database_schema import StoreError
from ttft_otel.report.store.span_store import SpanStore

# An exporter sends its head at once; only a stalled or idle client takes longer.
MAX_WAIT_S: Final = 10.0  # seconds for the head of a request
MAX_CONNECTIONS: Final = 256  # with more, those that have waited longest are closed
SHUTDOWN_GRACE_S: Final = 3  # seconds for requests in progress at the end


class ReportServer(uvicorn.Server):
    """uvicorn's server, with gRPC on the same event loop and a bound on connections that wait.

    on_started: gets the server once it listens on http_port and grpc_port (-1 without gRPC).
    """

    def __init__(
        self,
        config: uvicorn.Config,
        span_receiver: Receiver | None,
        options: ServeOptions,
        on_started: Callable[[ReportServer], None],
    ) -> None:
        super().__init__(config)
        self.http_port = self.grpc_port = -1
        self._span_receiver = span_receiver
        self.options = options
        self._on_started = on_started
        self._grpc_server: grpc.aio.Server | None = None
        # By connection: its last request (uvicorn's object), whether that has ended, and since when.
        self._waits: dict[Any, tuple[Any, bool, float]] = {}

    def close(self) -> None:
        """End after requests in progress."""
        # Read by uvicorn's loop at its next tick, so any thread may set it.
        self.should_exit = True

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        """Bind (`sockets` as in uvicorn), then call on_started. Raises StoreError for gRPC's port."""
        # gRPC first: if its port is taken, nothing has begun to listen yet.
        if self._span_receiver and self.options.grpc_port >= 0:
            self._grpc_server = self._bind_grpc(self._span_receiver)
            await self._grpc_server.start()
        try:
            await super().startup(sockets)  # type: ignore[arg-type]
        # uvicorn's way to say that it cannot bind; gRPC is listening already.
        except SystemExit:
            await self._stop_grpc()
            raise
        # What was built until now stays: the garbage collector need not look through it again and again,
        # which was a tenth of what it takes to receive.
        gc.collect()
        gc.freeze()
        if self.started:
            # Asked of the socket: port 0 is known only now.
            self.http_port = self.servers[0].sockets[0].getsockname()[1]
            self._on_started(self)

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: close connections that have waited too long for a request."""
        self._close_overdue()
        return await super().on_tick(counter)

    def _close_overdue(self) -> None:
        """Close what has waited for MAX_WAIT_S, and the oldest beyond MAX_CONNECTIONS.

        uvicorn closes a kept-alive connection between two requests, but neither one that never sends a
        request nor one that stops in the middle of a head.
        """
        now_s = monotonic()
        waits: dict[Any, tuple[Any, bool, float]] = {}
        connections: Iterable[Any] = self.server_state.connections
        for connection in connections:
            request = connection.cycle
            is_waiting = request is None or request.response_complete
            before = self._waits.get(connection)
            # Another request, or its end, starts the wait anew.
            is_same = before is not None and before[0] is request and before[1] == is_waiting
            waits[connection] = before if before and is_same else (request, is_waiting, now_s)
        # Replaced as a whole, so that closed connections are forgotten.
        self._waits = waits
        # Waiting ones first, each group oldest first.
        ordered = sorted(waits.items(), key=lambda item: (not item[1][1], item[1][2]))
        excess = len(ordered) - MAX_CONNECTIONS
        for position, (connection, (_, is_waiting, since_s)) in enumerate(ordered):
            if position < excess or (is_waiting and now_s - since_s > MAX_WAIT_S):
                connection.transport.close()

    async def shutdown(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        # Side by side, so that both together take no longer than the grace.
        await asyncio.gather(super().shutdown(sockets), self._stop_grpc())  # type: ignore[arg-type]

    async def _stop_grpc(self) -> None:
        if self._grpc_server:
            await self._grpc_server.stop(SHUTDOWN_GRACE_S)

    def _bind_grpc(self, span_receiver: Receiver) -> grpc.aio.Server:
        server = create_grpc_server(span_receiver)
        wanted = self.options
        host = f"[{wanted.host}]" if ":" in wanted.host else wanted.host
        try:
            self.grpc_port = server.add_insecure_port(f"{host}:{wanted.grpc_port}")
        except RuntimeError as error:
            raise StoreError(
                _describe_taken_port(wanted.host, wanted.grpc_port, "--grpc-port")
            ) from error
        return server


def run_server(options: ServeOptions, on_started: Callable[[ReportServer], None]) -> None:
    """Serve until a signal. Raises StoreError when the database or a port cannot be used."""
    if threading.current_thread() is threading.main_thread():
        # uvicorn raises SIGTERM again after its shutdown: without a handler that would end the process
        # before the store is closed.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if options.tempo:
        _run_until_signal(options, None, on_started)
        return
    store = SpanStore(options.path, options.max_traces, options.max_age_hours, options.max_bytes)
    try:
        _run_until_signal(options, Receiver(store, options.token), on_started)
    finally:
        # After both servers: what they have accepted is still written.
        store.close()


def _run_until_signal(
    options: ServeOptions,
    span_receiver: Receiver | None,
    on_started: Callable[[ReportServer], None],
) -> None:
    web = app.create_app(span_receiver, options)
    config = uvicorn.Config(
        web,
        host=options.host,
        port=options.http_port,
        http=cast(
            type[asyncio.Protocol],
            functools.partial(
                BoundedConnection,
                head_limits=HeadLimits(),
                callers=CallerRules(options.host, options.allowed_hosts),
            ),
        ),
        # Nothing here speaks WebSocket, and uvicorn would look for a library.
        ws="none",
        # Exports come every few seconds from every server: a line for each would be all there is.
        access_log=False,
        log_level="warning",
        timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
        # Nobody needs to know which server and version this is.
        server_header=False,
    )
    server = ReportServer(config, span_receiver, options, on_started)
    try:
        server.run()
    except SystemExit as error:
        # uvicorn exits with a code when it cannot bind; without one it is our SIGTERM handler.
        if error.code:
            raise StoreError(
                _describe_taken_port(options.host, options.http_port, "--http-port")
            ) from error


def _describe_taken_port(host: str, port: int, option: str) -> str:
    return f"cannot listen on {host}:{port}: is it taken? choose another with {option} PORT"
