# SPDX-License-Identifier: Apache-2.0
"""Make click options, add them to commands, write the file that one names; for all commands."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import field
from functools import wraps
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])
OptionDecorator: TypeAlias = Callable[[Any], Any]


def add_options(*options: OptionDecorator) -> Callable[[Command], Command]:
    """A decorator that adds click's `options` to a command; --help lists them in this order."""

    def decorate(command: Command) -> Command:
        # Decorators apply from the innermost out.
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def declare_flag(help_text: str, **click_arguments: Any) -> Any:
    """A field of a dataclass that is a flag: `metadata` has what click.option() takes besides names."""
    return field(metadata={"help": help_text, **click_arguments})


def make_number_option(names: str, kind: Any, default: Any, help_text: str) -> OptionDecorator:
    """An option with a number and a default that --help shows.

    names: its flag, and its parameter where that has another name. kind: its type, or click's range.
    """
    return click.option(
        *names.split(), type=kind, default=default, show_default=True, help=help_text
    )


def make_parsed_option(
    flag: str,
    metavar: str,
    parse: Callable[[str], object],
    help_text: str,
    list_name: str = "",
) -> OptionDecorator:
    """An option whose text is read by `parse`, and whose value is None where it is not given.

    parse: raises ValueError for a text that it cannot read, which becomes BadParameter. list_name: the
    parameter of an option that may be given several times, and whose value is a list.
    """

    def read(_context: Any, _option: Any, given: Any) -> object:
        try:
            if list_name:
                return [parse(text) for text in given]
            return parse(given) if given else None
        except ValueError as error:
            raise click.BadParameter(str(error)) from error

    names = (flag, list_name) if list_name else (flag,)
    return click.option(
        *names, metavar=metavar, multiple=bool(list_name), callback=read, help=help_text
    )


def add_watch_option(command: Command) -> Command:
    """Give a click command the option --watch, with which it is run again and again until Ctrl-C."""

    @wraps(command)
    def call(*args: Any, watch: float | None, **rest: Any) -> None:
        while True:
            try:
                command(*args, **rest)
            except click.exceptions.Exit:
                # Watched, a window without requests is one that waits for them.
                if not watch:
                    raise
            if not watch:
                return
            time.sleep(watch)
            click.clear()

    option = click.option(
        "--watch",
        metavar="SECONDS",
        type=click.FloatRange(1, 86_400),
        help="Answer again every so many seconds, until Ctrl-C.",
    )
    decorated: Any = option(call)
    result: Command = decorated
    return result


def write_whole(path: Path, text: str) -> None:
    """Write all of a file, or leave what was there; into a pipe or a device as it comes. Raises OSError."""
    if path.exists() and not path.is_file():
        path.write_text(text, "utf-8", "replace")
        return
    place = path.resolve()  # a link stays one
    partial = place.with_name(f"{place.name}.part")
    try:
        partial.unlink(missing_ok=True)
        # Exclusively: not through a link that somebody has laid there.
        with partial.open("x", encoding="utf-8", errors="replace") as file:
            file.write(text)
        partial.replace(place)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
