# SPDX-License-Identifier: Apache-2.0
"""Flags about the router's processes: how many, and how they end; command.py adds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import click

from ttft_otel.commands.command_options import Command, OptionDeclarer, add_options

DRAIN_TIMEOUT_S: Final = 30.0  # seconds for requests in flight to finish after SIGTERM
MAX_WORKERS: Final = 256  # each tells all others of each of its requests


def add_process_options(declare_option: OptionDeclarer) -> Callable[[Command], Command]:
    """Add the flags to a command."""
    return add_options(
        declare_option(
            "--workers",
            default=1,
            type=click.IntRange(1, MAX_WORKERS),
            help="Processes that serve the port, each on one core; they share what they know of the load.",
        ),
        declare_option(
            "--drain-delay",
            default=0.0,
            type=click.FloatRange(0),
            help="Seconds after SIGTERM during which new requests are still accepted.",
        ),
        declare_option(
            "--drain-timeout",
            default=DRAIN_TIMEOUT_S,
            type=click.FloatRange(0),
            help="Seconds after SIGTERM within which requests in flight may finish.",
        ),
    )
