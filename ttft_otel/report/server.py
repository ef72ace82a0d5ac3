# SPDX-License-Identifier: Apache-2.0
"""Run `ttft-otel serve`: the HTTP app and the gRPC door around one store, until a signal.

command.py gives the options; on SIGINT or SIGTERM what was accepted is on disk before it ends.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import uvicorn

from ttft_otel.report import app, watch
from ttft_otel.report.receiver import Receiver, grpc_server
from ttft_otel.report.schema import Trouble
from ttft_otel.report.store import Store

GRACE_S: Final = 3


@dataclass(frozen=True, slots=True)
class Options:
    """What the operator chose; port 0 takes a free one, grpc_port -1 opens no gRPC."""

    path: Path
    host: str = "127.0.0.1"
    http_port: int = 4318
    grpc_port: int = 4317
    keep: int = 20_000
    hours: float = 168.0
    limit: int = 2 << 30
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Doors:
    """Where it listens (grpc -1: nowhere), and how to end it from another thread."""

    http: int
    grpc: int
    close: Callable[[], None]


class Server(uvicorn.Server):
    """uvicorn, which says when it listens."""

    started_call: Callable[[int], None]

    def close(self) -> None:
        """End after what runs now."""
        self.should_exit = True

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        """Bind, then call back with the port."""
        await super().startup(sockets)  # type: ignore[arg-type]
        if self.started:
            self.started_call(self.servers[0].sockets[0].getsockname()[1])


def run(options: Options, started: Callable[[Doors], None]) -> None:
    """Serve until a signal; `started` is called when both doors are open. Raises Trouble."""
    if threading.current_thread() is threading.main_thread():
        # uvicorn raises SIGTERM again when it is done: unhandled, it would skip closing the store.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    store = Store(options.path, options.keep, options.hours, options.limit)
    try:
        _run(options, Receiver(store), started)
    finally:
        store.close()


def _run(options: Options, taking: Receiver, started: Callable[[Doors], None]) -> None:
    web = app.create(taking, allowed(options))
    provider = watch.install(web, (options.http_port, options.grpc_port))
    doors = grpc_server(taking)
    port = _bind(doors.add_insecure_port, options) if options.grpc_port >= 0 else -1
    doors.start()
    try:
        config = uvicorn.Config(
            web,
            host=options.host,
            port=options.http_port,
            access_log=False,
            log_level="warning",
            timeout_graceful_shutdown=GRACE_S,
            server_header=False,
        )
        try:
            server = Server(config)
            server.started_call = lambda http: started(Doors(http, port, server.close))
            server.run()
        except SystemExit as error:
            if error.code:
                raise Trouble(_taken(options.host, options.http_port, "--http-port")) from error
    finally:
        doors.stop(GRACE_S).wait(GRACE_S)
        if provider:
            provider.shutdown()


def allowed(options: Options) -> Sequence[str]:
    """Host headers accepted: on loopback only its own names, so that no web page reaches it."""
    if options.host in app.LOOPBACK:
        return [*app.LOOPBACK, *options.hosts]
    return options.hosts or ["*"]


def _bind(add: Callable[[str], int], options: Options) -> int:
    host = f"[{options.host}]" if ":" in options.host else options.host
    try:
        return add(f"{host}:{options.grpc_port}")
    except RuntimeError as error:
        raise Trouble(_taken(options.host, options.grpc_port, "--grpc-port")) from error


def _taken(host: str, port: int, option: str) -> str:
    return f"cannot listen on {host}:{port}: is it taken? choose another with {option} PORT"
