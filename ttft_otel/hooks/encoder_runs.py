# SPDX-License-Identifier: Apache-2.0
"""Steps whose answer left before their encoder had ended: how long the encoder ran in the end.

model_runners.py keeps such steps here; the API server asks for them over vLLM's utility channel
(engine_core.py). Where the worker is the engine core's process, it is asked. Where it is one of its
own, runs come with the output of a later step (scheduler.py); of the last ones before an instance
falls idle nothing is told.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final, Protocol

from ttft_otel.tracing.carrier import PENDING_ANSWER, EncoderRun

MAX_UNFINISHED_STEPS: Final = 256  # by request; the oldest are dropped


class UnfinishedStep(Protocol):
    """A step (model_runners.StepStamps) that ran the encoder for the requests encoded_ids."""

    encoded_ids: tuple[str, ...]

    def find_encoder_interval(self) -> tuple[int, int] | None:
        """From when to when the encoder ran; None while the device has not completed it."""


unfinished_steps: OrderedDict[str, UnfinishedStep] = OrderedDict()  # worker: by engine request id
# Engine core: answered before their encoder had ended; the run as JSON, once the worker has told it.
told_runs: OrderedDict[str, str] = OrderedDict()


def keep_step(step: UnfinishedStep) -> None:
    """Keep `step` until it is asked for, or told, for each request that it encodes for."""
    for request_id in step.encoded_ids:
        unfinished_steps[request_id] = step
        if len(unfinished_steps) > MAX_UNFINISHED_STEPS:
            unfinished_steps.popitem(last=False)


def collect_runs() -> dict[str, tuple[int, int]]:
    """Worker: the kept encoders that have ended by now, by request; they are not kept any more."""
    runs: dict[str, tuple[int, int]] = {}
    for request_id, step in unfinished_steps.items():
        interval = step.find_encoder_interval()
        if interval is None:  # the device works in their order
            break
        runs[request_id] = interval
    for request_id in runs:
        del unfinished_steps[request_id]
    return runs


def expect_run(request_id: str) -> None:
    """Engine core: this request's encoder still runs."""
    told_runs[request_id] = PENDING_ANSWER
    if len(told_runs) > MAX_UNFINISHED_STEPS:
        told_runs.popitem(last=False)


def note_runs(runs: dict[str, tuple[int, int]]) -> None:
    """Engine core: what collect_runs() has found in the worker."""
    for request_id, interval in runs.items():
        if request_id in told_runs:
            told_runs[request_id] = EncoderRun(*interval).to_json()


def answer_encoder_run(core: Any, request_id: str) -> str:
    """Utility call: from when to when a request's encoder ran, as EncoderRun JSON.

    PENDING_ANSWER while it runs, or has not been told; "" when nothing is known.
    """
    step = unfinished_steps.get(request_id)
    if step is None:
        told = told_runs.get(request_id, "")
        # "Pending" stays: the API server asks again, and the run may be told in between.
        if told != PENDING_ANSWER:
            told_runs.pop(request_id, None)
        return told
    interval = step.find_encoder_interval()
    if interval is None:
        return PENDING_ANSWER
    del unfinished_steps[request_id]
    told_runs.pop(request_id, None)
    return EncoderRun(*interval).to_json()
