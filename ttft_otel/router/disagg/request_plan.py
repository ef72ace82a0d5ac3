# SPDX-License-Identifier: Apache-2.0
"""Plan a request over prefill and decode instances: legs, first-token mode, and bodies.

No I/O. endpoint.py asks for the plan; prefill_decode.py sends the bodies.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import Raw

from ttft_otel.model.endpoints import CHAT_PATH, COMPLETIONS_PATH
from ttft_otel.model.stages import DECODE, PREFILL
from ttft_otel.router.types import JSON_ERRORS, MODE_OFF

# vLLM's NixlConnector: the prefill instance keeps the blocks and returns their location.
KEEP_BLOCKS_PARAMS: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
DEFAULT_COMPLETION_TOKENS: Final = 16  # tokens of a completion that names no number
MAX_FIELD_BYTES: Final = 4096  # of a field that is decoded whole, whatever it is
MAX_DECODED_PROMPT_BYTES: Final = 256 << 10  # of token ids of which objects are built

# With these, the decode instance serves the request alone: they need other KV blocks than one sequence of
# the prompt, or (truncation, which depends on max_tokens) the prefill instance would compute another
# prompt.
_DECODE_ONLY_FIELDS: Final = (
    "use_beam_search",
    "prompt_logprobs",
    "prompt_embeds",
    "truncate_prompt_tokens",
)
# Of these the decode instance may be asked for one: several would fetch the prefill instance's blocks.
_SINGLE_CHOICE_FIELDS: Final = ("n", "best_of")
# With these, the prefill response differs from the first event of a stream, or lacks information.
_NO_FIRST_TOKEN_FIELDS: Final = (
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
# Where max_tokens is 1.
_OVERRIDDEN_FIELDS: Final = ("stream_options", "max_completion_tokens", "stream_interval")
_encode_json: Final = msgspec.json.Encoder().encode  # made once, not for each call
_number_decoder: Final = msgspec.json.Decoder(int | None)
_json_decoder: Final = msgspec.json.Decoder()
_fields_decoder: Final = msgspec.json.Decoder(dict[str, Raw])
_stop_decoder: Final = msgspec.json.Decoder(str | list[str] | None)
_PROMPT_DECODERS: Final[Sequence[msgspec.json.Decoder[Any]]] = (
    msgspec.json.Decoder(tuple[str]),
    msgspec.json.Decoder(tuple[list[int]]),
    msgspec.json.Decoder(list[int]),
)
_NULL_JSON: Final = Raw(b"null")


class LegPlan(msgspec.Struct):
    """The legs after the encoders, in order; first-token mode and the reason if it is not the wanted one."""

    legs: tuple[str, ...]
    mode: str = MODE_OFF
    reason: str = ""
    is_chat: bool = False
    fields: dict[str, Raw] = {}
    max_tokens: int | None = None  # tokens that the client asked for; None is as many as fit
    min_tokens: int = 0
    seed: int | None = None
    stop_strings: tuple[str, ...] = ()
    include_usage: bool = False
    ec_params: bytes = b""  # what encoders announced, a JSON object

    def turn_off(self, reason: str) -> None:
        """Relay the decode response as a whole, without the prefill token before it, for this `reason`."""
        self.mode = MODE_OFF
        self.reason = reason

    def build_prefill_body(self) -> bytes:
        """The prefill body: the prompt and one token, not streamed; it alone has what encoders announced."""
        own_fields: dict[str, Any] = {
            "max_tokens": 1,
            "stream": False,
            "kv_transfer_params": KEEP_BLOCKS_PARAMS,
        }
        if self.min_tokens:
            own_fields["min_tokens"] = 1
        if self.seed is not None:
            own_fields["seed"] = self.seed
        if self.ec_params:
            own_fields["ec_transfer_params"] = Raw(self.ec_params)
        return _encode_json({**_omit_fields(self.fields, _OVERRIDDEN_FIELDS), **own_fields})

    def build_decode_body(self, kv_params: Raw | None) -> bytes:
        """The decode body by which the first token is generated again: the client's body with `kv_params`."""
        own_fields: dict[str, Any] = {} if kv_params is None else {"kv_transfer_params": kv_params}
        if self.mode != MODE_OFF and self.seed is not None:
            own_fields["seed"] = self.seed
        return _encode_json({**self.fields, **own_fields})


def plan_legs(path: str, data: bytes, is_streamed: bool, mode: str) -> LegPlan:
    if path not in (CHAT_PATH, COMPLETIONS_PATH):
        return LegPlan((DECODE,), reason="path")
    try:
        return _plan_parsed(path == CHAT_PATH, data, is_streamed, mode)
    except JSON_ERRORS:
        return LegPlan((DECODE,), reason="body")


def _plan_parsed(is_chat: bool, data: bytes, is_streamed: bool, mode: str) -> LegPlan:
    fields = _fields_decoder.decode(data)
    plan = LegPlan((PREFILL, DECODE), mode, is_chat=is_chat, fields=fields)
    if reason := _read_limits(plan):
        return LegPlan((DECODE,), reason=reason)
    if plan.max_tokens is not None and plan.max_tokens <= 1:
        return LegPlan((PREFILL,), reason="max_tokens")
    if mode != MODE_OFF:
        _choose_mode(plan, is_streamed)
    is_greedy = "temperature" in fields and _decode_field(fields, "temperature") == 0
    if plan.mode != MODE_OFF and plan.seed is None and not is_greedy:
        plan.seed = random.getrandbits(63)
    return plan


def _read_limits(plan: LegPlan) -> str:
    """Set the numbers of the plan; returns why the decode instance should serve it alone, or ""."""
    fields = plan.fields
    if not plan.is_chat:
        plan.max_tokens = DEFAULT_COMPLETION_TOKENS
    for name in ("max_completion_tokens", "max_tokens") if plan.is_chat else ("max_tokens",):
        if name in fields:
            plan.max_tokens = _number_decoder.decode(fields[name])
            if plan.max_tokens is not None or not plan.is_chat:
                break
    # Most are absent: a decoder would take most of the time of a plan for nothing.
    if "min_tokens" in fields:
        plan.min_tokens = _number_decoder.decode(fields["min_tokens"]) or 0
    if "seed" in fields:
        plan.seed = _number_decoder.decode(fields["seed"])
    for name in _SINGLE_CHOICE_FIELDS:
        if name in fields and _number_decoder.decode(fields[name]) not in (None, 1):
            return name
    if reason := _find_requested(fields, _DECODE_ONLY_FIELDS):
        return reason
    if not plan.is_chat and not _is_single_prompt(fields.get("prompt", _NULL_JSON)):
        return "prompt"
    if "echo" in fields and _is_requested(fields, "echo") and _is_requested(fields, "logprobs"):
        return "echo"
    max_tokens = plan.max_tokens
    if max_tokens is None:
        return "" if plan.is_chat and plan.min_tokens >= 0 else "max_tokens"
    return "" if 0 <= plan.min_tokens <= max(max_tokens, 1) and max_tokens >= 0 else "max_tokens"


def _choose_mode(plan: LegPlan, is_streamed: bool) -> None:
    """Restrict the mode: whether the prefill token can be sent before the decode answer."""
    fields = plan.fields
    if not is_streamed:
        plan.turn_off("not streamed")
        return
    if reason := _find_requested(fields, _NO_FIRST_TOKEN_FIELDS):
        plan.turn_off(reason)
        return
    if "stream_options" in fields and (options := _decode_field(fields, "stream_options")):
        if not isinstance(options, dict) or options.get("continuous_usage_stats"):
            plan.turn_off("stream_options")
            return
        plan.include_usage = options.get("include_usage") is True
    if "stop" in fields:
        plan.stop_strings = _read_stop_strings(fields["stop"])


def _read_stop_strings(stop: Raw) -> tuple[str, ...]:
    try:
        value = _stop_decoder.decode(stop) or ()
    except msgspec.ValidationError:
        return ()  # of another type, which the prefill instance refuses
    return (value,) if isinstance(value, str) else tuple(value)


def _omit_fields(fields: dict[str, Raw], names: Sequence[str]) -> dict[str, Raw]:
    omitted = fields.keys() & names
    return {key: fields[key] for key in fields if key not in omitted} if omitted else fields


def _find_requested(fields: dict[str, Raw], names: Sequence[str]) -> str:
    """The first of `names` whose field is set to something, or ""."""
    if fields.keys().isdisjoint(names):  # mostly, which C finds out in a tenth of the time
        return ""
    return next((name for name in names if name in fields and _is_requested(fields, name)), "")


def _is_requested(fields: dict[str, Raw], name: str) -> bool:
    """Whether a field is set to something; 0 is, if it is a number of logprobs. By its raw JSON: tools,
    for example, may be as large as the body.
    """
    raw = bytes(fields.get(name, _NULL_JSON))
    if name in ("logprobs", "prompt_logprobs"):
        return raw not in (b"null", b"false")
    if raw[:1] in b"[{":
        return bool(raw[1:-1].strip())
    if raw[:1] == b'"':
        return raw != b'""' and not (name == "tool_choice" and raw == b'"none"')
    return raw not in (b"null", b"false") and (raw == b"true" or float(raw) != 0)


def _decode_field(fields: dict[str, Raw], name: str) -> Any:
    """The value of a field. Raises ValidationError if it is so large that it can be none of vLLM's."""
    raw = fields.get(name, _NULL_JSON)
    if len(memoryview(raw)) > MAX_FIELD_BYTES:
        raise msgspec.ValidationError(f"{name} is too large")
    return _json_decoder.decode(raw)


def _is_single_prompt(prompt: Raw) -> bool:
    """Whether a completion has a single prompt: text, token ids, or a list with one of these."""
    if bytes(memoryview(prompt)[:1]) == b'"':
        return True
    if len(memoryview(prompt)) > MAX_DECODED_PROMPT_BYTES:
        text = bytes(prompt)  # whether its ids are whole numbers is for the prefill instance to say
        return b'"' not in text and text.count(b"[") == (
            2 if text[1:].lstrip(b" \t\r\n").startswith(b"[") else 1
        )
    for decoder in _PROMPT_DECODERS:  # a decoder stops at the first value of another type
        try:
            value = decoder.decode(prompt)
        except msgspec.ValidationError:
            continue
        return bool(value and value[0] != [])
    return False
