# SPDX-License-Identifier: Apache-2.0
"""Turn the environment into one frozen Settings; validate() says what is wrong and how to mend it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from ttft_otel import names

ON: Final = frozenset({"1", "true", "yes", "on"})
OFF: Final = frozenset({"", "0", "false", "no", "off"})
SAMPLERS: Final = (
    "always_on",
    "always_off",
    "traceidratio",
    "parentbased_always_on",
    "parentbased_always_off",
    "parentbased_traceidratio",
)
PROTOCOLS: Final = ("http/protobuf", "grpc")
DEFAULT_HTTP: Final = "http://127.0.0.1:4318"
DEFAULT_GRPC: Final = "http://127.0.0.1:4317"


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment asks for; sizes in bytes, ratio in 0..1."""

    on: bool = False
    protocol: str = "http/protobuf"
    endpoint: str = DEFAULT_HTTP
    service: str = ""
    sampler: str = "parentbased_always_on"
    ratio: float = 1.0
    trust: bool = True
    queue: int = 4 << 20
    wrong: tuple[str, ...] = ()


def switch(value: str) -> bool | None:
    """Read an on/off word in any case; None when it is neither."""
    word = value.strip().lower()
    return True if word in ON else False if word in OFF else None


def read(env: Mapping[str, str] | None = None) -> Settings:
    """Read the environment; never raises: what is wrong is listed in `wrong`, with its remedy."""
    source = os.environ if env is None else env
    wrong: list[str] = []
    on = switch(source.get(names.ENV_ON, ""))
    if on is None:
        wrong.append(
            f"{names.ENV_ON}={source[names.ENV_ON]!r} is neither on nor off; "
            f"set {names.ENV_ON}=1 to trace, 0 not to"
        )
    protocol = (
        source.get(names.ENV_TRACES_PROTOCOL) or source.get(names.ENV_PROTOCOL) or "http/protobuf"
    )
    if protocol not in PROTOCOLS:
        wrong.append(
            f"{names.ENV_PROTOCOL}={protocol!r} is unknown; use one of {', '.join(PROTOCOLS)}"
        )
        protocol = "http/protobuf"
    sampler, ratio = _sampler(source, wrong)
    if _silenced(source):
        sampler = "always_off"
    return Settings(
        on=bool(on),
        protocol=protocol,
        endpoint=_endpoint(source, protocol, wrong),
        service=source.get(names.ENV_SERVICE, ""),
        sampler=sampler,
        ratio=ratio,
        trust=_flag(source, names.ENV_TRUST, True, wrong),
        queue=_bytes(source, names.ENV_QUEUE, 4 << 20, wrong),
        wrong=tuple(wrong),
    )


_frozen: list[Settings] = []


def freeze() -> None:
    """Keep what the environment says now: vLLM's own tracing writes its endpoint into it later."""
    _frozen[:] = [read()]


def current() -> Settings:
    """The settings that this process was started with, else what the environment says."""
    return _frozen[0] if _frozen else read()


def validate(settings: Settings) -> tuple[str, ...]:
    """What is wrong with the settings, each line with its remedy; empty when all is well."""
    return settings.wrong


def _endpoint(source: Mapping[str, str], protocol: str, wrong: list[str]) -> str:
    default = DEFAULT_GRPC if protocol == "grpc" else DEFAULT_HTTP
    name = names.ENV_TRACES_ENDPOINT
    if not source.get(name):
        name = names.ENV_ENDPOINT
    url = source.get(name) or default
    parts = urlsplit(url)
    bare = protocol == "grpc" and "://" not in url
    if not bare and (parts.scheme not in ("http", "https") or not parts.hostname):
        wrong.append(f"{name}={url!r} is not a URL; set {names.ENV_ENDPOINT}={default}")
        return default
    return url


def _silenced(source: Mapping[str, str]) -> bool:
    """The standard ways to say that no span is wanted; timings in the response still are."""
    disabled = source.get(names.ENV_DISABLED, "").strip().lower() == "true"
    return disabled or source.get(names.ENV_EXPORTER, "").strip().lower() == "none"


def _sampler(source: Mapping[str, str], wrong: list[str]) -> tuple[str, float]:
    sampler = source.get(names.ENV_SAMPLER) or "parentbased_always_on"
    if sampler not in SAMPLERS:
        wrong.append(
            f"{names.ENV_SAMPLER}={sampler!r} is unknown; use one of {', '.join(SAMPLERS)}"
        )
        sampler = "parentbased_always_on"
    text = source.get(names.ENV_SAMPLER_ARG) or "1.0"
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0.0 <= ratio <= 1.0:
        wrong.append(f"{names.ENV_SAMPLER_ARG}={text!r} is not a ratio; use a number from 0 to 1")
        ratio = 1.0
    return sampler, ratio


def _flag(source: Mapping[str, str], name: str, default: bool, wrong: list[str]) -> bool:
    if name not in source:
        return default
    value = switch(source[name])
    if value is None:
        wrong.append(f"{name}={source[name]!r} is neither on nor off; use 1 or 0")
        return default
    return value


def _bytes(source: Mapping[str, str], name: str, default: int, wrong: list[str]) -> int:
    text = source.get(name)
    if not text:
        return default
    if not text.isdigit() or int(text) < 65536:
        wrong.append(f"{name}={text!r} is not a size; use a number of bytes from 65536")
        return default
    return int(text)
