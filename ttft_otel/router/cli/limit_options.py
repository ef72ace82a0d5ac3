# SPDX-License-Identifier: Apache-2.0
"""Declares a flag for each limit of limits.py; command.py adds them, RouterOptions keeps the values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

import click

from ttft_otel.router.limits import RouterLimits

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def add_limit_options(
    declare_option: Callable[..., Callable[[Decorated], Decorated]],
) -> Callable[[Decorated], Decorated]:
    """Add a flag per limit to a command, in the order of the fields."""

    def decorate(command: Decorated) -> Decorated:
        # Decorators apply from the innermost out: reversed, --help lists limits in their own order.
        for each in reversed(fields(RouterLimits)):
            # By the default and not the annotation, which is only a string here: see declare_limit.
            is_seconds = isinstance(each.default, float)
            kind = click.FloatRange if is_seconds else click.IntRange
            command = declare_option(
                f"--{each.name.replace('_', '-')}",
                default=each.default,
                type=kind(min=each.metadata["minimum"]),
                help=each.metadata["text"],
            )(command)
        return command

    return decorate


def take_limits(given: Mapping[str, Any]) -> tuple[RouterLimits, dict[str, Any]]:
    """Split the values of all flags into the limits and the others."""
    # The other flags go to RouterOptions, which rejects names that it has no field for.
    names = {each.name for each in fields(RouterLimits)}
    limits = RouterLimits(**{name: given[name] for name in names})
    return limits, {name: value for name, value in given.items() if name not in names}
