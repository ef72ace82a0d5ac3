# SPDX-License-Identifier: Apache-2.0
"""What the demo asks: every kind of request once or more, alone and at once; demo.py sends it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ttft_otel import names
from ttft_otel.lab import client
from ttft_otel.lab.client import Question

LONG: Final = 1300  # words: three chunks or more of 512 tokens
WARM: Final = 1_000_000  # seeds from here on are pictures that only the warm-up sends


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of the demo; those of one wave are sent at the same moment."""

    kind: str
    question: Question
    wave: int

    @property
    def name(self) -> str:
        """Its x-request-id."""
        return self.question.request_id or ""

    def legs(self, shape: str) -> int:
        """How many servers of a deployment it has to pass: an encoder per image, then one or two."""
        encoders = len(self.question.pictures) if shape.startswith("e") else 0
        # What the router cannot split goes to D alone.
        split = shape != "epd" and self.question.path != client.RESPONSES
        return encoders + (2 if split else 1)


ALONE: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("text", {}),
    ("text", {"words": 60}),
    ("text", {"words": 200}),
    ("text, not streamed", {"stream": False}),
    ("completion", {"path": client.COMPLETIONS}),
    ("completion", {"path": client.COMPLETIONS, "words": 100}),
    ("completion, not streamed", {"path": client.COMPLETIONS, "stream": False}),
    ("responses", {"path": client.RESPONSES}),
    ("responses, not streamed", {"path": client.RESPONSES, "stream": False}),
    ("three chunks", {"words": LONG}),
    ("three chunks", {"words": LONG + 200}),
    ("one image", {"pictures": (1,)}),
    ("one image", {"pictures": (2,), "size": 224}),
    ("one image", {"pictures": (3,), "size": 448}),
    ("same image again", {"pictures": (1,)}),
    ("same image again", {"pictures": (3,), "size": 448}),
    ("two images", {"pictures": (4, 5)}),
    ("two images", {"pictures": (6, 7), "size": 224}),
    ("image, not streamed", {"pictures": (8,), "stream": False}),
    ("image, three chunks", {"pictures": (9,), "words": LONG}),
)
AT_ONCE: Final[tuple[tuple[tuple[str, dict[str, Any]], ...], ...]] = (
    (("4 at once: text", {}),) * 4,
    (
        ("4 at once: image", {"pictures": (10,)}),
        ("4 at once: image", {"pictures": (11,), "size": 224}),
        ("4 at once: text", {}),
        ("4 at once: three chunks", {"words": LONG}),
    ),
)


def plan() -> list[Asked]:
    """All requests of the demo, numbered in the order in which they are sent."""
    waves = [*((each,) for each in ALONE), *AT_ONCE]
    asked: list[Asked] = []
    for wave, members in enumerate(waves):
        for kind, fields in members:
            name = f"demo-{len(asked) + 1:02d}"
            # A word of its own: otherwise the prefix cache would answer the second time.
            prompt = f"{name} what is in the picture"
            asked.append(Asked(kind, Question(prompt=prompt, request_id=name, **fields), wave))
    return asked


def warming(asked: Sequence[Asked]) -> list[list[Question]]:
    """The same waves with other pictures and words, not sampled: no trace of them is stored."""
    waves: dict[int, list[Question]] = {}
    for each in asked:
        waves.setdefault(each.wave, []).append(unsampled(each.question))
    return list(waves.values())


def unsampled(question: Question) -> Question:
    """A question that warms what the real one will use, and leaves nothing behind."""
    parent = f"00-{os.urandom(16).hex()}-{os.urandom(8).hex()}-00"
    return replace(
        question,
        prompt=f"warm {question.prompt}",
        request_id=f"warm-{question.request_id}",
        pictures=tuple(seed + WARM for seed in question.pictures),
        headers={names.TRACEPARENT: parent},
    )
