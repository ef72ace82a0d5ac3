# SPDX-License-Identifier: Apache-2.0
"""What-if answers against vLLM's own Scheduler with the other settings; refusals: test_window_check.py."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest

from tests.explain.recorded_window import (
    BUSY,
    SMALL,
    ask,
    find_token_times,
    find_truth,
    learn,
    predict,
    record,
)
from tests.explain.whatif.scheduler_truth import (
    BASE_US,
    BEFORE_US,
    GAP_US,
    STREAM_US,
    TOKEN_US,
    draw_arrivals,
    hasten,
    run_scheduler,
)
from ttft_otel.explain.whatif import what_if
from ttft_otel.explain.whatif.engine_model import EngineLimits, Step
from ttft_otel.explain.whatif.planned_change import PlannedChange
from ttft_otel.explain.whatif.replay_facts import ReplayRequest
from ttft_otel.explain.whatif.step_fit import StepSamples, fit_steps
from ttft_otel.explain.whatif.step_work import WORK
from ttft_otel.explain.whatif.what_if_figures import TTFT
from ttft_otel.explain.window.request_facts import CannotTellError
from ttft_otel.model.names import keys

pytestmark = pytest.mark.filterwarnings("ignore")

# A change, and the limits and the rate that it comes to.
CASES = {
    "max_num_seqs": (PlannedChange(max_num_seqs=16), EngineLimits(16, 512), 1.0),
    "fewer_seqs": (PlannedChange(max_num_seqs=3), EngineLimits(3, 512), 1.0),
    "max_num_batched_tokens": (PlannedChange(max_batched_tokens=128), EngineLimits(4, 128), 1.0),
    "rate": (PlannedChange(rate=1.2), SMALL, 1.2),
}


@pytest.mark.parametrize(
    ("name", "tells_answers"),
    [
        ("max_num_seqs", False),
        ("rate", False),
        ("fewer_seqs", True),
        ("max_num_batched_tokens", True),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("max_num_seqs", True),
                ("rate", True),
                ("fewer_seqs", False),
                ("max_num_batched_tokens", False),
            )
        ),
    ],
)
def test_change(name: str, tells_answers: bool) -> None:
    """Predicted p50 and p95 are within 5 % of those of vLLM's Scheduler with the changed setting."""
    change, limits, rate = CASES[name]
    answer, predicted = ask(learn(tells_answers=tells_answers), change)
    truth, before = find_truth(hasten(BUSY, rate), limits), find_truth(BUSY, SMALL)

    assert predicted == pytest.approx(truth, rel=0.05)
    assert abs(truth[1] / before[1] - 1) > 0.1, "a change that changes nothing would test nothing"
    assert max(abs(each) for each in answer.errors) < 0.05
    figure = answer.figures[TTFT][1]
    assert figure.low <= figure.predicted <= figure.high


def delay_visit(request: ReplayRequest, us: int) -> ReplayRequest:
    """Its prefill has taken so much longer."""
    stages = {**request.main.stages, "prefill.compute": request.main.stages["prefill.compute"] + us}
    main = replace(request.main, stages=stages)
    return replace(request, main=main, stages={**request.stages, **stages})


def test_disturbed_window() -> None:
    """Steps that something else made longer are told, and the intervals reach to what is without it."""
    recording, change = record(BUSY, SMALL), PlannedChange(max_num_seqs=5)
    calm, _ = ask(learn(), change, 6)
    late = [
        delay_visit(each, 60_000) if number % 15 == 0 else each
        for number, each in enumerate(recording.requests)
    ]
    disturbed, _ = predict(replace(recording, requests=tuple(late)), change, 6)

    assert calm.unexplained < 0.02 and not any("explain" in each for each in calm.warnings)
    assert disturbed.unexplained > 0.05
    assert any(f"vary by {disturbed.unexplained:.0%}" in each for each in disturbed.warnings)
    truth = find_truth(BUSY, replace(SMALL, max_num_seqs=5))
    for figure, true in zip(disturbed.figures[TTFT], truth, strict=False):
        assert figure.low <= true <= figure.high
    widths = [each.figures[TTFT][1].high - each.figures[TTFT][1].low for each in (calm, disturbed)]
    assert widths[1] > 2 * widths[0]


def test_async_scheduling() -> None:
    """Where steps are composed while others run, too; most of `dispatch` is then another step."""
    limits = replace(SMALL, async_scheduling=True)
    answer, predicted = ask(learn(BUSY, limits), PlannedChange(max_num_seqs=3))
    truth = find_truth(BUSY, replace(limits, max_num_seqs=3))

    assert predicted == pytest.approx(truth, rel=0.08)
    assert max(abs(each) for each in answer.errors) < 0.05
    assert truth[1] > 1.1 * find_truth(BUSY, limits)[1]


def test_wrong_settings() -> None:
    """Told wrong settings, the model misses the window itself, and says by how much or refuses."""
    try:
        learned = what_if.learn_fleet(record(BUSY, SMALL), PlannedChange(max_num_seqs=2))
        answer, _ = ask(learned, PlannedChange(rate=1.1))
    except CannotTellError:
        return
    assert max(abs(each) for each in answer.errors) > 0.15


def test_second_instance() -> None:
    """Two instances that take turns: each is vLLM's Scheduler with every other request."""
    answer, predicted = ask(learn(), PlannedChange(instances=1))
    ttfts = [
        BEFORE_US + one.first_token - each.at_us + STREAM_US
        for half in (BUSY[0::2], BUSY[1::2])
        for each, one in zip(half, run_scheduler(half, SMALL), strict=True)
    ]

    assert predicted == pytest.approx(numpy.quantile(ttfts, [0.5, 0.95]), rel=0.05)
    assert any("round_robin" in note for note in answer.notes)


def test_policies() -> None:
    """The router's own policies: by load, two instances serve better than by turns; none is refused."""
    fleet = learn(draw_arrivals(13, 400, 40_000, (5, 25)))
    by_turns, by_load, by_ttft = (
        ask(fleet, PlannedChange(instances=1, policy=policy, rate=1.8), 4)[1]
        for policy in ("round_robin", "least_requests", "ttft")
    )

    assert by_load[1] < by_turns[1] and by_ttft[1] < by_turns[1]
    with pytest.raises(CannotTellError, match="traces do not tell"):
        ask(learn(), PlannedChange(policy="prefix"))


def test_cache_hit() -> None:
    """More cached tokens are fewer computed ones: as if prompts were so much shorter."""
    _, predicted = ask(learn(), PlannedChange(cache_hit=0.3))
    shorter = tuple(replace(each, tokens=max(1, round(each.tokens * 0.7))) for each in BUSY)

    assert predicted == pytest.approx(find_truth(shorter, SMALL), rel=0.05)


def test_fit() -> None:
    """The steps' cost is what the clock took, also where something else has delayed every tenth."""
    visits = [
        delay_visit(each, 900_000).main if number % 10 == 0 else each.main
        for number, each in enumerate(record(BUSY, SMALL).requests)
    ]
    samples = StepSamples(visits, False, {"chat-1": SMALL.max_batched_tokens})
    fit = fit_steps(samples)

    assert fit.times.forward[WORK.index("prompt")] == pytest.approx(BASE_US, rel=0.05)
    assert fit.times.forward[WORK.index("token")] == pytest.approx(TOKEN_US, rel=0.05)
    assert fit.times.gap_us == pytest.approx(GAP_US, abs=5) and samples.knows_gap
    assert fit.speeds == {"chat-1": pytest.approx(1.0)}


def test_slow_period() -> None:
    """What slowed the machine down for a while slows the replay down then, and not all the time."""
    requests = record(BUSY, SMALL).requests
    middle = requests[100].main.arrived
    slow = [
        delay_visit(each, each.main.stages["prefill.compute"] * (each.main.arrived > middle)).main
        for each in requests
    ]
    times = fit_steps(StepSamples(slow, False, {})).build_times("chat-1", None)
    early, late = (
        times.measure_step(Step(1, middle + shift, [], 0, tokens=100)).forward
        for shift in (-1_000_000, 1_000_000)
    )

    assert late == pytest.approx(2 * early, rel=0.05)
    assert early == pytest.approx(BASE_US + 100 * TOKEN_US, rel=0.1)


SCARCE = replace(SMALL, max_num_seqs=16, kv_tokens=2400)
LONG_ANSWERS = draw_arrivals(19, 300, 40_000, (20, 60))


@pytest.mark.parametrize("tells_answers", [False, pytest.param(True, marks=pytest.mark.full)])
def test_more_memory(tells_answers: bool) -> None:
    """A window that waits for KV blocks, with twice as many: as in vLLM's Scheduler."""
    learned = learn(LONG_ANSWERS, SCARCE, tells_answers)
    answer, predicted = ask(learned, PlannedChange(kv_cache=2.0))
    truth = find_truth(LONG_ANSWERS, replace(SCARCE, kv_tokens=4800))

    assert predicted == pytest.approx(truth, rel=0.05)
    assert truth[1] < 0.9 * find_truth(LONG_ANSWERS, SCARCE)[1]
    assert max(abs(each) for each in answer.errors) < 0.05
    assert any("KV blocks are scarce" in each for each in answer.notes)
    assert sum(each.main.preemptions for each in learned.requests) > 3


def test_less_memory() -> None:
    """Where the change makes memory scarce that was not, the answer is right and says what is new."""
    limits, change = replace(SCARCE, kv_tokens=4000), PlannedChange(rate=3.0)
    slowly = hasten(LONG_ANSWERS, 1 / 3)
    answer, predicted = ask(learn(slowly, limits), change)
    truth = find_truth(LONG_ANSWERS, limits)

    assert predicted == pytest.approx(truth, rel=0.06)
    assert any("nothing of that was recorded" in each for each in answer.warnings)
    # Counter-test: without the cache's size it is wrong.
    _, wrong = ask(learn(slowly, replace(limits, kv_tokens=0)), change)
    assert wrong[1] < 0.9 * truth[1]


def test_shared_blocks() -> None:
    """Prefixes that requests share take less memory than the model thinks: it is left out, and told."""
    recording = record(BUSY, SMALL)
    reported = {**recording.settings["chat-1"], keys.ENGINE_KV_TOKENS: 2400}
    sharing = [replace(each, main=replace(each.main, cached=500)) for each in recording.requests]
    sharing_window = replace(recording, requests=tuple(sharing), settings={"chat-1": reported})
    learned = what_if.learn_fleet(sharing_window, PlannedChange())
    answer, _ = ask(learned, PlannedChange())
    assert any("share cached tokens" in each for each in answer.notes)
    assert max(abs(each) for each in answer.errors) < 0.05
    with pytest.raises(CannotTellError, match="how many of them requests share"):
        ask(learned, PlannedChange(max_num_seqs=10, rate=1.3))


def test_token_time() -> None:
    """The price: with larger steps running answers get their tokens later, as in vLLM's Scheduler."""
    small = EngineLimits(8, 96)
    answer, _ = ask(learn(BUSY, small, tells_answers=True), PlannedChange(max_batched_tokens=384))
    before, truth = (
        find_token_times(BUSY, each) for each in (small, replace(small, max_batched_tokens=384))
    )

    assert [each.recorded for each in answer.token_time] == pytest.approx(before, rel=0.001)
    assert [each.predicted for each in answer.token_time] == pytest.approx(truth, rel=0.05)
    assert 1 + answer.token_time[2].change == pytest.approx(truth[2] / before[2], rel=0.05)
    assert truth[2] > 1.1 * before[2], "a price that is none would test nothing"
    assert max(abs(each) for each in answer.token_errors) < 0.05
    # Without the spans' word nothing is said.
    assert not ask(learn(), PlannedChange())[0].token_time
