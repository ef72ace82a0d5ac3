# SPDX-License-Identifier: Apache-2.0
"""The instances of every leg with health, models and circuit breakers; upstream_client.py chooses from them.

HealthMonitor, admin.py and discovery.py change the pool. The candidates of a request are computed
when something changes, not for each request.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import monotonic
from typing import Any, Final, Generic, ParamSpec

import msgspec

from ttft_otel.model.endpoints import MODELS_PATH
from ttft_otel.model.names import keys
from ttft_otel.model.stages import ANSWERING_ROLES, DECODE, ENCODE, PREFILL, PREFILLING_ROLES
from ttft_otel.router.time_limits import DeadlineQueue, wait_at_most
from ttft_otel.router.timeline import Attempt
from ttft_otel.router.types import Instance
from ttft_otel.router.upstream.connection_pool import QUERY_ERRORS, QueryClient
from ttft_otel.router.upstream.failures import describe_error, is_resource_shortage

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
PROBE_INTERVAL_S: Final = 5.0  # seconds between two probes of a healthy instance
FAILED_PROBE_INTERVAL_S: Final = 1.0  # seconds between two probes of a failed instance
MAX_MISSED_PROBES: Final = 2  # consecutive time-outs; a busy server may miss one
PROBES_PER_MODEL_CHECK: Final = 6  # probes between two requests for its models
# Of one instance's list of models: one that has more, or longer names, is not read.
MAX_MODELS_BYTES: Final = 1 << 20
MAX_MODELS: Final = 1024
MAX_MODEL_NAME_CHARS: Final = 256
MODELS_KEPT_S: Final = 1.0  # seconds for which what the instances have said of their models is kept
MAX_MODEL_ROUNDS: Final = 64  # of callers with different keys, the oldest is forgotten

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
        # Where load is shared (workers/messages.py): a request goes to its instance, and it is over.
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
        if has_broken and error != keys.ERROR_CANCELLED:
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


class HealthMonitor:
    """Runs one probing task per instance, until `close`.

    interval_s: seconds between probes.
    """

    queries: QueryClient  # from start() on

    def __init__(self, pool: InstancePool, interval_s: float = PROBE_INTERVAL_S) -> None:
        self.pool = pool
        self.interval_s = interval_s
        self._tasks: dict[Instance, asyncio.Task[None]] = {}
        self._wake_events: dict[Instance, asyncio.Event] = {}
        self._ending_tasks: set[asyncio.Task[None]] = set()  # cancelled, and not over yet
        self._remove_listeners: list[Callable[[], None]] = []
        self._unreadable: set[Instance] = set()  # whose list of models could not be read
        # By instances and authorization, the oldest first: when the round began, and its statuses.
        self._model_rounds: dict[
            tuple[tuple[Instance, ...], str], tuple[float, asyncio.Task[dict[Instance, int]]]
        ] = {}

    async def start(self, queries: QueryClient) -> None:
        self.queries = queries
        self._remove_listeners = [
            self.pool.failure_listeners.add(self.request_probe),
            self.pool.change_listeners.add(self.sync_instances),
        ]
        self.sync_instances()

    async def close(self) -> None:
        # Before the tasks: a change of the pool would start new ones.
        for remove in self._remove_listeners:
            remove()
        self._stop_watching(list(self._tasks))
        await asyncio.gather(*self._ending_tasks, return_exceptions=True)

    def sync_instances(self) -> None:
        """Watch the instances that are in the pool now, and no others."""
        current = set(self.pool)
        self._unreadable &= current
        self._stop_watching([instance for instance in self._tasks if instance not in current])
        for instance in current - set(self._tasks):
            self._wake_events[instance] = asyncio.Event()
            self._tasks[instance] = asyncio.create_task(self._watch_instance(instance))

    async def wait_probed(self) -> None:
        await asyncio.gather(
            *(self.probe_instance(each) for each in self.pool if not each.was_probed)
        )

    def _stop_watching(self, instances: list[Instance]) -> None:
        for instance in instances:
            self._wake_events.pop(instance, None)
            task = self._tasks.pop(instance)
            # Kept until it has ended: the event loop has only weak references to tasks.
            self._ending_tasks.add(task)
            task.add_done_callback(self._ending_tasks.discard)
            task.cancel()

    def request_probe(self, instance: Instance) -> None:
        """Probe this instance soon, whenever its turn would be."""
        if instance in self._wake_events:
            self._wake_events[instance].set()

    async def _watch_instance(self, instance: Instance) -> None:
        wake_event = self._wake_events[instance]
        probe_number = 0
        while True:
            # Seldom: a request for a model that nobody lists asks at once (proxy/admission.py).
            if await self.probe_instance(instance) and (
                instance.models is None or probe_number % PROBES_PER_MODEL_CHECK == 0
            ):
                await self.refresh_models(instance)
            probe_number += 1
            # After the probe, which has answered for the failures that were reported meanwhile.
            wake_event.clear()
            pause_s = (
                min(self.interval_s, FAILED_PROBE_INTERVAL_S)
                if instance.state == "failed"
                else self.interval_s
            )
            try:
                # jitter, so that probes of many routers and instances do not synchronise
                await wait_at_most(wake_event.wait(), pause_s * random.uniform(0.8, 1.2))
            except asyncio.TimeoutError:
                continue
            # woken because a request failed just now: give it a moment
            await asyncio.sleep(min(self.interval_s, FAILED_PROBE_INTERVAL_S) / 2)

    async def probe_instance(self, instance: Instance) -> bool:
        """Probe /health of `instance` and set its state; a status below 500 is success. Returns success."""
        reason = ""
        has_timed_out = False
        try:
            answer = await self.queries.ask(f"{instance.url}/health", max_bytes=0)
            # Below 500 it lives: it may not know /health (404), or want a key (401).
            if answer.status >= 500:
                reason = f"its /health responded with status {answer.status}"
        except asyncio.TimeoutError:
            reason = "its /health probe timed out"
            has_timed_out = True
        except QUERY_ERRORS as error:
            if is_resource_shortage(error):
                return False  # the instance was not asked
            reason = describe_error(error)
        instance.was_probed = True
        instance.missed_probes = instance.missed_probes + 1 if reason else 0
        if not reason:
            self.pool.mark_healthy(instance)
        elif not has_timed_out or instance.missed_probes >= MAX_MISSED_PROBES:
            self.pool.mark_failed(instance, reason)
        return not reason

    async def refresh_leg_models(
        self, leg: str, authorization: str = "", kept_s: float = MODELS_KEPT_S
    ) -> Mapping[Instance, int]:
        """Read /v1/models of all instances of `leg`; what `refresh_models` gives, by instance.

        However many callers ask with the same authorization, instances are asked once at a time, and not
        again for `kept_s` seconds.
        """
        # The router's own key hides the client's, so all clients are one caller.
        key = (self.pool.get(leg), self.queries.authorization or authorization)
        now_s = monotonic()
        since_s, task = self._model_rounds.get(key, (0.0, None))
        if task is None or (task.done() and now_s - since_s > kept_s):
            task = asyncio.create_task(self._ask_models(*key))
            self._model_rounds.pop(key, None)
            if len(self._model_rounds) >= MAX_MODEL_ROUNDS:
                del self._model_rounds[next(iter(self._model_rounds))]
            self._model_rounds[key] = (now_s, task)
        # Shielded: a caller that leaves must not take the answer from the others.
        return await asyncio.shield(task)

    async def _ask_models(
        self, instances: tuple[Instance, ...], authorization: str
    ) -> dict[Instance, int]:
        asking = (self.refresh_models(each, authorization) for each in instances)
        return dict(zip(instances, await asyncio.gather(*asking), strict=True))

    async def refresh_models(self, instance: Instance, authorization: str = "") -> int:
        """Read /v1/models of `instance`. Returns the status, 0 without a valid response.

        authorization: the client's header, used if the router has no key of its own.
        """
        is_needed = authorization and not self.queries.authorization
        headers = {"Authorization": authorization} if is_needed else {}
        try:
            answer = await self.queries.ask(
                f"{instance.url}{MODELS_PATH}", headers=headers, max_bytes=MAX_MODELS_BYTES
            )
            if answer.status != 200:
                return answer.status
            model_cards = parse_model_cards(answer.body)
        except ValueError as error:
            # Once for each instance: the list is asked for again and again.
            if instance not in self._unreadable:
                self._unreadable.add(instance)
                log.warning(
                    "ttft-otel: the list of models of %s cannot be read, requests for any model go to it: %s",
                    describe_instance(instance),
                    describe_error(error),
                )
            return 0
        except QUERY_ERRORS:
            return 0
        # Candidates were computed by the models; without a change they stay.
        if instance.record_model_cards(model_cards):
            self.pool.reset_candidates()
        return 200


def parse_model_cards(body: bytes) -> tuple[dict[str, Any], ...]:
    """The cards of an answer to /v1/models.

    Raises ValueError for what is no list of models, or one with too many or with a name that is too long.
    """
    try:
        fields = msgspec.json.decode(body)
    except RecursionError as error:
        raise ValueError("lists in lists") from error
    data = fields.get("data") if isinstance(fields, dict) else None
    if not isinstance(data, list):
        raise ValueError("no list of models")
    cards = tuple(
        card for card in data if isinstance(card, dict) and isinstance(card.get("id"), str)
    )
    if len(cards) > MAX_MODELS:
        raise ValueError(f"more than {MAX_MODELS} models")
    if any(len(card["id"]) > MAX_MODEL_NAME_CHARS for card in cards):
        raise ValueError(f"a model's name of more than {MAX_MODEL_NAME_CHARS} characters")
    return cards
