# SPDX-License-Identifier: Apache-2.0
"""The demo's requests: every kind at least once, alone and concurrently."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from lab.ttft_client import TimedRequest
from ttft_otel.model.endpoints import COMPLETIONS_PATH, RESPONSES_PATH
from ttft_otel.model.names import header_names

LONG_PROMPT_WORDS: Final = 1300  # three or more chunks of 512 tokens
WARMUP_SEED_OFFSET: Final = 1_000_000  # seeds of images from here on are the warm-up's


@dataclass(frozen=True, slots=True)
class DemoRequest:
    """One request of the demo; those of one wave are sent at the same moment."""

    kind: str
    request: TimedRequest
    wave: int

    @property
    def name(self) -> str:
        """Its x-request-id."""
        return self.request.request_id or ""

    def count_legs(self, shape: str) -> int:
        """Number of server legs in a topology: one encoder per image, then one or two.

        shape: key of demo.TOPOLOGIES.
        """
        encoders = len(self.request.pictures) if shape.startswith("e") else 0
        # The router does not split the Responses API into prefill and decode: it goes to D alone.
        split = shape != "epd" and self.request.path != RESPONSES_PATH
        return encoders + (2 if split else 1)


# Every API, streamed or not, and every kind of content: each takes another way through the code.
SINGLE_REQUESTS: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("text", {}),
    ("text", {"words": 60}),
    ("text", {"words": 200}),
    ("text, not streamed", {"stream": False}),
    ("completion", {"path": COMPLETIONS_PATH}),
    ("completion", {"path": COMPLETIONS_PATH, "words": 100}),
    ("completion, not streamed", {"path": COMPLETIONS_PATH, "stream": False}),
    ("responses", {"path": RESPONSES_PATH}),
    ("responses, not streamed", {"path": RESPONSES_PATH, "stream": False}),
    ("three chunks", {"words": LONG_PROMPT_WORDS}),
    ("three chunks", {"words": LONG_PROMPT_WORDS + 200}),
    ("one image", {"pictures": (1,)}),
    ("one image", {"pictures": (2,), "size": 224}),
    ("one image", {"pictures": (3,), "size": 448}),
    ("same image again", {"pictures": (1,)}),
    ("same image again", {"pictures": (3,), "size": 448}),
    ("two images", {"pictures": (4, 5)}),
    ("two images", {"pictures": (6, 7), "size": 224}),
    ("image, not streamed", {"pictures": (8,), "stream": False}),
    ("image, three chunks", {"pictures": (9,), "words": LONG_PROMPT_WORDS}),
)
# At the same moment, so that requests wait for one another: queues and stalls show.
CONCURRENT_REQUESTS: Final[tuple[tuple[tuple[str, dict[str, Any]], ...], ...]] = (
    (("4 at once: text", {}),) * 4,
    (
        ("4 at once: image", {"pictures": (10,)}),
        ("4 at once: image", {"pictures": (11,), "size": 224}),
        ("4 at once: text", {}),
        ("4 at once: three chunks", {"words": LONG_PROMPT_WORDS}),
    ),
)


def build_demo_requests() -> list[DemoRequest]:
    """All requests of the demo, numbered in the order in which they are sent."""
    waves = [*((each,) for each in SINGLE_REQUESTS), *CONCURRENT_REQUESTS]
    demo_requests: list[DemoRequest] = []
    for wave, members in enumerate(waves):
        for kind, fields in members:
            name = f"demo-{len(demo_requests) + 1:02d}"
            # The name makes each prompt unique; otherwise later ones would hit the prefix cache.
            prompt = f"{name} what is in the picture"
            demo_requests.append(
                DemoRequest(kind, TimedRequest(prompt=prompt, request_id=name, **fields), wave)
            )
    return demo_requests


def build_warmup_waves(demo_requests: Sequence[DemoRequest]) -> list[list[TimedRequest]]:
    """The same waves with other images and words; not sampled, so that no trace is stored."""
    waves: dict[int, list[TimedRequest]] = {}
    for demo_request in demo_requests:
        # Waves as they are: batches compile and allocate what single requests do not.
        waves.setdefault(demo_request.wave, []).append(make_unsampled(demo_request.request))
    return list(waves.values())


def make_unsampled(request: TimedRequest) -> TimedRequest:
    """A warm-up copy of `request`: different text and images, with an unsampled `traceparent`."""
    # Flags 00 of a W3C traceparent: not sampled.
    parent = f"00-{os.urandom(16).hex()}-{os.urandom(8).hex()}-00"
    return replace(
        request,
        prompt=f"warm {request.prompt}",
        request_id=f"warm-{request.request_id}",
        pictures=tuple(seed + WARMUP_SEED_OFFSET for seed in request.pictures),
        headers={header_names.TRACEPARENT: parent},
    )
