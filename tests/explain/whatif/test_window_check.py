# SPDX-License-Identifier: Apache-2.0
"""Windows that cannot tell what would be with other settings: refused, each with its reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.explain.recorded_window import BUSY, SMALL, ask, learn, predict, record
from tests.explain.whatif.scheduler_truth import BASE_US
from ttft_otel.explain.whatif import window_check
from ttft_otel.explain.whatif.planned_change import PlannedChange
from ttft_otel.explain.whatif.replay_facts import Recording, ReplayRequest
from ttft_otel.explain.window.request_facts import CannotTellError
from ttft_otel.model.names import keys

pytestmark = pytest.mark.filterwarnings("ignore")


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


FASTER = PlannedChange(rate=1.1)


def keep(window: Recording) -> Recording:
    return window


REFUSALS: dict[str, tuple[Callable[[Recording], Recording], PlannedChange, str]] = {
    "few": (lambda w: replace(w, requests=w.requests[:20]), FASTER, "50 are needed"),
    "failed": (lambda w: replace(w, failed=40), FASTER, "40 of 240 requests failed"),
    "untold": (lambda w: replace(w, unreadable=40), FASTER, "ttft-otel doctor"),
    "settings": (
        lambda w: replace(w, settings={"chat-1": {}}),
        FASTER,
        "--recorded-max-num-seqs and --recorded-max-num-batched-tokens",
    ),
    "ends": (lambda w: change_main(w, answer_us=-1), FASTER, "how long they decoded"),
    "adapters": (
        lambda w: change_main(w, reasons={"lora": 9000, "in_step": 900}),
        FASTER,
        r"91% of all waiting is for reasons that are not modelled \(lora\)",
    ),
    "blocks": (
        lambda w: change_main(w, reasons={"kv_blocks": 9000}),
        FASTER,
        "do not tell the size of the KV cache",
    ),
    "roles": (
        lambda w: replace(w, roles=frozenset({"prefill", "decode"})),
        FASTER,
        "prefill and a decode instance",
    ),
    "saturated": (keep, PlannedChange(rate=4), "more requests arrive than are served"),
    "far": (keep, PlannedChange(max_num_seqs=64, rate=5.0), "too far|more requests arrive"),
    "memory": (
        lambda w: replace(
            w, settings={"chat-1": {**w.settings["chat-1"], keys.ENGINE_KV_TOKENS: 900}}
        ),
        FASTER,
        "a prompt needs .* tokens of KV cache, there are 900",
    ),
    "encoders": (keep, PlannedChange(encoders=1), "at an encoder instance"),
    "sampled": (
        lambda w: replace(w, requests=w.requests[::4]),
        FASTER,
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
    more = PlannedChange(instances=1)
    samples = learn().samples

    def check(requests: tuple[ReplayRequest, ...], change: PlannedChange = more) -> None:
        limits = dict.fromkeys((each.main.instance for each in requests), SMALL)
        window_check.check_change(requests, limits, samples, change)

    with pytest.raises(CannotTellError, match="'a' and 'b'.*--model"):
        check(spread_requests(window, "ab").requests)
    # At a higher rate each stays where it is.
    check(spread_requests(window, "ab").requests, PlannedChange(rate=1.1))
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
