# SPDX-License-Identifier: Apache-2.0
"""The flags of routing, checked together, and the Routing that they ask for; command.py adds them.

They are part of config.Options: environment and YAML file give them, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar, get_args

import click
from click.core import ParameterSource

from ttft_otel.router import routing
from ttft_otel.router.choose import ENCODE
from ttft_otel.router.fleet import Fleet
from ttft_otel.router.policies import pending
from ttft_otel.router.policies import state as states
from ttft_otel.router.policies.registry import POLICIES
from ttft_otel.router.prefixes import Kind, Source, lmcache, source

INDEXES: Final = get_args(Kind)
HISTORY: Final = INDEXES[-1]
MODELS: Final = ("calibrated", "trapezoid")
PLACES: Final = ("local", "engine")
TTFT: Final = "ttft"
ENCODERS: Final = (routing.OTHERS, TTFT)
READING: Final = tuple(name for name, each in POLICIES.items() if each.prompts)
# The logics that heed a flag, of those flags that not all heed.
HEEDED: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("tokenizer", "tokenize", "prefix_index", "enable_shared_cache"), READING),
    "ttft_model": (TTFT,),
    "kv_aware_threshold": ("kvaware",),
    "session_key": ("session", "kvaware"),
    "request_stats_window": tuple(name for name, each in POLICIES.items() if each.books),
}

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Flags:
    """What the operator wants of routing; a field for each flag, named as it is."""

    routing_logic: str
    encoder_routing_logic: Literal["least_requests", "ttft"]
    ttft_model: Literal["calibrated", "trapezoid"]
    slo_ttft_ms: float | None
    session_key: str
    request_stats_window: int
    kv_aware_threshold: int
    tokenizer: str
    tokenize: Literal["local", "engine"]
    prefix_index: Kind
    kv_events_endpoint: tuple[str, ...]
    lmcache_controller_url: str
    lmcache_instances: str
    enable_shared_cache: bool

    def routing(self, fleet: Fleet, key: str = "") -> routing.Routing:
        """Policies, and what they know prompts by; `key` is the instances'. Raises UsageError."""
        self._check()
        encoders = self._encoders(fleet)
        options = states.Options(
            session=self.session_key,
            threshold=self.kv_aware_threshold,
            score=self.ttft_model,
            shared=self.enable_shared_cache,
            slo=(self.slo_ttft_ms or 0) / 1000,
        )
        logic, window = self.routing_logic, self.request_stats_window
        if not POLICIES[logic].prompts:
            return routing.Routing(fleet, logic, options, window, encoders=encoders)
        from ttft_otel.router.prompts import reader  # only here: others need no tokenizer

        reads = reader(self.tokenizer or None, self.tokenize, fleet, key)
        known = (reads, self._source(fleet))
        return routing.Routing(fleet, logic, options, window, *known, encoders=encoders)

    def _encoders(self, fleet: Fleet) -> str:
        """How encoders are chosen; items are counted where prompts are read."""
        logic, flag = self.encoder_routing_logic, "--encoder-routing-logic ttft"
        if logic == TTFT and not fleet.get(ENCODE):
            raise click.UsageError(f"{flag} needs --encoder URL.")
        if logic == TTFT and not POLICIES[self.routing_logic].prompts:
            raise click.UsageError(f"{flag} needs prompts: --routing-logic {' or '.join(READING)}.")
        return logic

    def _source(self, fleet: Fleet) -> Source:
        names = [each for each in self.lmcache_instances.split(",") if each]
        try:
            if self.prefix_index == "lmcache":
                lmcache.told_apart(names, fleet.get(fleet.prefilling))
            return source(
                self.prefix_index,
                kv_endpoints=self.kv_events_endpoint,
                lmcache_url=self.lmcache_controller_url,
                lmcache_instances=names,
            )
        except ValueError as error:
            raise click.UsageError(str(error)) from error

    def _check(self) -> None:
        """What one flag means without another."""
        logic, index = self.routing_logic, self.prefix_index
        if logic == "session" and not self.session_key:
            raise click.UsageError("--routing-logic session needs --session-key NAME.")
        if self.slo_ttft_ms and (logic, self.ttft_model) != (TTFT, MODELS[0]):
            raise click.UsageError(
                "--slo-ttft-ms needs predictions: --routing-logic ttft --ttft-model calibrated."
            )
        if (index == "lmcache") != bool(self.lmcache_controller_url):
            raise click.UsageError(
                "--prefix-index lmcache and --lmcache-controller-url URL go together."
            )
        if self.lmcache_instances and index != "lmcache":
            raise click.UsageError("--lmcache-instances needs --prefix-index lmcache.")
        if self.kv_events_endpoint and index != "kv-events":
            raise click.UsageError("--kv-events-endpoint needs --prefix-index kv-events.")


def heeded(ctx: click.Context) -> None:
    """Refuse what was given, in whatever way, and would do nothing. Raises UsageError."""
    chosen = {ctx.params["routing_logic"], ctx.params["encoder_routing_logic"]}
    for name, logics in HEEDED.items():
        value, source = ctx.params[name], ctx.get_parameter_source(name)
        asked = value is not False and value != "" and source is not ParameterSource.DEFAULT
        if asked and not chosen.intersection(logics):
            flag = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{flag} needs --routing-logic {' or '.join(logics)}.")


def _finite(_: click.Context, __: click.Parameter, value: float | None) -> float | None:
    """Raises BadParameter for what no time is."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is no number of milliseconds.")
    return value


def _name(_: click.Context, __: click.Parameter, value: str) -> str:
    """Raises BadParameter for what no header can be called."""
    if value and (value.split() != [value] or not value.isprintable()):
        raise click.BadParameter(f"{value!r} is no name of a header or key: leave out its blanks.")
    return value


def options(option: Callable[..., Callable[[Decorated], Decorated]]) -> Callable[..., Any]:
    """All of them, as one decorator; `option` declares a flag with its variable."""
    declared = (
        option(
            "--routing-logic",
            type=click.Choice(tuple(POLICIES)),
            default=routing.DEFAULT,
            help="How --backend or --prefill instances are chosen; see docs/router.md.",
        ),
        option(
            "--encoder-routing-logic",
            type=click.Choice(ENCODERS),
            default=routing.OTHERS,
            help="How --encoder instances are chosen: fewest requests, or least work.",
        ),
        option(
            "--ttft-model",
            type=click.Choice(MODELS),
            default=MODELS[0],
            help="What ttft compares: learnt seconds, or (query, key) pairs to compute.",
        ),
        option(
            "--slo-ttft-ms",
            type=click.FloatRange(min=0, min_open=True),
            callback=_finite,
            metavar="MS",
            help="Refuse with 429 what no instance can begin to answer in this time.",
        ),
        option(
            "--session-key",
            default="",
            callback=_name,
            metavar="NAME",
            help="The header, or key of the body, that names a session; for session and kvaware.",
        ),
        option(
            "--request-stats-window",
            default=pending.WINDOW,
            type=click.IntRange(1, 3600),
            help="Seconds over which qps counts requests.",
        ),
        option(
            "--kv-aware-threshold",
            default=states.Options().threshold,
            type=click.IntRange(min=0),
            help="Tokens that a cached prefix may lack for kvaware to follow it.",
        ),
        option(
            "--tokenizer",
            default="",
            metavar="MODEL_OR_DIR",
            help="What to tokenize by; without it, for each model what /v1/models names.",
        ),
        option(
            "--tokenize",
            type=click.Choice(PLACES),
            default=PLACES[0],
            help="Count tokens in the router, or ask the instance's render endpoint.",
        ),
        option(
            "--prefix-index",
            type=click.Choice(INDEXES),
            default=HISTORY,
            help="Who says which prefixes are cached: instances, LMCache, or what was sent where.",
        ),
        option(
            "--kv-events-endpoint",
            multiple=True,
            metavar="URL=ENDPOINT[,REPLAY]",
            help="KV events of an instance, URL=ENDPOINT[,REPLAY]; without it, where it says itself.",
        ),
        option(
            "--lmcache-controller-url",
            default="",
            metavar="URL",
            help="LMCache's controller, for --prefix-index lmcache.",
        ),
        option(
            "--lmcache-instances",
            default="",
            metavar="ID[=URL],ID[=URL]",
            help="LMCache's names of the instances, in their order or as ID=URL.",
        ),
        option(
            "--enable-shared-cache",
            is_flag=True,
            help="What one instance has cached, all instances have.",
        ),
    )

    def decorate(command: Decorated) -> Decorated:
        for each in reversed(declared):
            command = each(command)
        return command

    return decorate
