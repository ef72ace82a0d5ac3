# SPDX-License-Identifier: Apache-2.0
"""RouterOptions and how flags, environment and YAML file set them; command.py makes a router of them.

Precedence is flag, environment variable, file, default: click's own order, in which the file is the
`default_map`.
"""

from __future__ import annotations

import functools
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args
from urllib.parse import parse_qsl, urlsplit

import click
import yaml
from click.core import ParameterSource

from ttft_otel.commands.command_options import Command, OptionDecorator, add_options, declare_flag
from ttft_otel.http.head_checks import is_loopback
from ttft_otel.model.names import env_names
from ttft_otel.model.stages import DECODE, ENCODE, MONO, PREFILL, PREFILL_DECODE
from ttft_otel.router import types
from ttft_otel.router.control.admin import DEFAULT_ADMIN_HOST
from ttft_otel.router.discovery.discovery import (
    DNS_SCHEME,
    Discovery,
    SourceAddress,
    WatchedSource,
    WatchFindings,
    parse_source_address,
)
from ttft_otel.router.limits import RouterLimits
from ttft_otel.router.proxy.exchange_reporter import MAX_REPORTS
from ttft_otel.router.routing import routing_service
from ttft_otel.router.routing.policies import policy_state as states
from ttft_otel.router.routing.policies.block_index import SentHistory
from ttft_otel.router.routing.policies.policy_registry import POLICIES
from ttft_otel.router.routing.prefixes import prefix_source as sources
from ttft_otel.router.types import Instance, parse_instance_url
from ttft_otel.router.upstream import failures
from ttft_otel.router.upstream.connection_pool import ClientTls
from ttft_otel.router.upstream.instance_pool import (
    MAX_CONSECUTIVE_FAILURES,
    PROBE_INTERVAL_S,
    InstancePool,
)

if TYPE_CHECKING:
    from ttft_otel.router.shared_state.store_link import StoreLink
    from ttft_otel.router.workers.messages import OwnLoads, RemoteLoads
    from ttft_otel.router.workers.worker import WorkerLink

ENV_PREFIX: Final = "TTFT_OTEL_ROUTER_"
DRAIN_TIMEOUT_S: Final = 30.0  # seconds for requests in flight to finish after SIGTERM
MAX_WORKERS: Final = 256  # each reports each of its requests to all others
DISCOVER_INTERVAL_S: Final = 5.0  # seconds between two questions to DNS; the TTL of cluster DNS
DEFAULT_PREFIX: Final = "ttft-otel"  # of keys in the shared store
# What a URL of the client may say; everything else could turn off checks and time-outs.
FILE_OPTIONS: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
# Key of the context's `meta` under which the command line is kept.
ARGUMENTS_KEY: Final = "ttft_otel.arguments"
# What SIGHUP applies; everything else is built into objects that live as long as the router.
RELOADABLE_FIELDS: Final = ("encoder", "prefill", "decode", "backend", "api_key")

PrefixIndexName = Literal["kv-events", "history"]
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


def check_keys(_: click.Context, __: click.Parameter, keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return `keys`. Raises BadParameter for an empty one: an unset variable would disable the check."""
    # Blanks at the ends are lost in an HTTP header, so such a key could never match.
    if not all(key and key == key.strip() for key in keys):
        raise click.BadParameter("a key is empty or has blanks around it; leave it out or set it.")
    return keys


def check_sources(_: click.Context, __: click.Parameter, texts: tuple[str, ...]) -> tuple[str, ...]:
    """Return `texts`. Raises BadParameter for one that names no source."""
    for each in texts:
        try:
            parse_source_address(each)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error
    return texts


def check_store_url(_: click.Context, __: click.Parameter, text: str) -> str:
    """Return `text`. Raises BadParameter if it names no store, or no file that can be read."""
    if not text:
        return text
    try:
        parts = urlsplit(text)
        is_right = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_right = False
    # The text is not shown: it may have a password.
    database = parts.path.strip("/") if is_right else ""
    if not is_right or parts.scheme not in ("redis", "rediss") or not (database or "0").isdecimal():
        raise click.BadParameter(
            "write redis://[USER@]HOST[:PORT][/DATABASE], or rediss:// for TLS."
        )
    for name, path in parse_qsl(parts.query, keep_blank_values=True):
        if name not in FILE_OPTIONS or parts.scheme != "rediss":
            raise click.BadParameter(
                f"after the question mark only {', '.join(FILE_OPTIONS)} may stand, with rediss://."
            )
        if not os.access(path, os.R_OK):
            raise click.BadParameter(f"{name}: {path} cannot be read.")
    return text


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


def _declare_list(help_text: str, metavar: str, **more: Any) -> Any:
    return declare_flag(help_text, multiple=True, metavar=metavar, **more)


def _declare_text(help_text: str, metavar: str, **more: Any) -> Any:
    return declare_flag(help_text, default="", metavar=metavar, **more)


def _declare_choice(help_text: str, choices: tuple[str, ...], default: str = "") -> Any:
    return declare_flag(help_text, type=click.Choice(choices), default=default or choices[0])


def _declare_number(help_text: str, default: Any, minimum: Any) -> Any:
    # By the default and not the annotation, which is only a string: see declare_limit.
    kind = click.FloatRange if isinstance(default, float) else click.IntRange
    return declare_flag(help_text, default=default, type=kind(min=minimum))


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """The values of all flags, in the order of --help; one field per flag, named after it."""

    encoder: tuple[str, ...] = _declare_list(
        "An encoder instance; repeatable. Without one, media are encoded where the prompt is prefilled.",
        "URL",
    )
    prefill: tuple[str, ...] = _declare_list(
        "A prefill instance; repeatable. Needs --decode and excludes --backend.", "URL"
    )
    decode: tuple[str, ...] = _declare_list(
        "A decode instance; repeatable. Needs --prefill.", "URL"
    )
    backend: tuple[str, ...] = _declare_list(
        "An instance that prefills and decodes, with or without encoders before it; repeatable.",
        "URL",
    )
    first_token: str = _declare_choice(
        "How the prefill instance's first token reaches the client; see docs/router.md.",
        types.FIRST_TOKEN_MODES,
        default=types.MODE_STRIP,
    )
    # Loopback, because there is no key by default: check_exposure() guards every other address.
    host: str = declare_flag(
        "The address to listen on; one that other machines can reach needs --api-key or --insecure.",
        default="127.0.0.1",
    )
    port: int = declare_flag(
        "The port to listen on; 0: any free one.", default=8000, type=click.IntRange(0, 65535)
    )
    reports: int = _declare_number(
        "Number of recent requests that /ttft_report can show.", MAX_REPORTS, 1
    )

    # Who may call, and what is believed of callers.
    # Repeatable: while one key replaces another (SIGHUP applies it), both have to be valid.
    api_key: tuple[str, ...] = _declare_list(
        "A key that clients may send; repeatable. Without one, Authorization is passed on.",
        "KEY",
        callback=check_keys,
    )
    # Its own flag: nobody should open a port to the network by forgetting a key.
    insecure: bool = declare_flag("Serve whoever reaches --host, without a key.", is_flag=True)
    # The second is the variable that vLLM's processes read: one setting for a deployment.
    trust_trace_headers: bool = declare_flag(
        "Honour the caller's sampled flag; by default only its trace ID is used.",
        is_flag=True,
        envvar=["TTFT_OTEL_ROUTER_TRUST_TRACE_HEADERS", env_names.TTFT_OTEL_TRUST_SAMPLED],
    )
    # Without it browsers keep answers from pages of other origins.
    cors_origin: tuple[str, ...] = _declare_list(
        "An origin whose web pages may call the router, like https://chat.example; repeatable.",
        "ORIGIN",
    )
    # On loopback only its own names are answered to: any page can have a name that resolves there.
    allowed_host: tuple[str, ...] = _declare_list(
        "A name that Host may have besides localhost and addresses; repeatable. Not on loopback, "
        "without it: any.",
        "NAME",
    )

    # What instances are shown, and how they prove who they are.
    # One key for all instances; clients' keys never reach one where the router checks them.
    upstream_key: str = _declare_text("API key that the router sends to instances.", "KEY")
    upstream_ca: str = _declare_text(
        "PEM file of the authorities that sign certificates of https:// instances; by default the "
        "system's. New connections follow these files when they are replaced.",
        "FILE",
    )
    upstream_cert: str = _declare_text(
        "PEM file of the certificate that the router shows to instances.", "FILE"
    )
    upstream_cert_key: str = _declare_text(
        "PEM file of its key, unless that stands in the same file.", "FILE"
    )
    upstream_name: str = _declare_text(
        "What certificates of instances are for, if not for the host of the URL.", "NAME"
    )
    health_interval: float = _declare_number(
        "Seconds between two health probes of an instance.", PROBE_INTERVAL_S, 0.05
    )
    retries: int = declare_flag(
        "Retries per request on other instances, before its first response byte.",
        default=failures.MAX_RETRIES,
        type=click.IntRange(0, 10),
    )
    breaker_failures: int = _declare_number(
        "Consecutive failures that open the circuit breaker of an instance.",
        MAX_CONSECUTIVE_FAILURES,
        1,
    )

    # The process and its ports.
    workers: int = declare_flag(
        "Processes that serve the port, each on one core; they share what they know of the load.",
        default=1,
        type=click.IntRange(1, MAX_WORKERS),
    )
    drain_delay: float = _declare_number(
        "Seconds after SIGTERM during which new requests are still accepted.", 0.0, 0
    )
    drain_timeout: float = _declare_number(
        "Seconds after SIGTERM within which requests in flight may finish.", DRAIN_TIMEOUT_S, 0
    )
    # A port of its own, so that a firewall can tell operators from clients.
    admin_port: int | None = declare_flag(
        "Port of the admin API, /instances; without it there is none.",
        type=click.IntRange(0, 65535),
    )
    admin_host: str = declare_flag(
        "Address of --admin-port; one that other machines can reach needs --admin-token.",
        default=DEFAULT_ADMIN_HOST,
    )
    admin_token: str = _declare_text("Bearer token that /instances requires.", "TOKEN")

    # Where instances are found, and the store of several replicas.
    discover: tuple[str, ...] = _declare_list(
        "dns://SERVICE:PORT or k8s://NAMESPACE/SELECTOR, with ?role=ROLE; repeatable.",
        "SOURCE",
        callback=check_sources,
    )
    discover_interval: float = _declare_number(
        "Seconds between two questions to DNS, and until a source that failed is asked again.",
        DISCOVER_INTERVAL_S,
        0.05,
    )
    kubernetes_api: str = _declare_text(
        "API server for k8s://, like that of `kubectl proxy`; by default the pod's own.", "URL"
    )
    shared_state: str = _declare_text(
        "redis://[USER@]HOST[:PORT][/DATABASE] of a Valkey or Redis, or rediss:// for TLS, through "
        "which replicas share load and circuit breakers.",
        "URL",
        callback=check_store_url,
    )
    shared_state_password_file: str = _declare_text(
        "The password for it; read anew at each connection.", "FILE"
    )
    shared_state_prefix: str = declare_flag(
        "What its keys begin with: one name for all replicas, another one for each deployment.",
        default=DEFAULT_PREFIX,
        metavar="NAME",
    )

    limits: RouterLimits  # one flag for each of its fields

    # Of the policies.
    routing_logic: str = _declare_choice(
        "Policy that chooses --backend or --prefill instances; see docs/router.md.",
        tuple(POLICIES),
        default=types.DEFAULT_POLICY,
    )
    encoder_routing_logic: Literal["least_requests", "ttft"] = _declare_choice(
        "Policy that chooses --encoder instances: fewest requests, or least expected time.",
        ENCODER_POLICIES,
    )
    ttft_model: Literal["calibrated", "trapezoid"] = _declare_choice(
        "What the ttft policy compares: predicted seconds, or attention pairs to compute.",
        TTFT_MODELS,
    )
    # No default: refusing requests is the operator's decision.
    slo_ttft_ms: float | None = declare_flag(
        "Reject with 429 requests whose first token no instance can send within MS milliseconds.",
        type=click.FloatRange(min=0, min_open=True),
        callback=_check_finite,
        metavar="MS",
    )
    max_queue_ms: float | None = declare_flag(
        "Hold requests in the router while every instance's predicted queue is longer than MS.",
        type=click.FloatRange(min=0, min_open=True),
        callback=_check_finite,
        metavar="MS",
    )
    trust_priority: bool = declare_flag(
        "Let a caller's `priority` below 0, too, order what --max-queue-ms holds.", is_flag=True
    )
    session_key: str = _declare_text(
        "Header, or key of the body, with the session ID; for session and kvaware.",
        "NAME",
        callback=_check_name,
    )
    # The default is the dataclass's, which simulations use without this flag.
    kv_aware_threshold: int = _declare_number(
        "Uncached prompt tokens up to which kvaware follows the longest cached prefix.",
        states.PolicyOptions().kv_aware_threshold,
        0,
    )

    # Of those that read prompts: who tokenizes, and who knows what is cached.
    # Needed where /v1/models names a folder that exists on the instance's machine only.
    tokenizer: str = _declare_text(
        "Tokenizer for all models; by default the one that /v1/models names for each.",
        "MODEL_OR_DIR",
    )
    tokenize: Literal["local", "engine"] = _declare_choice(
        "Tokenize prompts in the router, or ask the render endpoint of an instance.",
        TOKENIZE_PLACES,
    )
    prefix_index: PrefixIndexName = _declare_choice(
        "Source of cached prefixes: KV events, or the prompts sent to each instance.",
        PREFIX_INDEXES,
        default=HISTORY_INDEX,
    )
    kv_events_endpoint: tuple[str, ...] = _declare_list(
        "ZMQ endpoint of an instance's KV events; by default the one that it reports.",
        "URL=ENDPOINT[,REPLAY]",
    )
    # For instances that load blocks from one store, whoever of them computed these.
    enable_shared_cache: bool = declare_flag(
        "Count a prefix cached at one instance as cached at all of them.", is_flag=True
    )

    @classmethod
    def from_flags(cls, given: Mapping[str, Any]) -> RouterOptions:
        names = {each.name for each in fields(RouterLimits)}
        limits = RouterLimits(**{name: given[name] for name in names})
        return cls(limits=limits, **{name: given[name] for name in given.keys() - names})

    def build_instances(self) -> dict[str, tuple[Instance, ...]]:
        """The configured instances by leg. Raises UsageError, with the remedy.

        With --discover there may be none yet, and since encoders may join later, --backend
        instances are on the leg `prefill_decode` from the start.
        """
        is_disaggregated = self.prefill or self.decode
        # One that prefills may be found before one that decodes: half a pair is allowed.
        if self.discover:
            is_contradictory = bool(self.backend and is_disaggregated)
        else:
            # Exactly one of both forms, and a pair only complete: P alone could never answer.
            is_contradictory = bool(self.prefill) != bool(self.decode) or bool(
                self.backend
            ) == bool(is_disaggregated)
        if is_contradictory:
            raise click.UsageError("Give either --backend, or --prefill and --decode together.")
        # Spans and stages are named after the leg, which must not change when an encoder joins.
        backend_leg = PREFILL_DECODE if self.encoder or self.discover else MONO
        urls_by_leg = {
            ENCODE: self.encoder,
            PREFILL: self.prefill,
            DECODE: self.decode,
            backend_leg: self.backend,
        }
        # By URL, as one given twice is one instance: else it would get twice the share, with two states.
        by_leg: dict[str, dict[str, Instance]] = {}
        try:
            for leg, url in ((leg, url) for leg, urls in urls_by_leg.items() for url in urls):
                instance = parse_instance_url(url, leg)
                by_leg.setdefault(leg, {})[instance.url] = instance
        except ValueError as error:
            raise click.UsageError(str(error)) from error
        # The empty leg tells the pool which one prefills before any instance is found.
        if self.discover and not is_disaggregated:
            by_leg.setdefault(backend_leg, {})
        return {leg: tuple(several.values()) for leg, several in by_leg.items()}

    def check_exposure(self) -> None:
        """Raise UsageError for a port that other machines reach and that asks nobody for a key or a token."""
        # Names are not resolved: what they point to may change after the check.
        if not (self.api_key or self.insecure or is_loopback(self.host)):
            raise click.UsageError(
                f"--host {self.host} can be reached from other machines: it needs --api-key KEY, or "
                "--insecure if something else decides who reaches the router."
            )

        # There is no --insecure for the admin port: its requests add and drain instances.
        if not (self.admin_token or is_loopback(self.admin_host)):
            raise click.UsageError(
                f"--admin-host {self.admin_host} can be reached from other machines: "
                "it needs --admin-token TOKEN."
            )

    def build_routing(self, pool: InstancePool) -> routing_service.RoutingService:
        """Build the routing service with its prompt reader and prefix index. Raises UsageError.

        pool: the instances to choose from.
        """
        self._check_combinations()
        options = states.PolicyOptions(
            session_key=self.session_key,
            kv_aware_threshold=self.kv_aware_threshold,
            ttft_model=self.ttft_model,
            shared_cache=self.enable_shared_cache,
            # Policies count in seconds; 0 stands for no objective.
            slo_s=(self.slo_ttft_ms or 0) / 1000,
            max_queue_s=(self.max_queue_ms or 0) / 1000,
        )
        knowledge: dict[str, Any] = {}
        # Not for the others: no child process, no index, no subscription.
        if POLICIES[self.routing_logic].reads_prompts:
            # Imported here: other policies need no tokenizer.
            from ttft_otel.router.routing.prompts.prompt_reader import PROMPT_READERS

            # The reader needs the pool: instances name their models' tokenizers, or render themselves.
            knowledge["prompt_reader"] = PROMPT_READERS[self.tokenize](self.tokenizer or None, pool)
            knowledge["prefix_source"] = self._build_prefix_source()
        encoders_policy = self.encoder_routing_logic
        return routing_service.RoutingService(
            pool, self.routing_logic, options, encoders_policy=encoders_policy, **knowledge
        )

    def _build_prefix_source(self) -> sources.PrefixSource:
        if self.prefix_index == "history":
            index = SentHistory(sources.DEFAULT_BLOCK_SIZE, sources.MAX_HISTORY_BLOCKS)
            return sources.PrefixSource(index)
        try:
            # Imported here, because a router without KV events needs no ZMQ.
            from ttft_otel.router.routing.prefixes.kv_events_source import KvEventsSource

            return KvEventsSource(self.kv_events_endpoint)
        except (ImportError, ValueError) as error:
            raise click.UsageError(str(error)) from error

    def _check_combinations(self) -> None:
        """Raise UsageError for flags that need another flag or exclude each other."""
        policy_name = self.routing_logic
        if policy_name == "session" and not self.session_key:
            raise click.UsageError("--routing-logic session needs --session-key NAME.")
        # The trapezoid compares attention pairs, which cannot be held against milliseconds.
        predicts = (policy_name, self.ttft_model) == (TTFT_POLICY, TTFT_MODELS[0])
        for flag, value in (("slo-ttft", self.slo_ttft_ms), ("max-queue", self.max_queue_ms)):
            if value and not predicts:
                raise click.UsageError(
                    f"--{flag}-ms needs predictions: --routing-logic ttft --ttft-model calibrated."
                )
        if self.trust_priority and not self.max_queue_ms:
            raise click.UsageError("--trust-priority needs --max-queue-ms MILLISECONDS.")
        if self.kv_events_endpoint and self.prefix_index != "kv-events":
            raise click.UsageError("--kv-events-endpoint needs --prefix-index kv-events.")
        # `ttft` needs the sizes of items, which only readers of prompts count.
        if self.encoder_routing_logic == TTFT_POLICY:
            flag = "--encoder-routing-logic ttft"
            if not (self.encoder or self.discover):
                raise click.UsageError(f"{flag} needs --encoder URL.")
            if not POLICIES[policy_name].reads_prompts:
                raise click.UsageError(
                    f"{flag} needs prompts: --routing-logic {' or '.join(PROMPT_POLICIES)}."
                )
        if self.shared_state:
            file = self.shared_state_password_file
            if file and not os.access(file, os.R_OK):
                raise click.UsageError(f"--shared-state-password-file: {file} cannot be read.")
        elif self.shared_state_password_file or self.shared_state_prefix != DEFAULT_PREFIX:
            raise click.UsageError(
                "--shared-state-password-file and --shared-state-prefix need --shared-state."
            )


class RouterCommand(click.Command):
    """A command that keeps its arguments for a reload and rejects flags without effect."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse `args` as click does, keep them in `ctx.meta`, and reject flags without effect."""
        # A copy, before click's parser consumes the list.
        ctx.meta[ARGUMENTS_KEY] = list(args)
        rest = super().parse_args(ctx, args)
        # Shell completion parses half a command line, which must not be judged.
        if not ctx.resilient_parsing:
            check_unused_options(ctx)
        return rest


def add_flags(command: Command) -> Command:
    """Give a command --config and the flags of RouterOptions."""
    flags: dict[str, Any] = {}
    for each in fields(RouterOptions):
        if each.name != "limits":
            flags[each.name] = each.metadata
            continue
        flags |= {
            limit.name: _declare_number(
                limit.metadata["text"], limit.default, limit.metadata["minimum"]
            ).metadata
            for limit in fields(RouterLimits)
        }
    file = _make_option(
        "config",
        metavar="FILE",
        help="YAML file with flags as keys; SIGHUP reloads it.",
        type=click.Path(dir_okay=False),
        # Else flags that were processed before it would have taken their defaults already.
        is_eager=True,
        expose_value=False,
        callback=_load_file,
    )
    return add_options(file, *(_make_option(name, **flags[name]) for name in flags))(command)


def _make_option(name: str, **click_arguments: Any) -> OptionDecorator:
    """A flag and its environment variable, both shown by --help; `name` is its key in the YAML file."""
    variable = click_arguments.pop("envvar", f"{ENV_PREFIX}{name.upper()}")
    # An empty string means "not set": --help has no default to show then.
    show_default = click_arguments.get("default", "") != ""
    return click.option(
        f"--{name.replace('_', '-')}",
        name,
        envvar=variable,
        show_envvar=True,
        show_default=show_default,
        **click_arguments,
    )


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


def reread_options(ctx: click.Context) -> RouterOptions:
    """Read flags, environment and file of `ctx` again. Raises ClickException with what is wrong."""
    # A new context: click's precedence and checks apply anew, `ctx` keeps the old values.
    context = ctx.command.make_context(ctx.info_name, list(ctx.meta[ARGUMENTS_KEY]))
    with context:
        options = RouterOptions.from_flags(context.params)
        # Called for what they raise, since a reload must not pass what a start would refuse.
        options.build_instances()
        options.check_exposure()
        return options


def list_fixed_changes(old_options: RouterOptions, new_options: RouterOptions) -> list[str]:
    """Flags whose values differ between `old_options` and `new_options` but need a restart."""
    before, after = asdict(old_options), asdict(new_options)
    # Limits by their own names, so that the flag is named and not the group.
    before, after = before.pop("limits") | before, after.pop("limits") | after
    return [
        f"--{name.replace('_', '-')}"
        for name, value in before.items()
        if name not in RELOADABLE_FIELDS and after[name] != value
    ]


def _load_file(ctx: click.Context, _: click.Parameter, path: str | None) -> None:
    if path is None:
        return
    try:
        document = yaml.safe_load(Path(path).read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"--config {path}: {error}") from error
    except yaml.YAMLError as error:
        raise click.UsageError(f"--config {path} is not valid YAML: {error}") from error
    # An empty file is None, a file of one word a string.
    if not isinstance(document, Mapping):
        raise click.UsageError(f"--config {path}: write one `flag: value` per line.")
    options_by_name = {
        str(each.name): each
        for each in ctx.command.params
        # --config exposes no value: a file cannot name another file.
        if isinstance(each, click.Option) and each.expose_value
    }
    values: dict[str, Any] = {}
    for key, value in document.items():
        # Both spellings, as in the flag and in the environment variable.
        name = str(key).replace("-", "_")
        if name not in options_by_name:
            flags = ", ".join(sorted(each.replace("_", "-") for each in options_by_name))
            raise click.UsageError(f"--config {path}: {key!r} is not one of {flags}.")
        # click only says "Value must be an iterable", not what to write in the file.
        if options_by_name[name].multiple and not isinstance(value, list):
            raise click.UsageError(f"--config {path}: {key} is a list; write `{key}: [{value}]`.")
        # click would turn it into its Python text, which some string flag might accept.
        if not options_by_name[name].multiple and isinstance(value, list | dict):
            raise click.UsageError(f"--config {path}: {key} is one value; write `{key}: VALUE`.")
        # click's IntParamType would truncate a float
        if isinstance(value, float) and isinstance(
            options_by_name[name].type, click.types.IntParamType
        ):
            raise click.UsageError(f"--config {path}: {key}: {value} is not a whole number.")
        # YAML 1.1 reads a bare `off` as false
        is_off_word = value is False and isinstance(options_by_name[name].type, click.Choice)
        values[name] = types.MODE_OFF if is_off_word else value
    # Below flags and environment: click looks here after both and before `default`.
    ctx.default_map = {**(ctx.default_map or {}), **values}


def build_upstream_tls(options: RouterOptions) -> ClientTls | None:
    """What connections to instances trust and show, None for the system's authorities. Raises UsageError."""
    files = options.upstream_ca, options.upstream_cert, options.upstream_cert_key
    if options.upstream_cert_key and not options.upstream_cert:
        raise click.UsageError("--upstream-cert-key needs --upstream-cert.")
    if not any((*files, options.upstream_name)):
        return None
    try:
        return ClientTls(*files, options.upstream_name)
    except OSError as error:
        named = ", ".join(each for each in files if each)
        raise click.UsageError(f"{named}: {error}; these have to be PEM files.") from error


def build_discovery(
    options: RouterOptions, pool: InstancePool, configured: Mapping[str, Sequence[Instance]]
) -> Discovery | None:
    """The discovery of all sources, None without. Raises UsageError for k8s:// outside a cluster."""
    if not options.discover:
        return None
    addresses = [parse_source_address(each) for each in dict.fromkeys(options.discover)]
    try:
        sources = [WatchedSource(each, _choose_watch(each, options)) for each in addresses]
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    return Discovery(pool, configured, sources, options.discover_interval)


def _choose_watch(address: SourceAddress, options: RouterOptions) -> WatchFindings:
    # Imported where it is used: dnspython costs a router without sources 50 ms.
    from ttft_otel.router.discovery import sources

    if address.scheme == DNS_SCHEME:
        return functools.partial(sources.watch_name, address, options.discover_interval)
    cluster = sources.find_cluster(options.kubernetes_api)
    return sources.KubernetesSource(address, *cluster).watch_findings


def build_lone_link(
    options: RouterOptions, pool: InstancePool, routing: routing_service.RoutingService
) -> StoreLink | None:
    """What joins a router without --workers to the store; None without it."""
    # Workers have one each (build_worker_link).
    if not options.shared_state or options.workers > 1:
        return None
    from ttft_otel.router.workers.messages import OwnLoads, RemoteLoads

    # Nobody else keeps account of the load.
    own = OwnLoads(pool, routing, lambda _: None)
    loads = RemoteLoads(pool.find_instance, lambda leg: routing.get_policy(leg).state)
    own.start()
    pool.change_listeners.add(loads.sync_instances)
    return _build_link(options, pool, own, loads, secrets.token_hex(8))


def build_worker_link(options: RouterOptions, link: WorkerLink) -> StoreLink | None:
    """What joins one of several workers to the store; None without it."""
    if not options.shared_state:
        return None
    loads = link.loads
    made = _build_link(options, link.pool, loads.own, loads.remote, link.slot.replica)
    link.app.metrics.collect_shared_state = made.collect_metrics
    return made


def _build_link(
    options: RouterOptions, pool: InstancePool, own: OwnLoads, loads: RemoteLoads, replica: str
) -> StoreLink:
    # The client costs a router without it 100 ms.
    from ttft_otel.router.shared_state.store_link import StoreLink, StoreSettings

    settings = StoreSettings(
        options.shared_state, options.shared_state_password_file, options.shared_state_prefix
    )
    return StoreLink(settings, pool, own, loads, replica)
