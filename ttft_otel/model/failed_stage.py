# SPDX-License-Identifier: Apache-2.0
"""Judge from a request's marks how far it came: which stage it ended in, what it ran. Pure.

recorder.py asks for requests that ended without a first token; breakdown.py then partitions their time.
"""

from __future__ import annotations

from ttft_otel.model.breakdown import CODE_FORWARD, Marks


def runs_language_model(marks: Marks) -> bool:
    """Whether any step of the request ran the language model, not only the encoder."""
    return any(
        step.sampled or any(code == CODE_FORWARD for code, _, _ in step.pairs)
        for step in marks.steps
    )


def find_failed_stage(marks: Marks) -> str:
    """The stage in which a request ended without a first token; "" when a missing mark hides it."""
    if not marks.added:
        if not marks.render:
            return "receive"
        # Between handover and input: the mark may be missing because its hook is.
        return "" if marks.assign else "preprocess"
    if not marks.scheduled:
        # A wait that has a start and no end is the one that it ended in.
        if marks.moving:
            return "kv.transfer"
        return "ec.transfer" if marks.asking else "prefill.queue"
    if not marks.steps:
        return "dispatch"
    if marks.encode_only:
        return "encoder.compute" if not marks.entered else "output"
    return "output" if marks.steps[-1].sampled and not marks.partial else "prefill.compute"
