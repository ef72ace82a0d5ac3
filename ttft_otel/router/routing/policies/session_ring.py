# SPDX-License-Identifier: Apache-2.0
"""Policy `session`: consistent hashing of the session ID; requests without one go by request rate."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Container, Sequence, Set
from hashlib import blake2b
from typing import Final

import msgspec

from ttft_otel.router.routing.policies.load_policies import RequestRatePolicy
from ttft_otel.router.routing.policies.policy_state import PolicyState
from ttft_otel.router.types import JSON_ERRORS, Decision, Instance, RoutingPolicy, RoutingRequest

# Virtual nodes per instance; with n of them shares differ by about 1/sqrt(n), here 9 %.
POINTS_PER_INSTANCE: Final = 128
# Instances on the ring, removed ones included; beyond it the ring is rebuilt with the present ones.
MAX_RING_INSTANCES: Final = 1024
MAX_KEY_BYTES: Final = 4096  # of a session ID in a body; objects are built of no larger value
_NO_SESSION: Final = msgspec.Raw(b'""')


class HashRing:
    """A consistent-hash ring of every instance seen so far; absent ones are skipped on lookup.

    A changing set of candidates therefore costs nothing, unless it contains a new instance.
    """

    def __init__(self) -> None:
        self._urls: set[str] = set()
        self._points: list[int] = []
        self._owners: list[str] = []

    def find_owner(self, key: str, among: Container[str]) -> str:
        """The first URL of `among` on the ring, clockwise from the hash of `key`.

        At least one of them must have been added, or the search does not end.
        """
        # May be one beyond the last point: the modulo below closes the ring.
        position = bisect(self._points, _hash_text(key))
        while True:
            owner = self._owners[position % len(self._owners)]
            if owner in among:
                return owner
            position += 1

    def add_urls(self, urls: Set[str]) -> None:
        """Add those of `urls` that are not on the ring yet."""
        new_urls = urls - self._urls
        if not new_urls:
            return
        # Sessions of the present ones keep their instance: their
        # points do not depend on the others.
        if len(self._urls) + len(new_urls) > MAX_RING_INSTANCES:
            new_urls, self._urls, self._points, self._owners = urls, set(), [], []
        points = list(zip(self._points, self._owners, strict=True))
        points += sorted(
            (_hash_text(f"{url}#{n}"), url) for url in new_urls for n in range(POINTS_PER_INSTANCE)
        )
        points.sort()
        self._urls |= new_urls
        self._points = [point for point, _ in points]
        self._owners = [url for _, url in points]


class SessionPolicy(RoutingPolicy):
    """The session ID is the value of the header, or top-level body key, that --session-key names."""

    tracks_load = True

    def __init__(self, state: PolicyState) -> None:
        self._session_key = state.options.session_key
        self._fallback = RequestRatePolicy(state)
        self._ring = HashRing()

    def choose_instance(
        self, request: RoutingRequest, instances: Sequence[Instance], now_us: int, is_retry: bool
    ) -> Decision:
        """Choose the session's instance on the ring; when one leaves, only its own sessions move."""
        session = self.read_session_key(request)
        if not session:
            return self._fallback.choose_instance(request, instances, now_us, is_retry)
        offered = {each.url: each for each in instances}
        self._ring.add_urls(offered.keys())
        return Decision(offered[self._ring.find_owner(session, offered)], 0.0, "session")

    def read_session_key(self, request: RoutingRequest) -> str:
        """The session ID of `request`, "" without one; the header takes precedence over the body."""
        if not self._session_key:
            return ""
        value = request.headers.get(self._session_key.lower())
        if value is None:
            try:
                # Raw values: only the one that is asked for is decoded, however long the prompt is.
                fields = msgspec.json.decode(request.body, type=dict[str, msgspec.Raw])
                raw = fields.get(self._session_key, _NO_SESSION)
                if len(memoryview(raw)) > MAX_KEY_BYTES:
                    return ""
                value = msgspec.json.decode(raw)
            except JSON_ERRORS:
                return ""
        # Other values are no names; such a request goes by rate, like one without a session.
        return str(value) if isinstance(value, (str, int)) else ""


def _hash_text(text: str) -> int:
    # Not Python's hash(), which differs between processes: all routers must agree.
    return int.from_bytes(blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "big")
