# SPDX-License-Identifier: Apache-2.0
"""Worker: both model runners behind one contract; one record per marked step, bound to its output.

The scheduler marks the steps; carrier.py describes the record that scheduler.py finds on the output.
V1 (gpu_model_runner.py, CPU too) and V2 (gpu/model_runner.py, CUDA's default) differ in where the
encoder and the forward are found, which is in targets/; a V2 forward ends with execute_model.
"""

from __future__ import annotations

from typing import Any, Final

from ttft_otel import breakdown, clock
from ttft_otel.hooks import device, wrap

# The step being run, if it is a marked one; empty at all other times, so that hooks cost nothing.
opened: list[Step] = []
bound: list[Step] = []  # async outputs not read yet
_clock: list[device.Clock] = []
BOUND_LIMIT: Final = 64
AROUND: Final = 1
AFTER: Final = 2
roles: set[str] = set()  # encoder-cache connector's: "producer", "consumer"


class Step:
    """Stamps of one marked step, in the order they were taken."""

    __slots__ = (
        "blocks", "clock", "encodes", "forward", "media", "pairs", "sampled", "stamps", "tokens"
    )  # fmt: skip

    def __init__(self, now: device.Clock, encodes: bool, media: bool, blocks: int) -> None:
        self.blocks = blocks  # a KV connector's work in it: none, around the forward, after it only
        self.clock = now
        self.encodes = encodes
        self.media = media
        self.pairs: list[tuple[int, int, int]] = []  # code, indices of its two stamps
        self.stamps: list[Any] = []
        self.forward = -1
        self.sampled = -1
        self.tokens = False

    def stamp(self) -> int:
        """Take a stamp; give its index."""
        self.stamps.append(self.clock.stamp())
        return len(self.stamps) - 1

    def close(self, code: int, begin: int) -> None:
        """Add a pair that began at stamp `begin` and ends now."""
        self.pairs.append((code, begin, self.stamp()))

    def resolve(self) -> tuple[int, ...]:
        """The record: (boot, sampled, lost, code, start, end, ...)."""
        places = self.clock.place(self.stamps)
        pairs = self.pairs if places is not None else []
        flat: list[int] = []
        for code, begin, end in pairs:
            flat += (code, places[begin], places[end])  # type: ignore[index]
        sampled = places[self.sampled] if places is not None and self.sampled >= 0 else 0
        return (clock.boot_once(), sampled, self._lost({code for code, _, _ in pairs}), *flat)

    def _lost(self, seen: set[int]) -> int:
        lost = 0
        if self.encodes and breakdown.ENCODER not in seen:
            lost |= breakdown.LOST_ENCODER
        if self.tokens and breakdown.FORWARD not in seen:
            lost |= breakdown.LOST_FORWARD
        if self.media:
            if not wrap.active("transfer.load") and roles != {"producer"}:
                lost |= breakdown.LOST_LOAD
            if not wrap.active("transfer.save") and roles != {"consumer"}:
                lost |= breakdown.LOST_SAVE
        if self.blocks:
            if not wrap.active("kv.load"):
                lost |= breakdown.LOST_AFTER
                lost |= breakdown.LOST_BEFORE if self.blocks == AROUND else 0
            if not wrap.active("kv.save"):
                lost |= breakdown.LOST_AFTER
        return lost


def executing(runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Step | None:
    """Before execute_model(): open a record for a marked step."""
    if opened:
        opened.clear()  # the step before this one raised
    if getattr(scheduler_output, "_ttft", None) is None:
        return None
    if not _clock:
        _clock.append(device.pick())
    media = getattr(scheduler_output, "ec_connector_metadata", None) is not None and any(
        getattr(data, "mm_features", None) for data in scheduler_output.scheduled_new_reqs
    )
    blocks = 0
    if getattr(scheduler_output, "kv_connector_metadata", None) is not None:
        # Older releases do not say whether a load has to come before the forward.
        blocks = AROUND if getattr(scheduler_output, "has_sync_kv_loads", True) else AFTER
    step = Step(_clock[0], bool(scheduler_output.scheduled_encoder_inputs), media, blocks)
    opened.append(step)
    return step


def executed(step: Step | None, result: Any, *args: Any, **kwargs: Any) -> None:
    """After it: an encoder instance's output is final; otherwise sample_tokens() comes next."""
    if step is None:
        return
    if step.forward >= 0:
        step.close(breakdown.FORWARD, step.forward)
        step.forward = -1
    if result is not None:
        opened.clear()
        _bind(result, step)


def encoding(*args: Any, **kwargs: Any) -> int:
    """Before the encoder runs (V1 calls it on every step: only those with items count)."""
    step = opened[0]
    return step.stamp() if step.encodes else -1


def encoded(begin: int | None, result: Any, *args: Any, **kwargs: Any) -> None:
    """After the encoder: on a device the pair's end is an event, nothing waits for it."""
    if begin is not None and begin >= 0 and opened:
        opened[0].close(breakdown.ENCODER, begin)


def forwarding(owner: Any, *args: Any, **kwargs: Any) -> int:
    """Before the forward. V2's targets only start it: the first of them counts."""
    step = opened[0]
    if hasattr(owner, "_model_forward"):
        return step.stamp()
    if step.forward < 0:
        step.forward = step.stamp()
    return -1


def forwarded(begin: int | None, result: Any, *args: Any, **kwargs: Any) -> None:
    """After V1's forward."""
    if begin is not None and begin >= 0 and opened:
        opened[0].close(breakdown.FORWARD, begin)


def sampled(_: None, result: Any, *args: Any, **kwargs: Any) -> None:
    """After the sampler: the end of `sample`."""
    opened[0].sampled = opened[0].stamp()


def tokens(_: None, result: Any, *args: Any, **kwargs: Any) -> None:
    """After sample_tokens(): the record belongs to this output, whatever step runs next."""
    step = opened.pop()
    step.tokens = True
    if result is not None:
        _bind(result, step)


def _bind(result: Any, step: Step) -> None:
    if hasattr(result, "get_output"):
        result._ttft_step = step
        bound.append(step)
        if len(bound) > BOUND_LIMIT:
            del bound[0]
    elif getattr(result, "req_ids", None):  # not the shared empty output
        result._ttft = step.resolve()


def output(_: None, result: Any, pending: Any, *args: Any, **kwargs: Any) -> None:
    """After an async output's get_output(): its copy is complete, hence all its events are."""
    step = getattr(pending, "_ttft_step", None)
    if step is None:
        return
    if step in bound:
        bound.remove(step)
    if getattr(result, "req_ids", None):
        result._ttft = step.resolve()


HOOKS: Final = {
    "worker.execute": wrap.Hook(before=executing, after=executed),
    "worker.encoder": wrap.Hook(before=encoding, after=encoded, ready=opened),
    "worker.forward": wrap.Hook(before=forwarding, after=forwarded, ready=opened),
    "worker.sample": wrap.Hook(after=sampled, ready=opened),
    "worker.tokens": wrap.Hook(after=tokens, ready=opened),
    "worker.output": wrap.Hook(after=output, ready=bound),
}
