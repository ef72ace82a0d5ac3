# SPDX-License-Identifier: Apache-2.0
"""Each leg's policy and what it decides by; legs.py asks it, forward.py has prompts looked up by it.

The leg that prefills has the policy that the operator chose, and encoders another one; decoders get
requests by how many they have under way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from ttft_otel import clock
from ttft_otel.guard import Guard
from ttft_otel.router.account import Account
from ttft_otel.router.choose import ENCODE, Asked, Choice, Policy
from ttft_otel.router.fleet import Fleet
from ttft_otel.router.path import Attempt, Look, Trip
from ttft_otel.router.policies.index import Holders
from ttft_otel.router.policies.pending import WINDOW, Pending
from ttft_otel.router.policies.registry import POLICIES
from ttft_otel.router.policies.state import Options, State

if TYPE_CHECKING:
    from ttft_otel.router.prefixes.source import Source
    from ttft_otel.router.prompts.prompt import Reader

DEFAULT: Final = "round_robin"  # alike for every request, and needs to know nothing of any
OTHERS: Final = "least_requests"
BYTES: Final = 4  # of a body for each token, where nobody could count them
MOST: Final = 8192  # tokens that such a guess goes up to: images are long, too


@dataclass(slots=True)
class Desk:
    """One leg's policy, and its books if it needs any."""

    logic: str
    policy: Policy
    state: State

    def book(self, asked: Asked, choice: Choice, attempt: Attempt) -> None:
        """The request goes there now."""
        attempt.policy, attempt.choice = self.logic, choice
        if self.policy.books:
            attempt.predicted = self.state.expected(choice)
            attempt.account = Account(self.state, asked, choice, attempt.span_id, attempt.sent)


class Routing:
    """The policies of one router; without reader or source nothing is known about prompts."""

    def __init__(
        self,
        fleet: Fleet,
        logic: str = DEFAULT,
        options: Options | None = None,
        window: int = WINDOW,
        reader: Reader | None = None,
        source: Source | None = None,
        others: str = OTHERS,
        encoders: str = "",
    ) -> None:
        self.fleet, self.reader, self.source = fleet, reader, source
        self.leg = fleet.prefilling
        self.late = 0  # requests that no instance could have answered in time
        self._options, self._window = options or Options(), window
        self._desks = {self.leg: self._desk(logic)}
        self._others = others
        if fleet.get(ENCODE):
            self._desks[ENCODE] = self._beside(encoders or others)
        self._learn()

    def _desk(self, logic: str) -> Desk:
        index = Holders(1) if self.source is None else self.source.index
        state = State(index, self._options, Pending(window=self._window))
        return Desk(logic, POLICIES[logic](state), state)

    def at(self, leg: str) -> Desk:
        """A leg's policy."""
        found = self._desks.get(leg)
        if found is None:
            found = self._desks[leg] = self._beside(self._others)
        return found

    def _beside(self, logic: str) -> Desk:
        """A leg that has no prefixes, and nobody to refuse."""
        options = replace(self._options, shared=False, slo=0.0)
        state = State(Holders(1), options, Pending(window=self._window))
        return Desk(logic, POLICIES[logic](state), state)

    @property
    def desk(self) -> Desk:
        """The leg that prefills."""
        return self._desks[self.leg]

    @property
    def told(self) -> tuple[str, ...]:
        """The legs of which there is something to tell: the one that prefills, encoders with books."""
        encoders = self._desks.get(ENCODE)
        return (self.leg, ENCODE) if encoders and encoders.policy.books else (self.leg,)

    async def start(self, session: aiohttp.ClientSession) -> None:
        """Begin to learn what instances have cached."""
        if self.reader is not None:
            await self.reader.start(session)
        if self.source is not None:
            await self.source.start(session, self.fleet)

    async def close(self) -> None:
        """Learn nothing any more."""
        if self.source is not None:
            await self.source.close()
        if self.reader is not None:
            await self.reader.close()

    def follow(self) -> None:
        """The fleet's instances are others now."""
        self._learn()
        if self.source is not None:
            self.source.follow()

    def _learn(self) -> None:
        for leg, desk in self._desks.items():
            desk.state.follow(self._known(leg))

    def _known(self, leg: str) -> set[str]:
        return {each.url for each in self.fleet.get(leg)}

    async def look(self, asked: Asked, path: str, trip: Trip, media: bool = False) -> Asked:
        """The same request with its prompt's length and who has how much of it; marks the trip.

        media: it has items for encoders, whatever its leg is.
        """
        wanted = asked.leg == self.leg or (media and self.at(ENCODE).policy.prompts)
        if self.reader is None or not wanted:
            return asked
        trip.look = Look(clock.now())
        with Guard("router.look"):
            asked = await self._look(asked, path, trip.look, self.reader)
        if not asked.tokens:
            guess = min(len(asked.body) // BYTES, MOST)
            asked = replace(asked, tokens=guess, guessed=True)
        trip.look.found = clock.now()
        trip.look.read = trip.look.read or trip.look.found
        return asked

    async def _look(self, asked: Asked, path: str, look: Look, reader: Reader) -> Asked:
        index = self.desk.state.index
        prompt = await reader.read(path, asked.model, asked.body, index.size)
        look.read = clock.now()
        if prompt is None or not prompt.tokens:
            return asked
        urls = [each.url for each in self.fleet.get(self.leg)]
        found: Mapping[str, int] | None = None
        if self.source is not None:
            found = await self.source.lookup(asked.model, prompt, urls)
        if found is None:
            depths = index.match(prompt.blocks, urls)
            found = {url: depth * index.size for url, depth in zip(urls, depths, strict=True)}
        return replace(
            asked,
            tokens=prompt.tokens,
            blocks=prompt.blocks,
            found=found,
            items=prompt.encoder_items,
        )

    def foresee(self, asked: Asked, items: Sequence[Asked]) -> None:
        """Before encoders get these items: can anybody begin to answer in time after that?

        Books nothing. Raises Late.
        """
        offered = self.fleet.offered(asked.leg, asked.model)
        if self._options.slo and asked.leg == self.leg and offered:
            moment = clock.now()
            ahead, queued = self._ahead(items, moment)
            asked = replace(asked, ahead=ahead, queued=queued)
            self.desk.policy.choose(asked, offered, moment, True)

    def _ahead(self, items: Sequence[Asked], now: int) -> tuple[float, bool]:
        """Seconds that the slowest item will take, and whether every encoder has others to do first."""
        desk, known = self.at(ENCODE), [each for each in items if not each.guessed]
        item = max(known, key=lambda each: each.tokens, default=None)
        offered = () if item is None else self.fleet.offered(ENCODE, item.model)
        if item is None or not offered or not desk.policy.learns:
            return 0.0, False
        seconds = desk.state.expected(desk.policy.choose(item, offered, now, True))
        return seconds or 0.0, all(desk.state.pending.at(each.url).entries for each in offered)

    def tell(self, leg: str = "") -> dict[str, dict[str, Any]]:
        """What is known of each instance of a leg, by URL, for operators; of the one that prefills."""
        leg = leg or self.leg
        source = self.source if leg == self.leg else None
        state, status = self.at(leg).state, {} if source is None else source.status()
        fits = state.models.fits()
        found: dict[str, dict[str, Any]] = {}
        for url in sorted(self._known(leg)):
            load, outcome = state.pending.at(url), state.outcomes.get(url)
            found[url] = {
                "pending": {
                    "requests": len(load.entries),
                    "tokens": load.fresh,
                    "pairs": load.pairs,
                },
                "besides": state.besides.get(url),
                "fits": {model: fit.tell() for (model, at), fit in fits.items() if at == url},
                "predictions": None if outcome is None else outcome.tell(),
                "index": status.get(url),
            }
        return found
