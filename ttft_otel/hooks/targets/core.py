# SPDX-License-Identifier: Apache-2.0
"""Targets in the engine core: its input and its scheduler; hooks/{engine,scheduler}.py hang in."""

from __future__ import annotations

from typing import Final

from ttft_otel.hooks.targets.row import ENGINE, QUEUES, Place, Target

CORE: Final[tuple[Target, ...]] = (
    Target(
        "engine.input",
        "core",
        (Place("vllm.v1.engine.core", "EngineCore.preprocess_add_request"),),
        "end of ipc",
        ("ipc", *QUEUES, "kv.transfer"),
        "QUEUED is stamped later, after the wait for the running step",
        "a QUEUED event at the input thread",
        reads=("request",),
    ),
    Target(
        "scheduler.schedule",
        "core",
        (Place("vllm.v1.core.sched.scheduler", "Scheduler.schedule"),),
        "end of the queue; which steps the worker measures",
        ("ipc", *ENGINE),
        "a custom scheduler_cls would exclude the operator's own",
        "scheduled events carry the step and its encoder inputs",
    ),
    Target(
        "scheduler.update",
        "core",
        (Place("vllm.v1.core.sched.scheduler", "Scheduler.update_from_output"),),
        "joins the worker's marks; sends them along",
        ("ipc", *ENGINE),
        "the only place that has one step's input and output together",
        "EngineCoreOutput has a field for timings",
        reads=("scheduler_output", "model_runner_output"),
    ),
    Target(
        "scheduler.free",
        "core",
        (Place("vllm.v1.core.sched.scheduler", "Scheduler._free_request"),),
        "where an aborted request was",
        (),
        "every end of a request passes here",
        "vLLM reports aborted requests",
        reads=("request",),
        part=True,
    ),
)
