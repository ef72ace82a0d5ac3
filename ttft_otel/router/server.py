# SPDX-License-Identifier: Apache-2.0
"""Run the router under uvicorn; SIGTERM drains it, SIGHUP has it read its configuration again."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Final

import uvicorn

from ttft_otel.router.app import App

UNFINISHED: Final = "ASGI callable returned without completing response."
CUT: Final = 1  # seconds that cancelled answers have to end
COLLECT: Final = (20_000, 20, 20)  # objects, then rounds, between two collections of a generation

log: Final = logging.getLogger("ttft_otel")


class Server(uvicorn.Server):
    """uvicorn's server, which keeps listening while it drains: /readyz says so, and new requests
    get an answer instead of a refused connection."""

    def __init__(
        self,
        config: uvicorn.Config,
        app: App,
        delay: float,
        timeout: float,
        reload: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self.gate, self.delay, self.timeout, self.reload = app.gate, delay, timeout, reload
        self.told = 0.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, from now on to SIGHUP too."""
        await super().startup(sockets)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.reload)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; told a second time, end now."""
        if self.told:
            self.config.timeout_graceful_shutdown = 0
            self.should_exit = True
            return
        self.told = time.monotonic()
        self.gate.draining = True
        log.warning(
            "ttft-otel: stopping; %d requests have %g s to end", self.gate.inside, self.timeout
        )

    async def on_tick(self, counter: int) -> bool:
        """uvicorn's, ten times a second: whether to end."""
        if self.told:
            passed = time.monotonic() - self.told
            self.gate.shut = passed >= self.delay
            if (self.gate.shut and not self.gate.inside) or passed >= self.timeout:
                self.should_exit = True
        return await super().on_tick(counter)


def serve(
    app: App,
    host: str,
    port: int,
    delay: float,
    timeout: float,
    reload: Callable[[], None],
) -> None:
    """Run until told to stop."""
    # until uvicorn listens to it, and after: the exit's drain of the last records is not skipped
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # What was imported stays: collections need not look at it, and requests leave few cycles behind.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT)
    Server(configure(app, host, port), app, delay, timeout, reload).run()


def configure(app: App, host: str = "127.0.0.1", port: int = 0) -> uvicorn.Config:
    """The one way to serve it; the legs' own Date and Server headers pass through."""
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        loop="uvloop",
        http="httptools",
        ws="none",
        access_log=False,
        log_level="warning",
        date_header=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=CUT,
    )
    # An answer that broke off upstream is cut off here too, on purpose: counted, not logged each time.
    logging.getLogger("uvicorn.error").addFilter(lambda record: record.msg != UNFINISHED)
    return config
