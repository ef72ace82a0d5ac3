# SPDX-License-Identifier: Apache-2.0
"""What became of a prediction is on the span of its request, and the same as on the metrics."""

from __future__ import annotations

import pytest

from router import fakes, known
from router.fakes import Plan
from router.test_routing import COMPLETIONS, TRACED, ask, books, teach
from ttft_otel import names
from ttft_otel.record import Ttft


async def served(router: fakes.Router, stream: bool = True) -> Ttft:
    """One request's TTFT as the router tells it."""
    await router.post(COMPLETIONS, ask(stream=stream), **TRACED)
    record = (await router.settled(2))[0]
    assert record.ttft is not None
    return record.ttft


@pytest.mark.parametrize(("seconds", "late"), [(0.0001, True), (0.001, False)])
def test_the_error_is_what_came_less_what_was_predicted(seconds: float, late: bool) -> None:
    """Of the leg that was predicted, from sending until its first token; negative: it came sooner."""

    async def scenario() -> None:
        async with (
            fakes.instance(Plan({"prefill.compute": 300})) as one,
            fakes.router([one.url], routing=known.routing()) as router,
        ):
            teach(books(router), one.url, seconds)
            ttft = await served(router)
            predicted = ttft.attributes[names.PREDICTED_MS]
            error = ttft.attributes[names.PREDICTION_ERROR_MS]
            assert isinstance(predicted, int) and isinstance(error, int)
            leg = {"router.hop.mono", "mono.prefill.compute", "unattributed"}
            took = sum(piece.end - piece.start for piece in ttft.pieces if piece.name in leg) / 1000
            assert predicted + error == pytest.approx(took, abs=2)
            assert (error > 150) if late else (error < -150)
            mape = books(router).desk.state.outcomes[one.url].mape
            assert mape == pytest.approx(abs(error) / took, abs=0.01)

    fakes.run(scenario)


@pytest.mark.parametrize(("taught", "stream", "told"), [(0.0, True, False), (0.0001, False, True)])
def test_without_both_there_is_no_error(taught: float, stream: bool, told: bool) -> None:
    """Nothing was predicted yet; or an untraced answer came as a whole, whose first token nobody saw."""

    async def scenario() -> None:
        async with (
            fakes.instance(Plan(timed=False)) as one,
            fakes.router([one.url], routing=known.routing()) as router,
        ):
            if taught:
                teach(books(router), one.url, taught)
            ttft = await served(router, stream)
            assert (names.PREDICTED_MS in ttft.attributes) is told
            assert names.PREDICTION_ERROR_MS not in ttft.attributes
            assert books(router).desk.state.outcomes == {}

    fakes.run(scenario)
