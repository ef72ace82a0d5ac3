# SPDX-License-Identifier: Apache-2.0
"""Splice the prefill instance's (P) token and the decode instance's (D) stream into one vLLM stream.

No I/O. prefill_decode.py and decode_leg.py pass P's response and D's chunks; the client gets the result.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from ttft_otel.router.disagg.request_plan import LegPlan
from ttft_otel.router.types import MODE_STRIP

DONE_EVENT: Final = b"data: [DONE]\n\n"
# How vLLM's stream of a chat begins; in a text the quotes would be escaped.
_ROLE_DELTA: Final = b'"delta":{"role":"assistant","content":""}'
REPLACEMENT_CHARACTER: Final = "\ufffd"  # stands for an incomplete UTF-8 character
_decode_json: Final = msgspec.json.Decoder().decode
_encoder: Final = msgspec.json.Encoder()
_encode_json: Final = _encoder.encode
# raised when a response has another form than vLLM's
_SHAPE_ERRORS: Final = (msgspec.MsgspecError, LookupError, TypeError, ValueError, AttributeError)


class PrefillToken(msgspec.Struct):
    """P's response with one token, not streamed."""

    id: str
    model: str
    created: int
    text: str
    finish_reason: str
    stop_reason: int | str | None
    role: str = "assistant"
    is_parsed: bool = False  # a parser may have split it into reasoning and the like
    usage: dict[str, Any] = {}
    token_ids: list[int] = []
    prompt_token_ids: list[int] = []
    kv_params: dict[str, Any] | None = None
    fingerprint: str | None = None

    def explain_refusal(self, plan: LegPlan) -> str:
        """Reason why it cannot be sent to the client before D's stream, or ""."""
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


def parse_prefill_answer(data: bytes, is_chat: bool) -> PrefillToken | None:
    """Parse P's response `data`; None if it is not a vLLM response with one choice."""
    try:
        answer = _decode_json(data)
        # Exactly one: unpacking raises ValueError for any other number.
        (choice,) = answer["choices"]
        message = choice["message"] if is_chat else {}
        usage = answer.get("usage") or {}
        text = message.get("content") if is_chat else choice["text"]
        # A chat's answer has the prompt's ids beside its choices, a completion in the choice.
        token_ids, prompt_holder = choice.get("token_ids") or [], answer if is_chat else choice
        return PrefillToken(
            id=answer["id"],
            model=answer["model"],
            created=answer["created"],
            text=text or "",
            finish_reason=choice.get("finish_reason") or "",
            stop_reason=choice.get("stop_reason"),
            role=message.get("role", "assistant"),
            is_parsed=bool(
                message.get("reasoning")
                or message.get("tool_calls")
                or usage.get("completion_tokens_details")
            ),
            usage=usage,
            token_ids=token_ids,
            prompt_token_ids=prompt_holder.get("prompt_token_ids") or [],
            kv_params=answer.get("kv_transfer_params") or None,
            fingerprint=answer.get("system_fingerprint"),
        )
    except (*_SHAPE_ERRORS, RecursionError):
        return None


def parse_kv_params(data: bytes) -> dict[str, Any] | None:
    """Where P keeps the KV blocks, from its response `data`; None if it does not say."""
    try:
        params = _decode_json(data).get("kv_transfer_params")
    except (*_SHAPE_ERRORS, RecursionError):
        return None
    return params if params and isinstance(params, dict) else None


def render_first_events(first_token: PrefillToken, plan: LegPlan) -> bytes:
    """The server-sent events of `first_token`, as a streaming vLLM sends them."""
    is_finished = first_token.finish_reason == "stop"
    chunk = _build_chunk(first_token, plan)
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


def _build_chunk(first_token: PrefillToken, plan: LegPlan) -> dict[str, Any]:
    """What all events of `first_token` have in common."""
    return {
        "id": first_token.id,
        "object": "chat.completion.chunk" if plan.is_chat else "text_completion",
        "created": first_token.created,
        "model": first_token.model,
        "choices": [],
    }


def render_stream_error(body: bytes, message: str, status: int = 502) -> bytes:
    """The end of a stream if D fails after P's token was sent: its error, as vLLM streams one.

    body: D's error response, b"" for none. message, status: used if the body has no error object.
    """
    # D's own words, where it has any, say what it did not like.
    try:
        error = _decode_json(body)["error"]
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError):
        error = {"message": message, "type": "UpstreamError", "param": None, "code": status}
    return _render_event({"error": error}) + DONE_EVENT


class StreamSplicer:
    """Rewrites D's stream for a client that already has P's token."""

    def __init__(self, first_token: PrefillToken, plan: LegPlan) -> None:
        self.first_token, self.plan = first_token, plan
        self.pending_text = (
            first_token.text if plan.mode == MODE_STRIP else ""
        )  # of P's text, what D will say again
        self.awaits_role = plan.is_chat
        self.is_settled = self.has_mismatch = False
        self.passes_unchanged = False  # nothing is left to change
        self._partial_event = b""
        self._replacements: list[tuple[bytes, bytes]] = []

    def splice_chunk(self, data: bytes) -> bytes:
        """Rewrite `data`, the next chunk of D; returns bytes for the client, which may be empty."""
        if self.passes_unchanged:
            return data
        data = self._partial_event + data
        out: list[bytes] = []
        start = 0
        while (end := data.find(b"\n\n", start)) >= 0:
            out.append(self._rewrite_event(data[start:end]))
            start = end + 2
            # From here on D's bytes pass unparsed.
            if self.is_settled and self.plan.mode == MODE_STRIP and not self._replacements:
                self.passes_unchanged = True
                self._partial_event = b""
                out.append(data[start:])
                return b"".join(out)
        # A chunk may end inside an event: that part waits for the rest.
        self._partial_event = data[start:]
        return b"".join(out)

    def flush_rest(self) -> bytes:
        """The incomplete event that is left at the end of D's stream."""
        rest, self._partial_event = self._partial_event, b""
        return rest

    def _rewrite_event(self, event: bytes) -> bytes:
        if self.awaits_role and _ROLE_DELTA in event:  # which the client has from P
            self.awaits_role = False
            return b""
        has_usage = self.plan.mode != MODE_STRIP and b'"usage":{' in event
        # Texts of a long answer are not parsed: only what may have to change is.
        if event.startswith(b"data: {") and (has_usage or not self.is_settled):
            try:
                chunk = _decode_json(event[6:])
                if not self._adjust_chunk(chunk):
                    return b""
                event = _render_event(chunk)[:-2]
            except _SHAPE_ERRORS:
                # No event of vLLM's: it goes on as it came, as does the rest.
                self.is_settled = True
        # Bytes are replaced in settled events too: all of them name D's id.
        for old, new in self._replacements:
            event = event.replace(old, new)
        return event + b"\n\n"

    def _adjust_chunk(self, chunk: dict[str, Any]) -> bool:
        """Adjust a parsed event; returns whether it is sent to the client."""
        if self.is_settled:
            self._correct_usage(chunk)
            return True
        # Before the choices: the role's event may have been the only one before usage alone.
        self._align_identity(chunk)
        choices = chunk.get("choices")
        if not choices:
            self.is_settled = True  # an error, or usage alone
            self._correct_usage(chunk)
            return True
        choice = choices[0]
        holder, name = (choice["delta"], "content") if self.plan.is_chat else (choice, "text")
        if self.awaits_role and "role" in holder:
            self.awaits_role = False
            del holder["role"]
            # The client has a first event with the role from P.
            if not holder.get("content"):
                return False
        if not self.pending_text:
            self.is_settled = True
            return True
        text, is_last = holder.get(name), choice.get("finish_reason") is not None
        if not isinstance(text, str):
            # D's parser took the token for something else.
            self.is_settled = self.has_mismatch = True
            return True
        holder[name] = self._strip_sent_text(text, is_last)
        self.is_settled = is_last or not self.pending_text
        return bool(holder[name]) or is_last

    def _strip_sent_text(self, text: str, is_last: bool) -> str:
        """Remove the text that the client has from the front of D's text."""
        pending_text = self.pending_text
        if text.startswith(pending_text):
            self.pending_text = ""
            return text[len(pending_text) :]
        # D may need several events for the text that P said at once.
        if pending_text.startswith(text) and not is_last:
            self.pending_text = pending_text[len(text) :]
        else:
            self.has_mismatch, self.pending_text = True, ""
        return ""

    def _align_identity(self, chunk: dict[str, Any]) -> None:
        """Give all events P's id and time; replacing bytes is safe, since quotes in texts are escaped."""
        # One look is enough: all events of a stream have the same id.
        if self._replacements:
            return
        for name, value in (("id", self.first_token.id), ("created", self.first_token.created)):
            if chunk.get(name, value) != value:
                old, new = (_encode_json({name: each})[1:-1] for each in (chunk[name], value))
                self._replacements.append((old, new))

    def _correct_usage(self, chunk: dict[str, Any]) -> None:
        """Correct usage to that of a single server: for D, P's token is part of the prompt."""
        usage = chunk.get("usage")
        if not usage or self.plan.mode == MODE_STRIP:
            return  # D counted P's token itself
        usage["prompt_tokens"] -= 1
        usage["completion_tokens"] += 1
        if details := self.first_token.usage.get("prompt_tokens_details"):
            usage["prompt_tokens_details"] = details


def _may_begin_stop(text: str, stop_strings: tuple[str, ...]) -> bool:
    """Whether `text` ends with a proper prefix of a stop string.

    The ends of `text`, which is one token, are compared, not the prefixes of a stop string: a client
    chooses how long that one is.
    """
    endings = tuple(text[start:] for start in range(len(text)))
    return any(stop[:-1].startswith(endings) for stop in stop_strings)


def _render_event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + _encode_json(chunk) + b"\n\n"
