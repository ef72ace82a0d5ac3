# SPDX-License-Identifier: Apache-2.0
"""A client for OpenAI-style servers that measures TTFT from outside; for tests, demo and benchmarks.

The exchange itself is `ttft-otel bench`'s: a connection for each request, opened before the clock starts, the
time right before the request's bytes are written, and the kernel's time of each piece of the answer. Here the
request's body is made, and the answer is taken apart after its last byte.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic_ns
from typing import Any

from ttft_otel.bench.http_exchange import BenchTarget, RawResponse, perform_exchange
from ttft_otel.bench.load_driver import CONNECT_LEAD_NS, DONE_MARKER, decode_events
from ttft_otel.bench.request_factory import build_image_content
from ttft_otel.model.endpoints import CHAT_PATH, COMPLETIONS_PATH, RESPONSES_PATH
from ttft_otel.model.names import header_names

# Words of tiny_models.TOKENIZER_CORPUS: one or two tokens each.
FILLER_WORDS = ("quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog")


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """One request.

    prompt, words: the text, followed by that many filler words (one to two tokens each). pictures: seeds of
    images put before the text (chat only); size is their edge in pixels. headers: sent as they are.
    request_id: x-request-id; None makes one, "" sends none. abort_s: close the connection after so many
    seconds, even if the response is not complete. timeout_s: for all of it. extra: merged into the JSON
    body last.
    """

    prompt: str = "what is in the picture"
    words: int = 0
    pictures: tuple[int, ...] = ()
    size: int = 112
    max_tokens: int = 8
    n: int = 1
    stream: bool = True
    path: str = CHAT_PATH
    model: str = "tiny"
    headers: Mapping[str, str] = field(default_factory=dict)
    request_id: str | None = None
    abort_s: float | None = None
    timeout_s: float = 300.0
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TimedEvent:
    """One server-sent event: arrival of its last byte in us after the request, and its data."""

    at_us: int
    data: str


@dataclass(frozen=True, slots=True)
class TimedResponse:
    """A response with its times.

    status: 0 if the client hung up or was cut off before the headers.
    headers: names in lower case. server_timing: metric name -> its `dur` in milliseconds.
    client_ttft_us: write -> first body data; None for a plain answer or where none came.
    started_ns: the write, CLOCK_MONOTONIC. aborted: whether abort_s ended it.
    """

    request_id: str
    status: int
    headers: dict[str, str]
    client_ttft_us: int | None
    total_us: int
    text: str
    server_timing: dict[str, float]
    events: tuple[TimedEvent, ...]
    body: bytes
    started_ns: int
    aborted: bool = False

    def json(self) -> dict[str, Any]:
        """The body of a plain answer."""
        content: dict[str, Any] = json.loads(self.body)
        return content


def send_timed_request(
    url: str, request: TimedRequest | None = None, **fields: Any
) -> TimedResponse:
    """Send `request` (or one with `fields`) to the server at `url`, and read the whole response.

    Raises OSError where it cannot connect or waits for too long, and ValueError for what is no HTTP.
    """
    question = replace(request or TimedRequest(), **fields)
    return asyncio.run(_exchange_all(url, [question], monotonic_ns()))[0]


def send_timed_requests(url: str, requests: Sequence[TimedRequest]) -> list[TimedResponse]:
    """Send all `requests` at the same moment; responses in their order. Raises as send_timed_request()."""
    # Connections are open when the requests are due, so that these leave together.
    return asyncio.run(_exchange_all(url, requests, monotonic_ns() + CONNECT_LEAD_NS))


async def _exchange_all(
    url: str, requests: Sequence[TimedRequest], due_ns: int
) -> list[TimedResponse]:
    target = BenchTarget.parse_url(url)
    names = [_choose_request_id(request) for request in requests]
    # Before any is sent: encoding a picture takes milliseconds.
    messages = [
        _encode_request(target, request, name)
        for request, name in zip(requests, names, strict=True)
    ]
    lead_s = max(0, due_ns - monotonic_ns()) / 1e9
    responses = await asyncio.gather(
        *(
            perform_exchange(
                target,
                message,
                due_ns,
                lead_s + (request.timeout_s if request.abort_s is None else request.abort_s),
            )
            for request, message in zip(requests, messages, strict=True)
        )
    )
    return [
        _build_response(request, name, response)
        for request, name, response in zip(requests, names, responses, strict=True)
    ]


def _choose_request_id(request: TimedRequest) -> str:
    name = request.headers.get(header_names.REQUEST_ID) or request.request_id
    return uuid.uuid4().hex if name is None else name


def _encode_request(target: BenchTarget, request: TimedRequest, request_id: str) -> bytes:
    headers = dict(request.headers)
    if request_id:
        headers[header_names.REQUEST_ID] = request_id
    body = json.dumps(build_payload(request)).encode()
    return target.encode_request(request.path, body, headers)


def _build_response(request: TimedRequest, request_id: str, response: RawResponse) -> TimedResponse:
    """Take apart what came. Raises OSError and ValueError for an exchange without an answer."""
    aborted = response.error == "timeout" and request.abort_s is not None
    if response.error == "timeout" and not aborted:
        raise TimeoutError(f"no whole answer within {request.timeout_s:g} s")
    if response.error.startswith("connection"):
        raise ConnectionError(response.error)
    if response.error == "no HTTP":
        raise ValueError(response.error)
    # By the answer, not the request: an error to a streamed request is a plain answer.
    streamed = response.headers.get("content-type", "").startswith("text/event-stream")
    started_ns = response.sent_ns
    events = split_events(response.pieces, started_ns) if streamed else ()
    body = b"".join(piece for _, piece in response.pieces)
    return TimedResponse(
        request_id=response.headers.get(header_names.REQUEST_ID, request_id),
        status=response.status,
        headers=response.headers,
        client_ttft_us=find_first_data_us(response.pieces, started_ns) if streamed else None,
        total_us=(response.end_ns - started_ns) // 1000,
        text="".join(map(extract_event_text, events)) if streamed else extract_body_text(body),
        server_timing=parse_timing(response.headers.get(header_names.SERVER_TIMING, "")),
        events=events,
        body=body,
        started_ns=started_ns,
        aborted=aborted,
    )


def build_payload(request: TimedRequest) -> dict[str, Any]:
    """The JSON body of a TimedRequest in the form that its path wants."""
    filler = " ".join(FILLER_WORDS[place % len(FILLER_WORDS)] for place in range(request.words))
    prompt = f"{request.prompt} {filler}".strip()
    body: dict[str, Any] = {"model": request.model, "stream": request.stream}
    if request.path == RESPONSES_PATH:
        body |= {"input": prompt, "max_output_tokens": request.max_tokens}
    else:
        # Without ignore_eos a random model may stop at any token.
        body |= {"max_tokens": request.max_tokens, "n": request.n, "ignore_eos": True}
        # Greedy, but for n > 1, of which vLLM wants sampling.
        body |= {"temperature": 1.0 if request.n > 1 else 0.0}
    if request.path == COMPLETIONS_PATH:
        body["prompt"] = prompt
    elif request.path == CHAT_PATH:
        content = (
            build_image_content(request.pictures, request.size, prompt)
            if request.pictures
            else prompt
        )
        body["messages"] = [{"role": "user", "content": content}]
    return {**body, **request.extra}


def find_first_data_us(pieces: Iterable[tuple[int, bytes]], started_ns: int) -> int | None:
    """Microseconds to the first body data that is not a keep-alive comment."""
    for at_ns, piece in pieces:
        # Lines that begin with a colon are comments in server-sent events; proxies send them as keep-alive.
        if piece.strip() and not piece.startswith(b":"):
            return (at_ns - started_ns) // 1000
    return None


def split_events(pieces: Sequence[tuple[int, bytes]], started_ns: int) -> tuple[TimedEvent, ...]:
    """The events in `pieces`; an event's time is that of the piece that completes it."""
    return tuple(
        TimedEvent((at_ns - started_ns) // 1000, data.decode())
        for at_ns, data in decode_events(pieces)
    )


def extract_event_text(event: TimedEvent) -> str:
    """The piece of text in one event of any of the three APIs."""
    # The end of a stream in OpenAI's chat and completions; the Responses API has none.
    if event.data == DONE_MARKER:
        return ""
    data = json.loads(event.data)
    if data.get("type") == "response.output_text.delta":
        return str(data["delta"])
    return "".join(map(extract_choice_text, data.get("choices") or ()))


def extract_choice_text(choice: dict[str, Any]) -> str:
    """The text of one choice, streamed or plain, chat or completion."""
    # Streamed chats have `delta`, plain ones `message`, completions `text`.
    message = choice.get("delta") or choice.get("message") or {}
    # `reasoning` is vLLM's, for models that think first.
    return choice.get("text") or message.get("content") or message.get("reasoning") or ""


def extract_body_text(body: bytes) -> str:
    """The text of a plain answer, or nothing where the body is no such answer."""
    try:
        data = json.loads(body)
    except ValueError:
        return ""
    if not isinstance(data, dict):
        return ""
    # `output` is the Responses API's; other answers have `choices`.
    parts = [part for item in data.get("output") or () for part in item.get("content") or ()]
    text = "".join(part.get("text", "") for part in parts)
    return text + "".join(map(extract_choice_text, data.get("choices") or ()))


def parse_timing(header: str) -> dict[str, float]:
    """A W3C Server-Timing header as name -> milliseconds; entries without `dur` count as 0."""
    timing: dict[str, float] = {}
    for entry in header.split(","):
        name, *params = (part.strip() for part in entry.split(";"))
        if name:
            # A value may be quoted, and names of parameters have no case.
            durations = [part[4:] for part in params if part.lower().startswith("dur=")]
            timing[name] = float(durations[0].strip('"')) if durations else 0.0
    return timing
