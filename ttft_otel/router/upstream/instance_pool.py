# SPDX-License-Identifier: Apache-2.0
"""The instances of every leg with their health and circuit breakers; upstream_client.py chooses from it.

health_monitor.py, admin.py and discovery.py change it. The candidates of a request are computed
when something changes, not for each request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Generic, ParamSpec

from ttft_otel.model.stages import ANSWERING_ROLES, DECODE, ENCODE, PREFILL, PREFILLING_ROLES
from ttft_otel.router.time_limits import DeadlineQueue
from ttft_otel.router.timeline import CANCELLED, Attempt
from ttft_otel.router.types import Instance

P = ParamSpec("P")


class Listeners(Generic[P]):
    """The listeners of one kind of event; all of it runs on the event loop."""

    def __init__(self) -> None:
        self._listeners: list[Callable[P, None]] = []

    def add(self, listener: Callable[P, None]) -> Callable[[], None]:
        """Call `listener` from now on; the function returned ends that, and may be called twice."""
        self._listeners.append(listener)

        def remove() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return remove

    def notify(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """It happened: call each of them, in the order in which they were added."""
        # A copy: a listener may remove itself, or add another one, while it is called.
        for listener in tuple(self._listeners):
            listener(*args, **kwargs)


MAX_CONSECUTIVE_FAILURES: Final = 5  # of requests in a row open an instance's breaker
FIRST_OPEN_PERIOD_S: Final = 2.0  # seconds that it stays open the first time
MAX_TRIAL_S: Final = 10.0  # seconds for which a half-open breaker's trial keeps others away

log: Final = logging.getLogger("ttft_otel")


class InstancePool:
    """Every leg's instances; all of it runs on the event loop, so nothing is locked.

    max_trial_s: seconds for which a half-open breaker's trial keeps others away. first_byte_timeout_s:
    seconds for an answer to begin, 0 for any time.
    """

    def __init__(
        self,
        instances_by_leg: Mapping[str, Sequence[Instance]],
        max_failures: int = MAX_CONSECUTIVE_FAILURES,
        first_open_period_s: float = FIRST_OPEN_PERIOD_S,
        max_trial_s: float = MAX_TRIAL_S,
        first_byte_timeout_s: float = 0.0,
    ) -> None:
        timeout_s = first_byte_timeout_s
        self._deadlines = DeadlineQueue[Attempt](timeout_s) if timeout_s else None
        self.max_failures = max_failures
        self.first_open_period_s = first_open_period_s
        self.max_trial_s = max_trial_s
        self.failure_listeners: Listeners[[Instance]] = Listeners()  # it failed a moment ago
        self.return_listeners: Listeners[[Instance]] = Listeners()  # it was away, and is back
        self.change_listeners: Listeners[[]] = Listeners()  # there are other instances now
        self.order_listeners: Listeners[[str, str, str]] = Listeners()  # action, leg, URL
        # Where load is shared (workers/process_loads.py): a request goes to its instance, and it is over.
        self.on_sent: Callable[[Attempt], None] | None = None
        self.on_ended: Callable[[Attempt], None] | None = None
        self._away_instances: set[Instance] = set()
        self._in_flight: dict[Attempt, int] = {}  # its number as a breaker's trial, 0 for none
        self._candidates: dict[tuple[str, str], tuple[Instance, ...]] = {}
        self._set_members({leg: tuple(instances) for leg, instances in instances_by_leg.items()})

    def _set_members(self, instances_by_leg: Mapping[str, tuple[Instance, ...]]) -> None:
        """Replace the instances of each leg, and compute what depends on which legs have some.

        prefilling_leg: the leg that prefills. answering_leg: the leg whose response the client gets.
        has_encoders: whether there are encoders. A leg may be empty until its instances are found.
        """
        self._instances_by_leg = dict(instances_by_leg)
        self.prefilling_leg = self._find_first_leg(PREFILLING_ROLES)
        # requests need a decode instance too, also before the first one is found
        has_prefill = bool(self._instances_by_leg.get(PREFILL))
        self.answering_leg = DECODE if has_prefill else self._find_first_leg(ANSWERING_ROLES)
        self.has_encoders = bool(self._instances_by_leg.get(ENCODE))
        self.reset_candidates()
        self.change_listeners.notify()

    def _find_first_leg(self, legs: Sequence[str]) -> str:
        filled = (leg for leg in legs if self._instances_by_leg.get(leg))
        return next(filled, next((leg for leg in legs if leg in self._instances_by_leg), legs[-1]))

    def list_missing_legs(self) -> tuple[str, ...]:
        """The legs that every request needs but that have no instance."""
        needed = (PREFILL, DECODE) if self.answering_leg == DECODE else (self.answering_leg,)
        return tuple(leg for leg in needed if not self.get(leg))

    def get(self, leg: str, default: tuple[Instance, ...] = ()) -> tuple[Instance, ...]:
        return self._instances_by_leg.get(leg, default)

    def list_legs(self) -> tuple[str, ...]:
        return tuple(leg for leg, instances in self._instances_by_leg.items() if instances)

    def __iter__(self) -> Iterator[Instance]:
        return (each for instances in self._instances_by_leg.values() for each in instances)

    def get_candidates(self, leg: str, model: str = "") -> tuple[Instance, ...]:
        """The instances of `leg` that a request for `model` may go to now; empty if there is none."""
        candidates = self._candidates.get((leg, model))
        return self._find_candidates(leg, model) if candidates is None else candidates

    def _find_candidates(self, leg: str, model: str) -> tuple[Instance, ...]:
        instances = self.get(leg)
        if model and not self.lists_model(leg, model):
            return self.get_candidates(leg)  # not cached: clients can send any number of names
        reachable = [
            instance
            for instance in instances
            if instance.state != "draining"
            and instance.breaker.admits_requests
            and (not model or instance.models is None or model in instance.models)
        ]
        # If all have failed, probes may be wrong: try one rather than reject the request.
        candidates = tuple(
            instance for instance in reachable if instance.state == "healthy"
        ) or tuple(reachable)
        self._candidates[leg, model] = candidates
        return candidates

    def __len__(self) -> int:
        return sum(map(len, self._instances_by_leg.values()))

    def lists_model(self, leg: str, model: str) -> bool:
        """Whether an instance of `leg` lists `model`."""
        for instance in self.get(leg):
            if instance.models is not None and model in instance.models:
                return True
        return False

    def knows_model(self, leg: str, model: str) -> bool:
        """Whether an instance of `leg` lists `model`, or the models of one are not known yet."""
        instances = self.get(leg)
        return not instances or any(
            each.models is None or model in each.models for each in instances
        )

    def reset_candidates(self) -> None:
        self._candidates.clear()

    # Called per request; a healthy instance costs one comparison.

    def record_sent(self, attempt: Attempt) -> None:
        instance = attempt.instance
        instance.record_sent(attempt.sent_us)
        if self._deadlines is not None:
            self._deadlines.watch(attempt)
        trial_number = 0
        if instance.breaker.state != "closed":
            trial_number = instance.breaker.begin_trial()
            asyncio.get_running_loop().call_later(
                self.max_trial_s, self._release_trial, instance, trial_number
            )
            self.reset_candidates()
        self._in_flight[attempt] = trial_number
        if self.on_sent is not None:
            self.on_sent(attempt)

    def record_begun(self, attempt: Attempt) -> None:
        """Close the breaker of its instance, which has begun a good answer; errors are recorded at its end.

        Headers are none: a server whose engine hangs sends those of a stream.
        """
        attempt.instance.record_begun(attempt.first_byte_us)
        if attempt.status < 500 and attempt.instance.breaker.close():
            log.info(
                "ttft-otel: circuit breaker closed for %s: it responds and gets its full share again",
                describe_instance(attempt.instance),
            )
            self.reset_candidates()

    def record_failure(self, instance: Instance, reason: str, is_unreachable: bool = False) -> None:
        """Count a failure of `instance`, which may open its breaker; `is_unreachable` marks it failed too."""
        # Another replica has seen the other failures: one here is proof enough that it is the instance.
        max_failures = 1 if instance.breaker_openers else self.max_failures
        has_to_open = instance.breaker.record_failure(max_failures)
        if is_unreachable and instance.state == "healthy":
            self.mark_failed(instance, reason)
        if has_to_open:
            open_period_s = instance.breaker.open(self.first_open_period_s)
            self.reset_candidates()
            log.warning(
                "ttft-otel: circuit breaker open for %s for %.1f s: %s",
                describe_instance(instance),
                open_period_s,
                reason,
            )
            asyncio.get_running_loop().call_later(
                open_period_s, self._end_open_period, instance, instance.breaker.opening_number
            )

    def record_ended(self, attempt: Attempt) -> None:
        """Uncount `attempt`, however it ended, and record its result. Idempotent."""
        trial_number = self._in_flight.pop(attempt, None)
        if trial_number is None:
            return
        instance = attempt.instance
        instance.record_ended(bool(attempt.first_byte_us))
        if self._deadlines is not None:
            self._deadlines.forget(attempt)
        if attempt.load_entry is not None:
            attempt.load_entry.record_end()
        if self.on_ended is not None:
            self.on_ended(attempt)
        error = attempt.error
        # Statuses are numbers, and what broke off has the name of an exception.
        has_broken = bool(error) and not error.isdigit()
        instance.attempt_results[error if has_broken else f"{attempt.status // 100}xx"] += 1
        if trial_number:  # if it was cancelled, the next request is a trial
            self._release_trial(instance, trial_number)
        if has_broken and error != CANCELLED:
            # the failure of a retried attempt was recorded already
            if attempt.is_instance_failure and not attempt.is_lost:
                self.record_failure(instance, f"{error} while streaming its response")
        elif instance.breaker.consecutive_failures and 0 < attempt.status < 500:
            instance.breaker.record_success()

    def _release_trial(self, instance: Instance, trial_number: int = 0) -> None:
        if instance.breaker.release_trial(trial_number):
            self.reset_candidates()

    def _end_open_period(self, instance: Instance, opening_number: int) -> None:
        if instance.breaker.opening_number == opening_number and instance.breaker.half_open():
            self.reset_candidates()

    # Called by health probes, operators and discovery.

    def mark_failed(self, instance: Instance, reason: str) -> None:
        """Exclude `instance` until a health probe succeeds; `reason` is for the log."""
        self._away_instances.add(instance)
        if instance.state == "healthy":
            instance.state = "failed"
            self.reset_candidates()
            log.warning(
                "ttft-otel: %s failed, no requests until a health probe succeeds: %s",
                describe_instance(instance),
                reason,
            )
            self.failure_listeners.notify(instance)

    def mark_healthy(self, instance: Instance) -> None:
        """Readmit `instance` after a successful probe; an open breaker becomes half-open at once.

        A half-open one admits the next request, also if a trial is in flight: a plain answer may be long.
        """
        self._release_trial(instance)
        if instance in self._away_instances:
            self._away_instances.discard(instance)
            self.return_listeners.notify(instance)
        if instance.state == "failed":
            instance.state = "healthy"
            instance.breaker.half_open()
            self.reset_candidates()
            log.warning(
                "ttft-otel: %s is healthy again: its probe succeeded, requests go to it",
                describe_instance(instance),
            )

    def set_draining(self, instance: Instance, is_draining: bool) -> None:
        """Exclude `instance` from new requests while `is_draining`; otherwise it counts as healthy again."""
        if (instance.state == "draining") != is_draining:
            instance.state = "draining" if is_draining else "healthy"
            self.reset_candidates()

    def find_instance(self, leg: str, url: str) -> Instance | None:
        return next((each for each in self.get(leg) if each.url == url), None)

    def add_instance(self, instance: Instance) -> None:
        self._set_members(
            {**self._instances_by_leg, instance.leg: (*self.get(instance.leg), instance)}
        )

    def remove_instance(self, instance: Instance) -> None:
        """Remove `instance`; its requests in flight end normally."""
        rest = tuple(each for each in self.get(instance.leg) if each is not instance)
        self._set_members({**self._instances_by_leg, instance.leg: rest})
        self._away_instances.intersection_update(self)

    def replace_instances(
        self, instances_by_leg: Mapping[str, Sequence[Instance]]
    ) -> tuple[list[str], list[str]]:
        """Replace all instances; those that stay keep their state. Returns the URLs added and removed.

        instances_by_leg: the new ones. Requests in flight at removed ones end normally.
        """
        before = {(instance.leg, instance.url): instance for instance in self}
        after = {
            (instance.leg, instance.url): instance
            for instances in instances_by_leg.values()
            for instance in instances
        }
        self._set_members(
            {
                leg: tuple(before.get((leg, instance.url), instance) for instance in instances)
                for leg, instances in instances_by_leg.items()
            }
        )
        self._away_instances.intersection_update(self)
        added = [url for leg, url in after if (leg, url) not in before]
        return added, [url for leg, url in before if (leg, url) not in after]


def describe_instance(instance: Instance) -> str:
    """How log lines name an instance: its leg and URL."""
    return f"{instance.leg} instance {instance.url}"
