# SPDX-License-Identifier: Apache-2.0
"""Compare an instance's tokens of a probe chat with ours; local_reader.py does it after each load.

They differ if the instance was started with another template or tokenizer.
"""

from __future__ import annotations

import json
from typing import Any, Final

import aiohttp

from ttft_otel.router.upstream.instance_queries import (
    QUERY_ERRORS,
    QUERY_TIMEOUT,
    build_authorization,
)

DIFFERENCE_WARNING: Final = (
    "{url} tokenizes a chat differently from the tokenizer and template of {source}: cached prefixes "
    "will be missed; use --tokenize engine, or --tokenizer with what that instance was started with"
)
# Non-ASCII text, whitespace at the edges, several roles and text parts: where templates differ.
_PROBE_CHAT: Final[list[dict[str, Any]]] = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is 2 + 2?\n\nÀnd 3 × 4? \U0001f600"},
    {"role": "assistant", "content": " Four."},
    {"role": "user", "content": [{"type": "text", "text": "And  3?"}]},
]


def build_probe_body(model: str) -> bytes:
    """The request body with the probe chat for `model`."""
    return json.dumps({"model": model, "messages": _PROBE_CHAT}).encode()


async def request_token_ids(
    session: aiohttp.ClientSession, url: str, model: str, api_key: str
) -> list[int] | None:
    """Token ids of the probe chat from the instance's /tokenize; None if it does not answer with them.

    url: of the instance. api_key: "" for none.
    """
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = build_authorization(api_key)
    try:
        # Rendered and tokenized by the server itself, so both can be compared at once.
        async with session.post(
            f"{url}/tokenize", data=build_probe_body(model), headers=headers, timeout=QUERY_TIMEOUT
        ) as answer:
            if answer.status != 200:
                return None
            fields = await answer.json()
    except (*QUERY_ERRORS, ValueError):
        return None
    tokens = fields.get("tokens") if isinstance(fields, dict) else None
    return tokens if isinstance(tokens, list) else None
