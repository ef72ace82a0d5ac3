# SPDX-License-Identifier: Apache-2.0
"""Probes the health of every instance and reads its models, for instance_pool.py."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, Final

import aiohttp

from ttft_otel.model.endpoints import MODELS_PATH
from ttft_otel.router.time_limits import wait_at_most
from ttft_otel.router.types import Instance
from ttft_otel.router.upstream.failures import describe_error, is_resource_shortage
from ttft_otel.router.upstream.instance_pool import InstancePool
from ttft_otel.router.upstream.instance_queries import (
    QUERY_ERRORS,
    QUERY_TIMEOUT,
    build_authorization,
)

PROBE_INTERVAL_S: Final = 5.0  # seconds between two probes of a healthy instance
FAILED_PROBE_INTERVAL_S: Final = 1.0  # seconds between two probes of a failed instance
MAX_MISSED_PROBES: Final = 2  # consecutive time-outs; a busy server may miss one
PROBES_PER_MODEL_CHECK: Final = 6  # probes between two requests for its models


class HealthMonitor:
    """Runs one probing task per instance, until `close`.

    interval_s: seconds between probes. api_key: for /v1/models, "" for none.
    """

    def __init__(
        self, pool: InstancePool, interval_s: float = PROBE_INTERVAL_S, api_key: str = ""
    ) -> None:
        self.pool, self.interval_s = pool, interval_s
        self.authorization = build_authorization(api_key)
        self._session: aiohttp.ClientSession | None = None
        self._tasks: dict[Instance, asyncio.Task[None]] = {}
        self._wake_events: dict[Instance, asyncio.Event] = {}
        self._ending_tasks: set[asyncio.Task[None]] = set()  # cancelled, and not over yet
        self._remove_listeners: list[Callable[[], None]] = []

    async def start(self, session: aiohttp.ClientSession) -> None:
        """Begin to watch whoever is in the pool, and whoever comes."""
        self._session = session
        self._remove_listeners = [
            self.pool.failure_listeners.add(self.request_probe),
            self.pool.change_listeners.add(self.sync_instances),
        ]
        self.sync_instances()

    async def close(self) -> None:
        """Stop all probing tasks."""
        # Before the tasks: a change of the pool would start new ones.
        for remove in self._remove_listeners:
            remove()
        self._stop_watching(list(self._tasks))
        await asyncio.gather(*self._ending_tasks, return_exceptions=True)

    def sync_instances(self) -> None:
        """Watch the instances that are in the pool now, and no others."""
        current = set(self.pool)
        self._stop_watching([instance for instance in self._tasks if instance not in current])
        for instance in current - set(self._tasks):
            self._wake_events[instance] = asyncio.Event()
            self._tasks[instance] = asyncio.create_task(self._watch_instance(instance))

    async def wait_probed(self) -> None:
        """Wait until every instance was probed at least once."""
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
            await asyncio.sleep(
                min(self.interval_s, FAILED_PROBE_INTERVAL_S) / 2
            )  # woken because a request failed just now: give it a moment

    async def probe_instance(self, instance: Instance) -> bool:
        """Probe /health of `instance` and set its state; a status below 500 is success. Returns success."""
        reason, has_timed_out = "", False
        try:
            async with self.session.get(
                f"{instance.url}/health", timeout=QUERY_TIMEOUT
            ) as response:
                # Below 500 it lives: it may not know /health (404), or want a key (401).
                if response.status >= 500:
                    reason = f"its /health responded with status {response.status}"
        except asyncio.TimeoutError:
            reason, has_timed_out = "its /health probe timed out", True
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

    async def refresh_models(self, instance: Instance, authorization: str = "") -> int:
        """Read /v1/models of `instance`. Returns the status, 0 without a valid response.

        authorization: the client's header, used if the router has no key of its own.
        """
        status, model_cards = await self._fetch_models(instance, authorization)
        if model_cards is None:
            return status
        models = frozenset(str(card.get("id")) for card in model_cards)
        # Candidates were computed by the models; without a change they stay.
        if models != instance.models:
            instance.models = models
            self.pool.reset_candidates()
        instance.record_model_cards(model_cards)
        return status

    async def _fetch_models(
        self, instance: Instance, authorization: str
    ) -> tuple[int, tuple[dict[str, Any], ...] | None]:
        url = f"{instance.url}{MODELS_PATH}"
        own_or_client = self.authorization or authorization
        headers = {"Authorization": own_or_client} if own_or_client else {}
        try:
            async with self.session.get(url, timeout=QUERY_TIMEOUT, headers=headers) as response:
                if response.status != 200:
                    return response.status, None
                body = await response.json()
        except (*QUERY_ERRORS, ValueError):
            return 0, None
        data = body.get("data") if isinstance(body, dict) else None
        if not isinstance(data, list):
            return 0, None
        return 200, tuple(card for card in data if isinstance(card, dict))

    @property
    def session(self) -> aiohttp.ClientSession:
        """The upstream client's session; RuntimeError before `start`."""
        if self._session is None:
            raise RuntimeError("HealthMonitor is not started; serve the app with its lifespan on")
        return self._session
