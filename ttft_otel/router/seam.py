# SPDX-License-Identifier: Apache-2.0
"""Where P's token and D's stream become one: P's answer in, a plain vLLM stream's bytes out; pure.

pair.py gives P's answer and D's chunks as they come; the client gets what is returned.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from ttft_otel.router.plan import STRIP, Plan

DONE: Final = b"data: [DONE]\n\n"
HALF: Final = "\ufffd"  # what stands for an incomplete character
_decode: Final = msgspec.json.Decoder().decode
# what reading another shape than vLLM's raises
_SHAPE: Final = (msgspec.MsgspecError, LookupError, TypeError, ValueError, AttributeError)


@dataclass(slots=True)
class Token:
    """P's plain answer of one token."""

    id: str
    model: str
    created: int
    text: str
    finish: str
    stop: int | str | None
    role: str = "assistant"
    parsed: bool = False  # a parser may have split it into reasoning and the like
    usage: dict[str, Any] = field(default_factory=dict)
    ids: list[int] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    params: dict[str, Any] | None = None
    fingerprint: str | None = None

    def refusal(self, plan: Plan) -> str:
        """Why it cannot be handed out before D's, or ""."""
        if self.parsed:
            return "reasoning"
        if self.finish not in ("length", "stop"):
            return "finish_reason"
        if self.finish == "length":
            if not self.text or self.text.endswith(HALF):
                return "character"
            if any(_begins(self.text, stop) for stop in plan.stops):
                return "stop"
        return ""


def token(data: bytes, chat: bool) -> Token | None:
    """Read P's answer; None when it is not vLLM's answer with one choice."""
    try:
        top = _decode(data)
        (choice,) = top["choices"]
        message = choice["message"] if chat else {}
        usage = top.get("usage") or {}
        text = message.get("content") if chat else choice["text"]
        ids, prompt = choice.get("token_ids") or [], top if chat else choice
        return Token(
            id=top["id"],
            model=top["model"],
            created=top["created"],
            text=text or "",
            finish=choice.get("finish_reason") or "",
            stop=choice.get("stop_reason"),
            role=message.get("role", "assistant"),
            parsed=bool(
                message.get("reasoning")
                or message.get("tool_calls")
                or usage.get("completion_tokens_details")
            ),
            usage=usage,
            ids=ids,
            prompt=prompt.get("prompt_token_ids") or [],
            params=top.get("kv_transfer_params") or None,
            fingerprint=top.get("system_fingerprint"),
        )
    except (*_SHAPE, RecursionError):
        return None


def opening(one: Token, plan: Plan) -> bytes:
    """The events of P's token, as a server that streams sends them."""
    ended = one.finish == "stop"
    first: list[dict[str, Any]] = []
    if plan.chat:
        delta = {"role": one.role, "content": ""}
        lead = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        first.append(_chunk(one, plan, lead) | {"prompt_token_ids": None, "prompt_text": None})
        choice: dict[str, Any] = {"index": 0, "delta": {"content": one.text}}
    else:
        choice = {"index": 0, "text": one.text}
    choice |= {"logprobs": None, "finish_reason": one.finish if ended else None}
    if ended or not plan.chat:
        choice["stop_reason"] = one.stop if ended else None
    if not plan.chat:
        choice["prompt_token_ids"] = None
    choice["token_ids"] = None
    first.append(_chunk(one, plan, choice))
    if ended:
        _close(one, plan, first)
    return b"".join(map(_event, first)) + (DONE if ended else b"")


def _close(one: Token, plan: Plan, events: list[dict[str, Any]]) -> None:
    if plan.usage:
        usage = {name: value for name, value in one.usage.items() if value is not None}
        events.append({**_chunk(one, plan, None), "usage": usage})
    if one.fingerprint is not None:
        events[-1]["system_fingerprint"] = one.fingerprint


def _chunk(one: Token, plan: Plan, choice: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "id": one.id,
        "object": "chat.completion.chunk" if plan.chat else "text_completion",
        "created": one.created,
        "model": one.model,
        "choices": [] if choice is None else [choice],
    }


def broken(body: bytes, message: str) -> bytes:
    """The end of a stream whose D failed after P's token was out: its error, as vLLM streams one."""
    try:
        error = _decode(body)["error"]
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError):
        error = {"message": message, "type": "UpstreamError", "param": None, "code": 502}
    return _event({"error": error}) + DONE


class Seam:
    """D's stream on its way to a client that has P's token already."""

    def __init__(self, one: Token, plan: Plan) -> None:
        self.one, self.plan = one, plan
        self.owed = one.text if plan.mode == STRIP else ""  # of P's text, what D will say again
        self.preamble = plan.chat
        self.settled = self.mismatch = False
        self.raw = False  # nothing is left to change
        self._rest = b""
        self._swap: list[tuple[bytes, bytes]] = []

    def feed(self, data: bytes) -> bytes:
        """What of this chunk, and of those before it, the client gets now."""
        if self.raw:
            return data
        *events, self._rest = (self._rest + data).split(b"\n\n")
        out = b"".join([self._pass(event) for event in events])
        if self.settled and self.plan.mode == STRIP and not self._swap:
            self.raw = True
            out, self._rest = out + self._rest, b""
        return out

    def end(self) -> bytes:
        """What is left when D's stream is over."""
        rest, self._rest = self._rest, b""
        return rest

    def _pass(self, event: bytes) -> bytes:
        counted = self.plan.mode != STRIP and b'"usage":{' in event
        if event.startswith(b"data: {") and (counted or not self.settled):
            try:
                chunk = _decode(event[6:])
                if not self._learn(chunk):
                    return b""
                event = _event(chunk)[:-2]
            except _SHAPE:
                self.settled = True  # no event of vLLM's: it goes on as it came, as does the rest
        for old, new in self._swap:
            event = event.replace(old, new)
        return event + b"\n\n"

    def _learn(self, chunk: dict[str, Any]) -> bool:
        """Change a parsed event where it must be; whether anything of it goes on."""
        if self.settled:
            self._count(chunk)
            return True
        choices = chunk.get("choices")
        if not choices:
            self.settled = True  # an error, or usage alone
            self._count(chunk)
            return True
        self._same(chunk)
        choice = choices[0]
        holder, name = (choice["delta"], "content") if self.plan.chat else (choice, "text")
        if self.preamble and "role" in holder:
            self.preamble = False
            del holder["role"]
            if not holder.get("content"):
                return False
        if not self.owed:
            self.settled = True
            return True
        text, ended = holder.get(name), choice.get("finish_reason") is not None
        if not isinstance(text, str):
            self.settled = self.mismatch = True  # D's parser took the token for something else
            return True
        holder[name] = self._cut(text, ended)
        self.settled = ended or not self.owed
        return bool(holder[name]) or ended

    def _cut(self, text: str, ended: bool) -> str:
        """Take what the client has off the front of D's text."""
        owed = self.owed
        if text.startswith(owed):
            self.owed = ""
            return text[len(owed) :]
        if owed.startswith(text) and not ended:
            self.owed = owed[len(text) :]
        else:
            self.mismatch, self.owed = True, ""
        return ""

    def _same(self, chunk: dict[str, Any]) -> None:
        """One id and one time for the whole stream; quotes inside texts are escaped, so it is safe."""
        if self._swap:
            return
        for name, value in (("id", self.one.id), ("created", self.one.created)):
            if chunk.get(name, value) != value:
                old, new = (
                    msgspec.json.encode({name: each})[1:-1] for each in (chunk[name], value)
                )
                self._swap.append((old, new))

    def _count(self, chunk: dict[str, Any]) -> None:
        """Usage as one server would report it: D took P's token for a part of the prompt."""
        usage = chunk.get("usage")
        if not usage or self.plan.mode == STRIP:
            return  # D counted P's token itself
        usage["prompt_tokens"] -= 1
        usage["completion_tokens"] += 1
        if details := self.one.usage.get("prompt_tokens_details"):
            usage["prompt_tokens_details"] = details


def _begins(text: str, stop: str) -> bool:
    """Whether the end of a text may be the beginning of a stop string."""
    return any(text.endswith(stop[:size]) for size in range(1, len(stop)))


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"
