# SPDX-License-Identifier: Apache-2.0
"""The Server-Timing header, which a server writes and router and bench read back; the JSON of /ttft_report.

The JSON has stages per role in ms, with the field names of the original TTFT report: report/ passes what
stored spans say, router/ what Server-Timing does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, NamedTuple

import msgspec

from ttft_otel.model import stages
from ttft_otel.model.names import header_names, keys

MAX_HEADER_CHARS: Final = 8192  # longer headers are ignored
_TOKEN: Final = r"[!#$%&'*+.^_`|~0-9A-Za-z-]"
# An entry begins where a token begins: a search that tried each of its characters would be quadratic.
_ENTRY: Final = re.compile(
    rf"(?<!{_TOKEN})({_TOKEN}+)\s*;\s*dur\s*=\s*\"?(\d{{1,12}}(?:\.\d+)?)(?![\w.])\"?"
)
# Counts stand in `desc`, because Server-Timing has no other place for a value that is not a duration.
_DESCRIPTION: Final = ';desc="'  # in all of the following
_TOKENS_MARK: Final = f', {header_names.TIMING_TOKENS};desc="'
_TOKENS: Final = re.compile(
    r'prompt=(\d{1,9}) cached=(\d{1,9}) own=(\d{1,9}) step=(\d{1,9})"', re.ASCII
)
_EC_MARK: Final = f', {header_names.TIMING_EC};desc="'
_EC: Final = re.compile(
    r'items=(\d{1,9}) remote=(\d{1,9}) local=(\d{1,9}) recomputed=(\d{1,9}) bytes=(\d{1,15})"',
    re.ASCII,
)
_CLOCK_MARK: Final = f', {header_names.TIMING_CLOCK};desc="'
_CLOCK: Final = re.compile(rf'({"|".join(keys.CLOCK_WORDS)}) error=(\d{{1,9}})"', re.ASCII)
# Milliseconds, of as many digits as _ENTRY takes: their microseconds are exact in a double.
_lengths_decoder: Final = msgspec.json.Decoder(
    dict[str, Annotated[float, msgspec.Meta(ge=0, lt=1e12)]]
)


class TokenCounts(NamedTuple):
    """Token counts of a prefill.

    prompt: tokens of the prompt. cached: those found in the prefix cache. own: tokens of this request
    in its prefill steps. step: tokens of all requests in those steps.
    """

    prompt: int
    cached: int
    own: int
    step: int


class EncoderCacheCounts(NamedTuple):
    """Where an encoder-cache consumer got the encodings of a request's media items from.

    items: media items of the request that its EC connector knows of. remote: fetched from an
    encoder instance. local: found in a cache of its own. recomputed: encoded here although an
    encoder instance had encoded them for this request. bytes: size of what was fetched.
    """

    items: int
    remote: int
    local: int
    recomputed: int
    bytes: int


class ClockNote(NamedTuple):
    """Which clock placed the worker's marks: one of keys.CLOCK_WORDS, and its error in us."""

    word: str
    error_us: int


class ServerTiming(msgspec.Struct, frozen=True):
    """One server's breakdown in microseconds; stages and `unattributed` add up to `ttft`.

    rest: from the first token to the response, None for a stream.
    tokens: None when the server did not send them.
    ec: None when it is no encoder-cache consumer, or did not send it.
    clock: None when no worker has sent marks, or of a router.
    """

    stages: dict[str, int] = {}
    unattributed: int = 0
    ttft: int = 0
    rest: int | None = None
    tokens: TokenCounts | None = None
    ec: EncoderCacheCounts | None = None
    clock: ClockNote | None = None


def format_server_timing(
    parts: Mapping[str, int],
    unattributed: int,
    ttft: int,
    rest: int | None = None,
    tokens: TokenCounts | None = None,
    ec: EncoderCacheCounts | None = None,
    clock: ClockNote | None = None,
) -> str:
    """Write `prefill.queue;dur=1.234, ..., unattributed;dur=0.000, ttft;dur=5.000[, rest;dur=..]`.

    parts: stage -> microseconds; they and `unattributed` have to add up to `ttft`.
    rest: see ServerTiming; None leaves the entry out.
    tokens: appended as `tokens;desc="prompt=4096 cached=512 own=3584 step=3600"`.
    ec: appended as `ec;desc="items=2 remote=1 local=1 recomputed=0 bytes=1234"`.
    clock: appended as `clock;desc="device error=31"`.
    """
    entries = [_format_entry(name, value) for name, value in parts.items()]
    # Also where it is 0: the reader checks the sum, and must see that nothing is missing.
    entries.append(_format_entry(stages.UNATTRIBUTED, unattributed))
    entries.append(_format_entry(header_names.TIMING_TTFT, ttft))
    if rest is not None:
        entries.append(_format_entry(header_names.TIMING_REST, rest))
    if tokens is not None:
        description = "prompt={} cached={} own={} step={}".format(*tokens)
        entries.append(f'{header_names.TIMING_TOKENS};desc="{description}"')
    if ec is not None:
        description = "items={} remote={} local={} recomputed={} bytes={}".format(*ec)
        entries.append(f'{header_names.TIMING_EC};desc="{description}"')
    if clock is not None:
        entries.append(f'{header_names.TIMING_CLOCK};desc="{clock.word} error={clock.error_us}"')
    return ", ".join(entries)


def reports_no_token(text: str) -> bool:
    """Whether the header `text` says that the request ended without a first token."""
    return header_names.TIMING_NO_TOKEN in text and any(
        entry.strip() == header_names.TIMING_NO_TOKEN
        for entry in text[:MAX_HEADER_CHARS].split(",")
    )


def may_count_media(text: str) -> bool:
    """Whether the header `text` may have EncoderCacheCounts; it need not be parsed if not."""
    return _EC_MARK in text


def parse_server_timing(text: str) -> ServerTiming | None:
    """Parse a header written by format_server_timing(); entries of other origin are ignored.

    None when `text` is too long, has no `ttft`, or its stages do not add up to it. Milliseconds with
    three decimals become the same microseconds again.
    """
    # From a server that may be anybody's: the bound comes before any pattern.
    if not text or len(text) > MAX_HEADER_CHARS:
        return None
    # Counts first: their quoted text would not pass the fast path below.
    tokens = ec = clock = None
    if _DESCRIPTION in text:
        text, said = _cut_entry(text, _TOKENS_MARK, _TOKENS)
        tokens = TokenCounts(*map(int, said)) if said else None
        text, said = _cut_entry(text, _EC_MARK, _EC)
        ec = EncoderCacheCounts(*map(int, said)) if said else None
        text, said = _cut_entry(text, _CLOCK_MARK, _CLOCK)
        clock = ClockNote(said[0], int(said[1])) if said else None
        # Another program on the way may have written entries of these names: what contradicts itself is not
        # used. An item may be fetched, evicted and then encoded: only each count is at most that of items.
        if tokens is not None and tokens.cached > tokens.prompt:
            tokens = None
        if ec is not None and max(ec.remote, ec.local, ec.recomputed) > ec.items:
            ec = None
    values = _parse_own_format(text) or {
        name: round(float(value) * 1000) for name, value in _ENTRY.findall(text)
    }
    ttft = values.pop(header_names.TIMING_TTFT, None)
    # Not in the sum: it comes after the first token.
    rest = values.pop(header_names.TIMING_REST, None)
    unattributed = values.pop(stages.UNATTRIBUTED, 0)
    parts = values
    if not values.keys() <= stages.KNOWN_NAMES:
        parts = {name: value for name, value in values.items() if stages.is_known_stage(name)}
    # A proxy in between may have dropped or merged entries: what does not add up is not used.
    if ttft is None or sum(parts.values()) + unattributed != ttft:
        return None
    return ServerTiming(parts, unattributed, ttft, rest, tokens, ec, clock)


def _cut_entry(text: str, mark: str, form: re.Pattern[str]) -> tuple[str, tuple[str, ...]]:
    """Remove the entry that begins with `mark`; returns the other entries, and what it says.

    () where there is no such entry, or one of another form, which stays in the text.
    """
    before, separator, after = text.partition(mark)
    found = form.match(after) if separator else None
    if found is None:
        return text, ()
    return before + after[found.end() :], found.groups()


def _parse_own_format(text: str) -> dict[str, int]:
    """Fast path for what format_server_timing() writes: with other separators it is a JSON object.

    Half of the regular expression's time. {} for any other spelling, which that reads then.
    """
    document = '{"' + text.replace(";dur=", '":').replace(", ", ',"') + "}"
    try:
        lengths_ms = _lengths_decoder.decode(document)
    except (msgspec.DecodeError, UnicodeEncodeError):  # bytes that are no text are surrogates here
        return {}
    return {name: round(ms * 1000) for name, ms in lengths_ms.items()}


def _format_entry(name: str, value: int) -> str:
    # By integers: a float's rounding could break the exact sum.
    return f"{name};dur={value // 1000}.{value % 1000:03d}"


TTFT_MS_KEY: Final = "ttft_ms"
UNATTRIBUTED_MS_KEY: Final = "unattributed_ms"
STAGES_KEY: Final = "stages"


def build_ttft_report(
    request_id: str, by_role: Mapping[str, ServerTiming], combined: ServerTiming
) -> dict[str, Any]:
    """Build `{request_id, by_role: {role: {...}}, combined: {...}}`.

    by_role: each server's breakdown under its own stage names; of several encoder legs the slowest.
    combined: the outermost `ttft` span, from a router with prefixed names.

    In every entry stages and unattributed_ms add up to ttft_ms. A field of the original report is
    missing from a role that has none of its stages; `combined` has them all. The router's entry is
    its own share: time that the client waited and that no leg accounts for.
    """
    # The router's stages are in `combined`; as a role it gets only its share.
    legs = {role: sums for role, sums in by_role.items() if role != "router"}
    roles = {role: build_role_entry(sums) for role, sums in legs.items()}
    router_share = compute_router_share(combined, legs.values())
    if router_share.stages:
        roles["router"] = build_role_entry(router_share)
    return {
        "request_id": request_id,
        "by_role": roles,
        # Zeros for missing fields: readers of the original report expect all of them here.
        "combined": {**dict.fromkeys(stages.REPORT_FIELDS, 0.0), **build_role_entry(combined)},
    }


def build_role_entry(sums: ServerTiming) -> dict[str, Any]:
    """One role's `sums` in milliseconds: the original report's fields, totals, and all stages."""
    sum_by_stage: dict[str, int] = {}
    # `combined` of a router has one entry per leg of the same stage: they are added up.
    for name, value in sums.stages.items():
        stage = stages.split_stage(name)[1]
        sum_by_stage[stage] = sum_by_stage.get(stage, 0) + value
    fields: dict[str, Any] = {
        field: to_ms(sum(sum_by_stage[name] for name in parts if name in sum_by_stage))
        for field, parts in stages.REPORT_FIELDS.items()
        # Absent, not 0: a decode instance has no encoder whose queue could be empty.
        if any(name in sum_by_stage for name in parts)
    }
    fields[TTFT_MS_KEY] = to_ms(sums.ttft)
    fields[UNATTRIBUTED_MS_KEY] = to_ms(sums.unattributed)
    fields[STAGES_KEY] = {name: to_ms(value) for name, value in sums.stages.items()}
    return fields


def compute_router_share(combined: ServerTiming, legs: Iterable[ServerTiming]) -> ServerTiming:
    """The router's own share: its stages, and unattributed time that is not in any of the `legs`."""
    router_stages = {name: us for name, us in combined.stages.items() if name.startswith("router.")}
    # Legs' own unattributed time is part of `combined`'s and stays with the legs.
    rest = max(0, combined.unattributed - sum(leg.unattributed for leg in legs))
    return ServerTiming(router_stages, rest, sum(router_stages.values()) + rest)


def to_ms(us: int) -> float:
    """Microseconds -> milliseconds, exact to three decimals."""
    return us / 1000
