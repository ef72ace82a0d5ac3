# SPDX-License-Identifier: Apache-2.0
"""Ask a server, before the load, for its model, its context length and token IDs of its vocabulary.

One small completion shows how the server's tokenizer splits our words: every vLLM and every router
in front of it answers completions, while `/tokenize` is often not forwarded.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from time import monotonic_ns
from typing import Any, Final

from ttft_otel.bench.http_exchange import BenchTarget, perform_exchange
from ttft_otel.bench.load_driver import HTTP_OK
from ttft_otel.bench.request_factory import (
    MIN_TOKEN_ID,
    PROMPT_WORDS,
    BenchInputError,
    ModelProfile,
)
from ttft_otel.model.endpoints import COMPLETIONS_PATH, MODELS_PATH

COMPLETION_TIMEOUT_S: Final = 60.0  # long, because the first request to a server may be slow
MODELS_TIMEOUT_S: Final = 10.0
# The remedy differs: a server that wants a key is up.
KEY_WANTED: Final = ("HTTP 401", "HTTP 403")
# Whatever is missing from an answer, or of another type than it should be.
RESPONSE_ERRORS: Final = (OSError, ValueError, LookupError, TypeError, AttributeError)


def discover_model(target: BenchTarget, requested_model: str | None) -> tuple[str, int]:
    """The model's name and its context in tokens (0 when unknown).

    requested_model: the name from --model; None takes the first model of /v1/models.
    Raises BenchInputError when there is no name.
    """
    try:
        cards = _fetch_json(target, MODELS_PATH)["data"]
        card = next(candidate for candidate in cards if requested_model in (None, candidate["id"]))
        return str(card["id"]), int(card.get("max_model_len") or 0)
    except (*RESPONSE_ERRORS, StopIteration) as error:
        # Some gateways list no models; with a name the load can be sent all the same.
        if requested_model:
            return requested_model, 0
        remedy = "is the server up? Else give --model"
        if str(error) in KEY_WANTED:
            remedy = "give its key: --header 'authorization: Bearer KEY'"
        raise BenchInputError(
            f"{target.url}/v1/models names no model ({error}); {remedy}"
        ) from error


def discover_profile(
    target: BenchTarget, model: str, context_tokens: int, vocabulary_size: int | None
) -> ModelProfile:
    """Token IDs and tokens per word for building prompts.

    Asks the server with one completion; where that fails, uses IDs that every vocabulary has.
    vocabulary_size: value of --vocab, which replaces the token IDs.
    """
    profile = ModelProfile(context_tokens=context_tokens)
    # All words in one prompt, as they are joined in chats: a blank often belongs to the next token.
    question = {"model": model, "prompt": " ".join(PROMPT_WORDS), "max_tokens": 1, "temperature": 0}
    # Without special tokens: one would be counted as part of a word, and drawn into prompts.
    token_id_options = {"return_token_ids": True, "add_special_tokens": False}
    try:
        response = _fetch_json(target, COMPLETIONS_PATH, {**question, **token_id_options})
        if (count := response["usage"]["prompt_tokens"]) > 0:
            profile = replace(profile, tokens_per_word=count / len(PROMPT_WORDS))
        ids = response["choices"][0].get("prompt_token_ids")
        # Each once and in order: a seed must give the same prompt in the next run.
        profile = (
            replace(profile, token_ids=tuple(dict.fromkeys(map(int, ids)))) if ids else profile
        )
    except RESPONSE_ERRORS:
        pass  # an older vLLM or another server: the defaults work with any vocabulary
    return (
        replace(profile, token_ids=range(MIN_TOKEN_ID, vocabulary_size))
        if vocabulary_size
        else profile
    )


def _fetch_json(target: BenchTarget, path: str, body: Any = None) -> Any:
    """JSON from the server; POST with a `body`, else GET. Raises OSError, ValueError."""
    data = b"" if body is None else json.dumps(body).encode()
    message = target.encode_request(path, data, {}, "POST" if data else "GET")
    timeout_s = COMPLETION_TIMEOUT_S if data else MODELS_TIMEOUT_S
    response = asyncio.run(perform_exchange(target, message, monotonic_ns(), timeout_s))
    if response.error or response.status != HTTP_OK:
        raise OSError(response.error or f"HTTP {response.status}")
    return json.loads(b"".join(piece for _, piece in response.pieces))
