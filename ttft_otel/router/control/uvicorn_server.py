# SPDX-License-Identifier: Apache-2.0
"""Run the router under uvicorn, within its memory limit; SIGTERM drains it, SIGHUP reloads its options."""

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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final, cast

import uvicorn
from starlette.middleware.cors import CORSMiddleware

from ttft_otel.http.head_checks import CallerRules
from ttft_otel.model.names import header_names
from ttft_otel.router.control.app import RouterApp
from ttft_otel.router.control.client_connection import ClientConnection, ClientConnections

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
