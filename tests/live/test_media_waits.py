# SPDX-License-Identifier: Apache-2.0
"""Why requests with images wait for a real server's encoder; for late encodings: test_explain.py."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

from lab import tiny_models
from tests.live.conftest import DeploymentDeck
from tests.live.like_requests import FEWER_LIKE, LikeRequests, check_cause
from tests.live.test_alone import run_alone
from tests.live.test_queue_reasons import MIN_SHARE
from ttft_otel.model import stages
from ttft_otel.model.names import keys

EDGE: Final = 504  # pixels: 324 tokens, more than half of the encoder's 512 of a step
LARGE: Final[dict[str, Any]] = {
    "size": EDGE,
    "extra": {"mm_processor_kwargs": {"max_pixels": EDGE * EDGE}},
}
IMAGES: Final = 10  # with the text before each image fewer than the step's tokens
ENCODER_MS: Final = 80.0


def read_stall_reasons(found: dict[str, Any]) -> dict[str, int]:
    """Microseconds per reason of `prefill.stall`; fails unless they add up to it."""
    reasons = {
        parsed[1]: us
        for key, us in found.items()
        if (parsed := keys.parse_reason_attribute(key)) and parsed[0] == "stall"
    }
    assert sum(reasons.values()) == found.get(keys.name_stage_attribute(stages.STALL_STAGE), 0)
    return reasons


@pytest.mark.full
@pytest.mark.timeout(900)
def test_one_image_at_a_time(deck: DeploymentDeck, tmp_path: Path) -> None:
    """Ten images that are encoded one after the other: the last one waits for its turn, and for nothing else.

    The text before an image is computed at once, so that this is a wait between two chunks. The server is
    one of its own: a model that takes videos has an encoder budget for the longest of them.
    """
    limit = ("--limit-mm-per-prompt", json.dumps({"video": 0}), "--trust-request-mm-kwargs")
    model = tiny_models.build_model(tiny_models.VISION_RECIPE)
    with run_alone(deck, tmp_path, limit, model=model) as bench:
        like = LikeRequests(bench, count=FEWER_LIKE, image=True, **LARGE)
        bench.control.set_injections({"encoder": ENCODER_MS})
        with ThreadPoolExecutor(IMAGES) as pool:
            sent = list(pool.map(lambda _: like.time_one(), range(IMAGES)))
        bench.control.set_injections()
        last = max(sent, key=lambda each: each.client_ttft_us or 0)
        reported = like.explain(str(last.request_id))
        found = bench.fetch_ttft(reported["examples"][0]["trace_id"])
    reasons = read_stall_reasons(found)

    assert reasons["encoder_budget"] >= MIN_SHARE * sum(reasons.values()), reasons
    # Else few of the others were encoded in between.
    queued = [found.get(keys.name_stage_attribute(stage), 0) for stage in stages.QUEUE_STAGES]
    assert reasons["encoder_budget"] >= sum(queued)
    check_cause(reported, "setting_limit", "max_num_batched_tokens")
