# SPDX-License-Identifier: Apache-2.0
"""Instances that registered themselves: their legs, and when they are removed from the pool.

announcements.py calls it for HTTP requests. Roles and the eviction rule are those of vLLM's EPD proxy
(examples/disaggregated/disaggregated_encoder).
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from ttft_otel.model.stages import DECODE, ENCODE, PREFILL, PREFILL_DECODE
from ttft_otel.router import types
from ttft_otel.router.errors import RequestRejected
from ttft_otel.router.types import Instance
from ttft_otel.router.upstream.instance_pool import describe_instance
from ttft_otel.router.upstream.upstream_client import UpstreamClient
from ttft_otel.tracing import clock

# A role is also the name of its leg.
REGISTRABLE_ROLES: Final = (ENCODE, PREFILL, DECODE, PREFILL_DECODE)
PAIR_ROLES: Final = (PREFILL, DECODE)
MAX_URL_CHARS: Final = 2048
# Visible ASCII: line breaks, for instance, could forge log lines.
_VISIBLE_PATTERN: Final = re.compile(r"[!-~]+")


def check_url(url: str) -> str:
    """Return `url` without a trailing slash. Raises RequestRejected unless http(s)://HOST:PORT[/PREFIX]."""
    try:
        if len(url) > MAX_URL_CHARS or not _VISIBLE_PATTERN.fullmatch(url):
            raise ValueError
        parts = urlsplit(url)
        # A user's name would be shown to all who list instances; a fragment is never sent.
        if not parts.port or "@" in parts.netloc or parts.fragment:
            raise ValueError
        return types.parse_instance_url(url, "").url
    except ValueError as error:
        message = f"{url[:200]!r} is not an instance's URL; write it like http://10.0.0.7:8001"
        raise RequestRejected(400, message) from error


def check_topology(
    role: str, other_roles: Collection[str], configured_urls: Mapping[str, Collection[str]]
) -> None:
    """Raise RequestRejected for a `role` that cannot be mixed with registered or configured ones.

    other_roles: of the other registered instances. configured_urls: by leg.
    """
    backends = PREFILL_DECODE in other_roles or bool(
        configured_urls.get(PREFILL_DECODE) and role == PREFILL
    )
    pairs = any(each in other_roles or configured_urls.get(each) for each in PAIR_ROLES)
    if (role in PAIR_ROLES and backends) or (role == PREFILL_DECODE and pairs):
        conflicting_roles = PREFILL_DECODE if role in PAIR_ROLES else " and ".join(PAIR_ROLES)
        raise RequestRejected(
            409,
            f"This router has {conflicting_roles} instances, with which a {role} instance "
            "cannot be mixed; deregister them first.",
        )


MAX_REGISTERED_INSTANCES: Final = 256  # each costs a task and a probe every --health-interval
FORGET_AFTER_S: Final = 900.0  # seconds in the state failed; vLLM's default of --evicted-ttl
# Seconds between two sweeps for instances that left or stay unreachable.
SWEEP_INTERVAL_S: Final = 1.0
REGISTRATION_RESULTS: Final = ("registered", "renewed", "deregistered", "forgotten", "refused")

log: Final = logging.getLogger("ttft_otel")


@dataclass(slots=True)
class Registration:
    """The role that an instance registered with, and the instance in the pool."""

    role: str
    instance: Instance


class Registrations:
    """Every registered instance by its URL; used on the event loop only.

    configured: instances of the configuration, by leg. If one of them registers too and then
    deregisters, it stays in the pool, drained until it registers again.
    forget_after_s: seconds after which an instance that stays unreachable is removed; 0: never.
    """

    def __init__(
        self,
        upstream: UpstreamClient,
        configured: Mapping[str, Sequence[Instance]],
        forget_after_s: float = FORGET_AFTER_S,
    ) -> None:
        self.upstream = upstream
        self.pool = upstream.pool
        self.forget_after_s = forget_after_s
        self.result_counts: Counter[str] = Counter(dict.fromkeys(REGISTRATION_RESULTS, 0))
        self._configured_urls = {
            leg: {each.url for each in each_leg} for leg, each_leg in configured.items()
        }
        self._registered: dict[str, Registration] = {}
        self._leaving: set[Instance] = set()  # deregistered, or configured and away
        self._failed_since_us: dict[str, int] = {}  # microseconds of clock.now_us(), by URL

    def __contains__(self, instance: Instance) -> bool:
        registration = self._registered.get(instance.url)
        return registration is not None and registration.instance is instance

    def has_url(self, url: str) -> bool:
        """Whether an instance is registered with this URL, without a trailing slash."""
        return url in self._registered

    def list_roles(self) -> dict[str, str]:
        """The role of every registered instance, by URL."""
        return {url: each.role for url, each in self._registered.items()}

    def register_instance(self, role: str, url: str) -> bool:
        """Add the instance at `url` to the leg of its `role`, or renew its registration.

        Returns whether it is new. Raises RequestRejected: 400 for an unknown role or a malformed URL, 409
        for a role that cannot be mixed with those of other instances, 429 when there are too many.
        """
        if role not in REGISTRABLE_ROLES:
            raise RequestRejected(
                400, f"Unknown role {role[:64]!r}; it is one of {', '.join(REGISTRABLE_ROLES)}."
            )
        url = check_url(url)
        before = self._registered.get(url)
        other_roles = {other.role for key, other in self._registered.items() if key != url}
        check_topology(role, other_roles, self._configured_urls)
        if before is None and len(self._registered) >= MAX_REGISTERED_INSTANCES:
            message = (
                f"{MAX_REGISTERED_INSTANCES} instances are registered, which is the maximum; "
                f"deregister one."
            )
            raise RequestRejected(429, message, "RateLimitError", retry_after_s=30)
        # Another role is mostly another leg: it drains there, and is a new instance here.
        if before is not None and before.role != role:
            self._registered.pop(url)
            self._release_instance(before)
        # First: decoders that served whole requests become the other half of a pair.
        if role == PREFILL:
            self._move_decoders()
        self._failed_since_us.pop(url, None)
        if not self._place_instance(role, url):
            self.result_counts["renewed"] += 1
        else:
            self.result_counts["registered"] += 1
            instance = self._registered[url].instance
            log.warning(
                "ttft-otel: registered %s (role %s): health probes and requests go to it from now on",
                describe_instance(instance),
                role,
            )
        return before is None

    def deregister_instance(self, url: str) -> bool:
        """Drain the instance at `url`, and remove it when its requests have ended.

        Returns whether it was registered.
        """
        registration = self._registered.pop(url.rstrip("/"), None)
        if registration is None:
            return False
        self.result_counts["deregistered"] += 1
        instance = registration.instance
        log.warning(
            "ttft-otel: deregistered %s: no new requests, the %d in flight may finish; %s",
            describe_instance(instance),
            instance.in_flight,
            "it is in the configuration and stays drained until it registers again"
            if self._is_configured(instance)
            else "then it is removed",
        )
        self._release_instance(registration)
        return True

    def set_configured(
        self, configured: Mapping[str, Sequence[Instance]]
    ) -> tuple[list[str], list[str]]:
        """Replace the `configured` instances; registered ones stay. Returns the URLs added and removed.

        Raises ValueError, without any change, if both cannot be served together.
        """
        has_pair = any(configured.get(leg) for leg in PAIR_ROLES)
        roles = {registration.role for registration in self._registered.values()}
        registered_apart = any(
            registration.instance.leg in PAIR_ROLES for registration in self._registered.values()
        )
        if (configured.get(PREFILL_DECODE) and registered_apart) or (
            has_pair and PREFILL_DECODE in roles
        ):
            registered_roles = ", ".join(sorted(roles))
            raise ValueError(
                f"registered instances have the roles {registered_roles}, which cannot be mixed with the "
                f"configured {', '.join(configured)}: deregister them first, or restart"
            )
        self._configured_urls = {
            leg: {registration.url for registration in each_leg}
            for leg, each_leg in configured.items()
        }
        if has_pair:
            self._move_decoders()
        merged = {leg: list(instances) for leg, instances in configured.items()}
        # What an operator has removed from the pool does not come back by a reload.
        present = set(self.pool)
        for registration in self._registered.values():
            if registration.instance in present and not self._is_configured(registration.instance):
                merged.setdefault(registration.instance.leg, []).append(registration.instance)
        return self.pool.replace_instances(merged)

    async def sweep_forever(self) -> None:
        """Until cancelled, remove instances that have left and those that stay unreachable."""
        pause = min(SWEEP_INTERVAL_S, self.forget_after_s / 2 or SWEEP_INTERVAL_S)
        while True:
            await asyncio.sleep(pause)
            try:
                self.sweep_once()
            except Exception:
                log.exception(
                    "ttft-otel: sweep of registered instances failed, next one in %g s", pause
                )

    def sweep_once(self) -> None:
        """Run one sweep."""
        self._remove_ended()
        now_us = clock.now_us()
        for url, registration in list(self._registered.items()):
            if registration.instance.state != "failed":
                self._failed_since_us.pop(url, None)
                continue
            since_us = self._failed_since_us.setdefault(url, now_us)
            if self.forget_after_s and now_us - since_us >= self.forget_after_s * 1_000_000:
                self._forget_instance(url, registration)

    def describe_registered(self) -> dict[str, dict[str, list[str]]]:
        """URLs by role and by "live" or "evicted", as in GET /instances of vLLM's proxy."""
        listed: dict[str, dict[str, list[str]]] = {
            role: {"live": [], "evicted": []} for role in REGISTRABLE_ROLES
        }
        for each in self.pool:
            role = self._registered[each.url].role if each in self else each.leg
            words = {"healthy": "live", "failed": "evicted"}
            if each.state in words:
                listed[role][words[each.state]].append(each.url)
        return listed

    def _place_instance(self, role: str, url: str) -> bool:
        """Add the instance to its leg and register it; returns whether either was new."""
        before = self._registered.get(url)
        leg = before.instance.leg if before is not None else self._leg_of(role)
        instance = self.pool.find_instance(leg, url)
        is_news = before is None or instance is None
        if instance is None:
            instance = types.parse_instance_url(url, leg)
            self.pool.add_instance(instance)
        elif instance in self._leaving:
            self.pool.set_draining(instance, False)
        elif instance.state == "failed":
            self.upstream.health_monitor.request_probe(
                instance
            )  # it announced itself, so it may be back
        self._leaving.discard(instance)
        self._registered[url] = Registration(role, instance)
        return is_news

    def _leg_of(self, role: str) -> str:
        """The leg of a `role`. Instances that serve whole requests may register as `decode`: without
        prefill instances, now and for the ones registered before, they are backends."""
        is_disaggregated = any(self._configured_urls.get(leg) for leg in PAIR_ROLES) or any(
            each.instance.leg in PAIR_ROLES for each in self._registered.values()
        )
        return PREFILL_DECODE if role == DECODE and not is_disaggregated else role

    def _move_decoders(self) -> None:
        """Move decode instances that served as backends to the decode leg, once there is a prefill one."""
        for url, registration in self._registered.items():
            backend = registration.instance
            if registration.role != DECODE or backend.leg == DECODE:
                continue
            # An instance belongs to one leg for good; what is known of it goes along.
            registration.instance = types.parse_instance_url(url, DECODE)
            registration.instance.state = backend.state
            registration.instance.was_probed = backend.was_probed
            registration.instance.models = backend.models
            registration.instance.record_model_cards(backend.model_cards)
            if backend in set(self.pool):
                self.pool.remove_instance(backend)
                self.pool.add_instance(registration.instance)
            log.warning(
                "ttft-otel: %s is a %s instance now, because prefill instances registered: "
                "requests reach it after their prefill",
                describe_instance(backend),
                DECODE,
            )

    def _release_instance(self, registration: Registration) -> None:
        """Drain an instance that is not registered any more, and remove it once it has no request."""
        self.pool.set_draining(registration.instance, True)
        self._leaving.add(registration.instance)
        self._remove_ended()

    def _remove_ended(self) -> None:
        self._leaving.intersection_update(self.pool)
        for instance in list(self._leaving):
            if instance.state != "draining":  # an operator added it again
                self._leaving.discard(instance)
            elif not instance.in_flight and not self._is_configured(instance):
                self._leaving.discard(instance)
                self.pool.remove_instance(instance)

    def _forget_instance(self, url: str, registration: Registration) -> None:
        del self._registered[url]
        self._failed_since_us.pop(url, None)
        self.result_counts["forgotten"] += 1
        is_configured = self._is_configured(registration.instance)
        if not is_configured:
            self.pool.remove_instance(registration.instance)
        log.warning(
            "ttft-otel: forgot registered %s, unreachable for %g s: %s",
            describe_instance(registration.instance),
            self.forget_after_s,
            "it is in the configuration and still probed"
            if is_configured
            else "removed until it registers again",
        )

    def _is_configured(self, instance: Instance) -> bool:
        return instance.url in self._configured_urls.get(instance.leg, ())
