# SPDX-License-Identifier: Apache-2.0
"""Hooks in the worker, for both of vLLM's model runners: one record of intervals per marked step.

The scheduler marks steps with traced requests; scheduler.py finds the record (carrier.py describes
it) on the step's output. V1 (gpu_model_runner.py, also on CPU) and V2 (gpu/model_runner.py, default
on CUDA) call encoder and forward in different places, see targets/; V2's forward ends with
execute_model().
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from ttft_otel.hooks import encoder_runs, wrap
from ttft_otel.hooks.worker import device
from ttft_otel.model import breakdown
from ttft_otel.tracing import carrier, clock

# The step that is running, if it is marked. Empty otherwise, so that hooks return at once.
open_steps: list[StepStamps] = []
bound_steps: list[StepStamps] = []  # steps of async outputs that are not read yet
_step_clocks: list[device.StepClock] = []
MAX_BOUND_STEPS: Final = 64  # outputs that are never read must not accumulate
MIN_TRANSFER_US: Final = 50  # a load or save of KV blocks that is shorter has transferred nothing
# When a KV connector can work within a step (StepStamps.blocks; 0: not at all).
BLOCKS_AROUND_FORWARD: Final = 1
BLOCKS_AFTER_FORWARD: Final = 2
ec_roles: set[str] = set()  # of the encoder-cache connector: "producer", "consumer"


class StepStamps(msgspec.Struct, eq=False):
    """Stamps of one marked step.

    encodes: the step runs the encoder, for the requests encoded_ids. media: it may load or save
    encodings. blocks: BLOCKS_*. late_stage: earlier pipeline stages worked before it. pairs: stage
    code, indices of start and end stamps. forward, sampled: indices of stamps, -1 before. awaited:
    index of the last stamp before the copy that an async output waits for. tokens: sample_tokens()
    has run.
    """

    clock: device.StepClock
    encodes: bool
    media: bool
    blocks: int
    late_stage: bool = False
    encoded_ids: tuple[str, ...] = ()
    encoder_interval: tuple[int, int] | None = None
    stamps: list[Any] = []
    pairs: list[tuple[int, int, int]] = []
    forward: int = -1
    sampled: int = -1
    awaited: int = -1
    tokens: bool = False

    def __post_init__(self) -> None:
        self.stamps = self.clock.open_step()

    def take_stamp(self) -> int:
        """Take a stamp; returns its index."""
        self.clock.add_stamp(self.stamps)
        return len(self.stamps) - 1

    def close_interval(self, code: int, begin: int) -> None:
        """Add an interval of stage `code` that began at stamp `begin` and ends now."""
        self.pairs.append((code, begin, self.take_stamp()))

    def resolve(self) -> tuple[int, ...]:
        """The step's record: boot number, end of sampling, flags, then code, start, end each.

        flags: LOST_* and ENCODER_UNFINISHED. Intervals that the device has not completed are left
        out, except in an answer that did not wait for the device: it waited until this reading.
        """
        placement = self.clock.place_stamps(self.stamps)
        flags = 0
        flat: list[int] = []
        seen_codes: set[int] = set()
        for code, first, last in self.pairs:
            begin, end = placement.places[first], placement.places[last]
            if not end and not self.tokens and placement.read_at:
                end = max(begin, placement.read_at)
                if code == breakdown.CODE_ENCODER:
                    flags |= carrier.ENCODER_UNFINISHED
                    begin = begin or end
            if not (begin and end):
                continue
            # Most connectors only look at an empty list here, in every step.
            if code == breakdown.CODE_KV_TRANSFER and end - begin < MIN_TRANSFER_US:
                continue
            seen_codes.add(code)
            flat += (code, begin, end)
        if self.clock.kind != clock.CLOCK_HOST:
            flat += (carrier.CODE_CLOCK, self.clock.kind, placement.error_us)
        if flags & carrier.ENCODER_UNFINISHED:
            encoder_runs.keep_step(self)
        else:
            self.clock.release_stamps(self.stamps)
        sampled = placement.places[self.sampled] if self.sampled >= 0 else 0
        return (clock.get_boot_number(), sampled, flags | self._list_lost_flags(seen_codes), *flat)

    def find_encoder_interval(self) -> tuple[int, int] | None:
        """From when to when the encoder ran; None while the device has not completed the step."""
        if self.encoder_interval is None:
            places = self.clock.place_stamps(self.stamps).places
            for code, first, last in self.pairs:
                if code == breakdown.CODE_ENCODER and places and places[-1]:
                    self.encoder_interval = places[first], places[last]
            if self.encoder_interval is not None:
                self.clock.release_stamps(self.stamps)
        return self.encoder_interval

    def _list_lost_flags(self, seen_codes: set[int]) -> int:
        lost = breakdown.LOST_EARLIER if self.late_stage else 0
        # V2 does not call the encoder when all items of the step are cached or prompt embeddings.
        if self.encodes and breakdown.CODE_ENCODER not in seen_codes:
            called = any(code == breakdown.CODE_ENCODER for code, _, _ in self.pairs)
            if called or not wrap.is_active("worker.encoder"):
                lost |= breakdown.LOST_ENCODER
        if self.tokens and breakdown.CODE_FORWARD not in seen_codes:
            lost |= breakdown.LOST_FORWARD
        if self.media:
            if not wrap.is_active("transfer.load") and ec_roles != {"producer"}:
                lost |= breakdown.LOST_LOAD
            if not wrap.is_active("transfer.save") and ec_roles != {"consumer"}:
                lost |= breakdown.LOST_SAVE
        if self.encodes and "transfer.flush" in wrap.disabled_targets & set(wrap.installed_patches):
            lost |= breakdown.LOST_SAVE if ec_roles != {"consumer"} else 0
        if self.blocks:
            if not wrap.is_active("kv.load"):
                lost |= breakdown.LOST_AFTER
                lost |= breakdown.LOST_BEFORE if self.blocks == BLOCKS_AROUND_FORWARD else 0
            if not wrap.is_active("kv.save"):
                lost |= breakdown.LOST_AFTER
        return lost


def open_step(
    runner: Any, scheduler_output: Any, intermediate_tensors: Any = None, *args: Any, **kwargs: Any
) -> StepStamps | None:
    """Before execute_model(): open the stamps of a step that the scheduler has marked.

    intermediate_tensors: what an earlier pipeline stage computed; the encoder ran there as well.
    """
    if open_steps:
        open_steps.clear()  # the previous step raised
    if getattr(scheduler_output, "_ttft", None) is None:
        return None
    if not _step_clocks:  # not at import: the platform is known once the worker has started
        _step_clocks.append(device.choose_clock())
    media = getattr(scheduler_output, "ec_connector_metadata", None) is not None and any(
        getattr(data, "mm_features", None) for data in scheduler_output.scheduled_new_reqs
    )
    blocks = 0
    if getattr(scheduler_output, "kv_connector_metadata", None) is not None:
        # Older releases do not say whether a load has to come before the forward.
        blocks = (
            BLOCKS_AROUND_FORWARD
            if getattr(scheduler_output, "has_sync_kv_loads", True)
            else BLOCKS_AFTER_FORWARD
        )
    late_stage = intermediate_tensors is not None
    encodes = bool(scheduler_output.scheduled_encoder_inputs) and not late_stage
    step = StepStamps(_step_clocks[0], encodes, media, blocks, late_stage)
    step.encoded_ids = tuple(scheduler_output.scheduled_encoder_inputs)
    open_steps.append(step)
    return step


def close_step(step: StepStamps | None, result: Any, *args: Any, **kwargs: Any) -> None:
    """After execute_model(): a result is the final output of a step without sampling.

    None means that sample_tokens() follows, and bind_step() ends the step.
    """
    if step is None:
        return
    if step.forward >= 0:  # V2: its forward ends with execute_model()
        step.close_interval(breakdown.CODE_FORWARD, step.forward)
        step.forward = -1
    if result is not None:
        open_steps.clear()
        _attach_step(result, step)


def stamp_encoder_start(*args: Any, **kwargs: Any) -> int | None:
    """Before the encoder; None in a step without items (V1 calls it in every step)."""
    step = open_steps[0]
    return step.take_stamp() if step.encodes else None


def record_encoder(begin: int | None, result: Any, *args: Any, **kwargs: Any) -> None:
    """After the encoder: on a device the end is an event in the stream; nothing waits for it."""
    if begin is not None and open_steps:
        open_steps[0].close_interval(breakdown.CODE_ENCODER, begin)


def stamp_forward_start(owner: Any, *args: Any, **kwargs: Any) -> int | None:
    """Before the forward. V2's targets only mark its start (None): the first of them counts."""
    step = open_steps[0]
    if hasattr(owner, "_model_forward"):
        return step.take_stamp()
    if step.forward < 0:
        step.forward = step.take_stamp()
    return None


def record_forward(begin: int | None, result: Any, *args: Any, **kwargs: Any) -> None:
    """After V1's forward."""
    if begin is not None and open_steps:
        open_steps[0].close_interval(breakdown.CODE_FORWARD, begin)


def stamp_sampled(_: None, result: Any, *args: Any, **kwargs: Any) -> None:
    """After the sampler: the end of `sample`."""
    open_steps[0].sampled = open_steps[0].take_stamp()


def bind_step(_: None, result: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
    """After sample_tokens(): attach the step to its output, because the next step may start first."""
    step = open_steps.pop()
    step.tokens = True
    if result is None:
        return
    step.awaited = step.sampled  # V2 starts the copy before its drafter
    if hasattr(runner, "_model_forward"):  # V1 after it, and after the saves that wait for it
        drafter = getattr(runner, "speculative_config", runner)
        if drafter is not None and hasattr(result, "get_output"):
            step.take_stamp()
        step.awaited = -1
    _attach_step(result, step)


def _attach_step(result: Any, step: StepStamps) -> None:
    if hasattr(result, "get_output"):  # an async output: its events are complete once it is read
        result._ttft_step = step
        bound_steps.append(step)
        if len(bound_steps) > MAX_BOUND_STEPS:
            # vLLM reads the outputs of one tensor-parallel rank; those of the others come here.
            unread = bound_steps.pop(0)
            unread.clock.release_stamps(unread.stamps)
    elif getattr(result, "req_ids", None):  # not the shared empty output
        if encoder_runs.unfinished_steps and (runs := encoder_runs.collect_runs()):
            result._ttft_runs = runs  # of earlier steps
        result._ttft = step.resolve()
    else:  # an earlier pipeline stage's tensors, or nothing: nobody asks for the step
        step.clock.release_stamps(step.stamps)


def observe_step(pending: Any, *args: Any, **kwargs: Any) -> StepStamps | None:
    """Before an async output's get_output(): see what of its step is not complete yet."""
    step: StepStamps | None = getattr(pending, "_ttft_step", None)
    if step is None or step not in bound_steps:
        return None
    step.clock.note_pending(step.stamps, step.awaited)
    return step


def resolve_output(step: StepStamps, result: Any, pending: Any, *args: Any, **kwargs: Any) -> None:
    """After an async output's get_output(): its copy has ended, so the step's work has."""
    pending._ttft_step = None  # its events are used again by others
    if step not in bound_steps:
        return  # it waited for so long that they are already
    bound_steps.remove(step)
    if getattr(result, "req_ids", None):
        result._ttft = step.resolve()


HOOKS: Final = {
    "worker.execute": wrap.Hook(
        before=open_step, after=close_step, ready=open_steps, watches=wrap.MARKED_STEPS
    ),
    "worker.encoder": wrap.Hook(before=stamp_encoder_start, after=record_encoder, ready=open_steps),
    "worker.forward": wrap.Hook(before=stamp_forward_start, after=record_forward, ready=open_steps),
    "worker.sample": wrap.Hook(after=stamp_sampled, ready=open_steps),
    "worker.tokens": wrap.Hook(after=bind_step, ready=open_steps),
    "worker.output": wrap.Hook(before=observe_step, after=resolve_output, ready=bound_steps),
}
