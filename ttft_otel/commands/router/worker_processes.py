# SPDX-License-Identifier: Apache-2.0
"""`--workers N`: the command becomes a supervisor, N processes are the router; command.py calls it."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any, Final

import click

from ttft_otel.commands.router import router_options
from ttft_otel.commands.router.router_options import RouterOptions
from ttft_otel.router.workers.supervisor import WorkerSlot, WorkerSupervisor, reserve_port
from ttft_otel.router.workers.worker import run_worker_server

log: Final = logging.getLogger("ttft_otel")


class WorkerProcesses:
    """The options that workers start with: those of the last configuration that was valid.

    serve: runs a router with options and the function that serves it.
    """

    def __init__(
        self, ctx: click.Context, options: RouterOptions, serve: Callable[..., None]
    ) -> None:
        self.ctx, self.options, self.serve = ctx, options, serve

    def run_worker(self, slot: WorkerSlot) -> None:
        build = functools.partial(router_options.build_worker_link, self.options)
        self.serve(self.options, functools.partial(run_worker_server, slot, build))

    def reload_options(self) -> None:
        """Read the configuration again for workers that start later; those that run do so themselves."""
        try:
            fresh = router_options.reread_options(self.ctx)
        except click.ClickException:
            return  # each worker logs why
        changes: dict[str, Any] = {
            name: getattr(fresh, name) for name in router_options.RELOADABLE_FIELDS
        }
        self.options = dataclasses.replace(self.options, **changes)


def run_workers(ctx: click.Context, options: RouterOptions, serve: Callable[..., None]) -> int:
    """Run the workers until a signal ends them; returns the exit code. Raises UsageError for a used port."""
    # Bound all the time, though nobody listens on them: the ports stay ours while workers are replaced.
    reserved = []
    ports: dict[str, Any] = {}
    for name, host, port in (
        ("port", options.host, options.port),
        ("admin_port", options.admin_host, options.admin_port),
    ):
        if port is None:
            continue
        try:
            ports[name], sockets = reserve_port(host, port)
        except OSError as error:
            raise click.UsageError(f"cannot listen on {host} port {port}: {error}") from error
        reserved += sockets
    processes = WorkerProcesses(ctx, dataclasses.replace(options, **ports), serve)
    try:
        return WorkerSupervisor(
            options.workers, processes.run_worker, options.drain_timeout, processes.reload_options
        ).run()
    finally:
        for each in reserved:
            each.close()
