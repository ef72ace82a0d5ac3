# SPDX-License-Identifier: Apache-2.0
"""Ask an OpenAI-style server and take its TTFT from outside; tests, demo and bench read Answers.

The clock starts right before the request's bytes are written and `client_ttft_us` ends at the
first body data read from the socket. Every Question has a connection of its own, opened before the
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

from ttft_otel.bench import images
from ttft_otel.lab.answers import (
    Event,
    Reply,
    first_data,
    parse_timing,
    plain_text,
    split_events,
    text_of,
)

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
WORDS = ("quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog")


@dataclass(frozen=True, slots=True)
class Question:
    """One request.

    prompt, words: the text, followed by that many filler words (one to two tokens each).
    pictures: seeds of images put before the text (chat only); size is their edge in pixels.
    headers: sent as they are. request_id: x-request-id; None makes one, "" sends none.
    abort_s: hang up after so many seconds, whatever has come by then.
    extra: merged into the JSON body last.
    """

    prompt: str = "what is in the picture"
    words: int = 0
    pictures: tuple[int, ...] = ()
    size: int = 112
    max_tokens: int = 8
    n: int = 1
    stream: bool = True
    path: str = CHAT
    model: str = "tiny"
    headers: Mapping[str, str] = field(default_factory=dict)
    request_id: str | None = None
    abort_s: float | None = None
    timeout_s: float = 300.0
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back, and when.

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
    events: tuple[Event, ...]
    body: bytes
    started_ns: int
    aborted: bool = False

    def json(self) -> dict[str, Any]:
        """The body of a plain answer."""
        content: dict[str, Any] = json.loads(self.body)
        return content


def ask(url: str, question: Question | None = None, **fields: Any) -> Answer:
    """Send one Question (or its fields) to the server at `url` and wait for all of its answer."""
    question = replace(question or Question(), **fields)
    name = question.headers.get("x-request-id") or question.request_id
    name = uuid.uuid4().hex if name is None else name
    return Call(url, question, name).run()


def ask_all(url: str, questions: Sequence[Question]) -> list[Answer]:
    """Send all Questions at the same moment, one thread each; answers in the same order."""
    answers: list[Answer | BaseException] = [TimeoutError("no answer")] * len(questions)
    barrier = threading.Barrier(len(questions))

    def work(place: int, question: Question) -> None:
        try:
            barrier.wait()
            answers[place] = ask(url, question)
        except (OSError, httptools.HttpParserError, ValueError) as error:
            answers[place] = error

    threads = [
        threading.Thread(target=work, args=pair, daemon=True) for pair in enumerate(questions)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [checked(answer) for answer in answers]


def checked(answer: Answer | BaseException) -> Answer:
    """The answer, or the error in its place raised where the caller can see it."""
    if isinstance(answer, BaseException):
        raise answer
    return answer


class Call:
    """One request under way: the socket, the readings, then the parsing."""

    def __init__(self, url: str, question: Question, name: str) -> None:
        """Encode the request; nothing is sent yet."""
        self.question = question
        self.name = name
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "127.0.0.1", parts.port or 80
        self.path = parts.path.rstrip("/") + question.path
        self.readings: list[tuple[int, bytes]] = []
        self.connect_us = self.started_ns = 0
        self.aborted = False

    def run(self) -> Answer:
        """Connect, send, read to the end or to the abort, then parse."""
        message = self.message()
        began = monotonic_ns()
        address = (self.host, self.port)
        with socket.create_connection(address, timeout=self.question.timeout_s) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.connect_us = (monotonic_ns() - began) // 1000
            try:
                self.exchange(sock, message)
            except TimeoutError:
                if self.question.abort_s is None:
                    raise
                self.aborted = True
            ended = monotonic_ns()
        return self.answer(ended)

    def message(self) -> bytes:
        """The request's bytes: one write, so that no half of it waits for the other."""
        body = json.dumps(payload(self.question)).encode()
        headers = {
            "host": f"{self.host}:{self.port}",
            "connection": "close",
            "content-type": "application/json",
            "content-length": str(len(body)),
            **self.question.headers,
        }
        if self.name:
            headers["x-request-id"] = self.name
        lines = [f"POST {self.path} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body

    def exchange(self, sock: socket.socket, message: bytes) -> None:
        """Write the request, then note every piece of the answer with its time."""
        self.started_ns = monotonic_ns()
        self.leash(sock)
        sock.sendall(message)
        while piece := sock.recv(65536):
            self.readings.append((monotonic_ns(), piece))
            self.leash(sock)

    def leash(self, sock: socket.socket) -> None:
        """Shorten the socket's timeout to what is left until the abort."""
        if self.question.abort_s is None:
            return
        left = self.question.abort_s - (monotonic_ns() - self.started_ns) / 1e9
        if left <= 0:
            raise TimeoutError
        sock.settimeout(left)

    def answer(self, ended: int) -> Answer:
        """Parse what was noted."""
        reply = Reply.of(self.readings)
        streamed = reply.headers.get("content-type", "").startswith("text/event-stream")
        events = split_events(reply.body, self.started_ns) if streamed else ()
        body = b"".join(piece for _, piece in reply.body)
        return Answer(
            request_id=reply.headers.get("x-request-id", self.name),
            status=reply.status,
            headers=reply.headers,
            connect_us=self.connect_us,
            headers_us=(reply.headers_ns - self.started_ns) // 1000 if reply.status else None,
            client_ttft_us=first_data(reply.body, self.started_ns) if streamed else None,
            total_us=(ended - self.started_ns) // 1000,
            text="".join(map(text_of, events)) if streamed else plain_text(body),
            server_timing=parse_timing(reply.headers.get("server-timing", "")),
            events=events,
            body=body,
            started_ns=self.started_ns,
            aborted=self.aborted,
        )


def payload(question: Question) -> dict[str, Any]:
    """The JSON body of a Question in the form that its path wants."""
    filler = " ".join(WORDS[place % len(WORDS)] for place in range(question.words))
    prompt = f"{question.prompt} {filler}".strip()
    body: dict[str, Any] = {"model": question.model, "stream": question.stream}
    if question.path == RESPONSES:
        body |= {"input": prompt, "max_output_tokens": question.max_tokens}
    else:
        # Without ignore_eos a random model may stop at any token.
        body |= {"max_tokens": question.max_tokens, "n": question.n, "ignore_eos": True}
        body |= {"temperature": 1.0 if question.n > 1 else 0.0}
    if question.path == COMPLETIONS:
        body["prompt"] = prompt
    elif question.path == CHAT:
        body["messages"] = [{"role": "user", "content": content(question, prompt)}]
    return {**body, **question.extra}


def content(question: Question, prompt: str) -> str | list[dict[str, Any]]:
    """A chat message's content: plain text, or pictures and then the text."""
    if not question.pictures:
        return prompt
    edge = question.size
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": images.data_url(seed, edge, edge)}}
        for seed in question.pictures
    ]
    return [*parts, {"type": "text", "text": prompt}]
