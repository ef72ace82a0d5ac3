# SPDX-License-Identifier: Apache-2.0
"""Make click options, and add a list of them to a command; commands of all sides use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import click

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


def make_number_option(name: str, kind: Any, default: Any, help_text: str) -> OptionDecorator:
    """An option with a number and a default that --help shows. kind: its type, or click's range."""
    return click.option(name, type=kind, default=default, show_default=True, help=help_text)
