# SPDX-License-Identifier: Apache-2.0
"""Each leg's policy and what it decides by; legs.py asks it, forward.py has prompts looked up by it.

The leg that prefills has the policy that the operator chose; encoders and decoders get requests by
how many they have under way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from ttft_otel import clock
from ttft_otel.guard import Guard
from ttft_otel.router.account import Account
from ttft_otel.router.choose import Asked, Choice, Policy
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
    ) -> None:
        self.fleet, self.reader, self.source = fleet, reader, source
        self.leg = fleet.prefilling
        self.late = 0  # requests that no instance could have answered in time
        self._options, self._window = options or Options(), window
        self._desks = {self.leg: self._desk(logic)}
        self._others = others
        self.desk.state.follow(self._known())

    def _desk(self, logic: str) -> Desk:
        index = Holders(1) if self.source is None else self.source.index
        state = State(index, self._options, Pending(window=self._window))
        return Desk(logic, POLICIES[logic](state), state)

    def at(self, leg: str) -> Desk:
        """A leg's policy."""
        found = self._desks.get(leg)
        if found is None:
            state = State(Holders(1))
            policy = POLICIES[self._others](state)
            found = self._desks[leg] = Desk(self._others, policy, state)
        return found

    @property
    def desk(self) -> Desk:
        """The leg that prefills."""
        return self._desks[self.leg]

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
        self.desk.state.follow(self._known())
        if self.source is not None:
            self.source.follow()

    def _known(self) -> set[str]:
        return {each.url for each in self.fleet.get(self.leg)}

    async def look(self, asked: Asked, path: str, trip: Trip) -> Asked:
        """The same request with its prompt's length and who has how much of it; marks the trip."""
        if self.reader is None or asked.leg != self.leg:
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
        return replace(asked, tokens=prompt.tokens, blocks=prompt.blocks, found=found)

    def tell(self) -> dict[str, dict[str, Any]]:
        """What is known of each instance of the leg that prefills, by URL, for operators."""
        state, status = self.desk.state, {} if self.source is None else self.source.status()
        fits = state.models.fits()
        found: dict[str, dict[str, Any]] = {}
        for url in sorted(self._known()):
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
