# SPDX-License-Identifier: Apache-2.0
"""Read the environment variables into one frozen Settings, with a list of what is wrong in them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from ttft_otel.model import stages
from ttft_otel.model.names import env_names

# plugin.py has the same words once more: it must not import anything while tracing is off.
ON_WORDS: Final = frozenset({"1", "true", "yes", "on"})
OFF_WORDS: Final = frozenset({"", "0", "false", "no", "off"})
SAMPLERS: Final = (
    "always_on",
    "always_off",
    "traceidratio",
    "parentbased_always_on",
    "parentbased_always_off",
    "parentbased_traceidratio",
)
PROTOCOLS: Final = ("http/protobuf", "grpc")
COMPRESSIONS: Final = {"http/protobuf": ("none", "gzip", "deflate"), "grpc": ("gzip",)}
EXPORTERS: Final = ("otlp", "none")
PROPAGATOR: Final = "tracecontext"
DETAILS: Final = ("full", "stages", "ttft")  # exporter/span_writer.py: which spans each has
# lowmemory: delta where the SDK need not keep a sum for it, which is so for all of our metrics.
TEMPORALITIES: Final = ("cumulative", "delta", "lowmemory")
SERVER_ROLES: Final = ("", *(role for role in stages.ROLES if role != "router"))
GRPC_PORT: Final = 4317  # OTLP's; where no protocol is set, it means grpc
DEFAULT_HTTP_ENDPOINT: Final = "http://127.0.0.1:4318"
DEFAULT_GRPC_ENDPOINT: Final = "http://127.0.0.1:4317"


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment variables ask for.

    protocol: one of PROTOCOLS. protocol_reason: what chose it: a variable, "port 4317", "default".
    endpoint: OTLP endpoint, a URL. service: service.name, "" for one per role.
    ratio: sampling ratio of the traceidratio samplers, 0 to 1.
    trust_sampled: honour the caller's `sampled` flag; else only its trace ID is used.
    sampling_key: of ratios for callers that are not trusted; "" for one of this process.
    queue_bytes: send buffer of the socket to the exporter, in bytes.
    role: "" leaves it to vLLM's configuration and to each request.
    detail: which spans the exporter makes of a request, one of DETAILS.
    metrics: the exporter process counts every request, sampled or not, and sends metrics of them.
    temporality: of these metrics, one of TEMPORALITIES.
    numbers: those of env_names.NUMBERS that are set.
    variables: what a configuration file says, as variables; the others of env_names.REPLACED are not
        followed then. None without a file.
    unreadable: variables for which the SDK's exporter would raise; it must not see them.
    problems: one line for each invalid variable: "what is wrong; remedy".
    """

    on: bool = False
    protocol: str = "http/protobuf"
    protocol_reason: str = "default"
    endpoint: str = DEFAULT_HTTP_ENDPOINT
    service: str = ""
    sampler: str = "parentbased_always_on"
    ratio: float = 1.0
    trust_sampled: bool = True
    sampling_key: str = ""
    queue_bytes: int = 4 << 20
    role: str = ""
    detail: str = "full"
    metrics: bool = False
    temporality: str = TEMPORALITIES[0]
    numbers: Mapping[str, int] = field(default_factory=dict)
    variables: Mapping[str, str] | None = None
    unreadable: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def parse_switch(value: str) -> bool | None:
    """Parse an on/off word, ignoring case; None when `value` is neither. "" means off."""
    word = value.strip().lower()
    return True if word in ON_WORDS else False if word in OFF_WORDS else None


def read_settings(env: Mapping[str, str] | None = None) -> Settings:
    """Read the settings from `env`, by default os.environ.

    Never raises: an invalid variable takes its default and adds a line to `Settings.problems`.
    """
    source = os.environ if env is None else env
    problems: list[str] = []
    variables = _read_config_file(source, problems)
    source = replace_variables(source, variables)
    # Wrong means off: a typing error must not switch tracing on in production.
    on = parse_switch(source.get(env_names.TTFT_OTEL, ""))
    if on is None:
        problems.append(
            f"{env_names.TTFT_OTEL}={source[env_names.TTFT_OTEL]!r} is neither on nor off; "
            f"set {env_names.TTFT_OTEL}=1 to trace, 0 not to"
        )
    protocol, reason = _read_protocol(source, problems)
    sampler, ratio = _read_sampler(source, problems)
    # Not `on=False`: the middleware still has to answer x-ttft-timing.
    if not _is_exported(source, env_names.OTEL_TRACES_EXPORTER, problems):
        sampler = "always_off"
    _check_propagators(source, problems)
    return Settings(
        on=bool(on),
        protocol=protocol,
        protocol_reason=reason,
        endpoint=_read_endpoint(source, protocol, problems),
        service=source.get(env_names.OTEL_SERVICE_NAME, ""),
        sampler=sampler,
        ratio=ratio,
        trust_sampled=_read_flag(source, env_names.TTFT_OTEL_TRUST_SAMPLED, True, problems),
        sampling_key=source.get(env_names.TTFT_OTEL_SAMPLING_KEY, ""),
        queue_bytes=_read_bytes(source, env_names.TTFT_OTEL_QUEUE_BYTES, 4 << 20, problems),
        role=_read_word(source, env_names.TTFT_OTEL_ROLE, SERVER_ROLES, problems),
        detail=_read_word(source, env_names.TTFT_OTEL_DETAIL, DETAILS, problems),
        metrics=_read_metrics(source, problems),
        temporality=_read_word(
            source,
            env_names.OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE,
            TEMPORALITIES,
            problems,
        ),
        variables=variables,
        numbers=_read_numbers(source, problems),
        unreadable=_find_unreadable(source, protocol, problems),
        problems=tuple(problems),
    )


def replace_variables(
    env: Mapping[str, str], variables: Mapping[str, str] | None
) -> Mapping[str, str]:
    """`env` with Settings.variables in place of those that a configuration file replaces."""
    if variables is None:
        return env
    kept = {name: value for name, value in env.items() if name not in env_names.REPLACED}
    kept.pop(env_names.OTEL_CONFIG_FILE, None)
    return {**kept, **variables}


def _read_config_file(source: Mapping[str, str], problems: list[str]) -> Mapping[str, str] | None:
    path = source.get(env_names.OTEL_CONFIG_FILE)
    if not path:
        return None
    # Imported only where there is one: OpenTelemetry's reader takes 0.5 s.
    from ttft_otel.tracing.config_file import read_config_file

    variables, found = read_config_file(path)
    problems += found
    return variables


# A list, filled in place: no `global`, and empty until the plugin has run.
_frozen: list[Settings] = []


def freeze_settings() -> None:
    """Store the settings of this moment, because vLLM's own tracing sets OTEL_* variables later."""
    _frozen[:] = [read_settings()]


def get_settings() -> Settings:
    """The settings stored by freeze_settings(); without it, read from the environment now."""
    return _frozen[0] if _frozen else read_settings()


def _read_protocol(source: Mapping[str, str], problems: list[str]) -> tuple[str, str]:
    """The protocol and what chose it.

    Without a variable the port does: charts set http://HOST:4317 and no protocol, and mean gRPC.
    """
    # The signal's own variable first, as OpenTelemetry specifies.
    for name in (
        env_names.OTEL_EXPORTER_OTLP_TRACES_PROTOCOL,
        env_names.OTEL_EXPORTER_OTLP_PROTOCOL,
    ):
        protocol = source.get(name)
        if protocol in PROTOCOLS:
            return protocol, name
        if protocol:
            problems.append(f"{name}={protocol!r} is unknown; use one of {', '.join(PROTOCOLS)}")
            break
    url = (
        source.get(env_names.OTEL_EXPORTER_OTLP_TRACES_ENDPOINT)
        or source.get(env_names.OTEL_EXPORTER_OTLP_ENDPOINT)
        or ""
    )
    try:
        port = urlsplit(url if "://" in url else f"//{url}").port
    except ValueError:  # _read_endpoint() names it
        port = None
    if port == GRPC_PORT:
        return "grpc", f"port {GRPC_PORT}"
    return "http/protobuf", "default"


def _read_endpoint(source: Mapping[str, str], protocol: str, problems: list[str]) -> str:
    default = DEFAULT_GRPC_ENDPOINT if protocol == "grpc" else DEFAULT_HTTP_ENDPOINT
    # By OpenTelemetry's rules the signal's own variable wins, and an empty variable counts as unset.
    name = env_names.OTEL_EXPORTER_OTLP_TRACES_ENDPOINT
    if not source.get(name):
        name = env_names.OTEL_EXPORTER_OTLP_ENDPOINT
    url = source.get(name) or default
    has_no_scheme = protocol == "grpc" and "://" not in url  # gRPC exporters accept host:port
    if not has_no_scheme and not _is_http_url(url):
        problems.append(
            f"{name}={url!r} is not a URL; set {env_names.OTEL_EXPORTER_OTLP_ENDPOINT}={default}"
        )
        return default
    return url


def _read_metrics(source: Mapping[str, str], problems: list[str]) -> bool:
    """Whether TTFT_OTEL_METRICS asks for metrics, and no standard variable turns them off."""
    asked = _read_flag(source, env_names.TTFT_OTEL_METRICS, False, problems)
    # Standard variables win: an operator who turns telemetry off means all of it.
    return asked and _is_exported(source, env_names.OTEL_METRICS_EXPORTER, problems)


def _is_http_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises for what is no number
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def _read_list(source: Mapping[str, str], name: str) -> list[str]:
    return [word for each in source.get(name, "").split(",") if (word := each.strip().lower())]


def _is_exported(source: Mapping[str, str], name: str, problems: list[str]) -> bool:
    """Whether neither OTEL_SDK_DISABLED nor the signal's variable `name` turns a signal off.

    Server-Timing in responses still works then.
    """
    words = _read_list(source, name)
    if others := [word for word in words if word not in EXPORTERS]:
        problems.append(
            f"{name} names {', '.join(others)}: ttft-otel sends by OTLP alone; "
            f"set {name}=otlp, or none"
        )
    disabled = source.get(env_names.OTEL_SDK_DISABLED, "").strip().lower() == "true"
    return not disabled and "none" not in words


def _check_propagators(source: Mapping[str, str], problems: list[str]) -> None:
    words = _read_list(source, env_names.OTEL_PROPAGATORS)
    # Others beside it do no harm: callers send several formats, or baggage, which passes through.
    if words and PROPAGATOR not in words:
        problems.append(
            f"{env_names.OTEL_PROPAGATORS}={','.join(words)!r} leaves out {PROPAGATOR}, "
            f"which alone ttft-otel reads and writes; add {PROPAGATOR}"
        )


def _read_numbers(source: Mapping[str, str], problems: list[str]) -> dict[str, int]:
    """Those of env_names.NUMBERS that are set, and are whole numbers from their least one."""
    numbers: dict[str, int] = {}
    for name, least in env_names.NUMBERS.items():
        text = source.get(name, "").strip()
        if text.isdecimal() and int(text) >= least:
            numbers[name] = int(text)
        elif text:
            problems.append(
                f"{name}={text!r} is not a whole number from {least}; correct or unset it"
            )
    return numbers


def _find_unreadable(
    source: Mapping[str, str], protocol: str, problems: list[str]
) -> tuple[str, ...]:
    """Variables for which the SDK's exporter raises instead of taking its default."""
    found: list[str] = []
    words = COMPRESSIONS[protocol]
    for name in env_names.TIMEOUTS:
        text = source.get(name) or "1"
        if not re.fullmatch(r"\d+(\.\d+)?", text):
            found.append(name)
            problems.append(f"{name}={text!r} is no time; use a number of seconds, or unset it")
    for name in env_names.COMPRESSIONS:
        text = source.get(name, "").strip().lower()
        if name in source and text not in words:
            found.append(name)
            if text not in ("", "none"):  # gRPC's exporter takes it for an unknown one
                problems.append(f"{name}={text!r} is unknown to {protocol}; use gzip, or unset it")
    return tuple(found)


def _read_sampler(source: Mapping[str, str], problems: list[str]) -> tuple[str, float]:
    sampler = source.get(env_names.OTEL_TRACES_SAMPLER) or "parentbased_always_on"
    if sampler not in SAMPLERS:
        problems.append(
            f"{env_names.OTEL_TRACES_SAMPLER}={sampler!r} is unknown; use one of {', '.join(SAMPLERS)}"
        )
        sampler = "parentbased_always_on"
    text = source.get(env_names.OTEL_TRACES_SAMPLER_ARG) or "1.0"
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    # Also for nan, which compares as false.
    if not 0.0 <= ratio <= 1.0:
        problems.append(
            f"{env_names.OTEL_TRACES_SAMPLER_ARG}={text!r} is not a ratio; use a number from 0 to 1"
        )
        ratio = 1.0
    return sampler, ratio


def _read_word(
    source: Mapping[str, str], name: str, words: tuple[str, ...], problems: list[str]
) -> str:
    """The word in the variable `name`, one of `words`; the first of them is the default."""
    word = source.get(name, "").strip().lower() or words[0]
    if word not in words:
        known = ", ".join(filter(None, words))
        problems.append(f"{name}={word!r} is unknown; use one of {known}, or unset it")
        return words[0]
    return word


def _read_flag(source: Mapping[str, str], name: str, default: bool, problems: list[str]) -> bool:
    if name not in source:
        return default
    value = parse_switch(source[name])
    if value is None:
        problems.append(f"{name}={source[name]!r} is neither on nor off; use 1 or 0")
        return default
    return value


def _read_bytes(source: Mapping[str, str], name: str, default: int, problems: list[str]) -> int:
    text = source.get(name)
    if not text:
        return default
    # A record is one message of the socket: the buffer has to hold at least one.
    if not text.isdigit() or int(text) < 65536:
        problems.append(f"{name}={text!r} is not a size; use a number of bytes from 65536")
        return default
    return int(text)
