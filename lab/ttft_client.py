# SPDX-License-Identifier: Apache-2.0
"""A client for OpenAI-style servers that measures TTFT from outside; for tests, demo and benchmarks.

The clock starts right before the request's bytes are written and `client_ttft_us` ends at the
first body data read from the socket. Every TimedRequest has a connection of its own, opened before the
clock starts: `connect_us` reports it, no other figure contains it. Nothing is parsed before the
last byte is in, so that many threads do not delay each other's readings.
"""

from __future__ import annotations

import json
import socket
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic_ns
from typing import Any
from urllib.parse import urlsplit

import httptools

from lab.response_parser import (
    ParsedResponse,
    TimedEvent,
    extract_body_text,
    extract_event_text,
    find_first_data_us,
    parse_timing,
    split_events,
)
from ttft_otel.bench import noise_images
from ttft_otel.model.endpoints import CHAT_PATH, COMPLETIONS_PATH, RESPONSES_PATH

# Words of tiny_models.TOKENIZER_CORPUS: one or two tokens each.
FILLER_WORDS = ("quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog")


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """One request.

    prompt, words: the text, followed by that many filler words (one to two tokens each).
    pictures: seeds of images put before the text (chat only); size is their edge in pixels.
    headers: sent as they are. request_id: x-request-id; None makes one, "" sends none.
    abort_s: close the connection after so many seconds, even if the response is not complete.
    extra: merged into the JSON body last.
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
class TimedResponse:
    """A response with its times.

    status: 0 if the client hung up or was cut off before the headers.
    headers: names in lower case. server_timing: metric name -> its `dur` in milliseconds.
    client_ttft_us: write -> first body data; None for a plain answer or where none came.
    """

    request_id: str
    status: int
    headers: dict[str, str]
    connect_us: int
    headers_us: int | None
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
    """Send `request` (or one with `fields`) to the server at `url`, and read the whole response."""
    request = replace(request or TimedRequest(), **fields)
    name = request.headers.get("x-request-id") or request.request_id
    name = uuid.uuid4().hex if name is None else name
    return TimedCall(url, request, name).run()


def send_timed_requests(url: str, requests: Sequence[TimedRequest]) -> list[TimedResponse]:
    """Send all `requests` at the same moment, each from its own thread; responses in their order."""
    # Filled by place: threads end in any order.
    answers: list[TimedResponse | BaseException] = [TimeoutError("no answer")] * len(requests)
    # Threads take milliseconds to start: the barrier lets all requests leave together.
    barrier = threading.Barrier(len(requests))

    def send_at_barrier(place: int, question: TimedRequest) -> None:
        try:
            barrier.wait()
            answers[place] = send_timed_request(url, question)
        # A thread's exception would only be printed: the caller raises it.
        except (OSError, httptools.HttpParserError, ValueError) as error:
            answers[place] = error

    threads = [
        threading.Thread(target=send_at_barrier, args=pair, daemon=True)
        for pair in enumerate(requests)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [raise_if_error(answer) for answer in answers]


def raise_if_error(answer: TimedResponse | BaseException) -> TimedResponse:
    """Return `answer`, or raise it when it is an exception."""
    if isinstance(answer, BaseException):
        raise answer
    return answer


class TimedCall:
    """One request under way: the socket, the readings, then the parsing."""

    def __init__(self, url: str, question: TimedRequest, name: str) -> None:
        """Encode the request; nothing is sent yet."""
        self.request = question
        self.request_id = name
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "127.0.0.1", parts.port or 80
        self.path = parts.path.rstrip("/") + question.path
        self.readings: list[tuple[int, bytes]] = []
        self.connect_us = self.started_ns = 0
        self.aborted = False

    def run(self) -> TimedResponse:
        """Connect, send, read to the end or to the abort, then parse."""
        # Before the clock: encoding a picture takes milliseconds.
        message = self.build_message()
        began_ns = monotonic_ns()
        address = (self.host, self.port)
        with socket.create_connection(address, timeout=self.request.timeout_s) as sock:
            # No delay by Nagle's algorithm, should the kernel split the write.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.connect_us = (monotonic_ns() - began_ns) // 1000
            try:
                self.send_and_read(sock, message)
            # Without abort_s it is a fault of the server, and of the test.
            except TimeoutError:
                if self.request.abort_s is None:
                    raise
                self.aborted = True
            ended_ns = monotonic_ns()
        return self.build_response(ended_ns)

    def build_message(self) -> bytes:
        """The request's bytes: one write, so that no half of it waits for the other."""
        body = json.dumps(build_payload(self.request)).encode()
        headers = {
            "host": f"{self.host}:{self.port}",
            # The server closes after its answer, so that reading ends
            # without looking for the answer's end.
            "connection": "close",
            "content-type": "application/json",
            "content-length": str(len(body)),
            **self.request.headers,
        }
        if self.request_id:
            headers["x-request-id"] = self.request_id
        lines = [f"POST {self.path} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body

    def send_and_read(self, sock: socket.socket, message: bytes) -> None:
        """Write the request, then note every piece of the answer with its time."""
        # Last thing before the write: connecting and encoding are over.
        self.started_ns = monotonic_ns()
        self.limit_timeout(sock)
        sock.sendall(message)
        # Time first, then the list: parsing here would delay the readings of other threads.
        while piece := sock.recv(65536):
            self.readings.append((monotonic_ns(), piece))
            self.limit_timeout(sock)

    def limit_timeout(self, sock: socket.socket) -> None:
        """Shorten the socket's timeout to what is left until the abort."""
        if self.request.abort_s is None:
            return
        # A socket's timeout is for one read: the deadline is for all of them.
        left_s = self.request.abort_s - (monotonic_ns() - self.started_ns) / 1e9
        if left_s <= 0:
            raise TimeoutError
        sock.settimeout(left_s)

    def build_response(self, ended_ns: int) -> TimedResponse:
        """Parse what was noted."""
        reply = ParsedResponse.from_readings(self.readings)
        # By the answer, not the request: an error to a streamed request is a plain answer.
        streamed = reply.headers.get("content-type", "").startswith("text/event-stream")
        events = split_events(reply.body, self.started_ns) if streamed else ()
        body = b"".join(piece for _, piece in reply.body)
        return TimedResponse(
            request_id=reply.headers.get("x-request-id", self.request_id),
            status=reply.status,
            headers=reply.headers,
            connect_us=self.connect_us,
            headers_us=(reply.headers_ns - self.started_ns) // 1000 if reply.status else None,
            client_ttft_us=find_first_data_us(reply.body, self.started_ns) if streamed else None,
            total_us=(ended_ns - self.started_ns) // 1000,
            text="".join(map(extract_event_text, events)) if streamed else extract_body_text(body),
            server_timing=parse_timing(reply.headers.get("server-timing", "")),
            events=events,
            body=body,
            started_ns=self.started_ns,
            aborted=self.aborted,
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
        body["messages"] = [{"role": "user", "content": build_message_content(request, prompt)}]
    return {**body, **request.extra}


def build_message_content(request: TimedRequest, prompt: str) -> str | list[dict[str, Any]]:
    """A chat message's content: plain text, or pictures and then the text."""
    if not request.pictures:
        return prompt
    edge = request.size
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": noise_images.draw_data_url(seed, edge, edge)}}
        for seed in request.pictures
    ]
    return [*parts, {"type": "text", "text": prompt}]
