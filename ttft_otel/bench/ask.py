# SPDX-License-Identifier: Apache-2.0
"""One request before it is sent: data.py, replay.py and rounds.py make Asks, drive.py sends them.

Bodies are encoded before the run: encoding a long prompt between two sends would delay both.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
LOWEST: Final = 100  # smaller token ids are often special
EVERYWHERE: Final = range(LOWEST, 256)  # no vocabulary is smaller
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
    """A request's path, body and own headers.

    at: when a trace wants it sent, in seconds from its start. room: tokens of prompt and answer, 0
    where only the server can count them.
    """

    path: str
    body: bytes
    at: float = 0.0
    room: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Known:
    """What learn.py found out: token ids of plain words, tokens of a word, the context (0: untold)."""

    ids: Sequence[int] = EVERYWHERE
    per_word: float = 1.0
    context: int = 0


@dataclass(frozen=True, slots=True)
class Form:
    """How prompts become bodies: units are token ids on completions, places of WORDS on chat."""

    model: str
    chat: bool = False
    known: Known = field(default_factory=Known)

    def units(self, tokens: int) -> int:
        """How many units make so many tokens."""
        if not self.chat:
            return tokens
        return max(1, round(tokens / self.known.per_word)) if tokens else 0

    def draw(self, chance: random.Random, tokens: int) -> list[int]:
        """Random units of so many tokens."""
        pool = range(len(WORDS)) if self.chat else self.known.ids
        return chance.choices(pool, k=self.units(tokens))

    def ask(self, units: Sequence[int], answer: int, at: float = 0.0) -> Ask:
        """A request for `answer` tokens about a prompt."""
        if self.chat:
            return self.talk([{"role": "user", "content": text(units)}], answer, at)
        return Ask(
            COMPLETIONS, self._body({"prompt": list(units)}, answer), at, len(units) + answer
        )

    def talk(
        self,
        messages: list[dict[str, Any]],
        answer: int,
        at: float = 0.0,
        headers: Mapping[str, str] | None = None,
    ) -> Ask:
        """A chat request, whatever the form is."""
        return Ask(CHAT, self._body({"messages": messages}, answer), at, headers=headers or {})

    def _body(self, body: dict[str, Any], answer: int) -> bytes:
        usual = {
            "model": self.model,
            "max_tokens": answer,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return json.dumps({**usual, **body}).encode()


def text(places: Sequence[int]) -> str:
    """Places of WORDS as a text."""
    return " ".join(WORDS[each] for each in places)
