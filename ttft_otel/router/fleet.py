# SPDX-License-Identifier: Apache-2.0
"""The instances of every leg and how they are; legs.py takes from it, health.py and admin.py tell it.

What a request may go to is worked out when something changes, not for each request.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from ttft_otel.router.choose import Instance
from ttft_otel.router.path import CUT, Attempt

FAILURES: Final = 5  # of requests in a row open an instance's breaker
PAUSE: Final = 2.0  # seconds that it stays open the first time, doubled each time up to LONGEST
LONGEST: Final = 30.0
PREFILLS: Final = ("prefill", "prefill_decode", "mono")

log: Final = logging.getLogger("ttft_otel")


class Fleet:
    """Every leg's instances; all of it runs on the event loop, so nothing is locked."""

    def __init__(
        self,
        legs: Mapping[str, Sequence[Instance]],
        failures: int = FAILURES,
        pause: float = PAUSE,
    ) -> None:
        self._legs = {leg: tuple(instances) for leg, instances in legs.items()}
        self.failures, self.pause = failures, pause
        self.wake: Callable[[Instance], None] = lambda _: None  # health.py: it failed, look soon
        self.back: Callable[[Instance], None] = lambda _: None  # prefixes: it was away, and is back
        self._away: set[Instance] = set()
        self._offered: dict[tuple[str, str], tuple[Instance, ...]] = {}

    def get(self, leg: str, default: tuple[Instance, ...] = ()) -> tuple[Instance, ...]:
        """A leg's instances, whatever their state."""
        return self._legs.get(leg, default)

    def legs(self) -> tuple[str, ...]:
        """The legs that have instances."""
        return tuple(leg for leg, instances in self._legs.items() if instances)

    @property
    def prefilling(self) -> str:
        """The leg that prefills: the first there is."""
        return next((leg for leg in PREFILLS if self.get(leg)), PREFILLS[-1])

    def __iter__(self) -> Iterator[Instance]:
        return (each for instances in self._legs.values() for each in instances)

    def offered(self, leg: str, model: str = "") -> tuple[Instance, ...]:
        """Those that a request for this model may go to now; empty when there is none."""
        found = self._offered.get((leg, model))
        return self._offer(leg, model) if found is None else found

    def _offer(self, leg: str, model: str) -> tuple[Instance, ...]:
        every = self.get(leg)
        if model and not any(model in (each.models or ()) for each in every):
            return self.offered(leg)  # not kept: clients can think up any number of names
        closed = [
            each
            for each in every
            if each.state != "draining"
            and each.breaker != "open"
            and not each.trial
            and (not model or each.models is None or model in each.models)
        ]
        # with all of them failed the probes may be wrong; to try costs less than to refuse
        found = tuple(each for each in closed if each.state == "healthy") or tuple(closed)
        self._offered[leg, model] = found
        return found

    def __len__(self) -> int:
        return sum(map(len, self._legs.values()))

    def knows(self, leg: str, model: str) -> bool:
        """Whether an instance lists this model, or one has not said yet what it has."""
        every = self.get(leg)
        return not every or any(each.models is None or model in each.models for each in every)

    def changed(self) -> None:
        """Something about an instance is different: work out anew who is offered."""
        self._offered.clear()

    # What requests tell. Hot: one comparison when all is well.

    def take(self, attempt: Attempt, instance: Instance) -> None:
        """A request goes there now."""
        attempt.instance, attempt.open = instance, True
        instance.in_flight += 1
        if instance.breaker != "closed":
            attempt.trial = instance.trial = True
            self.changed()

    def good(self, instance: Instance) -> None:
        """It answers; whether it answers well is known when the request has left."""
        if instance.breaker != "closed":
            log.warning("ttft-otel: %s serves again", name(instance))
            instance.breaker, instance.trial = "closed", False
            self.changed()

    def bad(self, instance: Instance, why: str, unreachable: bool = False) -> None:
        """It did not answer, or said that it cannot; `unreachable`: nobody is there."""
        instance.failures += 1
        if unreachable and instance.state == "healthy":
            self.fail(instance, why)
        if instance.failures >= self.failures or instance.breaker == "half-open":
            self._open(instance, why)

    def left(self, attempt: Attempt) -> None:
        """A request is no longer there, however it ended. Idempotent."""
        instance = attempt.instance
        if not attempt.open or instance is None:
            return
        attempt.open = False
        instance.in_flight -= 1
        if attempt.account is not None:
            attempt.account.left()
        error = attempt.error
        broke = bool(error) and not error.isdigit()
        instance.results[error if broke else f"{attempt.status // 100}xx"] += 1
        if attempt.trial and instance.trial:  # a trial that was cancelled: the next request is one
            instance.trial = False
            self.changed()
        if broke and not attempt.lost and error != CUT:
            self.bad(instance, f"{error} within its answer")
        elif instance.failures and 0 < attempt.status < 500:
            instance.failures = instance.opened = 0

    def _open(self, instance: Instance, why: str) -> None:
        instance.trial = False
        self.changed()
        if instance.breaker == "open":
            return
        pause = min(self.pause * 2**instance.opened, LONGEST) * random.uniform(0.8, 1.2)
        instance.breaker = "open"
        instance.opened = min(instance.opened + 1, 16)
        instance.pause += 1
        log.warning("ttft-otel: %s gets nothing for %.1f s: %s", name(instance), pause, why)
        asyncio.get_running_loop().call_later(pause, self._over, instance, instance.pause)

    def _over(self, instance: Instance, pause: int) -> None:
        if instance.pause == pause:
            self._half(instance)

    def _half(self, instance: Instance) -> None:
        if instance.breaker == "open":
            instance.breaker = "half-open"
            self.changed()

    # What probes and operators tell.

    def fail(self, instance: Instance, why: str) -> None:
        """Take it out until a probe succeeds."""
        self._away.add(instance)
        if instance.state == "healthy":
            instance.state = "failed"
            self.changed()
            log.warning("ttft-otel: %s failed: %s", name(instance), why)
            self.wake(instance)

    def heal(self, instance: Instance) -> None:
        """A probe succeeded: it is back; an open breaker gives it one request at once."""
        if instance in self._away:
            self._away.discard(instance)
            self.back(instance)
        if instance.state == "failed":
            instance.state = "healthy"
            self._half(instance)
            self.changed()
            log.warning("ttft-otel: %s is back", name(instance))

    def drain(self, instance: Instance, drain: bool) -> None:
        """Nothing new for it; or again something, until a probe or a request says otherwise."""
        if (instance.state == "draining") != drain:
            instance.state = "draining" if drain else "healthy"
            self.changed()

    def find(self, leg: str, url: str) -> Instance | None:
        """The instance with this URL."""
        return next((each for each in self.get(leg) if each.url == url), None)

    def add(self, instance: Instance) -> None:
        """One more of its leg."""
        self._legs[instance.leg] = (*self.get(instance.leg), instance)
        self.changed()

    def remove(self, instance: Instance) -> None:
        """One less; its requests under way end as they would have."""
        self._legs[instance.leg] = tuple(
            each for each in self.get(instance.leg) if each is not instance
        )
        self._away.intersection_update(self)
        self.changed()

    def replace(self, legs: Mapping[str, Sequence[Instance]]) -> tuple[list[str], list[str]]:
        """Other instances from now on; those that stay keep their state. URLs added and removed.

        Requests under way at one that goes end as they would have.
        """
        before = {(each.leg, each.url): each for each in self}
        after = {(each.leg, each.url): each for instances in legs.values() for each in instances}
        self._legs = {
            leg: tuple(before.get((leg, each.url), each) for each in instances)
            for leg, instances in legs.items()
        }
        self._away.intersection_update(self)
        self.changed()
        added = [url for leg, url in after if (leg, url) not in before]
        return added, [url for leg, url in before if (leg, url) not in after]


def name(instance: Instance) -> str:
    """What logs call it."""
    return f"{instance.leg} instance {instance.url}"
