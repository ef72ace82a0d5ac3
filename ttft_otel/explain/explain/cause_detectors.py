# SPDX-License-Identifier: Apache-2.0
"""The detectors of `explain`: each computes its own contrast, and says whether it holds or what refutes it.

Input: a LateCase. Output: Candidates, of which explanation.py takes one. Pure; needs numpy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy

from ttft_otel.explain.explain import cause_kinds
from ttft_otel.explain.explain.late_case import (
    BLOCKS,
    MIN_FACTOR,
    MIN_OWN_REQUESTS,
    OUTLIER_Z,
    STEP_WORDS,
    SURE_FACTOR,
    Candidate,
    Contrast,
    Floats,
    LateCase,
    Mask,
    build_candidate,
    compare_speed,
    is_outlier,
    measure_share,
)
from ttft_otel.explain.explain.window_pair import (
    PAIR_DETECTORS,
    WindowPair,
    describe_since,
    detect_slow_steps,
    find_slowdown,
)
from ttft_otel.explain.window.request_facts import HOP, RequestFacts, count_values
from ttft_otel.model.stages import HOLD, RETRY
from ttft_otel.model.waits import WAIT_STAGES
from ttft_otel.report.show.terminal import format_short

MIN_BLOCKS: Final = 3  # separate pieces of time that must carry a cause
API_STAGES: Final = ("receive", "preprocess", "output", "egress")
GIVEN_AFTER: Final = ("preprocess", "egress")  # of these: after them a request leaves the process
ROUTER_STAGES: Final = (
    "router.receive",
    "router.tokenize",
    "router.lookup",
    "router.route",
    "router.egress",
)
MIN_PAUSE_US: Final = 30_000.0
PAUSE_RATIO: Final = 4.0  # of a stage to its usual length, from which on a pause may be in it
WORKED_RATIO: Final = 2.0  # of a step to its usual length, up to which its work explains it
IDLE_EDGE: Final = 0.15  # of a pause at each end, in which something may still, or again, move
MAX_MOVES: Final = 0.25  # of what a process usually does in a time, up to which it has stopped
SAME_END: Final = 0.2  # of a pause's length: stages that it stopped end within that
LONG_RATIO: Final = 4.0  # of a prompt's computed tokens to the median, from which on it is long
MOST_OF: Final = 0.8  # of them have a value in common
MAX_COMMON: Final = 0.6  # of all requests, which have it: with more it separates nothing
MIN_HELD: Final = 0.2  # of the late requests, that were beside a long prompt
RATE_SECONDS: Final = (1.0, 10.0, 60.0)  # over which arrivals are counted
MIN_RATE: Final = 1.5  # times the median rate
COLD_DROP: Final = 0.2  # of the cached share of like prompts, from which on one found less
MIN_SIZE_RATIO: Final = 1.5  # of the late prompts to the typical ones
MIN_WAITED: Final = 0.1  # of a request's TTFT, from which on a reason has held it up
# What few requests run into, and seldom, is not what bounds the window: of requests, and of BLOCKS.
MIN_REACHED: Final = 0.1
MIN_PIECES: Final = 10
# Reason of waiting -> the setting, or the resource, that bounds what runs.
LIMIT_REASONS: Final = {
    "max_num_seqs": "max_num_seqs",
    "token_budget": "max_num_batched_tokens",
    "kv_blocks": "kv_blocks",
    "stale_output": "kv_blocks",
    "encoder_budget": "max_num_batched_tokens",
    "lora": "max_loras",
    "prefill_interval": "prefill_schedule_interval",
    "priority": "scheduling_policy",
}
# Reasons that no limit is behind: what the request waited for was not there yet, or nothing was to run.
OWN_REASONS: Final = ("paused", "grammar", "remote_kv", "remote_ec")


def detect_slow_instances(case: LateCase) -> Iterator[Candidate]:
    """Instances whose steps take longer than those of others for the same work."""
    table = case.table
    names = numpy.array(table.instances)
    spent = table.sum_words("prefill.queue", *STEP_WORDS)
    for name in sorted(set(table.instances) - {""}):
        here = names == name
        peers = (table.pools == table.pools[numpy.argmax(here)]) & ~here
        is_known = min(here.sum(), peers.sum()) >= MIN_OWN_REQUESTS
        if not is_known or not (here & case.late).any():
            continue
        slow, speed = _compare_instance(case, here, peers)
        factor, low, high = (
            float(numpy.exp(each)) for each in (speed.value, speed.low, speed.high)
        )
        found = case.attribute(slow)
        # At least what its own steps take longer; with few late requests that is surer than who is late.
        own = measure_share(case, numpy.where(slow, (1 - 1 / factor) * spent, 0.0))
        if not found.holds or own.share > found.share:
            found = own
        refuted = ""
        if factor < MIN_FACTOR or low < SURE_FACTOR:
            refuted = "its steps take as long as those of others"
        elif not found.holds:
            refuted = "like requests of other instances are late as often"
        yield build_candidate(
            cause_kinds.SLOW_INSTANCE,
            f"steps of {name} take {factor:.2f} times as long as others' for the same work "
            f"({low:.2f} to {high:.2f})",
            found,
            refuted,
            name,
            factor=round(factor, 3),
            factor_low=round(low, 3),
            factor_high=round(high, 3),
        )


def _compare_instance(case: LateCase, here: Mask, peers: Mask) -> tuple[Mask, Contrast]:
    """The requests of an instance that had slower steps than its peers, and how much slower."""
    table = case.table
    speed = compare_speed(table, here, here | peers)
    if speed.value >= numpy.log(MIN_FACTOR):
        return here, speed
    # For a part of the time, which the mean of all of it hides.
    near = numpy.isin(table.blocks, numpy.unique(table.blocks[here & case.late]))
    return here & near, compare_speed(table, here, (here | peers) & near)


def detect_slow_start(case: LateCase) -> Iterator[Candidate]:
    """Steps of all instances take longer since a moment of the window, of which no time before is known."""
    table = case.table
    if case.before is not None or case.is_single:
        return
    _, since_ns = find_slowdown(table, table.blocks < BLOCKS // 4, table.blocks >= 0)
    is_after = [each.start_ns >= since_ns > 0 for each in table.requests]
    before, after = (
        [each for each, later in zip(table.requests, is_after, strict=True) if later == side]
        for side in (False, True)
    )
    for each in detect_slow_steps(WindowPair(before, after)) if after and before else ():
        if each.kind == cause_kinds.SLOW_FLEET:
            yield replace(each, sentence=each.sentence + describe_since(since_ns))


def detect_pauses(case: LateCase) -> Iterator[Candidate]:
    """Processes that stopped: what was in them ended together, and no work explains it."""
    table = case.table
    names = numpy.array(table.instances)
    until = table.start + table.ttft / 1e6
    for process, find in (("engine", _find_engine_stops), ("api", _find_api_stops)):
        ends, lengths, moves = find(case)
        for name in sorted(set(table.instances)):
            here = names == name
            pauses = [
                each
                for each in _cluster_stops(ends, lengths, here)
                if not _is_worked(case, here, *each)
            ]
            if not pauses or _moves_meanwhile(moves[:, here], pauses):
                continue
            lost, own = numpy.zeros(len(table)), numpy.zeros(len(table))
            for begin, end in pauses:
                inside = here & (begin <= ends) & (ends <= end + SAME_END * (end - begin))
                own[inside] = lengths[inside]
                # What had queued up is late for some time after the pause.
                shared = numpy.minimum(until, 2 * end - begin) - numpy.maximum(table.start, begin)
                lost += numpy.where(here, numpy.maximum(shared, 0.0), 0.0)
            yield _build_pause(case, process, name, lost, own, pauses)


def _build_pause(
    case: LateCase,
    process: str,
    name: str,
    lost: Floats,
    own: Floats,
    pauses: Sequence[tuple[float, float]],
) -> Candidate:
    """lost: seconds of pauses, and of the work that had gathered, in each request; own: us in its stages."""
    found = case.attribute(lost > 0)
    if not case.is_single:
        # No request is later by a pause than it was in it.
        most = measure_share(case, numpy.minimum(lost * 1e6, case.excess))
        found = min(found, most, key=lambda each: each.share)
    if process == "api" and not found.holds and len(pauses) >= MIN_BLOCKS:
        # What stood in its stages is measured, as hops are, and needs no like; a step has work.
        found = measure_share(case, numpy.minimum(own, case.excess))
    longest = max(end - begin for begin, end in pauses)
    refuted = ""
    if not found.holds and not case.is_single:
        refuted = (
            "too few separate pauses carry it"
            if len(pauses) < MIN_BLOCKS
            else "others are late, too"
        )
    return build_candidate(
        cause_kinds.PROCESS_PAUSE,
        f"the {process} process of {name} stopped {len(pauses)} times, for up to "
        f"{format_short(longest * 1e6)}, which no work explains",
        found,
        refuted,
        name,
        process=process,
        instance=name,
        pauses=len(pauses),
        longest_ms=round(longest * 1000, 1),
    )


def _moves_meanwhile(moves: numpy.ndarray, pauses: Sequence[tuple[float, float]]) -> bool:
    """Whether a process did things while it is said to have stopped: then it was slow, or nothing at all.

    moves: moments at which it gave something away, seconds. Of a pause the middle counts, because those
    that wait for it are taken at its end.
    """
    ordered = numpy.sort(moves, axis=None)
    edges = numpy.array(
        [
            (begin + IDLE_EDGE * (end - begin), end - IDLE_EDGE * (end - begin))
            for begin, end in pauses
        ]
    )
    seen = numpy.diff(numpy.searchsorted(ordered, edges), axis=1).sum()
    expected = len(ordered) / max(numpy.ptp(ordered), 1e-9) * numpy.diff(edges, axis=1).sum()
    return bool(seen > MAX_MOVES * expected)


def _is_worked(case: LateCase, here: Mask, begin: float, end: float) -> bool:
    """Whether a step ran for most of a stop that took as long as its work takes."""
    table, expected = case.table, case.expected_compute
    taken, done = case.spans
    covered = numpy.minimum(done, end) - numpy.maximum(taken, begin)
    is_usual = (table.compute < WORKED_RATIO * expected) & (expected > 0)
    return bool((here & is_usual & (covered >= 0.5 * (end - begin))).any())


def _find_engine_stops(case: LateCase) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
    """When each request's engine time ended that its work does not explain, seconds, and its length, us.

    Last, the moments at which the engine took a request, or had a first token.
    """
    table, expected = case.table, case.expected_compute
    taken, done = case.spans
    usual = numpy.where(expected > 0, expected, numpy.inf)
    beyond = numpy.where(table.compute > PAUSE_RATIO * usual, table.compute - expected, 0.0)
    waits = numpy.array(
        [
            float(sum(by.get("in_step", 0) for by in each.reasons.values()))
            for each in table.requests
        ]
    )
    typical = table.find_quantile(waits, 0.9)
    waits = numpy.where(waits > max(PAUSE_RATIO * typical, MIN_PAUSE_US), waits, 0.0)
    # A process that does not run takes nothing in: what is on its way to it arrives at the end.
    ipc = table.sum_words("ipc")
    normal = table.find_quantile(ipc)
    on_way = numpy.where(ipc > PAUSE_RATIO * normal + MIN_PAUSE_US, ipc - normal, 0.0)
    given = (
        taken
        - table.sum_words("prefill.queue", "encoder.queue", "kv.transfer", "ec.transfer") / 1e6
    )
    # The wait ends when the engine takes it; without a queue reason's place in time, its end is that.
    stops = [(done, beyond), (taken, waits), (given, on_way)]
    return *_take_longest(stops), numpy.array([taken, done])


def _take_longest(stops: Sequence[tuple[Floats, Floats]]) -> tuple[Floats, Floats]:
    """Of several ends and lengths of each request those of the longest stop, the first of equal ones."""
    ends, lengths = (numpy.stack(each) for each in zip(*stops, strict=True))
    chosen = lengths.argmax(0), numpy.arange(lengths.shape[1])
    return ends[chosen], lengths[chosen]


def _find_api_stops(case: LateCase) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
    """The same of stages in the API process, and of hops, which end when it accepts."""
    table = case.table
    place = table.start + table.sum_words(HOLD, RETRY, *ROUTER_STAGES[:-1]) / 1e6
    moves: list[Floats] = []
    stops: list[tuple[Floats, Floats]] = []
    for word in ("router.hop", *API_STAGES):
        us = table.sum_words(word)
        usual = table.find_quantile(us)
        beyond = numpy.where(us > PAUSE_RATIO * usual + MIN_PAUSE_US, us - usual, 0.0)
        is_after = word in ("output", "egress")
        done = table.ttft - table.sum_words("router.egress")
        place = table.start + done / 1e6 if is_after else place + us / 1e6
        stops.append((place, beyond))
        if word in GIVEN_AFTER:
            moves.append(place)
    return *_take_longest(stops), numpy.array(moves)


def _cluster_stops(
    ends: numpy.ndarray, lengths: numpy.ndarray, here: Mask
) -> list[tuple[float, float]]:
    """(begin, end) in seconds of stops at whose end several requests went on, longest ones first seen."""
    rows = numpy.flatnonzero(here & (lengths >= MIN_PAUSE_US))
    rows = rows[numpy.argsort(ends[rows])]
    pauses: list[tuple[float, float]] = []
    at = 0
    while at < len(rows):
        longest = max(lengths[row] for row in rows[at : at + 1])
        stop = at + 1
        while stop < len(rows) and ends[rows[stop]] - ends[rows[at]] <= SAME_END * longest / 1e6:
            longest = max(longest, lengths[rows[stop]])
            stop += 1
        end = float(ends[rows[at]])
        pauses.append((end - float(longest) / 1e6, end))
        at = stop
    return pauses


def detect_long_prompts(case: LateCase) -> Iterator[Candidate]:
    """Long prompts of others that were computed while late requests waited, or in the same steps."""
    table = case.table
    taken, done = case.spans
    waits = table.sum_words("prefill.queue", "encoder.queue") / 1e6
    median = table.find_quantile(table.computed)
    # In tokens, too: one of which little was cached is no long prompt. And beyond the sizes of the others.
    is_long = (table.computed >= LONG_RATIO * median) & is_outlier(table.tokens)
    held = numpy.zeros(len(table), bool)
    holders: Counter[int] = Counter()
    names = numpy.array(table.instances)
    for name in sorted(set(table.instances)):
        here = names == name
        for row in numpy.flatnonzero(here & is_long):
            overlap = here & (taken - waits < done[row]) & (done > taken[row])
            overlap[row] = False
            overlap &= table.computed < table.computed[row] / 2
            held |= overlap
            holders[int(row)] += int((overlap & case.late).sum())
    beside = int((held & case.late).sum())
    if beside < MIN_HELD * case.late.sum():
        return
    found = case.attribute(held)
    # The slowest may be of one burst: whether long prompts hold others up is asked of all beside one.
    everyone = table.contrast(table.ttft, held, table.sizes, ~is_long)
    if everyone.holds:
        low = found.share * everyone.low / everyone.value
        found = replace(found, low=low, share_low=low, blocks=everyone.blocks)
    # The long ones are late themselves, for what their size takes: the same prompts are behind both.
    own = float(case.excess[is_long & ~held].sum() / max(case.excess.sum(), 1.0))
    found = replace(
        found,
        share=found.share + own,
        share_low=found.share_low + own if found.share_low > 0 else found.share_low,
        share_high=found.share_high + own,
    )
    subject, separates = _name_holders(case, is_long, holders)
    factor = float(numpy.median(table.computed[is_long]) / median)
    refuted = ""
    if not found.holds:
        refuted = "like requests beside no long prompt are late as often"
    elif found.blocks < MIN_BLOCKS and not case.is_single:
        refuted = "too few separate bursts carry it"
    yield build_candidate(
        cause_kinds.HELD_BY_LONG_PROMPTS,
        f"{beside} of {int(case.late.sum())} late requests were beside long prompts "
        f"({separates}, {factor:.0f} times the median)",
        found,
        refuted,
        subject,
        factor=round(factor, 2),
    )


def _name_holders(case: LateCase, is_long: Mask, holders: Counter[int]) -> tuple[str, str]:
    """What separates the prompts that held others: a group, a model, or their length."""
    for read in (lambda each: each.group, lambda each: each.model):
        if name := _find_common(case, holders, read):
            return name, f"of {name}"
    least = float(case.table.computed[is_long].min())
    return f"{least:.0f} tokens", f"{least:.0f} tokens or more"


def _find_common(case: LateCase, rows: Counter[int], read: Callable[[RequestFacts], str]) -> str:
    """The value that most of these rows have, by their counts, and most requests have not; "" without one."""
    requests = case.table.requests
    values: Counter[str] = Counter()
    for row, count in rows.items():
        values[read(requests[row])] += count
    everywhere = count_values(requests, read)
    if not values.total():
        return ""
    name, count = values.most_common(1)[0]
    is_most = count >= MOST_OF * values.total()
    return name if is_most and everywhere[name] < MAX_COMMON * sum(everywhere.values()) else ""


def detect_load(case: LateCase) -> Iterator[Candidate]:
    """Bursts: late requests came when more came than usually."""
    if case.difference.word not in {*WAIT_STAGES, HOLD}:
        return
    table = case.table
    rows = numpy.argsort(table.start)
    order = table.start[rows]
    came = numpy.append(0.0, numpy.cumsum(table.weights[rows]))
    best: tuple[float, float, float, Contrast] | None = None
    for seconds in RATE_SECONDS:
        # Before the window nothing is known, which is not that nothing came.
        until = numpy.maximum(table.start, table.start.min() + seconds)
        since = until - seconds
        counts = (
            came[numpy.searchsorted(order, until, "right")]
            - came[numpy.searchsorted(order, since, "left")]
        )
        rates = counts / seconds
        usual = float(numpy.median(rates[case.typical]))
        # More than comes together by chance, of which the longest queues of any window are made.
        by_chance = usual + OUTLIER_Z * (usual / seconds) ** 0.5
        exposed = rates >= max(MIN_RATE * max(usual, 2 / seconds), by_chance)
        found = case.attribute(exposed)
        if best is None or found.share > best[3].share:
            best = (usual, float(numpy.median(rates[case.late])), seconds, found)
    assert best is not None
    usual, late, seconds, found = best
    refuted = ""
    if not found.holds or late < MIN_RATE * usual:
        refuted = (
            "no more came at once than chance makes, or those that came alone are late as often"
        )
    yield build_candidate(
        cause_kinds.LOAD_INCREASE,
        f"late requests came at {late:.3g} in a second, typical ones at {usual:.3g}",
        found,
        refuted,
        rate_from=round(usual, 3),
        rate_to=round(late, 3),
    )


def detect_cold_cache(case: LateCase) -> Iterator[Candidate]:
    """Prompts of which the prefix cache had less than of their like."""
    table = case.table
    if not table.cached.any():
        return
    shares = table.cached / numpy.maximum(table.tokens, 1)
    usual = numpy.zeros(len(table))
    for code in numpy.unique(table.sizes):
        here = table.sizes == code
        like = here & ~case.late
        usual[here] = numpy.median(shares[like]) if like.any() else numpy.median(shares[~case.late])
    exposed = shares <= usual - COLD_DROP
    if (
        case.is_single
    ):  # no others have its hits: what its own tokens take beyond those of usual hits
        usual_tokens = table.tokens * (1 - usual) / numpy.maximum(table.computed, 1)
        found = measure_share(
            case, numpy.where(exposed, case.own_time * (1 - numpy.minimum(usual_tokens, 1)), 0.0)
        )
    else:
        found = case.attribute(exposed)
    holds = found.share_low > 0 if case.is_single else found.holds
    late, typical = (
        float(table.cached[side].sum() / max(table.tokens[side].sum(), 1))
        for side in (case.late, ~case.late)
    )
    refuted = "" if holds else "like prompts with as many hits are late as often"
    if not refuted and typical - late < COLD_DROP:
        refuted = f"of the late prompts {late:.0%} was cached, of others {typical:.0%}"
    yield build_candidate(
        cause_kinds.COLD_PREFIX_CACHE,
        f"prefix-cache hits {typical:.0%} of other prompts, {late:.0%} of the late ones",
        found,
        refuted,
        hits_from=round(typical, 4),
        hits_to=round(late, 4),
    )


def detect_own_size(case: LateCase) -> Iterator[Candidate]:
    """What the late requests took longer because they are larger than others of their instances."""
    table, own = case.table, case.own_time
    late = case.late
    usual = numpy.zeros(len(table))
    for pool in numpy.unique(table.pools[late]):
        here = table.pools == pool
        others = here & ~late if (here & ~late).any() else here
        usual[here] = own[others].mean()
    chosen = table.pools[late]
    sides = (late, numpy.isin(table.pools, chosen) & ~late)
    sizes = [float(numpy.median(table.computed[side])) for side in sides]
    lengths = [float(numpy.median(table.tokens[side])) for side in sides]
    found = measure_share(case, own - usual)
    refuted = ""
    if sizes[0] < MIN_SIZE_RATIO * max(sizes[1], 1):
        refuted = f"median {sizes[0]:.0f} tokens to compute, of others {sizes[1]:.0f}"
    elif lengths[0] < MIN_SIZE_RATIO * max(lengths[1], 1):
        refuted = (
            f"median {lengths[0]:.0f} tokens, of others {lengths[1]:.0f}: less of them was cached"
        )
    elif found.share_low <= 0:
        refuted = "their size takes no longer"
    elif case.before is not None:
        # The like of them among the largest of before: their size is nothing new.
        share = float(table.weights[late].sum() / table.weights.sum())
        then = case.before.find_quantile(case.before.tokens, 1 - share / 2)
        if lengths[0] < MIN_SIZE_RATIO * then:
            refuted = f"as large ones came in the time before ({then:.0f} tokens)"
    rows = Counter({int(row): 1 for row in numpy.flatnonzero(late)})
    group = _find_common(case, rows, lambda each: each.group)
    yield build_candidate(
        cause_kinds.OWN_SIZE,
        f"{f'prompts of {group}: ' if group else ''}median {sizes[0]:.0f} tokens to compute, of others "
        f"{sizes[1]:.0f}",
        found,
        refuted,
        group,
        tokens_from=round(sizes[1]),
        tokens_to=round(sizes[0]),
    )


def _find_hop(each: RequestFacts) -> str:
    """The instance to which its first hop was; "" without one."""
    return next((at for name, at in each.instances.items() if name.startswith(HOP)), "")


# Stages of which one instance may have most -> which one a request had.
PLACES: Final[Mapping[str, Callable[[RequestFacts], str]]] = {
    "router.hop": _find_hop,
    RETRY: lambda each: each.failed,
}


def detect_stage_causes(case: LateCase) -> Iterator[Candidate]:
    """Causes that a stage itself measures: hops, the router, failed attempts."""
    table = case.table
    for kind, words in (
        (cause_kinds.SLOW_HOP, ("router.hop",)),
        (cause_kinds.SLOW_HOP, ("kv.transfer",)),
        (cause_kinds.SLOW_HOP, ("ec.transfer",)),
        (cause_kinds.ROUTER_BUSY, ROUTER_STAGES),
        (cause_kinds.FAILED_ATTEMPTS, (RETRY,)),
    ):
        us = table.sum_words(*words)
        if not us.any():
            continue
        usual = float(us[case.typical].mean())
        if case.before is not None:  # typical ones may have it, too
            usual = min(usual, float(case.before.sum_words(*words).mean()))
        found = measure_share(case, us - usual)
        rows = Counter(
            {int(row): int(us[row]) for row in numpy.flatnonzero(case.late & (us > usual))}
        )
        read = PLACES.get(words[0])
        subject = _find_common(case, rows, read) if read else ""
        refuted = ""
        if found.share_low <= 0:
            refuted = "as long as usual"
        elif found.blocks < MIN_BLOCKS and not case.is_single:
            refuted = "too few separate requests carry it"
        late = float(us[case.late].mean())
        yield build_candidate(
            kind,
            f"{words[0] if len(words) == 1 else 'the router itself'}"
            f"{f' to {subject}' if subject else ''}: {format_short(late)}, usual are {format_short(usual)}",
            found,
            refuted,
            subject,
        )


def detect_limits(case: LateCase) -> Iterator[Candidate]:
    """A reason of waiting that has most of the stage, and the setting behind it, where there is one."""
    top = case.difference.parts[0]
    for reason, share in case.difference.reasons[:3]:
        if share <= 0.1:
            continue
        if reason in OWN_REASONS:
            kind, subject, figures = cause_kinds.SET_ASIDE, reason, {"reason": reason}
        elif reason in LIMIT_REASONS:
            kind, subject = cause_kinds.SETTING_LIMIT, LIMIT_REASONS[reason]
            figures = {"setting": subject}
        else:
            continue
        waited = numpy.array(
            [each.reasons.get(top.name, {}).get(reason, 0) for each in case.table.requests]
        )
        reached = case.asked & (waited >= MIN_WAITED * case.table.ttft)
        part = float(case.table.weights[reached].sum() / case.table.weights[case.asked].sum())
        pieces = len(numpy.unique(case.table.blocks[reached]))
        refuted = "" if top.low > 0 else "as long as usual"
        is_rare = part < MIN_REACHED and pieces < MIN_PIECES and not case.is_single
        if kind == cause_kinds.SETTING_LIMIT and is_rare:
            refuted = (
                f"{part:.0%} of the requests waited for it, in {pieces} of {BLOCKS} pieces of time"
            )
        words = {"max_num_seqs": "all places of the batch were taken"}
        yield Candidate(
            kind,
            f"{words.get(reason, f'waited for {reason}')}: {share:.0%} of {top.name}",
            top.share * share,
            top.low * share,
            top.high * share,
            len(numpy.unique(case.table.blocks[case.late])),
            refuted,
            subject,
            figures,
        )


def detect_changes(case: LateCase) -> Iterator[Candidate]:
    """What `diff` finds between the time before and now, as shares of the lateness that is new."""
    pair = WindowPair(case.before.requests, case.table.requests) if case.before else None
    if pair is None or pair.change <= 0:
        return
    for each in (found for detect in PAIR_DETECTORS for found in detect(pair)):
        if each.kind == cause_kinds.SLOW_INSTANCE:
            if each.holds:  # its peers of the same time tell it better; a shift to it is none
                return
            continue
        share, low, high = (
            min(max(part, 0.0), 1.0) * case.new_share for part in (each.share, each.low, each.high)
        )
        is_change = each.kind != cause_kinds.MIX_CHANGE
        found = replace(each, share=share, low=low, high=high, is_change=is_change)
        yield found
        if found.holds and is_change:
            return  # what comes later are its consequences


Detector = Callable[[LateCase], Iterator[Candidate]]
# `diff` asks these, too. Of the others it has its own, which compare two windows.
SHARED_DETECTORS: Final[tuple[Detector, ...]] = (
    detect_slow_instances,
    detect_pauses,
    detect_stage_causes,
    detect_long_prompts,
    detect_limits,
)
DETECTORS: Final[tuple[Detector, ...]] = (
    *SHARED_DETECTORS,
    detect_slow_start,
    detect_cold_cache,
    detect_load,
    detect_changes,
    detect_own_size,
)
