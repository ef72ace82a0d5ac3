# SPDX-License-Identifier: Apache-2.0
"""Steps whose answer left before their encoder had ended: how long the encoder ran in the end.

model_runners.py keeps such steps here; the API server asks for them over vLLM's utility channel
(engine_core.py). That reaches them where the worker runs in the engine core's process, as it does for
an encoder on a single device; nothing is told of others.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final, Protocol

from ttft_otel.carrier import PENDING_ANSWER, EncoderRun

MAX_UNFINISHED_STEPS: Final = 256  # by request; the oldest are dropped


class UnfinishedStep(Protocol):
    """A step (model_runners.StepStamps) that ran the encoder for the requests encoded_ids."""

    encoded_ids: tuple[str, ...]

    def find_encoder_interval(self) -> tuple[int, int] | None:
        """From when to when the encoder ran; None while the device has not completed it."""


unfinished_steps: OrderedDict[str, UnfinishedStep] = OrderedDict()  # by engine request id


def keep_step(step: UnfinishedStep) -> None:
    """Keep `step` until the API server has asked for it, for each request that it encodes for."""
    for request_id in step.encoded_ids:
        unfinished_steps[request_id] = step
        if len(unfinished_steps) > MAX_UNFINISHED_STEPS:
            unfinished_steps.popitem(last=False)


def answer_encoder_run(core: Any, request_id: str) -> str:
    """Utility call: from when to when a request's encoder ran, as EncoderRun JSON.

    PENDING_ANSWER while it runs; "" when nothing is known.
    """
    step = unfinished_steps.get(request_id)
    if step is None:
        return ""
    interval = step.find_encoder_interval()
    if interval is None:
        return PENDING_ANSWER
    del unfinished_steps[request_id]
    return EncoderRun(*interval).to_json()
