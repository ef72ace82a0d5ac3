# SPDX-License-Identifier: Apache-2.0
"""One declaration for flags, environment and YAML file; command.py declares, and gets Options.

A flag beats its variable, that beats the file, that beats the default: click's own order, for which
the file is a default_map.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, TypeVar

import click
import yaml

from ttft_otel.router import plan
from ttft_otel.router.choose import Instance, instance
from ttft_otel.router.flags import Flags, heeded

ENV: Final = "TTFT_OTEL_ROUTER_"
ARGUMENTS: Final = "ttft_otel.arguments"  # where a context keeps what was typed
RELOADED: Final = ("encoder", "prefill", "decode", "backend", "api_key")

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Options(Flags):
    """What the operator wants; a field for each flag, named as it is."""

    encoder: tuple[str, ...]
    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    backend: tuple[str, ...]
    first_token: str
    stream_prefill_token: bool
    host: str
    port: int
    max_body: int
    reports: int
    api_key: tuple[str, ...]
    upstream_key: str
    trust_trace_headers: bool
    health_interval: float
    retries: int
    retry_budget: float
    breaker_failures: int
    drain_delay: float
    drain_timeout: float
    admin_port: int | None
    admin_token: str

    @property
    def mode(self) -> str:
        """How the first token travels. Raises UsageError when two flags disagree."""
        if self.stream_prefill_token and self.first_token != plan.STRIP:
            raise click.UsageError(
                f"--stream-prefill-token is --first-token {plan.STRIP}; "
                f"leave out one of it and --first-token {self.first_token}."
            )
        return self.first_token

    def legs(self) -> dict[str, tuple[Instance, ...]]:
        """Every leg's instances. Raises UsageError, with the remedy."""
        if bool(self.prefill) != bool(self.decode) or bool(self.backend) == bool(self.decode):
            raise click.UsageError("Give either --backend, or --prefill and --decode together.")
        given = {
            "encode": self.encoder,
            plan.PREFILL: self.prefill,
            plan.DECODE: self.decode,
            "prefill_decode" if self.encoder else "mono": self.backend,
        }
        try:
            made = {leg: [instance(url, leg) for url in urls] for leg, urls in given.items()}
        except ValueError as error:
            raise click.UsageError(str(error)) from error
        once = {leg: {each.url: each for each in several} for leg, several in made.items()}
        return {leg: tuple(several.values()) for leg, several in once.items() if several}


class Command(click.Command):
    """A command that remembers its arguments, to be read again, and refuses those without effect."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does."""
        ctx.meta[ARGUMENTS] = list(args)
        rest = super().parse_args(ctx, args)
        if not ctx.resilient_parsing:
            heeded(ctx)
        return rest


def option(flag: str, **more: Any) -> Callable[[Decorated], Decorated]:
    """A flag with its environment variable; both are in --help."""
    name = flag.removeprefix("--").replace("-", "_")
    variable = more.pop("envvar", f"{ENV}{name.upper()}")
    shown = more.get("default", "") != ""
    return click.option(flag, name, envvar=variable, show_envvar=True, show_default=shown, **more)


def file(flag: str, **more: Any) -> Callable[[Decorated], Decorated]:
    """The flag that names the YAML file; it is read before every other flag."""
    return option(
        flag,
        type=click.Path(dir_okay=False),
        is_eager=True,
        expose_value=False,
        callback=_load,
        **more,
    )


def filled(_: click.Context, __: click.Parameter, keys: tuple[str, ...]) -> tuple[str, ...]:
    """The keys as they are. Raises BadParameter for an empty one: a variable nobody set, which opens."""
    if not all(key and key == key.strip() for key in keys):
        raise click.BadParameter("a key is empty, or has blanks around it; leave it out or set it.")
    return keys


def again(ctx: click.Context) -> Options:
    """Read flags, environment and file once more. Raises ClickException and says what is wrong."""
    fresh = ctx.command.make_context(ctx.info_name, list(ctx.meta[ARGUMENTS]))
    with fresh:
        found = Options(**fresh.params)
        found.legs()
        return found


def fixed(old: Options, new: Options) -> list[str]:
    """The flags that are others now but need a restart."""
    return [
        f"--{each.name.replace('_', '-')}"
        for each in fields(Options)
        if each.name not in RELOADED and getattr(old, each.name) != getattr(new, each.name)
    ]


def _load(ctx: click.Context, _: click.Parameter, path: str | None) -> None:
    if path is None:
        return
    try:
        found = yaml.safe_load(Path(path).read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"--config {path}: {error}") from error
    except yaml.YAMLError as error:
        raise click.UsageError(f"--config {path} is no YAML: {error}") from error
    if not isinstance(found, Mapping):
        raise click.UsageError(f"--config {path}: write `flag: value`, one a line.")
    known = {
        str(each.name): each
        for each in ctx.command.params
        if isinstance(each, click.Option) and each.expose_value
    }
    read: dict[str, Any] = {}
    for key, value in found.items():
        name = str(key).replace("-", "_")
        if name not in known:
            flags = ", ".join(sorted(each.replace("_", "-") for each in known))
            raise click.UsageError(f"--config {path}: {key!r} is not one of {flags}.")
        if known[name].multiple and not isinstance(value, list):
            raise click.UsageError(f"--config {path}: {key} is a list; write `{key}: [{value}]`.")
        if not known[name].multiple and isinstance(value, list | dict):
            raise click.UsageError(f"--config {path}: {key} is one value; write `{key}: VALUE`.")
        # int() would cut it off
        if isinstance(value, float) and isinstance(known[name].type, click.types.IntParamType):
            raise click.UsageError(f"--config {path}: {key}: {value} is no whole number.")
        # YAML reads a bare off as false
        word = value is False and isinstance(known[name].type, click.Choice)
        read[name] = plan.OFF if word else value
    ctx.default_map = {**(ctx.default_map or {}), **read}
