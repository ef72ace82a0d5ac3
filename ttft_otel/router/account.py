# SPDX-License-Identifier: Apache-2.0
"""One attempt's entry in the books that its leg's policy decides by; legs.py opens it, fleet.py ends it.

It leaves at the first token or with the attempt, whichever comes first: where the fleet counts a
request out, the policy does too.
"""

from __future__ import annotations

from typing import Final

from ttft_otel import clock
from ttft_otel.router.choose import ENCODE, Asked, Choice
from ttft_otel.router.policies.pending import SECOND
from ttft_otel.router.policies.state import State
from ttft_otel.timing import Timing

# What keeps the engine from the next prompt, and an encoder from the next item; the work itself first.
PREFILL: Final = ("prefill.compute", "dispatch", "prefill.stall", "sample")
ENCODER: Final = ("encoder.compute", "dispatch", "ec.transfer")
QUEUES: Final = ("encoder.queue", "prefill.queue")  # one wait with two names
# Its streams begin with events that come before the engine is asked.
EVENTS: Final = "/v1/responses"
DELTA: Final = b'.delta"'


class Account:
    """One entry. `idle`: the instance had nothing else to begin; `early`: its first token is to come.

    `asks`: its breakdown is asked for by the policy and by nobody else. `error`: seconds that its first
    token came later than predicted, once that is known.
    """

    __slots__ = ("asked", "asks", "cached", "early", "error", "idle", "key", "sent", "state", "url")

    def __init__(self, state: State, asked: Asked, choice: Choice, attempt: str, now: int) -> None:
        self.state, self.asked, self.cached, self.sent = state, asked, choice.cached, now
        self.key = (asked.leg, attempt)  # clients choose request ids, and may choose one twice
        self.url = choice.instance.url
        self.idle = not state.pending.at(self.url).entries
        self.asks = self.early = False
        self.error: float | None = None
        state.sent(asked, choice, now, self.key)

    def first(self, at: int, told: Timing | None, streaming: bool) -> None:
        """The first token, or an answer as a whole; `told` by the server, if it tells."""
        if told is None:
            self._untold(at, streaming)
            return
        at -= told.rest or 0
        wanted = ENCODER if self.asked.leg == ENCODE else PREFILL
        service = sum(told.stages.get(name, 0) for name in wanted)
        computed = wanted[0] in told.stages
        if computed:
            queue = sum(told.stages.get(name, 0) for name in QUEUES)
            besides = at - self.sent - service - queue
            self.state.beside(self.url, max(besides, 0) / SECOND)
        seconds = service / SECOND
        cached, tokens = self.cached, 0 if self.asked.guessed else self.asked.tokens
        if told.tokens is not None:
            own, step = told.tokens.own, told.tokens.step
            cached, tokens = told.tokens.cached, told.tokens.prompt
            if 0 < own < step:  # the rest of these steps was other requests'
                seconds *= own / step
        known = computed and tokens
        measured = seconds if known else None
        self.error = self.state.first(self.asked, at, measured, cached, self.key, tokens)

    def _untold(self, at: int, streaming: bool) -> None:
        """Nobody measured the prefill: a request that had the instance to itself shows its length."""
        if streaming and self.asked.path.partition("?")[0] == EVENTS:
            self.early = True
            return
        alone = self.idle and streaming and self.asked.tokens and not self.asked.guessed
        seconds = (at - self.sent) / SECOND if alone else None
        self.error = self.state.first(
            self.asked, at, seconds, self.cached, self.key, measured=streaming
        )

    def heard(self, data: bytes) -> None:
        """More of an answer whose first events were none of the engine's: its tokens may have begun."""
        if DELTA in data:
            self.early = False
            self.state.first(self.asked, clock.now(), None, self.cached, self.key, measured=False)

    def left(self) -> None:
        """The attempt is over, however; idempotent."""
        self.state.left(self.asked, clock.now(), self.key)
