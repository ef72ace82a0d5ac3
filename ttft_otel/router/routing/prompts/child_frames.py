# SPDX-License-Identifier: Apache-2.0
"""Messages between tokenizer_worker.py and tokenizer_child.py, over the pipes of the child.

A frame is the length of the message, big-endian, followed by the message in msgpack. The child answers
each question before it reads the next one.
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
    """A request to load the tokenizer `source`, or with a `path` to read the prompt of `body`."""

    source: str
    path: str = ""  # "chat" or "completion"
    body: bytes = b""
    block_size: int = 0  # tokens per block
    adapter: str = ""  # the LoRA adapter, if any
    max_prompt_tokens: int = 0  # the model's limit, 0 if unknown


class TokenizeAnswer(msgspec.Struct, array_like=True, frozen=True):
    """The response to a question."""

    error: str = ""  # one word, "" for success
    detail: str = ""  # for logs, about the model and never of a prompt
    tokens: int = 0
    ids: bytes = b""  # an array("I") as bytes
    blocks: tuple[int, ...] = ()
    item_tokens: tuple[int, ...] = ()  # placeholder tokens per media item
    cached_tokens: int = 0  # tokens taken from the cache of tokenizer_child.py


def frame_message(message: TokenizeQuestion | TokenizeAnswer) -> bytes:
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


question_decoder: Final = msgspec.msgpack.Decoder(TokenizeQuestion)
answer_decoder: Final = msgspec.msgpack.Decoder(TokenizeAnswer)
