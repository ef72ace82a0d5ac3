# SPDX-License-Identifier: Apache-2.0
"""Random events for tests that drive vLLM's own Scheduler; test_queue_reasons.py and test_held_steps.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


def with_any_events(kinds: Sequence[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test with `events` (kind, size, microseconds before it), `places` and a `tokens` budget per step.

    kinds: what can happen; named twice, twice as often.
    """
    event = st.tuples(st.sampled_from(kinds), st.integers(1, 400), st.integers(0, 3_000))
    drawn: dict[str, Any] = {
        "events": st.lists(event, min_size=5, max_size=60),
        "places": st.integers(1, 4),
        "tokens": st.sampled_from([32, 64, 512]),
    }
    repeated = settings(
        max_examples=settings.default.max_examples // 5,  # 20, or 4 with the profile `quick`
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    return lambda test: repeated(given(**drawn)(test))
