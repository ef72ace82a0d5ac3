# SPDX-License-Identifier: Apache-2.0
"""Policy `ttft`: the least expected time to first token, from queued work and this request's prefill."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from ttft_otel.model.stages import ENCODE
from ttft_otel.router.errors import SloUnreachable
from ttft_otel.router.routing.policies.pending_load import US_PER_SECOND, BusyUntil, InstanceLoad
from ttft_otel.router.routing.policies.policy_state import RoutingPolicy
from ttft_otel.router.routing.policies.prefill_model import PrefillLine, PrefillWork, count_pairs
from ttft_otel.router.types import Decision, Instance, RoutingRequest

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

    @property
    def uses_predictions(self) -> bool:
        """Whether it learns prefill times; comparing pairs needs none."""
        return self.state.options.ttft_model == "calibrated"

    def choose_instance(
        self, request: RoutingRequest, instances: Sequence[Instance], now_us: int, is_retry: bool
    ) -> Decision:
        """Choose the least score, ties at random. Raises SloUnreachable."""
        state = self.state
        if self.uses_predictions:
            # None until MIN_SAMPLES prefills of this model were measured.
            model = state.models.get_line(request.model)
            if model is not None:
                return self._choose_soonest(request, instances, *model, now_us)
        cached_tokens = state.estimate_cached(request, instances)
        scores = [
            # Pending and own work in the same unit; no time is needed to compare them.
            load.pairs + count_pairs(request.prompt_tokens, cached)
            for load, cached in zip(state.pending.list_loads(instances), cached_tokens, strict=True)
        ]
        position = state.choose_least(scores)
        return Decision(
            instances[position],
            scores[position],
            "trapezoid",
            cached_tokens[position],
            None,
            scores,
            cached_tokens,
        )

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
        The prefill takes `prefill` seconds after `wait` seconds of queue. A request that arrives during
        the wait is delayed by all of `prefill`, one that arrives during the prefill by half of it on
        average; `delay_cost` is the number of such requests per second.
        """
        pending = self.state.pending
        loads = pending.list_loads(instances)
        # With pending prompts: their blocks are there by the time this one is prefilled.
        cached_tokens = self.state.estimate_cached(request, instances, loads)
        prefills = _predict_prefills(request.prompt_tokens, cached_tokens, line)
        # Usually empty: most instances do not differ significantly from the shared line.
        if speed_factors:
            prefills = [
                prefill * speed_factors.get(instance.url, 1.0)
                for prefill, instance in zip(prefills, instances, strict=True)
            ]
        waits = _predict_waits(instances, loads, line, speed_factors, now_us)
        if line.e:
            _add_decodes(waits, prefills, instances, loads, line.e, speed_factors)
        delay_cost = pending.estimate_delay_cost(now_us, len(instances))
        scores = [
            # Without the last term each would be served soonest, at the cost of those after it.
            wait + prefill + delay_cost * prefill * (wait + 0.5 * prefill)
            for wait, prefill in zip(waits, prefills, strict=True)
        ]
        position = self._choose_freshest(loads, scores)
        # Without a prompt length nothing is predicted; encoders send no first token.
        limits_s = self.state.options.slo_s, request.slo_s * (request.leg != ENCODE)
        slo_s = min(filter(None, limits_s), default=0.0)
        if slo_s and request.prompt_tokens:
            spent_s = (now_us - request.arrived_us) / US_PER_SECOND if request.arrived_us else 0.0
            # Encoding runs while the prompt would queue at the instance: only the longer wait counts.
            times = [
                spent_s
                + max(wait, request.encode_wait_s)
                + prefill
                + self.state.overheads_s.get(instance.url, 0.0)
                for wait, prefill, instance in zip(waits, prefills, instances, strict=True)
            ]
            position = self._choose_in_time(request, loads, waits, times, position, slo_s)
        predicted_s = waits[position] + prefills[position]
        return Decision(
            instances[position],
            scores[position],
            "calibrated",
            cached_tokens[position],
            predicted_s,
            scores,
            cached_tokens,
        )

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


def _predict_prefills(
    prompt_tokens: int, cached_tokens: Iterable[int], line: PrefillLine
) -> list[float]:
    """Prefill seconds of a prompt of `prompt_tokens`, for each of several numbers of `cached_tokens`.

    The time of the whole prompt minus that of its cached part, both by `line`.
    """
    # PrefillLine.predict_seconds and count_pairs written out: calls would dominate the cost of a decision.
    # (n² + n)/2 pairs for n tokens: d/2 goes into the linear and into the quadratic coefficient.
    a, b, d, _ = line
    half = 0.5 * d
    once = b + half
    whole = a + prompt_tokens * (once + half * prompt_tokens)
    return [whole - cached * (once + half * cached) for cached in cached_tokens]


def _add_decodes(
    waits: list[float],
    prefills: list[float],
    instances: Sequence[Instance],
    loads: Sequence[InstanceLoad],
    seconds: float,
    speed_factors: Mapping[str, float],
) -> None:
    """Add to waits and prefills what an instance's answers under way cost each prompt, `seconds` apiece.

    The steps that compute prompts continue these answers. Where no prompt is, half a step of theirs is to be
    waited for.
    """
    for position, (instance, load) in enumerate(zip(instances, loads, strict=True)):
        prompts = len(load.entries)
        # As count_decodes() has it, whose look-up of the load would double the time of this loop.
        decodes = instance.all_in_flight - prompts
        if decodes > 0:
            delay_s = seconds * decodes * speed_factors.get(instance.url, 1.0)
            waits[position] += delay_s * (prompts or 0.5)
            prefills[position] += delay_s


def _predict_waits(
    instances: Sequence[Instance],
    loads: Sequence[InstanceLoad],
    line: PrefillLine,
    speed_factors: Mapping[str, float],
    now_us: int,
) -> list[float]:
    """Seconds until each instance has finished its pending prefills; the running one is partly done.

    One that is overdue, as OwedAnswers has it, is expected to take as long again.
    """
    waits, now_s = [], now_us / US_PER_SECOND
    for instance, load in zip(instances, loads, strict=True):
        if not load.entries:
            waits.append(0.0)
            continue
        # Computed once per change of the entries or of the line; only the current time differs.
        busy_until = load.busy_until
        # By identity: each solution of the model is a new tuple.
        if busy_until is None or busy_until.line is not line:
            busy_until = load.busy_until = _predict_end(
                load, line, speed_factors.get(instance.url, 1.0), now_us
            )
        # Never below the minimum: a prefill that overruns its prediction has not ended.
        wait = max(busy_until.end_s - now_s, busy_until.min_wait_s)
        waits.append(wait + instance.owed_answers.measure_overdue_s(now_us))
    return waits


def _predict_end(load: InstanceLoad, line: PrefillLine, factor: float, now_us: int) -> BusyUntil:
    """When an instance will be idle, from all its pending work less what it has already run.

    factor: how much slower than `line` the instance is.
    """
    total_s = factor * line.predict_seconds(
        PrefillWork(load.tokens_to_compute, load.pairs), len(load.entries)
    )
    running = load.estimate_running(now_us)
    # Cannot be with entries; the caller has looked.
    if running is None:
        return BusyUntil(line, 0.0, 0.0)
    running_work, elapsed_s = running
    min_wait_s = total_s - (1 - OVERRUN_SHARE) * factor * line.predict_seconds(running_work)
    return BusyUntil(line, now_us / US_PER_SECOND - elapsed_s + total_s, min_wait_s)
