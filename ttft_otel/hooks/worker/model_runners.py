# SPDX-License-Identifier: Apache-2.0
"""WorkerTracer: hooks in the worker, for both of vLLM's model runners; one record of each marked step.

The scheduler's hook marks steps with traced requests, and finds the record (carrier.py describes it) on the
step's output. V1 (gpu_model_runner.py, also on CPU) and V2 (gpu/model_runner.py, default
on CUDA) call encoder and forward in different places, see targets.py; V2's forward ends with
execute_model().
"""

from __future__ import annotations

import inspect
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

import msgspec

from ttft_otel.hooks import vllm_fields
from ttft_otel.hooks.worker import device
from ttft_otel.hooks.wrap import Patcher
from ttft_otel.model import breakdown
from ttft_otel.tracing import carrier, clock, guard
from ttft_otel.tracing.guard import Hook

log = logging.getLogger("ttft_otel")
MAX_BOUND_STEPS: Final = 64  # outputs that are never read must not accumulate
MIN_TRANSFER_US: Final = 50  # a load or save of KV blocks that is shorter has transferred nothing
# When a KV connector can work within a step (StepStamps.blocks; 0: not at all).
BLOCKS_AROUND_FORWARD: Final = 1
BLOCKS_AFTER_FORWARD: Final = 2
MAX_UNFINISHED_STEPS: Final = 256  # by request; the oldest are dropped


class StepStamps(msgspec.Struct, eq=False):
    """Stamps of one marked step."""

    clock: device.StepClock
    #: The step runs the encoder, for the requests `encoded_ids`.
    encodes: bool
    #: It may load or save encodings.
    media: bool
    #: BLOCKS_*, 0: it moves no KV blocks.
    blocks: int
    #: Earlier pipeline stages worked before it.
    late_stage: bool = False
    encoded_ids: tuple[str, ...] = ()
    encoder_interval: tuple[int, int] | None = None
    stamps: list[Any] = []
    #: Stage code, indices of start and end stamps.
    pairs: list[tuple[int, int, int]] = []
    #: Indices of stamps, -1 before.
    forward: int = -1
    sampled: int = -1
    #: Index of the last stamp before the copy that an async output waits for.
    awaited: int = -1
    #: sample_tokens() has run.
    tokens: bool = False
    #: Indices of the drafter's start and end.
    draft: tuple[int, int] | None = None
    #: The attribute of its async output in whose place an AwaitedEvent is; "" without one.
    awaited_event: str = ""
    #: When the worker took the step, and the engine core sent it, by the host's clock.
    taken: int = 0
    sent: int = 0
    #: From when to when it waited for other data-parallel ranks, by the host's clock.
    synced: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        self.taken = clock.now_us()
        self.stamps = self.clock.open_step()

    def take_stamp(self) -> int:
        """Take a stamp; returns its index."""
        self.clock.add_stamp(self.stamps)
        return len(self.stamps) - 1

    def close_interval(self, code: int, begin: int) -> None:
        """Add an interval of stage `code` that began at stamp `begin` and ends now."""
        self.pairs.append((code, begin, self.take_stamp()))

    def find_encoder_interval(self) -> tuple[int, int] | None:
        """From when to when the encoder ran; None while the device has not completed the step."""
        if self.encoder_interval is None:
            places, _, _ = self.clock.place_stamps(self.stamps)
            for code, first, last in self.pairs:
                if code == breakdown.CODE_ENCODER and places and places[-1]:
                    self.encoder_interval = places[first], places[last]
            if self.encoder_interval is not None:
                self.clock.release_stamps(self.stamps)
        return self.encoder_interval


class AwaitedEvent:
    """The event of an async output's copy, whose `step` hears when the wait for it is over.

    get_output() goes on after it: lists of tokens, logprobs and others' outputs take milliseconds.
    """

    __slots__ = ("event", "step")

    def __init__(self, event: Any, step: StepStamps) -> None:
        self.event = event
        self.step = step

    def synchronize(self) -> None:
        self.event.synchronize()
        with guard.Guard("worker.output"):
            self.step.clock.note_reached(self.step.stamps)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.event, name)


class WorkerTracer:
    """What one worker process measures of its marked steps; its methods are the hooks."""

    def __init__(self, patcher: Patcher) -> None:
        self.patcher = patcher
        #: The step that is running, if it is marked. Empty otherwise, so that hooks return at once.
        self.open_steps: list[StepStamps] = []
        #: Steps of async outputs that are not read yet.
        self.bound_steps: list[StepStamps] = []
        #: By engine request ID: steps whose answer left before their encoder had ended.
        self.unfinished_steps: OrderedDict[str, StepStamps] = OrderedDict()
        #: Of the encoder-cache connector: "producer", "consumer".
        self.ec_roles: set[str] = set()
        #: None before the first marked step: the platform is known once the worker has started.
        self.clock: device.StepClock | None = None

    def build_hooks(self) -> dict[str, Hook]:
        """Hooks of both model runners."""
        steps = self.open_steps
        return {
            "worker.start": Hook(after=report_unhooked_runner),
            "worker.execute": Hook(
                before=self.open_step, after=self.close_step, ready=steps, wrap=guard.wrap_marked
            ),
            "worker.encoder": Hook(
                before=self.stamp_encoder_start,
                after=self.record_interval(breakdown.CODE_ENCODER),
                ready=steps,
            ),
            "worker.forward": Hook(  # V1's; of V2's only the start is seen
                before=self.stamp_forward_start,
                after=self.record_interval(breakdown.CODE_FORWARD),
                ready=steps,
            ),
            "worker.dp_sync": Hook(before=stamp_time, after=self.record_sync, ready=steps),
            "worker.sample": Hook(after=self.stamp_sampled, ready=steps),
            "worker.draft": Hook(
                before=self.stamp_interval_start, after=self.record_draft, ready=steps
            ),
            "worker.tokens": Hook(after=self.bind_step, ready=steps),
            "worker.output": Hook(
                before=self.observe_step, after=self.resolve_output, ready=self.bound_steps
            ),
        }

    def open_step(
        self,
        runner: Any,
        scheduler_output: Any,
        intermediate_tensors: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> StepStamps | None:
        """Before execute_model(): open the stamps of a step that the scheduler has marked.

        intermediate_tensors: what an earlier pipeline stage computed; the encoder ran there as well.
        """
        if self.open_steps:
            self.open_steps.clear()  # the previous step raised
        mark = getattr(scheduler_output, "_ttft_marked", None)
        if mark is None:
            return None
        if self.clock is None:
            self.clock = device.choose_clock()
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
        step = StepStamps(self.clock, encodes, media, blocks, late_stage)
        step.encoded_ids = tuple(scheduler_output.scheduled_encoder_inputs)
        step.sent = mark if type(mark) is int else step.taken  # StepMark
        self.open_steps.append(step)
        return step

    def close_step(self, step: StepStamps | None, result: Any, *args: Any, **kwargs: Any) -> None:
        """After execute_model(): a result is the final output of a step without sampling.

        None means that sample_tokens() follows, and self.bind_step() ends the step.
        """
        if step is None:
            return
        if step.forward >= 0:  # V2: its forward ends with execute_model()
            step.close_interval(breakdown.CODE_FORWARD, step.forward)
            step.forward = -1
        if result is not None:
            self.open_steps.clear()
            self._attach_step(result, step)

    def stamp_encoder_start(self, *args: Any, **kwargs: Any) -> int | None:
        """Before the encoder; None in a step without items (V1 calls it in every step)."""
        step = self.open_steps[0]
        return step.take_stamp() if step.encodes else None

    def record_sync(self, begin: int, result: Any, *args: Any, **kwargs: Any) -> None:
        """After the agreement with other ranks; a drafter can have one more, which is not before the work."""
        step = self.open_steps[0]
        step.synced = step.synced or (begin, clock.now_us())

    def stamp_forward_start(self, owner: Any, *args: Any, **kwargs: Any) -> int | None:
        """Before the forward. V2's targets only mark its start (None): the first of them counts."""
        step = self.open_steps[0]
        if hasattr(owner, "_model_forward"):
            return step.take_stamp()
        if step.forward < 0:
            step.forward = step.take_stamp()
        return None

    def record_interval(self, code: int) -> Callable[..., None]:
        """What to do after a call: its interval of stage `code` ends now, if a stamp was taken at its begin.

        On a device the end is an event in the stream; nothing waits for it.
        """

        def record(begin: int | None, *args: Any, **kwargs: Any) -> None:
            if begin is not None and self.open_steps:
                self.open_steps[0].close_interval(code, begin)

        return record

    def stamp_sampled(self, _: None, result: Any, *args: Any, **kwargs: Any) -> None:
        """After the sampler: the end of `sample`."""
        self.open_steps[0].sampled = self.open_steps[0].take_stamp()

    def record_draft(self, begin: int | None, result: Any, *args: Any, **kwargs: Any) -> None:
        """After V1's drafter, which runs before the output is ready; V2's runs after that."""
        if begin is not None and self.open_steps:
            self.open_steps[0].draft = begin, self.open_steps[0].take_stamp()

    def bind_step(self, _: None, result: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
        """After sample_tokens(): attach the step to its output, because the next step may start first."""
        step = self.open_steps.pop()
        step.tokens = True
        if result is None:
            return
        step.awaited = step.sampled  # V2 starts the copy before its drafter
        if hasattr(runner, "_model_forward"):  # V1 after it, and after the saves that wait for it
            step.awaited = -1
        self._attach_step(result, step)

    def _attach_step(self, result: Any, step: StepStamps) -> None:
        if hasattr(result, "get_output"):
            # An async output: its events are complete once it is read.
            result._ttft_step = step
            self.bound_steps.append(step)
            if len(self.bound_steps) > MAX_BOUND_STEPS:
                # vLLM reads the outputs of one tensor-parallel rank; those of the others come here.
                unread = self.bound_steps.pop(0)
                unread.clock.release_stamps(unread.stamps)
        elif getattr(result, "req_ids", None):  # not the shared empty output
            if self.unfinished_steps and (runs := self._collect_runs()):
                result._ttft_runs = runs  # of earlier steps
            result._ttft_record = self.resolve_step(step)
        else:  # an earlier pipeline stage's tensors, or nothing: nobody asks for the step
            step.clock.release_stamps(step.stamps)

    def observe_step(self, pending: Any, *args: Any, **kwargs: Any) -> StepStamps | None:
        """Before an async output's get_output(): see what of its step is not complete yet."""
        step: StepStamps | None = getattr(pending, "_ttft_step", None)
        if step is None or step not in self.bound_steps:
            return None
        if step.clock.note_pending(step.stamps, step.awaited):
            if name := vllm_fields.find_awaited_event(pending):
                setattr(pending, name, AwaitedEvent(getattr(pending, name), step))
                step.awaited_event = name
        return step

    def resolve_output(
        self, step: StepStamps, result: Any, pending: Any, *args: Any, **kwargs: Any
    ) -> None:
        """After an async output's get_output(): its copy has ended, so the step's work has."""
        pending._ttft_step = None  # its events are used again by others
        if name := step.awaited_event:
            setattr(pending, name, getattr(pending, name).event)
        try:
            self.bound_steps.remove(step)
        except ValueError:
            return  # it waited for so long that they are already
        if getattr(result, "req_ids", None):
            result._ttft_record = self.resolve_step(step)

    def resolve_step(self, step: StepStamps) -> tuple[int, ...]:
        """The step's record: boot number, end of sampling, flags, then code, start, end each.

        flags: LOST_* and ENCODER_UNFINISHED. Intervals that the device has not completed are left
        out, except in an answer that did not wait for the device: it waited until this reading.
        """
        places, read_at, error_us = step.clock.place_stamps(step.stamps)
        flags = 0
        flat: list[int] = []
        for code, first, last in step.pairs:
            begin, end = places[first], places[last]
            if not end and not step.tokens and read_at:
                end = max(begin, read_at)
                if code == breakdown.CODE_ENCODER:
                    flags |= carrier.ENCODER_UNFINISHED
                    begin = begin or end
            if not (begin and end):
                continue
            # Most connectors only look at an empty list here, in every step.
            if code == breakdown.CODE_KV_TRANSFER and end - begin < MIN_TRANSFER_US:
                continue
            flat += (code, begin, end)
        lost = self._list_lost_flags(step, flat[::3])
        if step.draft is not None:
            begin, end = (places[index] for index in step.draft)
            flat += (carrier.CODE_DRAFT, begin, end) if begin and end else ()
        if step.synced is not None:
            flat += (carrier.CODE_SYNC, *step.synced)
        flat += (carrier.CODE_SENT, step.sent, 0)
        if step.clock.kind == clock.CLOCK_HOST:
            flat += (carrier.CODE_TAKEN, step.taken, 0)
        else:
            queued = step.clock.find_queued(step.stamps, step.pairs[0][1]) if step.pairs else 0
            flat += (carrier.CODE_TAKEN, step.taken, queued)
            flat += (carrier.CODE_CLOCK, step.clock.kind, error_us)
        if flags & carrier.ENCODER_UNFINISHED:
            self._keep_step(step)
        else:
            step.clock.release_stamps(step.stamps)
        sampled = places[step.sampled] if step.sampled >= 0 else 0
        return (
            clock.get_boot_number(),
            sampled,
            flags | lost,
            *flat,
        )

    def _list_lost_flags(self, step: StepStamps, seen_codes: list[int]) -> int:
        lost = breakdown.LATE_STAGE if step.late_stage else 0
        # V2 does not call the encoder when all items of the step are cached or prompt embeddings.
        if step.encodes and breakdown.CODE_ENCODER not in seen_codes:
            called = any(code == breakdown.CODE_ENCODER for code, _, _ in step.pairs)
            if called or not self.patcher.is_active("worker.encoder"):
                lost |= breakdown.LOST_ENCODER
        if step.tokens and breakdown.CODE_FORWARD not in seen_codes:
            lost |= breakdown.LOST_FORWARD
        if step.media:
            if not self.patcher.is_active("transfer.load") and self.ec_roles != {"producer"}:
                lost |= breakdown.LOST_LOAD
            if not self.patcher.is_active("transfer.save") and self.ec_roles != {"consumer"}:
                lost |= breakdown.LOST_SAVE
        if step.encodes and self.patcher.is_switched_off("transfer.flush"):
            lost |= breakdown.LOST_SAVE if self.ec_roles != {"consumer"} else 0
        if step.blocks:
            if not self.patcher.is_active("kv.load"):
                lost |= breakdown.LOST_AFTER
                lost |= breakdown.LOST_BEFORE if step.blocks == BLOCKS_AROUND_FORWARD else 0
            if not self.patcher.is_active("kv.save"):
                lost |= breakdown.LOST_AFTER
        return lost

    # Connectors, on the worker's side: loads and saves inside a step.

    def stamp_interval_start(self, *args: Any, **kwargs: Any) -> int:
        """Before a load, a save or the drafter: index of the stamp."""
        return self.open_steps[0].take_stamp()

    def stamp_flush_start(self, *args: Any, **kwargs: Any) -> int | None:
        """Before get_finished(), in which ECCPUConnector starts to copy what this step has encoded."""
        step = self.open_steps[0]
        # vLLM calls get_finished() in steps that encode nothing, too: no event for these.
        return step.take_stamp() if step.encodes and "producer" in self.ec_roles else None

    # Encoders that outlast the answer.

    def _keep_step(self, step: StepStamps) -> None:
        """Keep `step` until its run is asked for, or reported, for each request that it encodes for."""
        for request_id in step.encoded_ids:
            self.unfinished_steps[request_id] = step
            if len(self.unfinished_steps) > MAX_UNFINISHED_STEPS:
                self.unfinished_steps.popitem(last=False)

    def _collect_runs(self) -> dict[str, tuple[int, int]]:
        """The kept encoders that have ended by now, by request; they are not kept any more."""
        runs: dict[str, tuple[int, int]] = {}
        for request_id, step in self.unfinished_steps.items():
            interval = step.find_encoder_interval()
            if interval is None:  # the device works in their order
                break
            runs[request_id] = interval
        for request_id in runs:
            del self.unfinished_steps[request_id]
        return runs

    def take_run(self, request_id: str) -> tuple[int, int] | None:
        """From when to when the encoder of a kept step ran; None while the device has not completed it."""
        interval = self.unfinished_steps[request_id].find_encoder_interval()
        if interval is not None:
            del self.unfinished_steps[request_id]
        return interval


def stamp_time(*args: Any, **kwargs: Any) -> int:
    """Before a wait for other data-parallel ranks: the time."""
    return clock.now_us()


def report_unhooked_runner(_: None, result: Any, worker: Any, *args: Any, **kwargs: Any) -> None:
    """After init_device(): log a model runner whose execute_model() goes past our hooks.

    Platforms outside vLLM (vllm.platform_plugins) bring such runners.
    """
    runner = type(getattr(getattr(worker, "worker", None), "model_runner", None))
    for kind in runner.__mro__:
        execute = vars(kind).get("execute_model")
        if execute is None:
            continue
        if not hasattr(execute, "__ttft_otel__"):
            names = getattr(inspect.unwrap(execute), "__code__", None)
            if names is not None and {"super", "execute_model"} <= set(names.co_names):
                continue  # it calls its base's
            log.warning(
                "ttft-otel: the model runner %s.%s has an execute_model() of its own, which is not measured: "
                "dispatch, compute and sample are unattributed",
                kind.__module__,
                kind.__qualname__,
            )
        return
