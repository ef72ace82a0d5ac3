# SPDX-License-Identifier: Apache-2.0
"""Flags that configure routing, their validation, and the RoutingService built from them.

RouterOptions (router_options.py) inherits their fields and adds them to the command, so they can also be
set by environment variable and YAML file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

import click
from click.core import ParameterSource

from ttft_otel.commands.command_options import declare_flag
from ttft_otel.router import types
from ttft_otel.router.routing import routing_service
from ttft_otel.router.routing.policies import policy_state as states
from ttft_otel.router.routing.policies.policy_registry import POLICIES
from ttft_otel.router.routing.prefixes import PrefixIndexName, PrefixSource, build_source
from ttft_otel.router.upstream.instance_pool import InstancePool

PREFIX_INDEXES: Final = get_args(PrefixIndexName)
# The only source that needs nothing of the instances, hence the default.
HISTORY_INDEX: Final = PREFIX_INDEXES[-1]
# The first of each is the default.
TTFT_MODELS: Final = ("calibrated", "trapezoid")
TOKENIZE_PLACES: Final = ("local", "engine")
TTFT_POLICY: Final = "ttft"
# None that follows cached prefixes: an encoder has no prefix cache.
ENCODER_POLICIES: Final = (types.OTHER_LEGS_POLICY, TTFT_POLICY)
# Derived from the registry, so that a new policy cannot be forgotten here.
PROMPT_POLICIES: Final = tuple(name for name, each in POLICIES.items() if each.reads_prompts)
# Flags that only some policies use, with the values of --routing-logic for which they have an effect.
POLICIES_BY_OPTION: Final[Mapping[str, tuple[str, ...]]] = {
    # The other policies never see a prompt: they start neither a reader nor a source.
    **dict.fromkeys(
        ("tokenizer", "tokenize", "prefix_index", "enable_shared_cache"), PROMPT_POLICIES
    ),
    "ttft_model": (TTFT_POLICY,),
    "kv_aware_threshold": ("kvaware",),
    # kvaware falls back to sessions where no cached prefix is long enough.
    "session_key": ("session", "kvaware"),
}


def _check_finite(_: click.Context, __: click.Parameter, value: float | None) -> float | None:
    """Raise BadParameter for infinity and NaN."""
    # FloatRange lets both pass: NaN compares false with every limit.
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a finite number of milliseconds.")
    return value


def _check_name(_: click.Context, __: click.Parameter, value: str) -> str:
    """Raise BadParameter for a name that cannot be a header: with blanks or control characters."""
    # A header of that name could never arrive, so no request would have a session.
    if value and (value.split() != [value] or not value.isprintable()):
        raise click.BadParameter(f"{value!r} is not a header or key name: leave out its blanks.")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingOptions:
    """The values of the routing flags, one field per flag, named after it."""

    # Of the policies.
    routing_logic: str = declare_flag(
        "Policy that chooses --backend or --prefill instances; see docs/router.md.",
        type=click.Choice(tuple(POLICIES)),
        default=types.DEFAULT_POLICY,
    )
    encoder_routing_logic: Literal["least_requests", "ttft"] = declare_flag(
        "Policy that chooses --encoder instances: fewest requests, or least expected time.",
        type=click.Choice(ENCODER_POLICIES),
        default=types.OTHER_LEGS_POLICY,
    )
    ttft_model: Literal["calibrated", "trapezoid"] = declare_flag(
        "What the ttft policy compares: predicted seconds, or attention pairs to compute.",
        type=click.Choice(TTFT_MODELS),
        default=TTFT_MODELS[0],
    )
    # No default: refusing requests is the operator's decision.
    slo_ttft_ms: float | None = declare_flag(
        "Reject with 429 requests whose first token no instance can send within MS milliseconds.",
        type=click.FloatRange(min=0, min_open=True),
        callback=_check_finite,
        metavar="MS",
    )
    session_key: str = declare_flag(
        "Header, or key of the body, with the session ID; for session and kvaware.",
        default="",
        callback=_check_name,
        metavar="NAME",
    )
    # The default is the dataclass's, which simulations use without this flag.
    kv_aware_threshold: int = declare_flag(
        "Uncached prompt tokens up to which kvaware follows the longest cached prefix.",
        default=states.PolicyOptions().kv_aware_threshold,
        type=click.IntRange(min=0),
    )

    # Of those that read prompts: who tokenizes, and who knows what is cached.
    # Needed where /v1/models names a folder that exists on the instance's machine only.
    tokenizer: str = declare_flag(
        "Tokenizer for all models; by default the one that /v1/models names for each.",
        default="",
        metavar="MODEL_OR_DIR",
    )
    tokenize: Literal["local", "engine"] = declare_flag(
        "Tokenize prompts in the router, or ask the render endpoint of an instance.",
        type=click.Choice(TOKENIZE_PLACES),
        default=TOKENIZE_PLACES[0],
    )
    prefix_index: PrefixIndexName = declare_flag(
        "Source of cached prefixes: KV events, or the prompts sent to each instance.",
        type=click.Choice(PREFIX_INDEXES),
        default=HISTORY_INDEX,
    )
    kv_events_endpoint: tuple[str, ...] = declare_flag(
        "ZMQ endpoint of an instance's KV events; by default the one that it reports.",
        multiple=True,
        metavar="URL=ENDPOINT[,REPLAY]",
    )
    # For instances that load blocks from one store, whoever of them computed these.
    enable_shared_cache: bool = declare_flag(
        "Count a prefix cached at one instance as cached at all of them.", is_flag=True
    )

    def build_routing(
        self, pool: InstancePool, api_key: str = "", may_encoders_join: bool = False
    ) -> routing_service.RoutingService:
        """Build the routing service with its prompt reader and prefix index. Raises UsageError.

        pool: the instances to choose from. api_key: sent to instances that are asked to tokenize.
        may_encoders_join: encoders may be found later, so --encoder-routing-logic needs no --encoder.
        """
        self._check_combinations()
        # Judged against the pool and not the flags: with --discover encoders may come later.
        encoders_policy = self._choose_encoder_policy(may_encoders_join or pool.has_encoders)
        options = states.PolicyOptions(
            session_key=self.session_key,
            kv_aware_threshold=self.kv_aware_threshold,
            ttft_model=self.ttft_model,
            shared_cache=self.enable_shared_cache,
            # Policies count in seconds; 0 stands for no objective.
            slo_s=(self.slo_ttft_ms or 0) / 1000,
        )
        policy_name = self.routing_logic
        # Nothing below is built for the others: no child process, no index, no subscription.
        if not POLICIES[policy_name].reads_prompts:
            return routing_service.RoutingService(
                pool, policy_name, options, encoders_policy=encoders_policy
            )
        from ttft_otel.router.routing.prompts import (
            build_reader,  # imported here: other policies need no tokenizer
        )

        # The reader needs the pool: instances name their models' tokenizers, or render themselves.
        prompt_reader = build_reader(self.tokenizer or None, self.tokenize, pool, api_key)
        knowledge = (prompt_reader, self._build_prefix_source())
        return routing_service.RoutingService(
            pool, policy_name, options, *knowledge, encoders_policy=encoders_policy
        )

    def _choose_encoder_policy(self, has_encoders: bool) -> str:
        """The policy of the encode leg; `ttft` needs item sizes, which only prompt readers count."""
        policy_name, flag = self.encoder_routing_logic, "--encoder-routing-logic ttft"
        if policy_name == TTFT_POLICY and not has_encoders:
            raise click.UsageError(f"{flag} needs --encoder URL.")
        if policy_name == TTFT_POLICY and not POLICIES[self.routing_logic].reads_prompts:
            raise click.UsageError(
                f"{flag} needs prompts: --routing-logic {' or '.join(PROMPT_POLICIES)}."
            )
        return policy_name

    def _build_prefix_source(self) -> PrefixSource:
        try:
            return build_source(self.prefix_index, kv_endpoints=self.kv_events_endpoint)
        except ValueError as error:
            raise click.UsageError(str(error)) from error

    def _check_combinations(self) -> None:
        """Raise UsageError for flags that need another flag or exclude each other."""
        policy_name = self.routing_logic
        if policy_name == "session" and not self.session_key:
            raise click.UsageError("--routing-logic session needs --session-key NAME.")
        # The trapezoid compares attention pairs, which cannot be held against milliseconds.
        if self.slo_ttft_ms and (policy_name, self.ttft_model) != (TTFT_POLICY, TTFT_MODELS[0]):
            raise click.UsageError(
                "--slo-ttft-ms needs predictions: --routing-logic ttft --ttft-model calibrated."
            )
        if self.kv_events_endpoint and self.prefix_index != "kv-events":
            raise click.UsageError("--kv-events-endpoint needs --prefix-index kv-events.")


def check_unused_options(ctx: click.Context) -> None:
    """Raise UsageError for a flag that was set, by any source, but has no effect with this policy.

    ctx: the parsed command line.
    """
    # A flag is in use if either leg's policy uses it.
    chosen_policies = {ctx.params["routing_logic"], ctx.params["encoder_routing_logic"]}
    for name, policies in POLICIES_BY_OPTION.items():
        value, source = ctx.params[name], ctx.get_parameter_source(name)
        # False and "" are how a file or an empty variable says that a flag is not wanted.
        is_given = value is not False and value != "" and source is not ParameterSource.DEFAULT
        if is_given and not chosen_policies.intersection(policies):
            flag = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{flag} needs --routing-logic {' or '.join(policies)}.")
