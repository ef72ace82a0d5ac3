# SPDX-License-Identifier: Apache-2.0
"""Probes the health of every instance and reads its models, for instance_pool.py."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any, Final

import msgspec

from ttft_otel.model.endpoints import MODELS_PATH
from ttft_otel.router.time_limits import wait_at_most
from ttft_otel.router.types import Instance
from ttft_otel.router.upstream.failures import describe_error, is_resource_shortage
from ttft_otel.router.upstream.instance_pool import InstancePool, describe_instance
from ttft_otel.router.upstream.query_client import QUERY_ERRORS, QueryClient

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
