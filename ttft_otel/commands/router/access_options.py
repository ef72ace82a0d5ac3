# SPDX-License-Identifier: Apache-2.0
"""Flags that say who may use the router, and what it believes them; command.py adds them."""

from __future__ import annotations

from collections.abc import Callable

import click

from ttft_otel.commands.command_options import Command, OptionDeclarer, add_options
from ttft_otel.model.names import env_names


def add_access_options(declare_option: OptionDeclarer) -> Callable[[Command], Command]:
    """Add the flags to a command."""
    return add_options(
        declare_option(
            # Repeatable: while one key replaces another (SIGHUP applies it), both have to be valid.
            "--api-key",
            multiple=True,
            callback=check_keys,
            metavar="KEY",
            help="A key that clients may send; repeatable. Without one, Authorization is passed on.",
        ),
        declare_option(
            # Its own flag: nobody should open a port to the network by forgetting a key.
            "--insecure",
            is_flag=True,
            help="Serve whoever reaches --host, without a key.",
        ),
        declare_option(
            # One key for all instances; clients' keys never reach an
            # instance where the router checks them.
            "--upstream-key",
            default="",
            metavar="KEY",
            help="API key that the router sends to instances.",
        ),
        declare_option(
            "--trust-trace-headers",
            is_flag=True,
            # The second is the variable that vLLM's processes read: one setting for a deployment.
            envvar=["TTFT_OTEL_ROUTER_TRUST_TRACE_HEADERS", env_names.TTFT_OTEL_TRUST_SAMPLED],
            help="Honour the caller's sampled flag; by default only its trace ID is used.",
        ),
        declare_option(
            # Without it browsers keep answers from pages of other origins.
            "--cors-origin",
            multiple=True,
            metavar="ORIGIN",
            help="An origin whose web pages may call the router, like https://chat.example; repeatable.",
        ),
        declare_option(
            # On loopback only its own names are answered to: any page can have a name that resolves there.
            "--allowed-host",
            multiple=True,
            metavar="NAME",
            help="A name that Host may have besides localhost and addresses; repeatable. Not on loopback, "
            "without it: any.",
        ),
    )


def check_keys(_: click.Context, __: click.Parameter, keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return `keys`. Raises BadParameter for an empty one: an unset variable would disable the check."""
    # Blanks at the ends are lost in an HTTP header, so such a key could never match.
    if not all(key and key == key.strip() for key in keys):
        raise click.BadParameter("a key is empty or has blanks around it; leave it out or set it.")
    return keys
