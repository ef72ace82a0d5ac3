# SPDX-License-Identifier: Apache-2.0
"""What-if answers, plans and remedies against vLLM's own Scheduler with the other settings; refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.explain.stored_records import (
    BASE_US,
    BEFORE_US,
    BUSY,
    GAP_US,
    LINEAR,
    REPETITIONS,
    SMALL,
    STREAM_US,
    TOKEN_US,
    Arrival,
    Device,
    StoreCommand,
    ask,
    delay,
    draw_arrivals,
    draw_busy_arrivals,
    find_token_times,
    find_truth,
    hasten,
    learn,
    predict,
    record,
    run_scheduler,
    store_served_window,
)
from ttft_otel.explain.explain import window_answer
from ttft_otel.explain.whatif import what_if, window_check
from ttft_otel.explain.whatif.engine_model import EngineLimits, Step
from ttft_otel.explain.whatif.replay_facts import WORK, Recording, ReplayRequest
from ttft_otel.explain.whatif.step_fit import StepSamples, fit_steps
from ttft_otel.explain.whatif.what_if import TTFT, Prediction
from ttft_otel.explain.whatif.window_check import PlannedChange
from ttft_otel.explain.window.request_facts import CannotTellError
from ttft_otel.model.names import keys

pytestmark = pytest.mark.filterwarnings("ignore")

SCARCE = replace(SMALL, max_num_seqs=16, kv_tokens=2400)
LONG_ANSWERS = draw_arrivals(19, 300, 40_000, (20, 60))
SLOWLY = hasten(LONG_ANSWERS, 1 / 3)
LIMITS = EngineLimits(16, 512)
SLOW = replace(LINEAR, speed=2.5)
READING = replace(LINEAR, context_us=2.0)
PAUSED = replace(LINEAR, pauses=((2_000_000, 2_900_000), (6_000_000, 6_700_000)))
ROOFLINE = Device(base_us=1000, floor_us=6000, token_us=90)


@dataclass
class Case:
    """A window, its change, and how near to the truth the answer is; `note` is among what it tells."""

    change: PlannedChange
    arrivals: tuple[Arrival, ...] = BUSY
    limits: EngineLimits = SMALL
    devices: tuple[Device, ...] = (LINEAR,)
    tells_answers: bool = False
    note: str = ""
    tolerance: float = 0.05
    repetitions: int = REPETITIONS

    def list_changed(self) -> tuple[tuple[Arrival, ...], EngineLimits, tuple[Device, ...]]:
        """The arrivals, limits and devices with the change."""
        change, limits = self.change, self.limits
        limits = replace(
            limits,
            max_num_seqs=change.max_num_seqs or limits.max_num_seqs,
            max_batched_tokens=change.max_batched_tokens or limits.max_batched_tokens,
            kv_tokens=round(change.kv_cache * limits.kv_tokens),
        )
        devices = self.devices + (LINEAR,) * change.instances
        return hasten(self.arrivals, change.rate), limits, devices


def draw_case(
    change: PlannedChange,
    arrivals: tuple[Arrival, ...],
    limits: EngineLimits = LIMITS,
    *devices: Device,
) -> Case:
    """A case of a device that is no straight line, of several, or of much load."""
    return Case(change, arrivals, limits, devices or (LINEAR,), True, "", 0.1, 4)


FASTER = PlannedChange(rate=1.5)
MORE = PlannedChange(instances=1)
CASES = {
    "max_num_seqs": Case(PlannedChange(max_num_seqs=16)),
    "rate": Case(PlannedChange(rate=1.2)),
    "fewer_seqs": Case(PlannedChange(max_num_seqs=3), tells_answers=True),
    "max_num_batched_tokens": Case(PlannedChange(max_batched_tokens=128), tells_answers=True),
    "more_memory": Case(
        PlannedChange(kv_cache=2.0), LONG_ANSWERS, SCARCE, note="KV blocks are scarce"
    ),
    "second_instance": Case(MORE, note="round_robin"),
    # Steps are composed while others run; most of `dispatch` is then another step.
    "async": Case(
        PlannedChange(max_num_seqs=3), limits=replace(SMALL, async_scheduling=True), tolerance=0.08
    ),
    # The change makes memory scarce that was not.
    "less_memory": Case(
        *(PlannedChange(rate=3.0), SLOWLY, replace(SCARCE, kv_tokens=4000)),
        note="nothing of that was recorded",
        tolerance=0.06,
    ),
    # Its slowness was in the noise of all instances and in its own speed.
    "slow_instance": draw_case(
        FASTER, draw_arrivals(31, 450, 14_000, (5, 25)), LIMITS, LINEAR, LINEAR, SLOW
    ),
    # A pass had no term for what decodes read.
    "contexts": draw_case(FASTER, draw_arrivals(32, 300, 60_000, (20, 80)), LIMITS, READING),
    "heavy_tail": draw_case(FASTER, draw_arrivals(33, 300, 22_000, (5, 25), sigma=1.8)),
    "kv_blocks": draw_case(MORE, LONG_ANSWERS, replace(LIMITS, kv_tokens=2400)),
    # More came than was served: the arrivals are known all the same.
    "overload": draw_case(
        MORE, draw_arrivals(34, 200, 16_000, (5, 25)), replace(LIMITS, max_num_seqs=4)
    ),
}
FULL = ("heavy_tail", "kv_blocks")


@pytest.mark.parametrize(
    ("name", "tells_answers"),
    [
        *(
            pytest.param(name, case.tells_answers, marks=[pytest.mark.full] * (name in FULL))
            for name, case in CASES.items()
        ),
        *(
            pytest.param(name, not CASES[name].tells_answers, marks=pytest.mark.full)
            for name in list(CASES)[:5]
        ),
    ],
)
def test_change(name: str, tells_answers: bool) -> None:
    """Predicted p50 and p95 are those of vLLM's Scheduler with the changed setting; so is the token time."""
    case = CASES[name]
    learned = learn(case.arrivals, case.limits, tells_answers, case.devices)
    answer, predicted = ask(learned, case.change, case.repetitions)
    truth = find_truth(*case.list_changed())
    before = find_truth(case.arrivals, case.limits, case.devices)

    assert predicted == pytest.approx(truth, rel=case.tolerance)
    assert abs(truth[1] / before[1] - 1) > 0.1, "a change that changes nothing would test nothing"
    assert max(abs(each) for each in answer.errors) < case.tolerance
    figure = answer.figures[TTFT][1]
    # Two replays are an interval of the model's chance alone.
    true = truth[1] if case.repetitions > REPETITIONS else figure.predicted
    assert figure.low <= true <= figure.high
    assert any(case.note in each for each in (*answer.notes, *answer.warnings))
    if tells_answers:
        assert [each.predicted for each in answer.token_time] == pytest.approx(
            find_token_times(*case.list_changed()), rel=0.15
        )


def test_memory_is_modelled() -> None:
    """Counter-test: without the cache's size a change that makes memory scarce is predicted wrongly."""
    case = CASES["less_memory"]
    _, wrong = ask(learn(SLOWLY, replace(case.limits, kv_tokens=0)), case.change)
    assert wrong[1] < 0.9 * find_truth(*case.list_changed())[1]


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


def test_wrong_settings() -> None:
    """Told wrong settings, the model misses the window itself, and says by how much or refuses."""
    try:
        learned = what_if.learn_fleet(record(BUSY, SMALL), PlannedChange(max_num_seqs=2))
        answer, _ = ask(learned, PlannedChange(rate=1.1))
    except CannotTellError:
        return
    assert max(abs(each) for each in answer.errors) > 0.15


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


def test_speeds() -> None:
    """A slow instance is slow by its factor; the others, and one that is added, are as the line says."""
    case = CASES["slow_instance"]
    fit = learn(case.arrivals, case.limits, True, case.devices).samples.fit
    assert fit.speeds == {
        "chat-1": pytest.approx(1, rel=0.03),
        "chat-2": pytest.approx(1, rel=0.03),
        "chat-3": pytest.approx(2.5, rel=0.05),
    }
    assert fit.unexplained < 0.03 and fit.build_times("+1", None).speed == 1


def test_pauses() -> None:
    """Times in which an engine's process stood still are found, and are as long after a change."""
    arrivals = draw_arrivals(35, 250, 40_000, (5, 25))
    learned = learn(arrivals, LIMITS, devices=(PAUSED,))
    found = learned.samples.pauses["chat-1"]
    assert numpy.array(found) == pytest.approx(numpy.array(PAUSED.pauses), abs=60_000)
    answer, _ = ask(learned, PlannedChange(max_batched_tokens=256))
    truth = find_truth(arrivals, replace(LIMITS, max_batched_tokens=256), (PAUSED,), (0.95, 0.99))
    assert truth[1] > 500_000
    assert [each.predicted for each in answer.figures[TTFT][1:]] == pytest.approx(truth, rel=0.1)


@pytest.mark.full
def test_extrapolation() -> None:
    """Intervals grow with the distance from what was seen, and hold the truth there."""
    arrivals = draw_arrivals(36, 300, 60_000, (5, 25), sigma=1.6)
    small = replace(LIMITS, max_batched_tokens=128)
    widths = []
    for budget in (160, 512):
        learned = learn(arrivals, small, True, (ROOFLINE,))
        figure = ask(learned, PlannedChange(max_batched_tokens=budget), 10)[0].figures[TTFT][1]
        truth = find_truth(arrivals, replace(small, max_batched_tokens=budget), (ROOFLINE,))[1]
        assert figure.low <= truth <= figure.high
        widths.append((figure.high - figure.low) / figure.predicted)
    assert widths[1] > 1.3 * widths[0]


def test_overload() -> None:
    """An overloaded window has no answer while it stays overloaded."""
    case = CASES["overload"]
    with pytest.raises(CannotTellError, match="in the prediction more requests arrive"):
        ask(learn(case.arrivals, case.limits, True), PlannedChange())


def test_lead_of_chunks() -> None:
    """Prompts of several chunks have the host's part of each in `dispatch`; a step has it once."""
    lead_us, chunks = 3000, 4
    visits = [
        replace(
            each.main,
            chunks=chunks,
            stages={**each.main.stages, "dispatch": chunks * lead_us, "kv.transfer": 9000},
        )
        for each in learn().requests
    ]
    times = StepSamples(visits, False, {}).fit.build_times("chat-1", None)
    assert times.leads[0] + times.gap_us == pytest.approx(lead_us, rel=0.01)


ARRIVALS = draw_arrivals(34, 120, 30_000, (5, 25))


def search(targets: str, devices: int = 1, tells_answers: bool = True) -> Prediction:
    """The plan for the window of so many instances, each replayed 3 times."""
    learned = learn(ARRIVALS, SMALL, tells_answers, (LINEAR,) * devices)
    calls: list[int] = []
    try:
        return what_if.search_plan(
            learned,
            what_if.parse_targets(targets),
            PlannedChange(),
            3,
            calls.append,
        )
    finally:
        assert len(calls) <= what_if.count_replays(3)


def test_plan() -> None:
    """More places hold the target on the one instance that is there: nothing is bought."""
    (before,) = find_truth(ARRIVALS, SMALL, shares=(0.95,))
    target_ms = before / 1000 / 2
    found = search(f"ttft_p95={target_ms}")
    change = found.change
    assert change.instances == 0 and change.max_num_seqs > SMALL.max_num_seqs
    assert found.held == 3
    limits = replace(
        SMALL,
        max_num_seqs=change.max_num_seqs,
        max_batched_tokens=change.max_batched_tokens or SMALL.max_batched_tokens,
    )
    assert find_truth(ARRIVALS, limits, shares=(0.95,))[0] <= 1000 * target_ms < before
    text = what_if.name_found(found)
    assert "plans that holds ttft_p95 <= " in text
    assert f": 1 instance with --max-num-seqs {change.max_num_seqs}" in text


def test_fewer_instances() -> None:
    """Where two hold it easily, one with other settings does, too."""
    found = search("ttft_p95=200,tpot_p99=100", devices=2)
    assert found.change.instances == -1


def test_nothing_holds() -> None:
    """No plan is faster than a prompt's own computing: it says how near the nearest one comes."""
    nearest = "with up to 5 instances holds ttft_p50 <= 1 ms .* nearest"
    with pytest.raises(CannotTellError, match=nearest):
        search("ttft_p50=1")
    with pytest.raises(CannotTellError, match="do not tell the time per output token"):
        search("tpot_p99=5", tells_answers=False)


@pytest.fixture(scope="module")
def window() -> Recording:
    return record(BUSY, SMALL)


def change_main(recording: Recording, step: int = 1, **fields: Any) -> Recording:
    """The recording with these fields in every `step`-th visit."""
    requests = [
        replace(each, main=replace(each.main, **fields)) if number % step == 0 else each
        for number, each in enumerate(recording.requests)
    ]
    return replace(recording, requests=tuple(requests))


SLIGHTLY_FASTER = PlannedChange(rate=1.1)


def keep(window: Recording) -> Recording:
    return window


REFUSALS: dict[str, tuple[Callable[[Recording], Recording], PlannedChange, str]] = {
    "few": (lambda w: replace(w, requests=w.requests[:20]), SLIGHTLY_FASTER, "50 are needed"),
    "failed": (lambda w: replace(w, failed=40), SLIGHTLY_FASTER, "40 of 240 requests failed"),
    "untold": (lambda w: replace(w, unreadable=40), SLIGHTLY_FASTER, "ttft-otel doctor"),
    "settings": (
        lambda w: replace(w, settings={"chat-1": {}}),
        SLIGHTLY_FASTER,
        "--recorded-max-num-seqs and --recorded-max-num-batched-tokens",
    ),
    "ends": (lambda w: change_main(w, answer_us=-1), SLIGHTLY_FASTER, "how long they decoded"),
    "adapters": (
        lambda w: change_main(w, reasons={"lora": 9000, "in_step": 900}),
        SLIGHTLY_FASTER,
        r"91% of all waiting is for reasons that are not modelled \(lora\)",
    ),
    "blocks": (
        lambda w: change_main(w, reasons={"kv_blocks": 9000}),
        SLIGHTLY_FASTER,
        "do not tell the size of the KV cache",
    ),
    "roles": (
        lambda w: replace(w, roles=frozenset({"prefill", "decode"})),
        SLIGHTLY_FASTER,
        "prefill and a decode instance",
    ),
    "saturated": (keep, PlannedChange(rate=4), "more requests arrive than are served"),
    "far": (keep, PlannedChange(max_num_seqs=64, rate=5.0), "too far|more requests arrive"),
    "memory": (
        lambda w: replace(
            w, settings={"chat-1": {**w.settings["chat-1"], keys.ENGINE_KV_TOKENS: 900}}
        ),
        SLIGHTLY_FASTER,
        "a prompt needs .* tokens of KV cache, there are 900",
    ),
    "encoders": (keep, PlannedChange(encoders=1), "at an encoder instance"),
    "sampled": (
        lambda w: replace(w, requests=w.requests[::4]),
        SLIGHTLY_FASTER,
        "not all requests are traced|misses the recorded window",
    ),
    "equal": (
        lambda w: change_main(w, step_tokens=300, chunks=1, computed=300, own_tokens=300),
        PlannedChange(max_batched_tokens=2048),
        "what a token more costs",
    ),
}


def spread_requests(recording: Recording, models: str, routers: str = "") -> Recording:
    """Every second request is at another instance; `models` and `routers` have a letter for each half."""
    requests = [
        replace(
            each,
            model=models[number % 2],
            router=routers[number % 2 : number % 2 + 1],
            main=replace(each.main, instance=f"chat-{1 + number % 2}"),
        )
        for number, each in enumerate(recording.requests)
    ]
    settings = {name: recording.settings["chat-1"] for name in ("chat-1", "chat-2")}
    return replace(recording, requests=tuple(requests), settings=settings)


def test_two_models(window: Recording) -> None:
    """An instance serves one model: requests for two are moved nowhere, those for one are."""
    samples = learn().samples

    def check(requests: tuple[ReplayRequest, ...], change: PlannedChange = MORE) -> None:
        limits = dict.fromkeys((each.main.instance for each in requests), SMALL)
        window_check.check_change(requests, limits, samples, change)

    with pytest.raises(CannotTellError, match="'a' and 'b'.*--model"):
        check(spread_requests(window, "ab").requests)
    # At a higher rate each stays where it is.
    check(spread_requests(window, "ab").requests, SLIGHTLY_FASTER)
    check(spread_requests(window, "aa").requests)
    # An adapter has a name of its own, and the same instance.
    check(
        tuple(
            replace(each, model="adapter" if number % 3 else "a")
            for number, each in enumerate(window.requests)
        )
    )
    with pytest.raises(CannotTellError, match="none would be left"):
        check(window.requests, PlannedChange(instances=-1))


def test_two_routers(window: Recording) -> None:
    """Each router knows its own requests only; that the replay has one router is told."""
    for routers, is_told in (("ab", True), ("aa", False)):
        requests = spread_requests(window, "mm", routers).requests
        samples = learn().samples
        notes = window_check.list_notes(requests, samples, PlannedChange(instances=1), "ttft")
        assert any("came through 2 routers" in note for note in notes) == is_told


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(window: Recording, name: str) -> None:
    """What the window cannot tell is refused, with the reason."""
    spoil, change, reported = REFUSALS[name]
    with pytest.raises(CannotTellError, match=reported):
        if spoil is keep:
            ask(learn(), change)
        else:
            predict(spoil(window), change)


def test_not_refused() -> None:
    """The window that the refusals spoil answers by itself, and warns where it leaves what was seen."""
    answer, _ = ask(learn(), PlannedChange(max_num_seqs=8))

    assert answer.requests == 200 and answer.warnings
    assert sum(figure.predicted for figure in (answer.figures["prefill.compute"][0],)) > BASE_US
    assert not any("grammar" in note for note in answer.notes)


def test_other_reasons(window: Recording) -> None:
    """What is waited for besides the scheduler's limits is told as a note."""
    waits = change_main(window, reasons={"in_step": 900, "grammar": 100}).requests
    notes = window_check.list_notes(waits, learn().samples, PlannedChange(), "")

    assert any("10% of all waiting" in note and "(grammar)" in note for note in notes)


EXPLAIN = StoreCommand("explain")


def check_p99(found: dict[str, Any], arrivals: tuple[Arrival, ...], limits: EngineLimits) -> None:
    """The p99 that the real scheduler gives with these limits lies in the predicted interval."""
    ttfts = [
        BEFORE_US + one.queue + one.compute + one.stall + STREAM_US
        for one in run_scheduler(arrivals, limits)
    ]
    true_ms = float(numpy.quantile(ttfts, 0.99)) / 1000
    assert found["low_p99_ms"] <= true_ms * 1.02 and true_ms * 0.98 <= found["high_p99_ms"]
    # Counter-test: the recorded p99 is not in that interval, so that it says something.
    assert found["high_p99_ms"] < found["recorded_p99_ms"]


def test_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the places: what the real scheduler then gives is what was predicted, and its price."""
    monkeypatch.setattr(window_answer, "REPETITIONS", 8)
    arrivals, limits = draw_busy_arrivals(), replace(SMALL, max_num_seqs=2 * SMALL.max_num_seqs)
    store_served_window(tmp_path / "told.db", arrivals, SMALL)
    reported = EXPLAIN.read_json(tmp_path / "told.db", "--predict")
    assert reported["cause"]["setting"] == "max_num_seqs"
    assert reported["cause"]["remedy"]["price_kind"] == "predicted"
    found = reported["cause"]["prediction"]
    assert found["setting"] == f"--max-num-seqs {limits.max_num_seqs}"
    check_p99(found, arrivals, limits)
    price = found["time_per_output_token"]
    times = [
        (one.end - one.first_token) / (each.answer - 1) / 1000
        for each, one in zip(arrivals, run_scheduler(arrivals, limits), strict=True)
    ]
    assert numpy.quantile(times, 0.99) == pytest.approx(
        price["recorded_p99_ms"] * (1 + price["change"]), rel=0.05
    )
    assert any(
        "Its price: p99 of the time per output token" in each for each in reported["sentences"]
    )


def test_no_remedy_without_settings(tmp_path: Path) -> None:
    """Without the servers' settings the prediction is refused, and the explanation stays."""
    store_served_window(tmp_path / "silent.db", draw_busy_arrivals(), SMALL, tells_settings=False)
    reported = EXPLAIN.read_json(tmp_path / "silent.db")
    assert reported["cause"]["remedy"]["price_kind"] == "qualitative"
    assert reported["cause"]["prediction"] == {
        "refusal": "the servers' spans do not tell --max-num-seqs; ttft-otel whatif takes it by hand"
    }


@pytest.mark.full
def test_remedy_of_memory(tmp_path: Path) -> None:
    """Late requests waited for KV blocks: with twice as many the p99 is that of the real scheduler."""
    scarce = EngineLimits(16, 512, kv_tokens=2400)
    arrivals = delay(LONG_ANSWERS)
    store_served_window(tmp_path / "scarce.db", arrivals, scarce)
    reported = EXPLAIN.read_json(tmp_path / "scarce.db")
    assert reported["cause"]["setting"] == "kv_blocks"
    assert reported["cause"]["prediction"]["setting"] == "2 times the KV cache"
    check_p99(reported["cause"]["prediction"], arrivals, replace(scarce, kv_tokens=4800))
