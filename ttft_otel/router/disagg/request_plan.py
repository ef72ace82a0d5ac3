# SPDX-License-Identifier: Apache-2.0
"""Plan a request over prefill and decode instances, and make one stream of what both answer.

No I/O. endpoint.py asks for the plan (legs, first-token mode, bodies), sends the bodies, passes the prefill
answer and the decode chunks; the client gets the stream, the decode instance where the KV blocks are.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw, UnsetType

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
DONE_EVENT: Final = b"data: [DONE]\n\n"
REPLACEMENT_CHARACTER: Final = "\ufffd"  # stands for an incomplete UTF-8 character
# How vLLM's stream of a chat begins; in a text the quotes would be escaped.
_ROLE_DELTA: Final = b'"delta":{"role":"assistant","content":""}'
# raised when a response has another form than vLLM's
_SHAPE_ERRORS: Final = (*JSON_ERRORS, LookupError, TypeError, ValueError, AttributeError)
_encoder: Final = msgspec.json.Encoder()  # made once, not for each call
_encode_json: Final = _encoder.encode
_number_decoder: Final = msgspec.json.Decoder(int | None)
_decode_json: Final = msgspec.json.Decoder().decode
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
    return _decode_json(raw)


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
    try:
        params.decode()
    except UnicodeDecodeError:
        return None
    if params[:1] != b"{" or not params[1:-1].strip():
        return None
    return Raw(params)  # a copy: the other one would keep all of the prefill answer


def _may_begin_stop(text: str, stop_strings: tuple[str, ...]) -> bool:
    """Whether `text` ends with a proper prefix of a stop string.

    The ends of `text`, which is one token, are compared, not the prefixes of a stop string: a client
    chooses how long that one is.
    """
    endings = tuple(text[start:] for start in range(len(text)))
    return any(stop[:-1].startswith(endings) for stop in stop_strings)


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
