# SPDX-License-Identifier: Apache-2.0
"""Read the prefill instance's answer, and splice its token and the decode stream into one vLLM stream.

No I/O. prefill_decode.py passes the prefill answer and the decode chunks; the client gets
the stream, the decode instance where the KV blocks are.
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


DONE_EVENT: Final = b"data: [DONE]\n\n"
# How vLLM's stream of a chat begins; in a text the quotes would be escaped.
_ROLE_DELTA: Final = b'"delta":{"role":"assistant","content":""}'
_decode_json: Final = msgspec.json.Decoder().decode
_encoder: Final = msgspec.json.Encoder()
_encode_json: Final = _encoder.encode
# raised when a response has another form than vLLM's
_SHAPE_ERRORS: Final = (*JSON_ERRORS, LookupError, TypeError, ValueError, AttributeError)


def render_first_events(first_token: PrefillToken, plan: LegPlan) -> bytes:
    is_finished = first_token.finish_reason == "stop"
    chunk: dict[str, Any] = {
        "id": first_token.id,
        "object": "chat.completion.chunk" if plan.is_chat else "text_completion",
        "created": first_token.created,
        "model": first_token.model,
        "choices": [],
    }
    events: list[dict[str, Any]] = []
    if plan.is_chat:
        delta = {"role": first_token.role, "content": ""}
        role_choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        events.append(
            {**chunk, "choices": [role_choice], "prompt_token_ids": None, "prompt_text": None}
        )
        choice: dict[str, Any] = {"index": 0, "delta": {"content": first_token.text}}
    else:
        choice = {"index": 0, "text": first_token.text}
    choice |= {
        "logprobs": None,
        "finish_reason": first_token.finish_reason if is_finished else None,
    }
    if is_finished or not plan.is_chat:
        choice["stop_reason"] = first_token.stop_reason if is_finished else None
    if not plan.is_chat:
        choice["prompt_token_ids"] = None
    choice["token_ids"] = None
    events.append({**chunk, "choices": [choice]})
    if is_finished:
        if plan.include_usage:
            usage = {name: value for name, value in first_token.usage.items() if value is not None}
            events.append({**chunk, "usage": usage})
        if first_token.fingerprint is not None:
            events[-1]["system_fingerprint"] = first_token.fingerprint
    # One call of the encoder for all of them: no line break is within a line of JSON.
    lines = _encoder.encode_lines(events).replace(b"\n", b"\n\ndata: ")
    return b"data: " + (lines[:-6] + DONE_EVENT if is_finished else lines[:-6])


def render_stream_error(body: bytes, message: str, status: int = 502) -> bytes:
    """The end of a stream if decoding fails after the prefill token was sent: the error, as vLLM streams one.

    body: the decode error response, b"" for none. message, status: used if the body has no error object.
    """
    # The decode instance's own words, where it has any, say what it did not like.
    try:
        error = _decode_json(body)["error"]
    except (*JSON_ERRORS, KeyError, TypeError):
        error = {"message": message, "type": "UpstreamError", "param": None, "code": status}
    return _render_event({"error": error}) + DONE_EVENT


class StreamSplicer:
    """Rewrites the decode stream for a client that already has the prefill token.

    sent_events: what it has of `first_token`, by render_first_events(); b"" compares texts alone.
    """

    def __init__(self, first_token: PrefillToken, plan: LegPlan, sent_events: bytes = b"") -> None:
        self.first_token = first_token
        self.plan = plan
        self._sent_event = sent_events[:-2].rpartition(b"\n\n")[2] if sent_events else None
        # The part of the prefill text that the decode instance will repeat.
        self.pending_text = first_token.text
        self.awaits_role = plan.is_chat
        self.is_settled = self.has_mismatch = False
        self.passes_unchanged = False  # nothing is left to change
        self._partial_event = b""
        self._replacements: list[tuple[bytes, bytes]] = []

    def splice_chunk(self, data: bytes) -> bytes:
        """Rewrite `data`, the next chunk of the decode stream; returns bytes for the client, maybe none."""
        if self.passes_unchanged:
            return data
        data = self._partial_event + data
        out: list[bytes] = []
        start = 0
        while (end := data.find(b"\n\n", start)) >= 0:
            out.append(self._rewrite_event(data[start:end]))
            start = end + 2
            # From here on the decode bytes pass unparsed.
            if self.is_settled and not self._replacements:
                self.passes_unchanged = True
                self._partial_event = b""
                out.append(data[start:])
                return b"".join(out)
        # A chunk may end inside an event: that part waits for the rest.
        self._partial_event = data[start:]
        return b"".join(out)

    def flush_rest(self) -> bytes:
        """The incomplete event that is left at the end of the decode stream."""
        rest, self._partial_event = self._partial_event, b""
        return rest

    def _rewrite_event(self, event: bytes) -> bytes:
        # The client has the role from the prefill instance.
        if self.awaits_role and _ROLE_DELTA in event:
            self.awaits_role = False
            return b""
        # Byte for byte the prefill event, which the client has: mostly, as `created` counts whole seconds.
        if (
            event == self._sent_event
            and not self.is_settled
            and self.pending_text is self.first_token.text
        ):
            self.pending_text = ""
            self.is_settled = True
            return b""
        # Texts of a long answer are not parsed: only what may have to change is.
        if event.startswith(b"data: {") and not self.is_settled:
            try:
                chunk = _decode_json(event[6:])
                if not self._adjust_chunk(chunk):
                    return b""
                event = _render_event(chunk)[:-2]
            except _SHAPE_ERRORS:
                # No event of vLLM's: it goes on as it came, as does the rest.
                self.is_settled = True
        # Bytes are replaced in settled events too: all of them name the decode instance's id.
        for old, new in self._replacements:
            event = event.replace(old, new)
        return event + b"\n\n"

    def _adjust_chunk(self, chunk: dict[str, Any]) -> bool:
        """Adjust a parsed event; returns whether it is sent to the client."""
        # Before the choices: the role's event may have been the only one before usage alone.
        self._align_identity(chunk)
        choices = chunk.get("choices")
        if not choices:
            self.is_settled = True  # an error, or usage alone
            return True
        choice = choices[0]
        holder, name = (choice["delta"], "content") if self.plan.is_chat else (choice, "text")
        if self.awaits_role and "role" in holder:
            self.awaits_role = False
            del holder["role"]
            # The client has a first event with the role from the prefill instance.
            if not holder.get("content"):
                return False
        if not self.pending_text:
            self.is_settled = True
            return True
        text, is_last = holder.get(name), choice.get("finish_reason") is not None
        if not isinstance(text, str):
            # The decode parser took the token for something else.
            self.is_settled = self.has_mismatch = True
            return True
        holder[name] = self._strip_sent_text(text, is_last)
        self.is_settled = is_last or not self.pending_text
        return bool(holder[name]) or is_last

    def _strip_sent_text(self, text: str, is_last: bool) -> str:
        """Remove the text that the client has from the front of the decode text."""
        pending_text = self.pending_text
        if text.startswith(pending_text):
            self.pending_text = ""
            return text[len(pending_text) :]
        # The decode instance may need several events for the text that the prefill instance said at once.
        if pending_text.startswith(text) and not is_last:
            self.pending_text = pending_text[len(text) :]
        else:
            self.has_mismatch = True
            self.pending_text = ""
        return ""

    def _align_identity(self, chunk: dict[str, Any]) -> None:
        """Give all events the prefill id and time; replacing bytes is safe, quotes in texts are escaped."""
        # One look is enough: all events of a stream have the same id.
        if self._replacements:
            return
        for name, value in (("id", self.first_token.id), ("created", self.first_token.created)):
            if chunk.get(name, value) != value:
                old, new = (_encode_json({name: each})[1:-1] for each in (chunk[name], value))
                self._replacements.append((old, new))


def _render_event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + _encode_json(chunk) + b"\n\n"
