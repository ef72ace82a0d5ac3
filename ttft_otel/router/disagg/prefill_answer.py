# SPDX-License-Identifier: Apache-2.0
"""Read the answer of a prefill instance: its token, and where it keeps the KV blocks.

No I/O. prefill_decode.py passes the prefill body; stream_splice.py makes events of the token, and the
decode instance gets the rest.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw, UnsetType

from ttft_otel.router.disagg.request_plan import LegPlan
from ttft_otel.router.types import JSON_ERRORS

REPLACEMENT_CHARACTER: Final = "\ufffd"  # stands for an incomplete UTF-8 character
_NULL_JSON: Final = Raw(b"null")


class PrefillToken(msgspec.Struct):
    """The prefill response with one token, not streamed."""

    id: str
    model: str
    created: int
    text: str
    finish_reason: str
    stop_reason: int | str | None
    role: str = "assistant"
    is_parsed: bool = False  # a parser may have split it into reasoning and the like
    usage: dict[str, Any] = {}
    kv_params: Raw | None = None  # where the prefill instance keeps the KV blocks, a JSON object
    fingerprint: str | None = None

    def explain_refusal(self, plan: LegPlan) -> str:
        """Reason why it cannot be sent to the client before the decode stream, or ""."""
        if self.is_parsed:
            return "reasoning"
        if self.finish_reason not in ("length", "stop"):
            return "finish_reason"
        if self.finish_reason == "length":
            # A character may take several tokens: the first one's text is not final then.
            if not self.text or self.text.endswith(REPLACEMENT_CHARACTER):
                return "character"
            # A server holds back what may become a stop string, which would be cut off.
            if plan.stop_strings and _may_begin_stop(self.text, plan.stop_strings):
                return "stop"
        return ""


class _Message(msgspec.Struct):
    """The message of a chat's choice."""

    content: str | None = None
    role: str = "assistant"
    reasoning: Any = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    """The only choice, with the prefill token."""

    message: _Message | None = None
    text: str | None | UnsetType = UNSET  # of a completion
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _BlocksAnswer(msgspec.Struct):
    """What every answer has. Raw: the decode instance gets it as it is, and it may be long."""

    kv_transfer_params: Raw = _NULL_JSON


class _TokenAnswer(_BlocksAnswer, kw_only=True):
    """vLLM's answer with one choice."""

    id: str
    model: str
    created: int
    choices: tuple[_Choice]
    usage: dict[str, Any] | None = None
    system_fingerprint: str | None = None


_NO_MESSAGE: Final = _Message()
_blocks_decoder: Final = msgspec.json.Decoder(_BlocksAnswer)
_token_decoder: Final = msgspec.json.Decoder(_TokenAnswer)


def parse_prefill_answer(data: bytes, is_chat: bool) -> PrefillToken | None:
    """Parse the prefill response `data`; None if it is not a vLLM response with one choice."""
    try:
        answer = _token_decoder.decode(data)
    except JSON_ERRORS:
        return None
    (choice,), usage = answer.choices, answer.usage or {}
    message = choice.message
    if is_chat:
        if message is None:
            return None
        text = message.content
    else:
        if choice.text is UNSET:
            return None
        message, text = _NO_MESSAGE, choice.text
    return PrefillToken(
        id=answer.id,
        model=answer.model,
        created=answer.created,
        text=text or "",
        finish_reason=choice.finish_reason or "",
        stop_reason=choice.stop_reason,
        role=message.role,
        is_parsed=bool(
            message.reasoning or message.tool_calls or usage.get("completion_tokens_details")
        ),
        usage=usage,
        kv_params=_take_params(answer),
        fingerprint=answer.system_fingerprint,
    )


def parse_kv_params(data: bytes) -> Raw | None:
    """Where the prefill instance keeps the KV blocks, from its response `data`; None if it does not say."""
    try:
        return _take_params(_blocks_decoder.decode(data))
    except JSON_ERRORS:
        return None


def _take_params(answer: _BlocksAnswer) -> Raw | None:
    params = bytes(answer.kv_transfer_params)
    # The decode instance refuses what is no UTF-8, which a decoder of raw JSON does not look at (nor at how
    # large numbers are).
    if params[:1] != b"{" or not params[1:-1].strip() or not _is_utf8(params):
        return None
    return Raw(params)  # a copy: the other one would keep all of the prefill answer


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _may_begin_stop(text: str, stop_strings: tuple[str, ...]) -> bool:
    """Whether `text` ends with a proper prefix of a stop string.

    The ends of `text`, which is one token, are compared, not the prefixes of a stop string: a client
    chooses how long that one is.
    """
    endings = tuple(text[start:] for start in range(len(text)))
    return any(stop[:-1].startswith(endings) for stop in stop_strings)
