# SPDX-License-Identifier: Apache-2.0
"""What policies decide by, and how it learns: whoever sends requests tells it, with the time.

`sent` after each choice, then `first` at the first token or `left` at any other end.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ttft_otel.router.choose import Asked, Choice, Instance
from ttft_otel.router.policies.index import Index
from ttft_otel.router.policies.model import MOST, Models, Quality
from ttft_otel.router.policies.pending import SECOND, Entry, Pending
from ttft_otel.router.policies.work import work


@dataclass(frozen=True, slots=True)
class Options:
    """What an operator may set.

    `session`: the header or body key that names a client's session. `threshold`: tokens that a
    cached prefix may be shorter than the prompt. `shared`: what one instance has cached, all have.
    `slo`: seconds within which a first token must come, 0 for none.
    """

    session: str = ""
    threshold: int = 2000
    score: Literal["trapezoid", "calibrated"] = "calibrated"
    shared: bool = False
    slo: float = 0.0


@dataclass(slots=True)
class State:
    """One leg's accounts, cached prefixes and models; `random` breaks ties."""

    index: Index
    options: Options = field(default_factory=Options)
    pending: Pending = field(default_factory=Pending)
    models: Models = field(default_factory=Models)
    outcomes: dict[str, Quality] = field(default_factory=dict)  # of predicted TTFTs, by instance
    random: random.Random = field(default_factory=random.Random)

    def cached(
        self, request: Asked, instances: Sequence[Instance], queued: bool = False
    ) -> list[int]:
        """Prompt tokens that each instance need not compute; `queued`: nor those it will have by then."""
        blocks, size = request.blocks, self.index.size
        found = self.index.match(blocks, [each.url for each in instances])
        if queued:
            load_of, length = self.pending.at, len(blocks)
            for at, each in enumerate(instances):
                depth = found[at]
                coming = load_of(each.url).queued
                if coming:
                    while depth < length and blocks[depth] in coming:
                        depth += 1
                    found[at] = depth
        if self.options.shared:
            found = [max(found)] * len(found)
        most = max(0, request.tokens - 1) // size  # the engine computes the last token always
        return [min(depth, most) * size for depth in found]

    def sent(self, request: Asked, choice: Choice, now: int) -> None:
        """The request goes there now."""
        todo = work(request.tokens, choice.cached)
        entry = Entry(choice.instance.url, now, todo, request.blocks, choice.predicted)
        self.pending.sent((request.leg, request.request_id), entry)

    def first(self, request: Asked, now: int, seconds: float, cached: int) -> None:
        """Its first token came after a prefill of so many seconds, with so many tokens cached."""
        entry = self.left(request, now)
        if entry is None:
            return
        self.index.served(entry.url, request.blocks)
        self.models.add(request.model, entry.url, work(request.tokens, cached), seconds)
        if entry.predicted is not None:
            if entry.url not in self.outcomes and len(self.outcomes) >= MOST:
                del self.outcomes[next(iter(self.outcomes))]
            quality = self.outcomes.setdefault(entry.url, Quality())
            quality.add(entry.predicted, (now - entry.sent) / SECOND)

    def left(self, request: Asked, now: int) -> Entry | None:
        """It ended, however; idempotent."""
        return self.pending.left((request.leg, request.request_id), now)

    def least(self, scores: Sequence[float]) -> int:
        """The place of the least score; among equal ones any."""
        least = min(scores)
        if scores.count(least) == 1:
            return scores.index(least)
        return self.random.choice([at for at, score in enumerate(scores) if score == least])
