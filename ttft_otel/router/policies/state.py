# SPDX-License-Identifier: Apache-2.0
"""What policies decide by, and how it learns: whoever sends requests tells it, with the time.

`sent` after each choice, then `first` at the first token or `left` at any other end.
"""

from __future__ import annotations

import random
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Final, Literal

from ttft_otel.router.choose import Asked, Choice, Instance
from ttft_otel.router.policies.index import Index
from ttft_otel.router.policies.model import MOST, Models, Quality
from ttft_otel.router.policies.pending import SECOND, Entry, Key, Load, Pending
from ttft_otel.router.policies.work import work

LATELY: Final = 0.1  # of an average is its latest sample


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
    besides: dict[str, float] = field(default_factory=dict)  # seconds around queue and prefill
    urls: Set[str] | None = None  # instances to learn about; None: any
    random: random.Random = field(default_factory=random.Random)

    def cached(
        self, request: Asked, instances: Sequence[Instance], loads: Sequence[Load] = ()
    ) -> list[int]:
        """Prompt tokens that each instance need not compute; `loads`: nor those it will have by then."""
        blocks, size = request.blocks, self.index.size or 1
        urls = [each.url for each in instances]
        if request.found is None:
            found = self.index.match(blocks, urls)
        else:
            found = [request.found.get(url, 0) // size for url in urls]
        _go_on(found, blocks, loads)
        if self.options.shared:
            found = [max(found)] * len(found)
        most = max(0, request.tokens - 1) // size  # the engine computes the last token always
        if max(found) > most:
            found = [min(depth, most) for depth in found]
        return [depth * size for depth in found]

    def sent(self, request: Asked, choice: Choice, now: int, key: Key | None = None) -> None:
        """The request goes there now; `key` where its id does not tell it from others."""
        todo = work(request.tokens, choice.cached)
        entry = Entry(choice.instance.url, now, todo, request.blocks, self.expected(choice))
        self.pending.sent(key or (request.leg, request.request_id), entry)

    def expected(self, choice: Choice) -> float | None:
        """Its TTFT in seconds: queue and prefill as predicted, and what came besides lately."""
        if choice.predicted is None:
            return None
        return choice.predicted + self.besides.get(choice.instance.url, 0.0)

    def beside(self, url: str, seconds: float) -> None:
        """What a first token took besides queue and prefill: the way there and back, tokenizing."""
        if self._gone(url):
            return
        if url not in self.besides and len(self.besides) >= MOST:
            del self.besides[next(iter(self.besides))]
        before = self.besides.get(url, seconds)
        self.besides[url] = before + LATELY * (seconds - before)

    def first(
        self,
        request: Asked,
        now: int,
        seconds: float | None,
        cached: int,
        key: Key | None = None,
        tokens: int = 0,
        measured: bool = True,
    ) -> float | None:
        """Its first token came after a prefill of so many seconds, with so many tokens cached.

        seconds: None where nobody has measured them; tokens: the prompt's, if the engine told them;
        measured: it is known when that token came. Returns how many seconds later than predicted that
        was, if it counts as an outcome.
        """
        entry = self.left(request, now, key)
        if entry is None or self._gone(entry.url):
            return None
        self.index.served(entry.url, request.blocks)
        if seconds is not None:
            tokens = tokens or request.tokens
            done = work(tokens, min(cached, tokens))
            self.models.add(request.model, entry.url, done, seconds)
        if entry.predicted is None or not measured:
            return None
        if entry.url not in self.outcomes and len(self.outcomes) >= MOST:
            del self.outcomes[next(iter(self.outcomes))]
        took = (now - entry.sent) / SECOND
        self.outcomes.setdefault(entry.url, Quality()).add(entry.predicted, took)
        return took - entry.predicted

    def left(self, request: Asked, now: int, key: Key | None = None) -> Entry | None:
        """It ended, however; idempotent."""
        return self.pending.left(key or (request.leg, request.request_id), now)

    def follow(self, urls: Set[str]) -> None:
        """Learn about these instances and no others."""
        for url in (self.urls or frozenset()) - urls:
            self.forget(url)
        self.urls = urls

    def forget(self, url: str) -> None:
        """The instance is gone; what it had been sent ends as it would have."""
        self.outcomes.pop(url, None)
        self.besides.pop(url, None)
        self.models.drop(url)

    def _gone(self, url: str) -> bool:
        return self.urls is not None and url not in self.urls

    def least(self, scores: Sequence[float]) -> int:
        """The place of the least score; among equal ones any."""
        least = min(scores)
        if scores.count(least) == 1:
            return scores.index(least)
        return self.random.choice([at for at, score in enumerate(scores) if score == least])


def _go_on(found: list[int], blocks: Sequence[int], loads: Sequence[Load]) -> None:
    """From the blocks that instances have to those that they will have."""
    length = len(blocks)
    for at, load in enumerate(loads):
        depth, coming = found[at], load.queued
        while depth < length and blocks[depth] in coming:
            depth += 1
        found[at] = depth
