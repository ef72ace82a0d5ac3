# SPDX-License-Identifier: Apache-2.0
"""Ask a server, before the load, for its model, its context length and token IDs of its vocabulary.

One small completion shows how the server's tokenizer splits our words: every vLLM and every router
in front of it answers completions, while `/tokenize` is often not forwarded.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from dataclasses import replace
from typing import Any, Final

from ttft_otel.bench.http_exchange import USER_AGENT, BenchTarget
from ttft_otel.bench.request_factory import (
    MIN_TOKEN_ID,
    PROMPT_WORDS,
    BenchInputError,
    ModelProfile,
)
from ttft_otel.bench.stream_parser import sanitize_text
from ttft_otel.model.endpoints import COMPLETIONS_PATH, MODELS_PATH

COMPLETION_TIMEOUT_S: Final = 60.0  # long, because the first request to a server may be slow
# The remedy differs: a server that wants a key is up.
AUTH_STATUSES: Final = (401, 403)
RESPONSE_ERRORS: Final = (OSError, http.client.HTTPException, ValueError, LookupError, TypeError)

# Ignores HTTP_PROXY, as the load's own connections do.
_opener: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def discover_model(target: BenchTarget, requested_model: str | None) -> tuple[str, int]:
    """The model's name and its context in tokens (0 when unknown).

    requested_model: the name from --model; None takes the first model of /v1/models.
    Raises BenchInputError when there is no name.
    """
    try:
        cards = _fetch_json(target, MODELS_PATH)["data"]
        card = next(candidate for candidate in cards if requested_model in (None, candidate["id"]))
        return str(card["id"]), int(card.get("max_model_len") or 0)
    except (*RESPONSE_ERRORS, AttributeError, StopIteration) as error:
        # Some gateways list no models; with a name the load can be sent all the same.
        if requested_model:
            return requested_model, 0
        message = (
            f"{target.url}/v1/models names no model ({sanitize_text(str(error))}); "
            f"{_suggest_remedy(error)}"
        )
        raise BenchInputError(message) from error


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
    except (*RESPONSE_ERRORS, AttributeError):
        pass  # an older vLLM or another server: the defaults work with any vocabulary
    return (
        replace(profile, token_ids=range(MIN_TOKEN_ID, vocabulary_size))
        if vocabulary_size
        else profile
    )


def _suggest_remedy(error: BaseException) -> str:
    if isinstance(error, urllib.error.HTTPError) and error.code in AUTH_STATUSES:
        return "give its key: --header 'authorization: Bearer KEY'"
    return "is the server up? Else give --model"


def _fetch_json(target: BenchTarget, path: str, body: Any = None) -> Any:
    """JSON from the server; POST with a `body`, else GET. Raises OSError, ValueError."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"user-agent": USER_AGENT, "content-type": "application/json", **target.headers}
    request = urllib.request.Request(target.url + path, data, headers)
    with _opener.open(request, timeout=COMPLETION_TIMEOUT_S if data else 10) as answer:
        return json.load(answer)
