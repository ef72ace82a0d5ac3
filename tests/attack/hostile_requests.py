# SPDX-License-Identifier: Apache-2.0
"""Requests of clients that want to hold the router up, by kind; made when they are sent, some are large."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from router.control.test_client_connection import encode_post

MEGA = 1 << 20
MARKED_BODY = b'{"model": "tiny", "stream": true, "messages": []}'
CHAT_CONTENT = b'{"model": "tiny", "messages": [{"role": "user", "content": %b}]}'


def fill_field(name: bytes, before: bytes, unit: bytes, after: bytes, size: int) -> bytes:
    """A POST whose field `name` is about `size` bytes of `unit` between `before` and `after`."""
    value = before + unit * (size // len(unit)) + after
    return encode_post(b'{"model": "tiny", "max_tokens": 1, "%b": %b}' % (name, value))


def number_keys(size: int, before: bytes = b"") -> bytes:
    """A JSON object of about `size` bytes that begins with `before` and has nothing but many keys."""
    return b"{%b%b}" % (before, b",".join(b'"k%d":1' % each for each in range(size // 11)))


# What HTTP itself is abused for.
HTTP_KINDS: Mapping[str, Callable[[], bytes]] = {
    "equal headers": lambda: encode_post(b"{}", *["x-a: b"] * 60_000),
    "many headers": lambda: encode_post(b"{}", *[f"x-{number}: b" for number in range(60_000)]),
    "as many headers as allowed": lambda: encode_post(MARKED_BODY, *["x-a: " + "b" * 200] * 250),
    "a long header": lambda: b"POST /v1/completions HTTP/1.1\r\nx: " + b"a" * 22 * MEGA,
    "a header in pieces": lambda: b"POST /v1/completions HTTP/1.1\r\n" + b"x:\r\n" * 500_000,
    "a long target": lambda: b"POST /v1/" + b"a" * 4 * MEGA,
    "a target of dots": lambda: encode_post(path="/v1" + "/.." * 2500),
    "connection words": lambda: encode_post(MARKED_BODY, "connection: " + "a," * 30_000),
    "upgrades": lambda: encode_post(b"", "connection: upgrade", "upgrade: h2c") * 4000,
    "pipelined": lambda: encode_post(path="/v1/embeddings") * 4000,
    "pipelined GETs": lambda: b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n" * 20_000,
    "trailers": lambda: encode_post(b"0\r\n" + b"a: b\r\n" * 200_000, "transfer-encoding: chunked"),
    "tiny chunks": lambda: encode_post(
        b"1\r\n \r\n" * 300_000 + b"0\r\n\r\n", "transfer-encoding: chunked"
    ),
    "empty lines": lambda: b"\r\n" * 500_000,
    "tracestate": lambda: encode_post(MARKED_BODY, f"tracestate: {'a=b,' * 15_000}"),
}
# What JSON is abused for: sizes of a large body, and those that are just not one yet.
JSON_KINDS: Mapping[str, Callable[[], bytes]] = {
    "a large image": lambda: encode_post(
        CHAT_CONTENT
        % (
            b'[{"type":"image_url","image_url":{"url":"data:image/png;base64,%b"}}]'
            % (b"A" * 60 * MEGA)
        )
    ),
    "a large text": lambda: fill_field(b"input", b'"', b"word ", b'"', 40 * MEGA),
    "escapes": lambda: fill_field(b"input", b'"', b"\\n", b'"', 24 * MEGA),
    "escaped quotes": lambda: fill_field(b"input", b'"', b'\\"', b'"', 24 * MEGA),
    "a long model": lambda: encode_post(b'{"model": "%b"}' % (b"\xc3\xa4" * 12 * MEGA)),
    "a long model of escapes": lambda: encode_post(b'{"model": "%b"}' % (b"\\n" * 12 * MEGA)),
    "numbers": lambda: fill_field(b"input", b"[", b"1,", b"1]", 24 * MEGA),
    "as many numbers as allowed": lambda: fill_field(b"prompt", b"[", b"1,", b"1]", 7 * MEGA),
    "numbers as temperature": lambda: fill_field(b"temperature", b"[", b"1,", b"1]", 7 * MEGA),
    "empty lists": lambda: fill_field(b"input", b"[", b"[],", b"1]", 24 * MEGA),
    "empty texts": lambda: fill_field(b"stop", b"[", b'"",', b'""]', 24 * MEGA),
    "few empty texts": lambda: fill_field(b"stop", b"[", b'"",', b'""]', MEGA // 2),
    "spaces": lambda: fill_field(b"input", b"", b" ", b"1", 60 * MEGA),
    "one name again and again": lambda: fill_field(b"input", b"1", b',"":1', b"", 24 * MEGA),
    "many keys": lambda: encode_post(number_keys(24 * MEGA)),
    "many keys to be stripped": lambda: encode_post(
        number_keys(24 * MEGA, b'"kv_transfer_params":1,')
    ),
    "some keys to be stripped": lambda: encode_post(
        number_keys(MEGA // 2, b'"kv_transfer_params":1,')
    ),
    "keys to be stripped inside": lambda: encode_post(
        b'{"vllm_xargs":%b}' % number_keys(MEGA // 2, b'"kv_transfer_params":1,')
    ),
    "empty parts": lambda: encode_post(CHAT_CONTENT % (b"[" + b"{}," * 8 * MEGA + b"{}]")),
    "some empty parts": lambda: encode_post(CHAT_CONTENT % (b"[" + b"{}," * 80_000 + b"{}]")),
    "few empty parts": lambda: encode_post(CHAT_CONTENT % (b"[" + b"{}," * 20_000 + b"{}]")),
    "empty messages": lambda: fill_field(b"messages", b"[", b"{},", b"{}]", MEGA // 2),
    "lists in lists": lambda: encode_post(b'{"model":' + b"[" * 24 * MEGA),
    "maps in maps": lambda: encode_post(b'{"model":' + b'{"a":' * 5 * MEGA),
    "NaN at the end": lambda: fill_field(b"input", b"[", b"1,", b"NaN]", 24 * MEGA),
    "no text at the end": lambda: fill_field(b"input", b'"', b"a", b'\xff"', 40 * MEGA),
    "no object": lambda: encode_post(b" " * 40 * MEGA + b"1"),
}
