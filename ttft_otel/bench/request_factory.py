# SPDX-License-Identifier: Apache-2.0
"""Build request bodies, and images for them, for the datasets; load_driver.py sends them.

Bodies are encoded before the run: encoding a long prompt during the run would delay other requests. What
the server's model takes is asked before: one small completion shows how its tokenizer splits our words,
since every vLLM and every router in front of it answers completions, while `/tokenize` is often not
forwarded.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic_ns
from typing import Any, Final

from ttft_otel.bench.http_exchange import HTTP_OK, BenchTarget, perform_exchange
from ttft_otel.model.endpoints import CHAT_PATH, COMPLETIONS_PATH, MODELS_PATH

# In every vocabulary; smaller ones are often special tokens.
UNIVERSAL_TOKEN_IDS: Final = range(100, 256)
PNG_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
# Common English nouns, mostly one token each, so that lengths can be met closely.
PROMPT_WORDS: Final = tuple(
    (
        "time year people way day man thing woman life child world school state family student "
        "group country problem hand part place case week company system program question work "
        "government number night point home water room mother area money story fact month lot "
        "right study book eye job word business issue side kind head house service friend father "
        "power hour game line end member law car city community name president team minute idea"
    ).split()
)
COMPLETION_TIMEOUT_S: Final = 60.0  # long, because the first request to a server may be slow
MODELS_TIMEOUT_S: Final = 10.0
# The remedy differs: a server that wants a key is up.
KEY_WANTED: Final = ("HTTP 401", "HTTP 403")
# Whatever is missing from an answer, or of another type than it should be.
RESPONSE_ERRORS: Final = (OSError, ValueError, LookupError, TypeError, AttributeError)


class BenchInputError(ValueError):
    """What the user gave cannot be benchmarked; the message has the reason or the remedy."""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A request, and what follows its answer."""

    path: str
    body: bytes
    #: Seconds from the start of a trace, of a later turn from the end of the answer before.
    wait_s: float = 0.0
    headers: Mapping[str, str] = field(default_factory=dict)
    #: Makes the conversation's next request of the answer, None for one that failed.
    next_turn: Callable[[str | None], BenchRequest] | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One question of a conversation."""

    content: Any  #: token IDs, or what a chat's message contains
    answer_tokens: int
    wait_s: float = 0.0  #: as of BenchRequest
    is_whole: bool = False  #: it has all of the prompt, whatever was said before


@dataclass(frozen=True, slots=True)
class RequestFactory:
    """Builds bodies from prompts; a prompt is a list of units.

    Units are token IDs for the completions API, and indices of PROMPT_WORDS for the chat API. side: 0, or 1
    for the second server of --ab, whose prompts are as long as the first one's, and others.
    """

    model: str
    uses_chat: bool = False
    side: int = 0
    context_tokens: int = 0  #: 0 when unknown
    token_ids: Sequence[int] = UNIVERSAL_TOKEN_IDS  #: of which prompts are made
    tokens_per_word: float = 1.0  #: the mean over PROMPT_WORDS

    def count_units(self, tokens: int) -> int:
        """Number of units of a prompt with about `tokens` tokens."""
        if not self.uses_chat:
            return tokens
        # Never empty where tokens were asked for: servers refuse an empty prompt.
        return max(1, round(tokens / self.tokens_per_word)) if tokens else 0

    def count_text_tokens(self, text: str) -> int:
        """About the number of tokens of a text, by those of PROMPT_WORDS; 1 at least."""
        word_length = len(" ".join(PROMPT_WORDS)) / len(PROMPT_WORDS)
        return max(1, round(len(text) / word_length * self.tokens_per_word))

    def draw_prompt(self, rng: random.Random, tokens: int) -> list[int]:
        """Random units of about `tokens` tokens."""
        # With replacement, so that prompts may be longer than the pool.
        pool = range(len(PROMPT_WORDS)) if self.uses_chat else self.token_ids
        return rng.choices(pool, k=self.count_units(tokens))

    def write_content(self, units: Sequence[int]) -> Any:
        """A prompt as its API takes it: token IDs, or a text."""
        return join_words(units) if self.uses_chat else list(units)

    def build_conversation(
        self,
        turns: Sequence[Turn],
        headers: Mapping[str, str] | None = None,
        history: Sequence[Any] = (),
    ) -> BenchRequest:
        """The request of the first of `turns`; the others follow with what has been said until then.

        history: messages before the first of them.
        """
        turn, *later = turns
        messages = [*history, {"role": "user", "content": turn.content}]
        if turn.is_whole:
            messages = messages[-1:]

        def build_next_turn(answer: str | None) -> BenchRequest:
            said = [*messages, {"role": "assistant", "content": answer}]
            # A question that failed is not part of the following prompts.
            return self.build_conversation(later, headers, history if answer is None else said)

        prompt = {"messages": messages} if self.uses_chat else {"prompt": turn.content}
        body = self._encode_body(prompt, turn.answer_tokens)
        path = CHAT_PATH if self.uses_chat else COMPLETIONS_PATH
        following = build_next_turn if later else None
        return BenchRequest(path, body, turn.wait_s, headers or {}, following)

    def _encode_body(self, body: dict[str, Any], answer_tokens: int) -> bytes:
        defaults = {
            "model": self.model,
            "max_tokens": answer_tokens,
            # Greedy, so that repeated runs do the same work.
            "temperature": 0.0,
            # Answers of the length asked for, whatever the model would say to noise.
            "ignore_eos": True,
            "stream": True,
            # The server's own counts: an event may hold several tokens.
            "stream_options": {"include_usage": True},
        }
        return json.dumps({**defaults, **body}).encode()


def join_words(word_indices: Sequence[int]) -> str:
    """The PROMPT_WORDS at `word_indices`, joined to a text."""
    return " ".join(PROMPT_WORDS[index] for index in word_indices)


def build_image_content(seeds: Sequence[int], edge_px: int, text: str) -> list[dict[str, Any]]:
    """The content of a chat message: an image for each of `seeds`, then the text."""
    # Images first, so that prompts differ from their first block on.
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": draw_data_url(seed, edge_px, edge_px)}}
        for seed in seeds
    ]
    return [*parts, {"type": "text", "text": text}]


def draw_png(seed: int, width: int = 112, height: int = 112) -> bytes:
    """The bytes of a PNG with random pixels; the same arguments give the same bytes.

    width, height: pixels.
    """
    # The size is part of the seed: another size is another picture.
    rng = random.Random(f"{seed}/{width}x{height}")
    # Each row begins with its filter byte; 0 is "no filter".
    rows = b"".join(b"\0" + rng.randbytes(3 * width) for _ in range(height))
    # 8 bits, colour type 2 (RGB); then the only compression and filter there are, not interlaced.
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        PNG_SIGNATURE
        + _encode_chunk(b"IHDR", header)
        # Level 1: noise does not become smaller, and higher levels only take longer.
        + _encode_chunk(b"IDAT", zlib.compress(rows, 1))
        + _encode_chunk(b"IEND", b"")
    )


def _encode_chunk(kind: bytes, data: bytes) -> bytes:
    """One PNG chunk: length, `kind`, data, CRC-32."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def draw_data_url(seed: int, width: int = 112, height: int = 112) -> str:
    """draw_png() as a data URL for `image_url` of a chat request, so that no server has to fetch it."""
    return "data:image/png;base64," + base64.b64encode(draw_png(seed, width, height)).decode(
        "ascii"
    )


def discover_factory(
    target: BenchTarget, requested_model: str | None, uses_chat: bool, side: int
) -> RequestFactory:
    """A factory for the server's model. uses_chat, side: of RequestFactory.

    requested_model: the name from --model; None takes the first model of /v1/models.
    Token IDs and tokens per word are asked of the server with one completion; where that fails, they are
    those that every vocabulary has. Raises BenchInputError when there is no name.
    """
    try:
        cards = _fetch_json(target, MODELS_PATH)["data"]
        card = next(candidate for candidate in cards if requested_model in (None, candidate["id"]))
        model, context_tokens = str(card["id"]), int(card.get("max_model_len") or 0)
    except (*RESPONSE_ERRORS, StopIteration) as error:
        # Some gateways list no models; with a name the load can be sent all the same.
        if not requested_model:
            remedy = "is the server up? Else give --model"
            if str(error) in KEY_WANTED:
                remedy = "give its key: --header 'authorization: Bearer KEY'"
            said = f"{target.url}/v1/models names no model ({error}); {remedy}"
            raise BenchInputError(said) from error
        model, context_tokens = requested_model, 0
    factory = RequestFactory(model, uses_chat, side, context_tokens)
    # All words in one prompt, as they are joined in chats: a blank often belongs to the next token.
    question = {"model": model, "prompt": " ".join(PROMPT_WORDS), "max_tokens": 1, "temperature": 0}
    # Without special tokens: one would be counted as part of a word, and drawn into prompts.
    token_id_options = {"return_token_ids": True, "add_special_tokens": False}
    try:
        response = _fetch_json(target, COMPLETIONS_PATH, {**question, **token_id_options})
        if (count := response["usage"]["prompt_tokens"]) > 0:
            factory = replace(factory, tokens_per_word=count / len(PROMPT_WORDS))
        # Each once and in order: a seed must give the same prompt in the next run.
        ids = dict.fromkeys(map(int, response["choices"][0].get("prompt_token_ids") or ()))
        return replace(factory, token_ids=tuple(ids) or factory.token_ids)
    except RESPONSE_ERRORS:
        return factory  # an older vLLM or another server: the defaults work with any vocabulary


def _fetch_json(target: BenchTarget, path: str, body: Any = None) -> Any:
    """JSON from the server; POST with a `body`, else GET. Raises OSError, ValueError."""
    data = b"" if body is None else json.dumps(body).encode()
    message = target.encode_request(path, data, {}, "POST" if data else "GET")
    timeout_s = COMPLETION_TIMEOUT_S if data else MODELS_TIMEOUT_S
    response = asyncio.run(perform_exchange(target, message, monotonic_ns(), timeout_s))
    if response.error or response.status != HTTP_OK:
        raise OSError(response.error or f"HTTP {response.status}")
    return json.loads(b"".join(piece for _, piece in response.pieces))
