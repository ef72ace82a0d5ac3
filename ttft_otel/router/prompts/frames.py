# SPDX-License-Identifier: Apache-2.0
"""What worker.py and child.py say to each other: msgpack behind a length, over the child's pipes."""

from __future__ import annotations

from typing import Final

import msgspec

HEAD: Final = 4  # bytes of a frame's length
IDS: Final = "\0"  # the source of who reads token ids without a tokenizer: no model's


class Ask(msgspec.Struct, array_like=True, frozen=True):
    """Load a model's tokenizer (IDS: none), or with a path read this body's prompt.

    adapter: the LoRA adapter asked for; limit: the longest prompt of the model, 0 unknown.
    """

    number: int
    source: str
    path: str = ""
    body: bytes = b""
    size: int = 0
    adapter: str = ""
    limit: int = 0


class Told(msgspec.Struct, array_like=True, frozen=True):
    """The answer; `error` one word, `detail` for logs: about the model, never of a prompt.

    ids: array("I") as bytes; items: placeholders of each; cached: of so many tokens the text was known.
    """

    number: int
    error: str = ""
    detail: str = ""
    tokens: int = 0
    ids: bytes = b""
    blocks: tuple[int, ...] = ()
    items: tuple[int, ...] = ()
    cached: int = 0


def frame(message: Ask | Told) -> bytes:
    """A message as it travels."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(HEAD, "big") + data


ask: Final = msgspec.msgpack.Decoder(Ask)
told: Final = msgspec.msgpack.Decoder(Told)
