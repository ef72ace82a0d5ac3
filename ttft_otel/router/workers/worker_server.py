# SPDX-License-Identifier: Apache-2.0
"""One worker's server: on the shared port, joined to the other workers; cli/worker_processes.py runs it."""

from __future__ import annotations

import asyncio
import functools
import logging
import signal
import socket
from collections.abc import Callable
from typing import Final

from ttft_otel.router.control.app import RouterApp
from ttft_otel.router.control.uvicorn_server import DrainingServer, ServerPlan, run_router_server
from ttft_otel.router.workers.private_folder import leave_folder
from ttft_otel.router.workers.supervisor import WorkerSeat, bind_shared_port
from ttft_otel.router.workers.worker_link import Companion, WorkerLink

log: Final = logging.getLogger("ttft_otel")


class WorkerServer(DrainingServer):
    """A draining server that is linked to the other workers while it serves.

    It drains too when its supervisor is gone: nobody would replace it, nor pass signals on.
    """

    def __init__(self, app: RouterApp, plan: ServerPlan, link: WorkerLink) -> None:
        super().__init__(app, plan)
        self.link, self.is_orphaned = link, False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Join the others, then listen on `sockets`: a successor first takes over their instances."""
        start_app = self.lifespan.startup

        async def start_and_join() -> None:
            await start_app()
            if not self.lifespan.should_exit:
                await self.link.start()

        # Between the application's start and the first connection uvicorn offers no other place.
        self.lifespan.startup = start_and_join
        await super().startup(sockets)
        # Nobody writes to it: it is readable when the supervisor is gone.
        asyncio.get_running_loop().add_reader(self.link.seat.lifeline_fd, self._leave_orphaned)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, then leave the others."""
        asyncio.get_running_loop().remove_reader(self.link.seat.lifeline_fd)
        # Linked until the last request is over, whose end the others have to hear of.
        await super().shutdown(sockets)
        await self.link.close()
        if self.is_orphaned:
            leave_folder(self.link.seat.folder, self.link.seat.number)

    def _leave_orphaned(self) -> None:
        # An end of file stays readable: this would be called in every turn of the loop.
        asyncio.get_running_loop().remove_reader(self.link.seat.lifeline_fd)
        self.is_orphaned = True
        # If it drains already, a second signal would end it at once.
        if not self.stop_requested_s:
            log.error("ttft-otel: the supervisor of the workers is gone: this one drains and ends")
            signal.raise_signal(signal.SIGTERM)


def run_worker_server(
    seat: WorkerSeat,
    build_companion: Callable[[WorkerLink], Companion | None],
    app: RouterApp,
    plan: ServerPlan,
) -> None:
    """Serve `app` as `plan` says, on the port that all workers share."""
    link = WorkerLink(seat, app)
    link.companion = build_companion(link)
    build_server = functools.partial(WorkerServer, link=link)
    run_router_server(app, plan, build_server, bind_shared_port(plan.host, plan.port))
