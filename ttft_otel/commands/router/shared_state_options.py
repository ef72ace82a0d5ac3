# SPDX-License-Identifier: Apache-2.0
"""Flags about the store that replicas share, and what joins a router to it; command.py uses both."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, urlsplit

import click

from ttft_otel.commands.command_options import Command, OptionDeclarer, add_options
from ttft_otel.commands.router.router_options import RouterOptions

if TYPE_CHECKING:
    from ttft_otel.router.routing.routing_service import RoutingService
    from ttft_otel.router.shared_state.store_link import StoreLink, StoreSettings
    from ttft_otel.router.upstream.instance_pool import InstancePool
    from ttft_otel.router.workers.worker import WorkerLink

DEFAULT_PREFIX: Final = "ttft-otel"
# What a URL of the client may say; everything else could turn off checks and time-outs.
FILE_OPTIONS: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")


def add_shared_state_options(declare_option: OptionDeclarer) -> Callable[[Command], Command]:
    """Add the flags to a command."""
    return add_options(
        declare_option(
            "--shared-state",
            default="",
            callback=check_store_url,
            metavar="URL",
            help="redis://[USER@]HOST[:PORT][/DATABASE] of a Valkey or Redis, or rediss:// for TLS, through "
            "which replicas share load and circuit breakers.",
        ),
        declare_option(
            "--shared-state-password-file",
            default="",
            metavar="FILE",
            help="The password for it; read anew at each connection.",
        ),
        declare_option(
            "--shared-state-prefix",
            default=DEFAULT_PREFIX,
            metavar="NAME",
            help="What its keys begin with: one name for all replicas, another one for each deployment.",
        ),
    )


def check_store_url(_: click.Context, __: click.Parameter, text: str) -> str:
    """Return `text`. Raises BadParameter if it names no store, or no file that can be read."""
    if not text:
        return text
    try:
        parts = urlsplit(text)
        is_right = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_right = False
    # The text is not shown: it may have a password.
    database = parts.path.strip("/") if is_right else ""
    if not is_right or parts.scheme not in ("redis", "rediss") or not (database or "0").isdecimal():
        raise click.BadParameter(
            "write redis://[USER@]HOST[:PORT][/DATABASE], or rediss:// for TLS."
        )
    for name, path in parse_qsl(parts.query, keep_blank_values=True):
        if name not in FILE_OPTIONS or parts.scheme != "rediss":
            raise click.BadParameter(
                f"after the question mark only {', '.join(FILE_OPTIONS)} may stand, with rediss://."
            )
        if not os.access(path, os.R_OK):
            raise click.BadParameter(f"{name}: {path} cannot be read.")
    return text


def build_settings(options: RouterOptions) -> StoreSettings | None:
    """What the flags say, None without --shared-state. Raises UsageError, with the remedy."""
    password_file, prefix = options.shared_state_password_file, options.shared_state_prefix
    if not options.shared_state:
        if password_file or prefix != DEFAULT_PREFIX:
            raise click.UsageError(
                "--shared-state-password-file and --shared-state-prefix need --shared-state."
            )
        return None
    if password_file and not os.access(password_file, os.R_OK):
        raise click.UsageError(f"--shared-state-password-file: {password_file} cannot be read.")
    # The client costs a router without it 100 ms.
    from ttft_otel.router.shared_state.store_link import StoreSettings

    return StoreSettings(options.shared_state, password_file, prefix)


def build_lone_link(
    options: RouterOptions, pool: InstancePool, routing: RoutingService
) -> StoreLink | None:
    """What joins a router without --workers to the store; None without it. Raises UsageError."""
    settings = build_settings(options)
    # Workers have one each (worker_processes.py); here it is only checked.
    if settings is None or options.workers > 1:
        return None
    from ttft_otel.router.shared_state import store_link

    return store_link.build_lone_link(settings, pool, routing)


def build_worker_link(options: RouterOptions, link: WorkerLink) -> StoreLink | None:
    """What joins one of several workers to the store; None without it. Raises UsageError."""
    settings = build_settings(options)
    if settings is None:
        return None
    from ttft_otel.router.shared_state.store_link import StoreLink

    loads = link.loads
    made = StoreLink(settings, link.pool, loads.own, loads.remote, link.slot.replica)
    link.app.metrics.collect_shared_state = made.collect_metrics
    return made
