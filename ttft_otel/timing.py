# SPDX-License-Identifier: Apache-2.0
"""Server-Timing text: a server writes its breakdown into the response, the router reads it back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ttft_otel import names, stages

LIMIT: Final = 8192  # longer headers are refused, not read
_ENTRY: Final = re.compile(
    r"([!#$%&'*+.^_`|~0-9A-Za-z-]+)\s*;\s*dur\s*=\s*\"?(\d{1,12}(?:\.\d+)?)\"?"
)
_MARK: Final = f', {names.TIMING_TOKENS};desc="'
_COUNTS: Final = re.compile(
    r'prompt=(\d{1,9}) cached=(\d{1,9}) own=(\d{1,9}) step=(\d{1,9})"', re.ASCII
)


class Tokens(NamedTuple):
    """A prompt's tokens, those that were cached, and its own and all tokens of its prefill's steps."""

    prompt: int
    cached: int
    own: int
    step: int


@dataclass(frozen=True, slots=True)
class Timing:
    """One server's breakdown in microseconds: stages, remainder, their sum, and what came after.

    tokens: of the prompt that it computed; None when it does not say.
    """

    stages: dict[str, int] = field(default_factory=dict)
    unattributed: int = 0
    ttft: int = 0
    rest: int | None = None
    tokens: Tokens | None = None


def write(
    parts: Mapping[str, int],
    unattributed: int,
    ttft: int,
    rest: int | None = None,
    tokens: Tokens | None = None,
) -> str:
    """Write `prefill.queue;dur=1.234, ..., unattributed;dur=0.000, ttft;dur=5.000[, rest;dur=..]`.

    After that, with tokens, `tokens;desc="prompt=4096 cached=512 own=3584 step=3600"`.
    """
    entries = [_entry(name, value) for name, value in parts.items()]
    entries.append(_entry(stages.UNATTRIBUTED, unattributed))
    entries.append(_entry(names.TIMING_TTFT, ttft))
    if rest is not None:
        entries.append(_entry(names.TIMING_REST, rest))
    if tokens is not None:
        said = "prompt={} cached={} own={} step={}".format(*tokens)
        entries.append(f'{names.TIMING_TOKENS};desc="{said}"')
    return ", ".join(entries)


def read(text: str) -> Timing | None:
    """Read a header written by `write`, other people's entries skipped; None when it does not close.

    Milliseconds with three decimals come back as the same microseconds.
    """
    if not text or len(text) > LIMIT:
        return None
    before, mark, told = text.partition(_MARK)
    counts = _COUNTS.match(told) if mark else None
    if counts is not None:
        text = before + told[counts.end() :]
    found = _own(text) or {name: round(float(value) * 1000) for name, value in _ENTRY.findall(text)}
    ttft = found.pop(names.TIMING_TTFT, None)
    rest = found.pop(names.TIMING_REST, None)
    unattributed = found.pop(stages.UNATTRIBUTED, 0)
    parts = {name: value for name, value in found.items() if stages.known(name)}
    if ttft is None or sum(parts.values()) + unattributed != ttft:
        return None
    return Timing(parts, unattributed, ttft, rest, None if counts is None else _tokens(counts))


def _tokens(found: re.Match[str]) -> Tokens | None:
    """The four numbers, where they can be true."""
    tokens = Tokens(*map(int, found.groups()))
    return tokens if tokens.cached <= tokens.prompt else None


def _own(text: str) -> dict[str, int]:
    """What `write` wrote, in a quarter of the general reader's time; {} for any other spelling."""
    found: dict[str, int] = {}
    for entry in text.split(", "):
        name, _, value = entry.partition(";dur=")
        digits = value[:-4] + value[-3:]
        if value[-4:-3] != "." or len(digits) > 15 or not (digits.isascii() and digits.isdigit()):
            return {}
        found[name] = int(digits)
    return found


def _entry(name: str, value: int) -> str:
    return f"{name};dur={value // 1000}.{value % 1000:03d}"
