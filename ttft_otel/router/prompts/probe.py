# SPDX-License-Identifier: Apache-2.0
"""Does an instance read a chat as we do? local.py asks its /tokenize once, after each load."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

import aiohttp

ASK: Final = aiohttp.ClientTimeout(total=5.0)
DIFFERS: Final = (
    "{url} reads a chat otherwise than the tokenizer and template of {source}: cached prefixes will be "
    "missed; use --tokenize engine, or --tokenizer with what that instance was started with"
)
_CHAT: Final[list[dict[str, Any]]] = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is 2 + 2?\n\nÀnd 3 × 4? \U0001f600"},
    {"role": "assistant", "content": " Four."},
    {"role": "user", "content": [{"type": "text", "text": "And  3?"}]},
]


def body(model: str) -> bytes:
    """The chat that both are given."""
    return json.dumps({"model": model, "messages": _CHAT}).encode()


async def ask(session: aiohttp.ClientSession, url: str, model: str, key: str) -> list[int] | None:
    """The instance's token ids; None when it will not say."""
    named = {"Content-Type": "application/json"}
    if key:
        named["Authorization"] = f"Bearer {key}"
    try:
        async with session.post(
            f"{url}/tokenize", data=body(model), headers=named, timeout=ASK
        ) as answer:
            if answer.status != 200:
                return None
            found = await answer.json()
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError, ValueError):
        return None
    tokens = found.get("tokens") if isinstance(found, dict) else None
    return tokens if isinstance(tokens, list) else None
