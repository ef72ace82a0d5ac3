# SPDX-License-Identifier: Apache-2.0
"""One request before it is sent: data.py, replay.py and rounds.py make Asks, drive.py sends them.

Bodies are encoded before the run: encoding a long prompt between two sends would delay both.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
LOWEST: Final = 100  # smaller token ids are often special
WORDS: Final = tuple(
    (
        "time year people way day man thing woman life child world school state family student "
        "group country problem hand part place case week company system program question work "
        "government number night point home water room mother area money story fact month lot "
        "right study book eye job word business issue side kind head house service friend father "
        "power hour game line end member law car city community name president team minute idea"
    ).split()
)


@dataclass(frozen=True, slots=True)
class Ask:
    """A request's path and body; `at` is when a trace wants it sent, in seconds from its start."""

    path: str
    body: bytes
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Form:
    """How prompts become bodies: token ids on completions, words (about a token each) on chat."""

    model: str
    chat: bool = False
    vocab: int = 1000
    extra: dict[str, Any] = field(default_factory=dict)

    def ask(self, ids: Sequence[int], answer: int, at: float = 0.0) -> Ask:
        """A request for `answer` tokens about a prompt given as token ids."""
        if self.chat:
            return self.talk([{"role": "user", "content": text(ids)}], answer, at)
        return self._pack(COMPLETIONS, {"prompt": list(ids)}, answer, at)

    def talk(self, messages: list[dict[str, Any]], answer: int, at: float = 0.0) -> Ask:
        """A chat request, whatever the form is."""
        return self._pack(CHAT, {"messages": messages}, answer, at)

    def _pack(self, path: str, body: dict[str, Any], answer: int, at: float) -> Ask:
        usual = {
            "model": self.model,
            "max_tokens": answer,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return Ask(path, json.dumps({**usual, **body, **self.extra}).encode(), at)


def text(ids: Sequence[int]) -> str:
    """Token ids as words: equal ids are equal words, so shared prefixes stay shared."""
    return " ".join(WORDS[each % len(WORDS)] for each in ids)
