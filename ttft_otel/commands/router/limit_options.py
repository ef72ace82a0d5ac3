# SPDX-License-Identifier: Apache-2.0
"""Declares a flag for each limit of limits.py; command.py adds them, RouterOptions keeps the values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import click

from ttft_otel.commands.command_options import Command, OptionDeclarer, add_options
from ttft_otel.router.limits import RouterLimits


def add_limit_options(declare_option: OptionDeclarer) -> Callable[[Command], Command]:
    """Add a flag per limit to a command, in the order of the fields."""
    return add_options(
        *(
            declare_option(
                f"--{each.name.replace('_', '-')}",
                default=each.default,
                type=_choose_range(each.default)(min=each.metadata["minimum"]),
                help=each.metadata["text"],
            )
            for each in fields(RouterLimits)
        )
    )


def _choose_range(default: object) -> type[click.IntRange | click.FloatRange]:
    # By the default and not the annotation, which is only a string here: see declare_limit.
    return click.FloatRange if isinstance(default, float) else click.IntRange


def take_limits(given: Mapping[str, Any]) -> tuple[RouterLimits, dict[str, Any]]:
    """Split the values of all flags into the limits and the others."""
    # The other flags go to RouterOptions, which rejects names that it has no field for.
    names = {each.name for each in fields(RouterLimits)}
    limits = RouterLimits(**{name: given[name] for name in names})
    return limits, {name: value for name, value in given.items() if name not in names}
