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


class PrefillAnswer(_BlocksAnswer, kw_only=True):
    """The prefill instance's answer with one token, not streamed, in vLLM's form."""

    id: str
    model: str
    created: int
    choices: tuple[_Choice]
    usage: dict[str, Any] | None = None
    system_fingerprint: str | None = None

    @property
    def message(self) -> _Message:
        """Its token; of a completion too, once parse_prefill_answer() has read it."""
        return self.choices[0].message or _Message()

    @property
    def is_last(self) -> bool:
        """Whether the token ends the whole answer."""
        return self.choices[0].finish_reason == "stop"

    def explain_refusal(self, plan: LegPlan) -> str:
        """Reason why the token cannot be sent to the client before the decode stream, or ""."""
        message, finish_reason = self.message, self.choices[0].finish_reason
        # A parser may have split it.
        details = self.usage.get("completion_tokens_details") if self.usage else None
        if message.reasoning or message.tool_calls or details:
            return "reasoning"
        if finish_reason != "length":
            return "" if finish_reason == "stop" else "finish_reason"
        text = message.content
        # A character may take several tokens: the first one's text is not final then.
        if not text or text.endswith(REPLACEMENT_CHARACTER):
            return "character"
        # A server holds back what may become a stop string, which would be cut off.
        if plan.stop_strings and _may_begin_stop(text, plan.stop_strings):
            return "stop"
        return ""


_blocks_decoder: Final = msgspec.json.Decoder(_BlocksAnswer)
_answer_decoder: Final = msgspec.json.Decoder(PrefillAnswer)


def parse_prefill_answer(data: bytes, is_chat: bool) -> PrefillAnswer | None:
    """Parse the prefill response `data`; None if it is not a vLLM response with one choice."""
    try:
        answer = _answer_decoder.decode(data)
    except JSON_ERRORS:
        return None
    (choice,) = answer.choices
    if not is_chat:
        choice.message = None if choice.text is UNSET else _Message(choice.text)
    return None if choice.message is None else answer


def parse_kv_params(data: bytes) -> Raw | None:
    """Where the prefill instance keeps the KV blocks, from its response `data`; None if it does not say."""
    try:
        return take_kv_params(_blocks_decoder.decode(data))
    except JSON_ERRORS:
        return None


def take_kv_params(answer: _BlocksAnswer) -> Raw | None:
    """As parse_kv_params(); `answer`, which may be kept for minutes, has them no longer."""
    params, answer.kv_transfer_params = bytes(answer.kv_transfer_params), _NULL_JSON
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


def render_first_events(answer: PrefillAnswer, plan: LegPlan) -> bytes:
    message, is_last = answer.message, answer.is_last
    text = message.content or ""
    chunk: dict[str, Any] = {
        "id": answer.id,
        "object": "chat.completion.chunk" if plan.is_chat else "text_completion",
        "created": answer.created,
        "model": answer.model,
        "choices": [],
    }
    events: list[dict[str, Any]] = []
    if plan.is_chat:
        delta = {"role": message.role, "content": ""}
        role_choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        events.append(
            {**chunk, "choices": [role_choice], "prompt_token_ids": None, "prompt_text": None}
        )
        choice: dict[str, Any] = {"index": 0, "delta": {"content": text}}
    else:
        choice = {"index": 0, "text": text}
    choice |= {"logprobs": None, "finish_reason": "stop" if is_last else None}
    if is_last or not plan.is_chat:
        choice["stop_reason"] = answer.choices[0].stop_reason if is_last else None
    if not plan.is_chat:
        choice["prompt_token_ids"] = None
    choice["token_ids"] = None
    events.append({**chunk, "choices": [choice]})
    if is_last:
        if plan.include_usage:
            usage = {
                name: value for name, value in (answer.usage or {}).items() if value is not None
            }
            events.append({**chunk, "usage": usage})
        if answer.system_fingerprint is not None:
            events[-1]["system_fingerprint"] = answer.system_fingerprint
    # One call of the encoder for all of them: no line break is within a line of JSON.
    lines = _encoder.encode_lines(events).replace(b"\n", b"\n\ndata: ")
    return b"data: " + (lines[:-6] + DONE_EVENT if is_last else lines[:-6])


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

    sent_events: what it has of `answer`, by render_first_events(); b"" compares texts alone.
    """

    def __init__(self, answer: PrefillAnswer, plan: LegPlan, sent_events: bytes = b"") -> None:
        self.answer = answer
        self.plan = plan
        self._sent_event = sent_events[:-2].rpartition(b"\n\n")[2] if sent_events else None
        # The part of the prefill text that the decode instance will repeat.
        self._sent_text = self.pending_text = answer.message.content or ""
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
            and self.pending_text is self._sent_text
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
        for name, value in (("id", self.answer.id), ("created", self.answer.created)):
            if chunk.get(name, value) != value:
                old, new = (_encode_json({name: each})[1:-1] for each in (chunk[name], value))
                self._replacements.append((old, new))


def _render_event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + _encode_json(chunk) + b"\n\n"
