# SPDX-License-Identifier: Apache-2.0
"""Messages between tokenizer_worker.py and tokenizer_child.py, over the pipes of the child.

A frame is the length of the message, big-endian, followed by the message in msgpack.
"""

from __future__ import annotations

from typing import Final

import msgspec

# MessagePack does not tell its length in front, and a pipe has no message bounds.
LENGTH_BYTES: Final = 4  # bytes of a frame's length
# The `source` of prompts that are token ids already and need no tokenizer; no model has this name.
NO_TOKENIZER: Final = "\0"


# array_like: fields by position, since both ends are of the same version.
class TokenizeQuestion(msgspec.Struct, array_like=True, frozen=True):
    """A request to load the tokenizer `source`, or with a `path` to read the prompt of `body`.

    path: "chat" or "completion". block_size: tokens per block. adapter: the LoRA adapter, if any.
    max_prompt_tokens: the model's limit, 0 if unknown.
    """

    number: int
    source: str
    path: str = ""
    body: bytes = b""
    block_size: int = 0
    adapter: str = ""
    max_prompt_tokens: int = 0


class TokenizeAnswer(msgspec.Struct, array_like=True, frozen=True):
    """The response to the question of the same `number`.

    error: one word, "" for success. detail: for logs, about the model and never of a prompt. ids: an
    array("I") as bytes. item_tokens: placeholder tokens per media item. cached_tokens: tokens taken from the
    cache of text_encoder.py.
    """

    number: int
    error: str = ""
    detail: str = ""
    tokens: int = 0
    ids: bytes = b""
    blocks: tuple[int, ...] = ()
    item_tokens: tuple[int, ...] = ()
    cached_tokens: int = 0


def frame_message(message: TokenizeQuestion | TokenizeAnswer) -> bytes:
    """Encode `message` as a frame."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


question_decoder: Final = msgspec.msgpack.Decoder(TokenizeQuestion)
answer_decoder: Final = msgspec.msgpack.Decoder(TokenizeAnswer)
