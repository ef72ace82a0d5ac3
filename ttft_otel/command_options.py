# SPDX-License-Identifier: Apache-2.0
"""Add a list of click options to a command; commands of bench, report, explain and router use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

Command = TypeVar("Command", bound=Callable[..., Any])
OptionDecorator: TypeAlias = Callable[[Any], Any]
OptionDeclarer: TypeAlias = Callable[..., OptionDecorator]  # takes what click.option() takes


def add_options(*options: OptionDecorator) -> Callable[[Command], Command]:
    """A decorator that adds click's `options` to a command; --help lists them in this order."""

    def decorate(command: Command) -> Command:
        # Decorators apply from the innermost out.
        for option in reversed(options):
            command = option(command)
        return command

    return decorate
