# SPDX-License-Identifier: Apache-2.0
"""Ask a server, before the load, for its model, its context and tokens that it knows; command.py uses it.

One small completion says how the server's tokenizer cuts our words: any vLLM and any router in front
of it answers that, where `/tokenize` is often not passed on.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from dataclasses import replace
from typing import Any, Final

from ttft_otel.bench.ask import COMPLETIONS, LOWEST, WORDS, Known
from ttft_otel.bench.stream import plain
from ttft_otel.bench.wire import AGENT, Target

PATIENCE: Final = 60.0  # the first request to a server may be slow
REFUSED: Final = (401, 403)
STRANGE: Final = (OSError, http.client.HTTPException, ValueError, LookupError, TypeError)

# Like the load's own connections: past what HTTP_PROXY says.
_opener: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Mute(ValueError):
    """The server does not name a model; the message has the remedy."""


def model(target: Target, wanted: str | None) -> tuple[str, int]:
    """The model to ask for and its context, 0 if it is not told. Raises Mute without a name."""
    try:
        cards = _get(target, "/v1/models")["data"]
        card = next(each for each in cards if wanted in (None, each["id"]))
        return str(card["id"]), int(card.get("max_model_len") or 0)
    except (*STRANGE, AttributeError, StopIteration) as error:
        if wanted:
            return wanted, 0
        why = f"{target.url}/v1/models names no model ({plain(str(error))}); {_remedy(error)}"
        raise Mute(why) from error


def known(target: Target, name: str, context: int, vocab: int | None) -> Known:
    """What prompts can be made of; where the server does not say, tokens that all vocabularies have."""
    found = Known(context=context)
    question = {"model": name, "prompt": " ".join(WORDS), "max_tokens": 1, "temperature": 0}
    exact = {"return_token_ids": True, "add_special_tokens": False}
    try:
        told = _get(target, COMPLETIONS, {**question, **exact})
        if (count := told["usage"]["prompt_tokens"]) > 0:
            found = replace(found, per_word=count / len(WORDS))
        ids = told["choices"][0].get("prompt_token_ids")
        found = replace(found, ids=tuple(dict.fromkeys(map(int, ids)))) if ids else found
    except (*STRANGE, AttributeError):
        pass
    return replace(found, ids=range(LOWEST, vocab)) if vocab else found


def _remedy(error: BaseException) -> str:
    if isinstance(error, urllib.error.HTTPError) and error.code in REFUSED:
        return "give its key: --header 'authorization: Bearer KEY'"
    return "is the server up? Else give --model"


def _get(target: Target, path: str, body: Any = None) -> Any:
    """JSON from the server. Raises OSError, ValueError."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"user-agent": AGENT, "content-type": "application/json", **target.headers}
    request = urllib.request.Request(target.url + path, data, headers)
    with _opener.open(request, timeout=PATIENCE if data else 10) as answer:
        return json.load(answer)
