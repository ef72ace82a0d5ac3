# SPDX-License-Identifier: Apache-2.0
"""Targets in the engine core: input and scheduler; for hooks/{engine_core,scheduler}.py."""

from __future__ import annotations

from typing import Final

from ttft_otel.hooks.targets.patch_target import ENGINE_STAGES, PatchTarget, TargetPlace
from ttft_otel.model.stages import QUEUE_STAGES

CORE_TARGETS: Final[tuple[PatchTarget, ...]] = (
    PatchTarget(
        # In the input thread (process_input_sockets), while a step may run on the main thread.
        name="engine.input",
        process="core",
        places=(TargetPlace("vllm.v1.engine.core", "EngineCore.preprocess_add_request"),),
        marks="end of ipc",
        lost=("ipc", *QUEUE_STAGES, "kv.transfer"),
        why="QUEUED is stamped later, after the wait for the running step",
        drop_when="a QUEUED event at the input thread",
        reads=("request",),
    ),
    PatchTarget(
        # AsyncScheduler and other subclasses inherit it, so that a patch of the base reaches them.
        name="scheduler.schedule",
        process="core",
        places=(TargetPlace("vllm.v1.core.sched.scheduler", "Scheduler.schedule"),),
        marks="end of the queue; which steps the worker measures",
        lost=("ipc", *ENGINE_STAGES),
        why="a custom scheduler_cls would exclude the operator's own",
        drop_when="scheduled events carry the step and its encoder inputs",
    ),
    PatchTarget(
        # Its argument names the step's requests; under async scheduling another step runs already.
        name="scheduler.update",
        process="core",
        places=(TargetPlace("vllm.v1.core.sched.scheduler", "Scheduler.update_from_output"),),
        marks="joins the worker's marks; sends them along",
        lost=("ipc", *ENGINE_STAGES),
        why="the only place that has one step's input and output together",
        drop_when="EngineCoreOutput has a field for timings",
        reads=("scheduler_output", "model_runner_output"),
    ),
    PatchTarget(
        # Called for a pause and for its end alike; the state is the argument.
        name="scheduler.pause",
        process="core",
        places=(TargetPlace("vllm.v1.core.sched.scheduler", "Scheduler.set_pause_state"),),
        marks="since when a queued request waits for the end of a pause",
        why="a paused engine core runs no step in which it could be seen",
        drop_when="scheduling events say that requests wait, and why",
        reads=("pause_state",),
    ),
    PatchTarget(
        # DPEngineCoreProc's loop, for models with experts; every rank takes part in each step of any.
        name="engine.dummy",
        process="core",
        places=(TargetPlace("vllm.v1.engine.core", "EngineCore.execute_dummy_batch"),),
        marks="that a queued request waits for a batch of another data-parallel rank",
        why="it runs without schedule(), so that no step is seen",
        drop_when="scheduling events say that requests wait, and why",
    ),
    PatchTarget(
        # Called by finish_requests() (aborts) and by update_from_output(): hooks distinguish them.
        name="scheduler.free",
        process="core",
        places=(TargetPlace("vllm.v1.core.sched.scheduler", "Scheduler._free_request"),),
        marks="where an aborted request was",
        why="every end of a request passes here",
        drop_when="vLLM reports aborted requests",
        reads=("request",),
    ),
    PatchTarget(
        # Called when the input comes, or when the answer to the one before it ends.
        name="scheduler.session",
        process="core",
        places=(
            TargetPlace("vllm.v1.core.sched.scheduler", "Scheduler._update_request_as_session"),
        ),
        marks="which input of a stream (/v1/realtime) the steps of its session are for",
        why="a session is one request to the scheduler, which has one QUEUED event",
        drop_when="events of an input's own",
        reads=("session", "update"),
    ),
)
