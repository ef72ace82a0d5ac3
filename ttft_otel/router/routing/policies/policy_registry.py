# SPDX-License-Identifier: Apache-2.0
"""The policies by their names in --routing-logic, for the router and for simulations.

`ttft` is in least_ttft.py. `round_robin` is the router's default, `least_requests` that of encode and
decode legs.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Container, Sequence, Set
from hashlib import blake2b
from typing import Final

import msgspec

from ttft_otel.router.routing.policies.least_ttft import LeastTtftPolicy
from ttft_otel.router.routing.policies.policy_state import PolicyState, RoutingPolicy
from ttft_otel.router.types import (
    DEFAULT_POLICY,
    JSON_ERRORS,
    OTHER_LEGS_POLICY,
    Decision,
    Instance,
    RoutingRequest,
)

SECONDS_PER_REQUEST: Final = 5.0  # of overdue answers that weigh as much as one more request


class RoundRobinPolicy(RoutingPolicy):
    """Needs no state of requests or instances, only one counter per leg."""

    name = DEFAULT_POLICY

    def __init__(self, state: PolicyState) -> None:
        super().__init__(state)
        self._next_turn: dict[str, int] = {}

    def choose_instance(
        self, request: RoutingRequest, instances: Sequence[Instance], now_us: int, is_retry: bool
    ) -> Decision:
        """Choose the next of `instances`; a retry (`is_retry`) does not advance the turn."""
        turn = self._next_turn.get(request.leg, 0)
        # A retry's candidates lack the instance that failed:
        # advancing would skip another one's turn.
        if not is_retry:
            self._next_turn[request.leg] = turn + 1
        # Modulo here and not in the counter: the number of candidates changes.
        return Decision(instances[turn % len(instances)], 0.0, self.name)


class LeastRequestsPolicy(RoutingPolicy):
    """Compares `Instance.all_in_flight`, which counts a request until its response has ended.

    An instance that owes answers for long, and has begun none meanwhile, counts as if it had more: one
    that hangs would keep its share for as long as its clients leave and others come.
    """

    name = OTHER_LEGS_POLICY

    def choose_instance(
        self, request: RoutingRequest, instances: Sequence[Instance], now_us: int, is_retry: bool
    ) -> Decision:
        """Choose the fewest requests in flight, ties at random; the score is that number."""
        counts = [
            # A request counts until its answer has ended: for decoding this is the load that
            # matters.
            each.all_in_flight + each.measure_overdue_s(now_us) / SECONDS_PER_REQUEST
            for each in instances
        ]
        position = self.state.choose_least(counts)
        return Decision(
            instances[position], counts[position], "least_requests", candidate_scores=counts
        )


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

    name = "session"

    def __init__(self, state: PolicyState) -> None:
        super().__init__(state)
        self._fallback = LeastRequestsPolicy(state)
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
        session_key = self.state.options.session_key
        if not session_key:
            return ""
        value = request.headers.get(session_key.lower())
        if value is None:
            try:
                # Raw values: only the one that is asked for is decoded, however long the prompt is.
                fields = msgspec.json.decode(request.body, type=dict[str, msgspec.Raw])
                raw = fields.get(session_key, _NO_SESSION)
                if len(memoryview(raw)) > MAX_KEY_BYTES:
                    return ""
                value = msgspec.json.decode(raw)
            except JSON_ERRORS:
                return ""
        # Other values are no names; such a request counts as one without a session.
        return str(value) if isinstance(value, (str, int)) else ""


def _hash_text(text: str) -> int:
    # Not Python's hash(), which differs between processes: all routers must agree.
    return int.from_bytes(blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "big")


# Share of the prompt that must match: a system prompt common to all must not concentrate the load.
MIN_PREFIX_SHARE: Final = 0.3
# An instance is overloaded if its requests in flight exceed the minimum by more than both of these.
MAX_EXTRA_REQUESTS: Final = 8
MAX_REQUEST_RATIO: Final = 1.5


class PrefixPolicy(RoutingPolicy):
    """Prefers the longest prefix; load only limits how many requests a popular prefix attracts."""

    name = "prefix"
    reads_prompts = True

    def __init__(self, state: PolicyState) -> None:
        super().__init__(state)
        self._fallback = LeastRequestsPolicy(state)

    def choose_instance(
        self, request: RoutingRequest, instances: Sequence[Instance], now_us: int, is_retry: bool
    ) -> Decision:
        """Choose the longest cached prefix, ties by requests in flight; the score is uncached tokens."""
        loads = self.state.pending.list_loads(instances)
        # With pending prompts: a burst with one prefix should go where the first of it went.
        cached_tokens = self.state.estimate_cached(request, instances, loads)
        longest = max(cached_tokens)
        if longest <= MIN_PREFIX_SHARE * request.prompt_tokens:
            return self._fallback.choose_instance(request, instances, now_us, is_retry)
        in_flight = [each.all_in_flight for each in instances]
        positions = [position for position, there in enumerate(cached_tokens) if there == longest]
        position = positions[self.state.choose_least([in_flight[each] for each in positions])]
        lowest = min(in_flight)
        if (
            # Both: 8 more are little among hundreds, and half as many again is little among two.
            in_flight[position] > lowest + MAX_EXTRA_REQUESTS
            and in_flight[position] > MAX_REQUEST_RATIO * lowest
        ):
            return self._fallback.choose_instance(request, instances, now_us, is_retry)
        scores = [request.prompt_tokens - each for each in cached_tokens]
        return Decision(
            instances[position], scores[position], "prefix", longest, None, scores, cached_tokens
        )


class KvAwarePolicy(RoutingPolicy):
    """The rule of production-stack's kvaware router: at most `kv_aware_threshold` tokens uncached.

    Other requests follow their session; without one the fewest requests in flight decide.
    """

    name = "kvaware"
    reads_prompts = True

    def __init__(self, state: PolicyState) -> None:
        super().__init__(state)
        self._fallback = SessionPolicy(state)

    def choose_instance(
        self, request: RoutingRequest, instances: Sequence[Instance], now_us: int, is_retry: bool
    ) -> Decision:
        """Choose the longest cached prefix, ties by session or load; the score is uncached tokens."""
        # Without loads: what is cached now counts, not what is queued.
        cached_tokens = self.state.estimate_cached(request, instances)
        longest = max(cached_tokens)
        if not longest or longest < request.prompt_tokens - self.state.options.kv_aware_threshold:
            return self._fallback.choose_instance(request, instances, now_us, is_retry)
        tied = [
            each for each, tokens in zip(instances, cached_tokens, strict=True) if tokens == longest
        ]
        chosen = tied[0]
        # A prefix that all have (a system prompt, a shared cache) must not draw all requests to one.
        if len(tied) > 1:
            chosen = self._fallback.choose_instance(request, tied, now_us, is_retry).instance
        tokens_left = [request.prompt_tokens - each for each in cached_tokens]
        return Decision(
            chosen,
            request.prompt_tokens - longest,
            "kvaware",
            longest,
            None,
            tokens_left,
            cached_tokens,
        )


POLICIES: Final[dict[str, type[RoutingPolicy]]] = {
    each.name: each
    for each in (
        RoundRobinPolicy,
        SessionPolicy,
        LeastRequestsPolicy,
        PrefixPolicy,
        KvAwarePolicy,
        LeastTtftPolicy,
    )
}
