# SPDX-License-Identifier: Apache-2.0
"""`ttft-otel router`: turn flags, environment and YAML file into a running server; main.py offers it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import click

from ttft_otel.commands.router import router_options
from ttft_otel.commands.router.router_options import RouterOptions
from ttft_otel.model.names import env_names
from ttft_otel.router.control import admin
from ttft_otel.router.control import app as control
from ttft_otel.router.control.uvicorn_server import ServerPlan, run_router_server
from ttft_otel.router.discovery.discovery import Discovery
from ttft_otel.router.proxy.admission import AdmissionGate
from ttft_otel.router.proxy.endpoint import ProxyEndpoint
from ttft_otel.router.proxy.exchange_reporter import RecentReports
from ttft_otel.router.routing.upstream_client import UpstreamClient
from ttft_otel.router.upstream.instance_pool import HealthMonitor, InstancePool
from ttft_otel.tracing import handoff, settings

if TYPE_CHECKING:
    from ttft_otel.router.shared_state.store_link import StoreLink

log: Final = logging.getLogger("ttft_otel")
RunServer: TypeAlias = Callable[[control.RouterApp, ServerPlan], None]

EXAMPLES: Final = """
\b
One plain vLLM server:
  ttft-otel router --backend http://127.0.0.1:8001 --port 8000
\b
One encoder and two prefill-decode servers:
  ttft-otel router --encoder http://127.0.0.1:8001 \\
                   --backend http://127.0.0.1:8002 --backend http://127.0.0.1:8003
\b
Prefill and decode apart, with an encoder before them or without:
  ttft-otel router --prefill http://127.0.0.1:8002 --decode http://127.0.0.1:8003
  ttft-otel router --encoder http://127.0.0.1:8001 \\
                   --prefill http://127.0.0.1:8002 --decode http://127.0.0.1:8003
\b
The same by environment (lists are separated by blanks):
  TTFT_OTEL_ROUTER_BACKEND="http://127.0.0.1:8002 http://127.0.0.1:8003" ttft-otel router
\b
The same from a file, flags without their dashes; `kill -HUP` reads it again:
  printf 'backend: [http://127.0.0.1:8002]\\nport: 8000\\n' > router.yaml
  ttft-otel router --config router.yaml
\b
Where a request's time went:
  curl http://127.0.0.1:8000/ttft_report/REQUEST_ID
"""


@click.command("router", cls=router_options.RouterCommand, epilog=EXAMPLES)
@router_options.add_flags
@click.pass_context
def command(ctx: click.Context, /, **given: Any) -> None:
    """Route requests to vLLM servers and trace each one's time to first token.

    Images of chat requests go to the encoders first, all at once; then the whole request goes to a
    backend, or to a prefill and then to a decode instance. Answers are passed on byte by byte.
    Spans go where the OTEL_EXPORTER_OTLP_* variables say; TTFT_OTEL=0 makes none.
    """
    options = RouterOptions.from_flags(given)
    # vLLM's processes trust their callers by default; a router faces clients and does not.
    settings_read = dataclasses.replace(
        settings.read_settings(), trust_sampled=options.trust_trace_headers
    )
    # By this process alone, of however many workers; never a reason to refuse requests.
    for line in settings_read.problems:
        log.warning("ttft-otel: %s", line)
    serve = functools.partial(_serve_router, ctx, settings_read)
    if options.workers == 1:
        serve(options, run_router_server)
        return
    build_router(options, settings_read, None)  # what is wrong is said once, by this process
    ctx.exit(_run_workers(ctx, options, serve))


def _run_workers(
    ctx: click.Context, options: RouterOptions, serve: Callable[[RouterOptions, RunServer], None]
) -> int:
    """`--workers N`: this process is their supervisor, until a signal ends them; returns the exit code.

    Raises UsageError for a used port.
    """
    # Not needed by one process.
    from ttft_otel.router.workers.supervisor import WorkerSlot, WorkerSupervisor, reserve_port
    from ttft_otel.router.workers.worker import run_worker_server

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
    current = dataclasses.replace(options, **ports)

    def run_worker(slot: WorkerSlot) -> None:
        build = functools.partial(router_options.build_worker_link, current)
        serve(current, functools.partial(run_worker_server, slot, build))

    def reload_options() -> None:
        """Read the configuration again for workers that start later; those that run do so themselves."""
        nonlocal current
        with contextlib.suppress(click.ClickException):  # each worker logs why
            fresh = router_options.reread_options(ctx)
            changes: dict[str, Any] = {
                name: getattr(fresh, name) for name in router_options.RELOADABLE_FIELDS
            }
            current = dataclasses.replace(current, **changes)

    try:
        return WorkerSupervisor(
            options.workers, run_worker, options.drain_timeout, reload_options
        ).run()
    finally:
        for each in reserved:
            each.close()


def _serve_router(
    ctx: click.Context,
    settings_read: settings.Settings,
    options: RouterOptions,
    run_server: RunServer,
) -> None:
    """Run one router in this process until a signal stops it, with run_router_server() or its like."""
    # Starting a router asks for its spans: only an explicit "off" turns them off.
    is_untraced = env_names.TTFT_OTEL in os.environ and not settings_read.on
    app = build_router(options, settings_read, None if is_untraced else handoff.get_sender().send)
    reload = functools.partial(_reload_configuration, ctx, options, app)
    drain = options.drain_delay, options.drain_timeout
    run_server(app, ServerPlan(options.host, options.port, *drain, reload))


def build_router(
    options: RouterOptions,
    settings_read: settings.Settings,
    send_record: Callable[[bytes], bool] | None,
) -> control.RouterApp:
    """Build the application for `options`; without `send_record` nothing is traced. Raises UsageError."""
    configured = options.build_instances()
    # Before objects with tasks exist: a refused configuration ends at once, with its remedy.
    options.check_exposure()
    pool = InstancePool(
        configured,
        options.breaker_failures,
        max_trial_s=options.limits.breaker_trial,
        first_byte_timeout_s=options.limits.first_byte_timeout,
    )
    routing = options.build_routing(pool)
    upstream = UpstreamClient(
        routing,
        max_retries=options.retries,
        health_monitor=HealthMonitor(pool, options.health_interval),
        limits=options.limits,
        tls=router_options.build_upstream_tls(options),
        api_key=options.upstream_key,
    )
    admission = AdmissionGate(upstream, options.api_key, options.upstream_key)
    reports = RecentReports(options.reports)
    endpoint = ProxyEndpoint(
        upstream,
        settings_read,
        send_record,
        reports,
        options.first_token,
        admission,
        options.trust_priority,
    )
    discovery = router_options.build_discovery(options, pool, configured)
    store = router_options.build_lone_link(options, pool, routing)
    app = control.build_app(
        endpoint,
        handoff.get_counts,
        functools.partial(_run_background, options, endpoint, discovery, store),
        discovery,
    )
    app.metrics.collect_shared_state = None if store is None else store.collect_metrics
    app.cors_origins, app.allowed_hosts = options.cors_origin, options.allowed_host
    return app


@asynccontextmanager
async def _run_background(
    options: RouterOptions,
    endpoint: ProxyEndpoint,
    discovery: Discovery | None,
    store: StoreLink | None,
) -> AsyncIterator[None]:
    """Run what `options` ask for meanwhile.

    store: joins this router to its replicas, None without --shared-state or with several workers.
    """
    async with AsyncExitStack() as stack:
        if options.admin_port is not None:
            await stack.enter_async_context(
                admin.serve_admin(
                    endpoint.upstream,
                    options.admin_port,
                    options.admin_token,
                    options.admin_host,
                    is_shared=options.workers > 1,
                )
            )
        if discovery is not None:
            await stack.enter_async_context(discovery.run())
        if store is not None:
            await stack.enter_async_context(store)
        yield


def _reload_configuration(
    ctx: click.Context, start_options: RouterOptions, app: control.RouterApp
) -> None:
    """At SIGHUP, on the event loop: apply new instances and API keys, or log why they are invalid."""
    try:
        # All is checked before anything is applied: a wrong file leaves the router as it is.
        new_options = router_options.reread_options(ctx)
        added, removed = _replace_instances(new_options, app)
    except click.ClickException as error:
        # Whoever sent the signal gets no answer: the counter and the log line are all there is.
        app.metrics.reloads["failed"] += 1
        log.error(
            "ttft-otel: configuration reload failed, keeping the current one: %s",
            error.format_message(),
        )
        return
    # After the instances, which may be refused: then the old keys stay valid, too.
    app.admission.set_client_keys(new_options.api_key)
    app.metrics.reloads["ok"] += 1
    log.warning(
        "ttft-otel: configuration reloaded: added %s; removed %s",
        ", ".join(added) or "nothing",
        ", ".join(removed) or "nothing",
    )
    # Compared with the options of the start, which are still in force: every reload repeats this.
    if needs_restart := router_options.list_fixed_changes(start_options, new_options):
        log.warning(
            "ttft-otel: configuration reload: restart the router to apply the new %s",
            ", ".join(needs_restart),
        )


def _replace_instances(
    new_options: RouterOptions, app: control.RouterApp
) -> tuple[list[str], list[str]]:
    """Replace the configured instances; the URLs added and removed. Raises UsageError."""
    pool = app.endpoint.upstream.pool
    instances_by_leg = new_options.build_instances()
    # Those that sources name stay.
    if app.discovery is not None:
        try:
            return app.discovery.set_configured(instances_by_leg)
        except ValueError as error:
            raise click.UsageError(str(error)) from error
    # Only within the same legs: which flow serves a request depends on the legs there are.
    if set(instances_by_leg) == set(pool.list_legs()):
        return pool.replace_instances(instances_by_leg)
    before, after = ", ".join(pool.list_legs()), ", ".join(instances_by_leg)
    raise click.UsageError(
        f"it would change the legs from {before} to {after}; restart the router for that"
    )
