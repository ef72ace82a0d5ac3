# SPDX-License-Identifier: Apache-2.0
"""Which legs a request needs, how its first token travels, and the bodies for P and D; pure.

forward.py asks when there are prefill and decode instances; pair.py sends the bodies.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from msgspec import Raw

OFF: Final = "off"
STRIP: Final = "strip"
CONTINUE: Final = "continue"
MODES: Final = (OFF, STRIP, CONTINUE)

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
PREFILL: Final = "prefill"
DECODE: Final = "decode"

# The NIXL contract: P keeps the blocks and says where they are.
KEEP: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
COMPLETION: Final = 16  # tokens of a completion that names no number
SEEDS: Final = 1 << 63
_MIX: Final = 0x9E3779B97F4A7C15  # an odd number: seeds that differ stay different

# D does all of it: P's one sequence of KV blocks is not what these need, or (truncation: it depends
# on max_tokens) not of the same prompt.
_ALONE: Final = ("use_beam_search", "prompt_logprobs", "prompt_embeds", "truncate_prompt_tokens")
_ONE: Final = ("n", "best_of")  # of these D may be asked for one: several would fetch P's blocks
# With these a token of P's is not the stream's, or says too little.
_NO_TOKEN: Final = (
    "logprobs",
    "top_logprobs",
    "tools",
    "tool_choice",
    "functions",
    "response_format",
    "structured_outputs",
    "echo",
    "return_token_ids",
    "return_prompt_text",
)
# With these D, to which P's token is prompt, would sample otherwise than one server.
_NO_CONTINUE: Final = (
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "bad_words",
    "thinking_token_budget",
    "repetition_detection",
    "continue_final_message",
    "suffix",
)
_OTHER: Final = (
    "stream_options",
    "max_completion_tokens",
    "stream_interval",
)  # where max_tokens is 1
_number: Final = msgspec.json.Decoder(int | None)
_json: Final = msgspec.json.Decoder()
_fields: Final = msgspec.json.Decoder(dict[str, Raw])
_NULL: Final = Raw(b"null")
_ZERO: Final = Raw(b"0")


@dataclass(slots=True)
class Plan:
    """The legs after the encoders, in order, and how the first token travels with the reason."""

    legs: tuple[str, ...]
    mode: str = OFF
    reason: str = ""
    chat: bool = False
    fields: dict[str, Raw] = field(default_factory=dict)
    most: int | None = None  # tokens that the client asked for; None is as many as fit
    least: int = 0
    seed: int | None = None
    stops: tuple[str, ...] = ()
    usage: bool = False

    def off(self, reason: str) -> None:
        """Give up handing P's token out; D's answer is the answer."""
        self.mode, self.reason = OFF, reason

    def prefill(self) -> bytes:
        """P's request: the prompt and one token, not streamed."""
        own: dict[str, Any] = {"max_tokens": 1, "stream": False, "kv_transfer_params": KEEP}
        if self.least:
            own["min_tokens"] = 1
        if self.seed is not None:
            own["seed"] = self.seed
        if self.mode == CONTINUE:
            own["return_token_ids"] = True
        kept = {name: raw for name, raw in self.fields.items() if name not in _OTHER}
        return msgspec.json.encode({**kept, **own})

    def decode(self, params: Any) -> bytes:
        """D's request where D makes the first token again: the client's, and P's parameters."""
        own: dict[str, Any] = {} if params is None else {"kv_transfer_params": params}
        if self.mode != OFF and self.seed is not None:
            own["seed"] = self.seed
        return msgspec.json.encode({**self.fields, **own})

    def load(self, params: Any) -> bytes:
        """Make D fetch P's blocks; the token that comes with them is nobody's."""
        own = {"kv_transfer_params": params, "max_tokens": 1, "stream": False}
        dropped = (*_OTHER, "min_tokens")
        kept = {name: raw for name, raw in self.fields.items() if name not in dropped}
        return msgspec.json.encode({**kept, **own})

    def proceed(self, ids: list[int], params: dict[str, Any] | None) -> bytes:
        """D's request where it goes on after P's token, which `ids` end with."""
        own: dict[str, Any] = {}
        for name in ("max_tokens", "max_completion_tokens"):
            if name in self.fields and self.most is not None:
                own[name] = self.most - 1
        if "max_tokens" not in self.fields and not self.chat:
            own["max_tokens"] = COMPLETION - 1
        if self.least:
            own["min_tokens"] = self.least - 1
        if self.seed is not None:
            own["seed"] = derived(self.seed)
        if self.chat:
            own["kv_transfer_params"] = {**(params or {}), "prompt_token_ids": ids}
        else:
            own["prompt"] = ids
            if params is not None:
                own["kv_transfer_params"] = params
        return msgspec.json.encode({**self.fields, **own})


def decide(path: str, data: bytes, stream: bool, media: bool, mode: str) -> Plan:
    """Read a request as far as the legs depend on it."""
    if path not in (CHAT, COMPLETIONS):
        return Plan((DECODE,), reason="path")
    try:
        return _decide(path == CHAT, data, stream, media, mode)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Plan((DECODE,), reason="body")


def _decide(chat: bool, data: bytes, stream: bool, media: bool, mode: str) -> Plan:
    fields = _fields.decode(data)
    made = Plan((PREFILL, DECODE), mode, chat=chat, fields=fields)
    if alone := _read(made):
        return Plan((DECODE,), reason=alone)
    if made.most is not None and made.most <= 1:
        return Plan((PREFILL,), reason="max_tokens")
    if mode != OFF:
        _choose(made, stream, media)
    if made.mode != OFF and made.seed is None and _given(fields, "temperature") != 0:
        made.seed = random.getrandbits(63)
    return made


def derived(seed: int) -> int:
    """D's seed where it continues: with P's own it would repeat P's random draw."""
    return (seed * _MIX + 1) % SEEDS


def _read(made: Plan) -> str:
    """Fill in what the plan's numbers are; the reason why D should do it alone, if it should."""
    fields = made.fields
    if not made.chat:
        made.most = COMPLETION
    for name in ("max_completion_tokens", "max_tokens") if made.chat else ("max_tokens",):
        if name in fields:
            made.most = _number.decode(fields[name])
            if made.most is not None or not made.chat:
                break
    made.least = _number.decode(fields.get("min_tokens", _ZERO)) or 0
    made.seed = _number.decode(fields.get("seed", _NULL))
    for name in _ONE:
        if _number.decode(fields.get(name, _NULL)) not in (None, 1):
            return name
    for name in _ALONE:
        if _asked(fields, name):
            return name
    if not made.chat and not _single(fields.get("prompt", _NULL)):
        return "prompt"
    if _asked(fields, "echo") and _asked(fields, "logprobs"):
        return "echo"
    most = made.most
    if most is None:
        return "" if made.chat and made.least >= 0 else "max_tokens"
    return "" if 0 <= made.least <= max(most, 1) and most >= 0 else "max_tokens"


def _choose(made: Plan, stream: bool, media: bool) -> None:
    """Whether P's token can be handed out, and whether D can go on after it."""
    fields = made.fields
    if not stream:
        made.off("not streamed")
        return
    for name in _NO_TOKEN:
        if _asked(fields, name):
            made.off(name)
            return
    options = _given(fields, "stream_options")
    if options:
        if not isinstance(options, dict) or options.get("continuous_usage_stats"):
            made.off("stream_options")
            return
        made.usage = options.get("include_usage") is True
    stops = _given(fields, "stop") or []
    made.stops = tuple(map(str, stops if isinstance(stops, list) else [stops]))
    if made.mode != CONTINUE:
        return
    for name in _NO_CONTINUE:
        if _asked(fields, name):
            made.mode, made.reason = STRIP, name
            return
    if media:
        made.mode, made.reason = STRIP, "media"


def _asked(fields: dict[str, Raw], name: str) -> bool:
    """Whether a field asks for something: 0 does where it is a number of candidates."""
    found = _given(fields, name)
    if name in ("logprobs", "prompt_logprobs"):
        return found is not None and found is not False
    return bool(found) and not (name == "tool_choice" and found == "none")


def _given(fields: dict[str, Raw], name: str) -> Any:
    raw = fields.get(name)
    return None if raw is None else _json.decode(raw)


def _single(prompt: Raw) -> bool:
    """Whether a completion's prompt is one: a text, or token ids, or a list of one of these."""
    found = _json.decode(prompt)
    if isinstance(found, list) and len(found) == 1 and isinstance(found[0], str | list):
        found = found[0]
    return isinstance(found, str) or (
        isinstance(found, list) and bool(found) and all(type(one) is int for one in found)
    )
