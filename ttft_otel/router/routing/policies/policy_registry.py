# SPDX-License-Identifier: Apache-2.0
"""The policies by their names in --routing-logic, for the router and for simulations.

`ttft` chooses the least expected time to first token, from queued work and this request's prefill.
`round_robin` is the router's default, `least_requests` that of encode and decode legs.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from hashlib import blake2b
from typing import Final

import msgspec

from ttft_otel.router.errors import SloUnreachable
from ttft_otel.router.routing.policies.policy_state import (
    US_PER_SECOND,
    BusyUntil,
    InstanceLoad,
    PolicyState,
    RoutingPolicy,
)
from ttft_otel.router.routing.policies.prefill_model import PrefillLine, PrefillWork, count_pairs
from ttft_otel.router.types import (
    DEFAULT_POLICY,
    JSON_ERRORS,
    OTHER_LEGS_POLICY,
    Decision,
    Instance,
    RoutingRequest,
    find_base_model,
)

# Relative difference below which scores count as equal: predictions are not more accurate than that.
TIE_MARGIN: Final = 0.05
# Share of its predicted time that a prefill is assumed to still need once it exceeds the prediction.
OVERRUN_SHARE: Final = 0.1


class LeastTtftPolicy(RoutingPolicy):
    """Compares predicted seconds once a prefill model is fitted, before that attention pairs.

    The number of (query, key) pairs left to compute is the trapezoid formula of `count_pairs`.
    """

    name = "ttft"
    reads_prompts = True

    def __init__(self, state: PolicyState) -> None:
        super().__init__(state)
        # Comparing pairs needs no prefill times.
        self.uses_predictions = state.options.ttft_model == "calibrated"

    def choose_instance(
        self, request: RoutingRequest, instances: Sequence[Instance], now_us: int, is_retry: bool
    ) -> Decision:
        """Choose the least score, ties at random. Raises SloUnreachable."""
        state = self.state
        if (model := self._find_line(request, instances)) is not None:
            return self._choose_soonest(request, instances, *model, now_us)
        cached = state.estimate_cached(request, instances)
        scores = [
            # Pending and own work in the same unit; no time is needed to compare them.
            load.pairs + count_pairs(request.prompt_tokens, tokens)
            for load, tokens in zip(state.pending.list_loads(instances), cached, strict=True)
        ]
        at = state.choose_least(scores)
        return Decision(instances[at], scores[at], "trapezoid", cached[at], None, scores, cached)

    def _find_line(
        self, request: RoutingRequest, instances: Sequence[Instance]
    ) -> tuple[PrefillLine, Mapping[str, float]] | None:
        """None until MIN_SAMPLES prefills of its base model were measured, and without predictions."""
        if not self.uses_predictions:
            return None
        return self.state.models.get_line(find_base_model(instances, request.model))

    def predict_wait(
        self, request: RoutingRequest, instances: Sequence[Instance], now_us: int
    ) -> tuple[float, float]:
        """Seconds of the shortest queue of `instances`, 0 if one is idle, and of the shortest prefill."""
        model = self._find_line(request, instances)
        loads = self.state.pending.list_loads(instances)
        if model is None or not all(load.entries for load in loads):
            return 0.0, 0.0
        cached_tokens = self.state.estimate_cached(request, instances, loads)
        _, waits, prefills = _score_instances(
            request.prompt_tokens, cached_tokens, instances, loads, *model, 0.0, now_us
        )
        return min(waits), min(prefills)

    def _choose_soonest(
        self,
        request: RoutingRequest,
        instances: Sequence[Instance],
        line: PrefillLine,
        speed_factors: Mapping[str, float],
        now_us: int,
    ) -> Decision:
        """Choose the least sum of this request's TTFT and the delay that it causes to later requests.

        line: prefill model shared by all instances. speed_factors: by URL, 1.0 where absent.
        """
        pending = self.state.pending
        loads = pending.list_loads(instances)
        # With pending prompts: their blocks are there by the time this one is prefilled.
        cached = self.state.estimate_cached(request, instances, loads)
        delay_cost = pending.estimate_delay_cost(now_us, len(instances))
        prompt_tokens = request.prompt_tokens
        scores, waits, prefills = _score_instances(
            prompt_tokens, cached, instances, loads, line, speed_factors, delay_cost, now_us
        )
        at = self._choose_freshest(loads, scores)
        # Without a prompt length nothing is predicted.
        slo_s = self.state.find_slo_s(request)
        if slo_s and prompt_tokens:
            spent_s = (now_us - request.arrived_us) / US_PER_SECOND if request.arrived_us else 0.0
            # Encoding runs while the prompt would queue at the instance: only the longer wait counts.
            times = [
                spent_s
                + max(wait, request.encode_wait_s)
                + prefill
                + self.state.overheads_s.get(instance.url, 0.0)
                for wait, prefill, instance in zip(waits, prefills, instances, strict=True)
            ]
            at = self._choose_in_time(request, loads, waits, times, at, slo_s)
        ttft_s = waits[at] + prefills[at]
        return Decision(instances[at], scores[at], "calibrated", cached[at], ttft_s, scores, cached)

    def _choose_in_time(
        self,
        request: RoutingRequest,
        loads: Sequence[InstanceLoad],
        waits_s: Sequence[float],
        ttfts_s: Sequence[float],
        position: int,
        slo_s: float,
    ) -> int:
        """Choose `position` if it meets the objective, else the soonest that does, else the soonest idle one.

        waits_s, ttfts_s: predicted seconds of queue and TTFT, per instance. slo_s: the objective.
        An idle instance that is predicted to be late is still tried: it will not become faster by waiting,
        and a stale prediction is only corrected by new samples. If the request must queue for an encoder
        first, or no instance is idle, it is rejected: raises SloUnreachable.
        """
        queue_s = request.encode_wait_s if request.encoders_busy else 0.0
        # The policy's own choice first: it is better for the requests to come.
        if ttfts_s[position] <= slo_s:
            return position
        position = self.state.choose_least(ttfts_s)
        if ttfts_s[position] <= slo_s:
            return position
        idle = [index for index, load in enumerate(loads) if not load.entries]
        if queue_s or not idle:
            # Waiting shortens the queue by as much as it lasts, but by no more than the queue is long.
            ends = zip(ttfts_s, waits_s, strict=True)
            raise SloUnreachable(min(min(time - slo_s, max(wait, queue_s)) for time, wait in ends))
        return min(idle, key=ttfts_s.__getitem__)

    def _choose_freshest(self, loads: Sequence[InstanceLoad], scores: Sequence[float]) -> int:
        """Among scores within TIE_MARGIN of the least, choose the least recently loaded instance.

        It will evict the oldest blocks to make room for this prompt, those least likely to be reused.
        """
        # Relative, since prefills differ by a factor of a thousand.
        highest = min(scores) * (1 + TIE_MARGIN)
        positions = [at for at, score in enumerate(scores) if score <= highest]
        if len(positions) == 1:
            return positions[0]
        return positions[self.state.choose_least([loads[at].recent_tokens for at in positions])]


def _score_instances(
    prompt_tokens: int,
    cached_tokens: Iterable[int],
    instances: Sequence[Instance],
    loads: Sequence[InstanceLoad],
    line: PrefillLine,
    speed_factors: Mapping[str, float],
    delay_cost: float,
    now_us: int,
) -> tuple[list[float], list[float], list[float]]:
    """A score of each instance, seconds until it has finished its pending prefills, and of this prompt's own.

    The prefill takes `prefill` seconds after `wait` seconds of queue. A request that arrives during the wait
    is delayed by all of `prefill`, one that arrives during the prefill by half of it on average; `delay_cost`
    is the number of such requests per second. The running prefill is partly done; one that is overdue, as
    Instance has it, is expected to take as long again. The steps that compute prompts continue the answers
    under way, which costs each prompt as much; where no prompt is, half a step of theirs is to be waited for.
    """
    # All in one loop, PrefillLine.predict_seconds and count_pairs written out: calls would
    # dominate the cost of a decision. (n² + n)/2 pairs for n tokens: d/2 goes into the linear and into the
    # quadratic coefficient.
    a, b, d, e = line
    half = 0.5 * d
    once = b + half
    whole = a + prompt_tokens * (once + half * prompt_tokens)
    scores, waits, prefills, factor, now_s = [], [], [], 1.0, now_us / US_PER_SECOND
    for instance, load, cached in zip(instances, loads, cached_tokens, strict=True):
        prompts = len(load.entries)
        decodes = instance.in_flight + instance.in_flight_elsewhere - prompts
        decodes_s = e * decodes if decodes > 0 else 0.0
        # Usually empty: most instances do not differ significantly from the shared line.
        if speed_factors:
            factor = speed_factors.get(instance.url, 1.0)
        # The time of the whole prompt minus that of its cached part.
        prefill = factor * (whole - cached * (once + half * cached) + decodes_s)
        wait = factor * decodes_s * (prompts or 0.5)
        if prompts:
            # Computed once per change of the entries or of the line; only the current time differs.
            busy_until = load.busy_until
            # By identity: each solution of the model is a new tuple.
            if busy_until is None or busy_until[0] is not line:
                busy_until = load.busy_until = _predict_end(load, line, factor, now_us)
            _, end_s, min_wait_s = busy_until
            # Never below the minimum: a prefill that overruns its prediction has not ended.
            wait += end_s - now_s if end_s - now_s > min_wait_s else min_wait_s
            if now_us > instance.overdue_from_us:
                wait += instance.measure_overdue_s(now_us)
        # Without the last term each would be served soonest, at the cost of those after it.
        scores.append(wait + prefill + delay_cost * prefill * (wait + 0.5 * prefill))
        waits.append(wait)
        prefills.append(prefill)
    return scores, waits, prefills


def _predict_end(load: InstanceLoad, line: PrefillLine, factor: float, now_us: int) -> BusyUntil:
    """When an instance will be idle, from all its pending work less what it has already run.

    factor: how much slower than `line` the instance is.
    """
    total_s = factor * line.predict_seconds(
        PrefillWork(load.tokens_to_compute, load.pairs), len(load.entries)
    )
    running_work, elapsed_s = load.estimate_running(now_us)
    min_wait_s = total_s - (1 - OVERRUN_SHARE) * factor * line.predict_seconds(running_work)
    return BusyUntil(line, now_us / US_PER_SECOND - elapsed_s + total_s, min_wait_s)


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
        numbers = range(POINTS_PER_INSTANCE)
        points = list(zip(self._points, self._owners, strict=True))
        points += ((_hash_text(f"{url}#{n}"), url) for url in new_urls for n in numbers)
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
        cached = self.state.estimate_cached(request, instances)
        longest = max(cached)
        if not longest or longest < request.prompt_tokens - self.state.options.kv_aware_threshold:
            return self._fallback.choose_instance(request, instances, now_us, is_retry)
        tied = [each for each, tokens in zip(instances, cached, strict=True) if tokens == longest]
        chosen = tied[0]
        # A prefix that all have (a system prompt, a shared cache) must not draw all requests to one.
        if len(tied) > 1:
            chosen = self._fallback.choose_instance(request, tied, now_us, is_retry).instance
        scores = [request.prompt_tokens - tokens for tokens in cached]
        return Decision(chosen, min(scores), "kvaware", longest, None, scores, cached)


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
