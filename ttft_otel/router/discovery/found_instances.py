# SPDX-License-Identifier: Apache-2.0
"""Instances that sources name: discovery.py takes them in and out here, beside those of the configuration."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Final
from urllib.parse import urlsplit

from ttft_otel.model.stages import DECODE, ENCODE, PREFILL, PREFILL_DECODE
from ttft_otel.router.types import Instance, parse_instance_url
from ttft_otel.router.upstream.instance_pool import InstancePool, describe_instance

# A role is also the name of its leg.
ROLES: Final = (ENCODE, PREFILL, DECODE, PREFILL_DECODE)
PAIR_ROLES: Final = (PREFILL, DECODE)
MAX_URL_CHARS: Final = 2048
MAX_FOUND_INSTANCES: Final = 256  # each costs a task and a probe every --health-interval
SWEEP_INTERVAL_S: Final = 1.0  # seconds between two looks for instances that have left
# Visible ASCII: line breaks, for instance, could forge log lines.
_VISIBLE_PATTERN: Final = re.compile(r"[!-~]+")

log: Final = logging.getLogger("ttft_otel")


def check_url(url: str) -> str:
    """Return `url` without a trailing slash. Raises ValueError unless http(s)://HOST:PORT[/PREFIX]."""
    try:
        if len(url) > MAX_URL_CHARS or not _VISIBLE_PATTERN.fullmatch(url):
            raise ValueError
        parts = urlsplit(url)
        # A user's name would be shown to all who list instances; a fragment is never sent.
        if not parts.port or "@" in parts.netloc or parts.fragment:
            raise ValueError
        return parse_instance_url(url, "").url
    except ValueError as error:
        message = f"{url[:200]!r} is not an instance's URL; write it like http://10.0.0.7:8001"
        raise ValueError(message) from error


class FoundInstances:
    """Every instance that a source names, by its URL; used on the event loop only.

    configured: instances of the configuration, by leg. If a source names one of them and then drops it, it
    stays in the pool, drained until it is named again.
    """

    def __init__(self, pool: InstancePool, configured: Mapping[str, Sequence[Instance]]) -> None:
        self.pool = pool
        self._configured_urls = _list_urls(configured)
        self._found: dict[str, Instance] = {}
        self._leaving: set[Instance] = set()  # dropped by their sources, and not yet idle

    def map_roles(self) -> dict[str, str]:
        return {url: instance.leg for url, instance in self._found.items()}

    def add_instance(self, role: str, url: str) -> None:
        """Have the instance at `url` in the leg of its `role`; nothing changes if it is there.

        Raises ValueError for an unknown role, a malformed URL, a role that cannot be mixed with those of
        other instances, and when there are too many.
        """
        url = self._check_instance(role, url)
        before = self._found.get(url)
        # Another role is another leg: it drains there, and is a new instance here.
        if before is not None and before.leg != role:
            self._release_instance(self._found.pop(url))
            before = None
        instance = self.pool.find_instance(role, url)
        if instance is None:
            instance = parse_instance_url(url, role)
            self.pool.add_instance(instance)
        elif instance in self._leaving:
            self.pool.set_draining(instance, False)
        self._leaving.discard(instance)
        self._found[url] = instance
        if before is not instance:
            log.warning(
                "ttft-otel: found %s: health probes and requests go to it from now on",
                describe_instance(instance),
            )

    def drop_instance(self, url: str) -> None:
        """Drain the instance at `url`, and remove it when its requests have ended."""
        instance = self._found.pop(url.rstrip("/"), None)
        if instance is None:
            return
        log.warning(
            "ttft-otel: no source names %s any more: no new requests, the %d in flight may finish; %s",
            describe_instance(instance),
            instance.in_flight,
            "it is in the configuration and stays drained until one does"
            if self._is_configured(instance)
            else "then it is removed",
        )
        self._release_instance(instance)

    def set_configured(
        self, configured: Mapping[str, Sequence[Instance]]
    ) -> tuple[list[str], list[str]]:
        """Replace the `configured` instances; found ones stay. Returns the URLs added and removed.

        Raises ValueError, without any change, if both cannot be served together.
        """
        legs = {instance.leg for instance in self._found.values()}
        has_pair = any(configured.get(leg) for leg in PAIR_ROLES)
        if (configured.get(PREFILL_DECODE) and legs.intersection(PAIR_ROLES)) or (
            has_pair and PREFILL_DECODE in legs
        ):
            raise ValueError(
                f"found instances have the roles {', '.join(sorted(legs))}, which cannot be mixed with "
                f"the configured {', '.join(configured)}: change what --discover names, or restart"
            )
        self._configured_urls = _list_urls(configured)
        merged = {leg: list(instances) for leg, instances in configured.items()}
        # What an operator has removed from the pool does not come back by a reload.
        present = set(self.pool)
        for instance in self._found.values():
            if instance in present and not self._is_configured(instance):
                merged.setdefault(instance.leg, []).append(instance)
        return self.pool.replace_instances(merged)

    async def sweep_forever(self) -> None:
        """Remove instances that have left and have no request any more."""
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            self.remove_ended()

    def remove_ended(self) -> None:
        self._leaving.intersection_update(self.pool)
        for instance in list(self._leaving):
            if instance.state != "draining":  # an operator added it again
                self._leaving.discard(instance)
            elif not instance.in_flight and not self._is_configured(instance):
                self._leaving.discard(instance)
                self.pool.remove_instance(instance)

    def _check_instance(self, role: str, url: str) -> str:
        """The URL as the pool writes it. Raises ValueError for what cannot be added."""
        if role not in ROLES:
            raise ValueError(f"unknown role {role[:64]!r}; it is one of {', '.join(ROLES)}")
        url = check_url(url)
        other_roles = {each.leg for key, each in self._found.items() if key != url}
        legs = other_roles | {leg for leg, urls in self._configured_urls.items() if urls}
        conflicts = (
            {PREFILL_DECODE} if role in PAIR_ROLES else {*PAIR_ROLES} if role != ENCODE else {*()}
        )
        if conflicts & legs:
            raise ValueError(
                f"this router has {' and '.join(sorted(conflicts & legs))} instances, with which a {role} "
                "instance cannot be mixed"
            )
        if url not in self._found and len(self._found) >= MAX_FOUND_INSTANCES:
            raise ValueError(f"{MAX_FOUND_INSTANCES} instances were found, which is the maximum")
        return url

    def _release_instance(self, instance: Instance) -> None:
        self.pool.set_draining(instance, True)
        self._leaving.add(instance)
        self.remove_ended()

    def _is_configured(self, instance: Instance) -> bool:
        return instance.url in self._configured_urls.get(instance.leg, ())


def _list_urls(configured: Mapping[str, Sequence[Instance]]) -> dict[str, Collection[str]]:
    return {leg: {each.url for each in instances} for leg, instances in configured.items()}
