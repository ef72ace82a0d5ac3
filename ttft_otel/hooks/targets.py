# SPDX-License-Identifier: Apache-2.0
"""All vLLM functions that we patch, as data. wrap.py installs them, doctor checks them, and
tests/hooks/test_target_check.py checks them against the sources of each supported release.

`lost` are the stages that become unattributed (the total stays exact) without the target; on an
encoder instance `lost_encode` applies instead, where it is given (tests/live/test_targets.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

from ttft_otel.model.stages import QUEUE_STAGES, STAGES


def _list_lost(*groups: str) -> tuple[str, ...]:
    return tuple(stage.name for stage in STAGES if stage.lost_with in groups)


# Losing a mark also loses its neighbours: the partition cannot know where one of them ends.
COMPUTE_STAGES: Final = _list_lost("compute")
WORKER_STAGES: Final = _list_lost("compute", "worker")
ENGINE_STAGES: Final = _list_lost("compute", "worker", "engine")
ALL_STAGES: Final = _list_lost("compute", "worker", "engine", "server")
# For `drop_when`: what has to come upstream before a patch can go.
VLLM_EMITS_IT: Final = "vLLM emits this time per request itself"


@dataclass(frozen=True, slots=True)
class TargetPlace:
    """Address of a target: module and dotted name.

    since: first vLLM release that has it, until: first one that has not; "" is unbounded.
    """

    module: str
    name: str
    since: str = ""
    until: str = ""

    @property
    def address(self) -> str:
        """The form used in messages: "module:Class.method"."""
        return f"{self.module}:{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchTarget:
    """One patched function."""

    name: str
    #: Where it is in each release; () for a connector's method.
    places: tuple[TargetPlace, ...] = ()
    #: A connector's method on vLLM's base classes; it is wrapped on the class that vLLM's factory makes.
    methods: tuple[TargetPlace, ...] = ()
    #: What the hook measures.
    marks: str
    #: Stages that become unattributed without it, () for a detail inside a stage; the total stays exact.
    lost: tuple[str, ...] = ()
    #: Why a patch is needed.
    why: str
    #: What vLLM has to offer before the patch can go.
    drop_when: str
    #: Parameters that the hook reads by name.
    reads: tuple[str, ...] = ()
    #: `lost` on an encoder instance; None: the same.
    lost_encode: tuple[str, ...] | None = None


_target: Final = partial(PatchTarget, drop_when=VLLM_EMITS_IT)

# In the API server, from the ASGI call to the engine and back; hooks: api_server.py.
_RENDERER: Final = "vllm.renderers.base"
_OUTPUTS: Final = "vllm.v1.engine.output_processor"

_FRONTEND: Final[tuple[PatchTarget, ...]] = (
    _target(
        # Starlette builds the stack at the first call, after all add_middleware(): ours is outside.
        name="frontend.app",
        places=(TargetPlace("fastapi.applications", "FastAPI.build_middleware_stack"),),
        marks="arrival, first chunk, end; trace context; Server-Timing",
        lost=ALL_STAGES,
        why="--middleware needs a flag and endpoint plugins (0.29) VLLM_PLUGINS; a patch is always outermost",
        drop_when="a plugin that nobody has to name can add the outermost middleware",
    ),
    _target(
        # Each sets arrival_time in its first line (renderers/base.py): no rendering is before.
        name="frontend.render",
        places=(
            TargetPlace(_RENDERER, "BaseRenderer.render_chat_async"),
            TargetPlace(_RENDERER, "BaseRenderer.render_cmpl_async"),
        ),
        marks="end of receive",
        lost=("receive", "preprocess"),
        why="vLLM sets arrival_time here and does not hand it out",
    ),
    _target(
        # Once per URL of a message, so that a request has as many parts as it has media.
        name="frontend.media",
        places=(
            TargetPlace("vllm.multimodal.media.connector", "MediaConnector.load_from_url_async"),
        ),
        marks="part of preprocess: fetch and decode",
        why="vLLM has no event for it",
    ),
    _target(
        # The plural method: render_cmpl_async() gathers its prompts through it in one call.
        name="frontend.tokenize",
        places=(TargetPlace(_RENDERER, "BaseRenderer.tokenize_prompts_async"),),
        marks="part of preprocess: tokenizer",
        why="vLLM has no event for it",
    ),
    _target(
        # Called for text as well: the hook reads `prompt` to leave that out.
        name="frontend.multimodal",
        places=(TargetPlace(_RENDERER, "BaseRenderer.process_for_engine_async"),),
        marks="part of preprocess: multimodal processor",
        why="enable_mm_processor_stats only sums it, per server",
        reads=("prompt",),
    ),
    _target(
        # Whoever calls an engine: vLLM's own servers, too, whose HTTP request has a trace already.
        name="frontend.direct",
        places=(
            TargetPlace("vllm.v1.engine.async_llm", "AsyncLLM.add_request"),
            TargetPlace("vllm.v1.engine.llm_engine", "LLMEngine.add_request"),
        ),
        marks="arrival of a request that came without HTTP; its parent",
        why="scripts, gRPC, WebSockets, Dynamo and Ray Serve call the engine without an ASGI application",
        drop_when="vLLM begins a span of its own at the engine",
        reads=("request_id", "params", "arrival_time", "trace_headers"),
    ),
    _target(
        # Adds 8 random characters to the client's ID; all paths of AsyncLLM call it.
        name="frontend.assign",
        places=(TargetPlace("vllm.v1.engine.input_processor", "InputProcessor.assign_request_id"),),
        marks="end of preprocess; the role that the request's transfer parameters give",
        lost=("preprocess", "ipc"),
        why="the last call before the request leaves for the engine, in all releases",
        reads=("request",),
    ),
    _target(
        # Late enough: before, AsyncLLM.add_request() drops headers if vLLM's tracing is off.
        name="frontend.register",
        places=(TargetPlace(_OUTPUTS, "OutputProcessor.add_request"),),
        marks="engine request id; trace headers",
        lost=("ipc", *ENGINE_STAGES, "egress"),
        why="the only place where every engine request (n > 1 too) has its final id",
        drop_when="trace headers reach the engine core without --otlp-traces-endpoint",
        reads=("request",),
    ),
    _target(
        # Called for slices of a batch (VLLM_V1_OUTPUT_PROC_CHUNK_SIZE), each with its own times.
        name="frontend.outputs",
        places=(TargetPlace(_OUTPUTS, "OutputProcessor.process_outputs"),),
        marks="end of output; the engine's marks",
        lost=("ipc", *ENGINE_STAGES, "egress"),
        why="vLLM's own first-token time is a wall-clock difference",
        reads=("engine_core_outputs",),
    ),
    _target(
        # Once for each request, whether or not vLLM keeps statistics; not for one that is aborted.
        name="frontend.end",
        places=(TargetPlace(_OUTPUTS, "OutputProcessor._update_stats_from_finished"),),
        marks="end of a generation: its tokens, finish reason, time per token",
        why="process_outputs() would have to be asked at each decode step",
        reads=("req_state", "finish_reason"),
    ),
    _target(
        # The middleware sees that an HTTP client has left; of other callers nobody else says it.
        name="frontend.abort",
        places=(TargetPlace(_OUTPUTS, "OutputProcessor.abort_requests"),),
        marks="end of a request that came without HTTP and was aborted",
        why="vLLM reports no end of an aborted request",
        reads=("request_ids",),
    ),
)

# In the engine core: input and scheduler; hooks: engine_core/tracer.py.
_SCHEDULER: Final = "vllm.v1.core.sched.scheduler"

_ENGINE_CORE: Final[tuple[PatchTarget, ...]] = (
    _target(
        # In the input thread (process_input_sockets), while a step may run on the main thread.
        name="engine.input",
        places=(TargetPlace("vllm.v1.engine.core", "EngineCore.preprocess_add_request"),),
        marks="end of ipc",
        lost=("ipc", *QUEUE_STAGES, "kv.transfer"),
        why="QUEUED is stamped later, after the wait for the running step",
        drop_when="a QUEUED event at the input thread",
        reads=("request",),
    ),
    _target(
        # AsyncScheduler and other subclasses inherit it, so that a patch of the base reaches them.
        name="scheduler.schedule",
        places=(TargetPlace(_SCHEDULER, "Scheduler.schedule"),),
        marks="end of the queue; which steps the worker measures",
        lost=("ipc", *ENGINE_STAGES),
        why="a custom scheduler_cls would exclude the operator's own",
        drop_when="scheduled events carry the step and its encoder inputs",
    ),
    _target(
        # Its argument names the step's requests; under async scheduling another step runs already.
        name="scheduler.update",
        places=(TargetPlace(_SCHEDULER, "Scheduler.update_from_output"),),
        marks="joins the worker's marks; sends them along",
        lost=("ipc", *ENGINE_STAGES),
        why="the only place that has one step's input and output together",
        drop_when="EngineCoreOutput has a field for timings",
        reads=("scheduler_output", "model_runner_output"),
    ),
    _target(
        # Called for a pause and for its end alike; the state is the argument.
        name="scheduler.pause",
        places=(TargetPlace(_SCHEDULER, "Scheduler.set_pause_state"),),
        marks="since when a queued request waits for the end of a pause",
        why="a paused engine core runs no step in which it could be seen",
        drop_when="scheduling events say that requests wait, and why",
        reads=("pause_state",),
    ),
    _target(
        # DPEngineCoreProc's loop, for models with experts; every rank takes part in each step of any.
        name="engine.dummy",
        places=(TargetPlace("vllm.v1.engine.core", "EngineCore.execute_dummy_batch"),),
        marks="that a queued request waits for a batch of another data-parallel rank",
        why="it runs without schedule(), so that no step is seen",
        drop_when="scheduling events say that requests wait, and why",
    ),
    _target(
        # Called by finish_requests() (aborts) and by update_from_output(): hooks distinguish them.
        name="scheduler.free",
        places=(TargetPlace(_SCHEDULER, "Scheduler._free_request"),),
        marks="where an aborted request was",
        why="every end of a request passes here",
        drop_when="vLLM reports aborted requests",
        reads=("request",),
    ),
    _target(
        # Called when the input comes, or when the answer to the one before it ends.
        name="scheduler.session",
        places=(TargetPlace(_SCHEDULER, "Scheduler._update_request_as_session"),),
        marks="which input of a stream (/v1/realtime) the steps of its session are for",
        why="a session is one request to the scheduler, which has one QUEUED event",
        drop_when="events of an input's own",
        reads=("session", "update"),
    ),
)

# In the worker, in both of vLLM's model runners; hooks: worker/model_runners.py.
# A release can have both; a server uses one of them.
_V1: Final = "vllm.v1.worker.gpu_model_runner"
_GPU: Final = "vllm.v1.worker.gpu"
_V2: Final = f"{_GPU}.model_runner"

_worker_target: Final = partial(_target, why="runner internals have no events")

_WORKER: Final[tuple[PatchTarget, ...]] = (
    _worker_target(
        name="worker.start",
        places=(TargetPlace("vllm.v1.worker.worker_base", "WorkerWrapperBase.init_device"),),
        marks="which model runner the platform has",
        why="a runner of another package can have an execute_model() that passes our hooks",
    ),
    _worker_target(
        # MMEncoderModelRunner (0.29) is V2's runner without a language model, with its own method.
        name="worker.execute",
        places=(
            TargetPlace(_V1, "GPUModelRunner.execute_model"),
            TargetPlace(_V2, "GPUModelRunner.execute_model"),
            TargetPlace(
                "vllm.v1.worker.mm_encoder_model_runner",
                "MMEncoderModelRunner.execute_model",
                since="0.29",
            ),
        ),
        marks="opens the step's record",
        lost=(*WORKER_STAGES, "sample", "output"),
        reads=("scheduler_output", "intermediate_tensors"),
    ),
    _worker_target(
        # V1 calls it in every step with multimodal models, V2 only with something to encode.
        name="worker.encoder",
        places=(
            TargetPlace(_V1, "GPUModelRunner._execute_mm_encoder"),
            TargetPlace(f"{_GPU}.mm.encoder_runner", "EncoderRunner.execute_mm_encoder"),
        ),
        marks="encoder.compute",
        lost=("dispatch", "encoder.compute"),
        why="vLLM's own encoder timing synchronizes the device",
        lost_encode=("dispatch", "encoder.compute", "output"),
    ),
    _worker_target(
        # V2 has no method around its forward: what runs just before it marks the start.
        name="worker.forward",
        places=(
            TargetPlace(_V1, "GPUModelRunner._model_forward"),
            TargetPlace(f"{_GPU}.async_utils", "StepTimingCollector.forward_start", since="0.29"),
            TargetPlace(f"{_GPU}.kv_connector", "KVConnector.pre_forward", until="0.29"),
            TargetPlace(f"{_GPU}.kv_connector", "ActiveKVConnector.pre_forward", until="0.29"),
        ),
        marks="prefill.compute",
        lost=("dispatch", "prefill.compute", "prefill.stall", "sample"),
        why="vLLM has no event for the forward pass",
    ),
    _worker_target(
        # Only with experts. V2 does it in a function of its own, before encoder and forward as V1.
        name="worker.dp_sync",
        places=(
            TargetPlace("vllm.v1.worker.dp_utils", "_synchronize_dp_ranks"),
            TargetPlace(f"{_GPU}.dp_utils", "sync_cudagraph_and_dp_padding"),
        ),
        marks="dispatch: the wait for other data-parallel ranks",
    ),
    _worker_target(
        name="worker.sample",
        places=(
            TargetPlace(_V1, "GPUModelRunner._sample"),
            TargetPlace(_V2, "GPUModelRunner.sample"),
        ),
        marks="end of sample",
        lost=("sample", "output"),
        why="vLLM has no event for the sampler's end",
    ),
    _worker_target(
        # V1 drafts before its output is ready, V2 after it has gone.
        name="worker.draft",
        places=(TargetPlace(_V1, "GPUModelRunner.propose_draft_token_ids"),),
        marks="output: the drafter, with speculative decoding",
    ),
    _worker_target(
        # execute_model() has returned None: the forward is queued, and sampling follows here.
        name="worker.tokens",
        places=(
            TargetPlace(_V1, "GPUModelRunner.sample_tokens"),
            TargetPlace(_V2, "GPUModelRunner.sample_tokens"),
        ),
        marks="binds the step's record to its output",
        lost=(*WORKER_STAGES, "sample", "output"),
        why="under async scheduling the next step starts before this one's output is read",
        lost_encode=(),
    ),
    _worker_target(
        # get_output() waits for the copy's event itself (synchronize()), so that our hook need not.
        name="worker.output",
        places=(
            TargetPlace(_V1, "AsyncGPUModelRunnerOutput.get_output"),
            TargetPlace(f"{_GPU}.async_utils", "AsyncOutput.get_output"),
        ),
        marks="resolves device events once the output copy is complete",
        lost=(*WORKER_STAGES, "sample", "output"),
        why="the only moment when all events are known to be complete without a synchronization",
        lost_encode=(),
    ),
)

# In encoder-cache and KV connectors, which can be third-party classes; hooks: install.py. Their methods are
# wrapped on the class that vLLM's factory makes, and checked on vLLM's base classes. The session that serves
# an encoder's fetches has only one class. Loads, saves and flushes run in the worker, the factories there and
# in the engine core, all others in the engine core alone.
_EC_FOLDER: Final = "vllm.distributed.ec_transfer.ec_connector"
_EC: Final = f"{_EC_FOLDER}.base"
_SESSION: Final = f"{_EC_FOLDER}.cpu.session"
_KV_FOLDER: Final = "vllm.distributed.kv_transfer.kv_connector"
_KV: Final = f"{_KV_FOLDER}.v1.base"

_connector_target: Final = partial(
    PatchTarget,
    why="connectors have no timings per request",
    drop_when="connectors report per-request timings",
)

_CONNECTORS: Final[tuple[PatchTarget, ...]] = (
    _connector_target(
        # In both processes: the scheduler's half waits for encodings, the worker's half moves them.
        name="transfer.create",
        places=(TargetPlace(f"{_EC_FOLDER}.factory", "ECConnectorFactory.create_connector"),),
        marks="finds the encoder-cache connector's class",
        lost=(*QUEUE_STAGES, "dispatch", "ec.transfer", "encoder.compute"),
        why="connectors are third-party classes: only vLLM's factory has the instance's class",
        lost_encode=(*QUEUE_STAGES, "dispatch", "ec.transfer", "encoder.compute", "output"),
    ),
    _connector_target(
        # An encoder waits for nobody's encodings, hence nothing is lost on one.
        name="transfer.wait",
        methods=(
            # Before 0.24 an encoder-cache connector could not make a request wait.
            TargetPlace(_EC, "ECConnectorBase.ensure_cache_available", since="0.24"),
        ),
        marks="ec.transfer: waiting for an item",
        lost=(*QUEUE_STAGES, "ec.transfer"),
        reads=("request",),
        lost_encode=(),
    ),
    _connector_target(
        name="transfer.load",
        methods=(TargetPlace(_EC, "ECConnectorBase.start_load_caches"),),
        marks="ec.transfer: load",
        lost=("dispatch", "ec.transfer"),
        lost_encode=(),
    ),
    _connector_target(
        # V1 saves inside of the encoder's call, whose length would have the save in it.
        name="transfer.save",
        methods=(
            TargetPlace(_EC, "ECConnectorBase.save_caches"),
            # Publishes what an earlier step has encoded: save_caches() is never called for that.
            TargetPlace(_EC, "ECConnectorBase.start_save_caches", since="0.32"),
        ),
        marks="ec.transfer: save",
        lost=("ec.transfer", "encoder.compute", "dispatch"),
        lost_encode=("ec.transfer", "encoder.compute", "output"),
    ),
    _connector_target(
        # vLLM calls it after each step, also of connectors that do nothing in it.
        name="transfer.flush",
        methods=(TargetPlace(_EC, "ECConnectorBase.get_finished"),),
        marks="ec.transfer: get_finished(), where ECCPUConnector starts the copies of what a step encoded",
        lost=("ec.transfer", "encoder.compute", "dispatch"),
        why="ECCPUConnector's save_caches only writes descriptors",
        lost_encode=("ec.transfer", "encoder.compute", "output"),
    ),
    _connector_target(
        name="transfer.place",
        methods=(TargetPlace(_EC, "ECConnectorBase.update_state_after_alloc"),),
        marks="whether a media item was fetched, found in a cache or encoded here",
        why="vLLM does not report per request which of its items it encoded",
        drop_when="outputs say per item where its encoding came from",
        reads=("request", "index"),
    ),
    _connector_target(
        name="transfer.keep",
        methods=(TargetPlace(_EC, "ECConnectorBase.request_finished"),),
        marks="how long encodings are kept for another instance after the answer",
        why="request_finished is the only place that has the request and what it announces",
        reads=("request",),
    ),
    _connector_target(
        name="transfer.ready",
        methods=(TargetPlace(_EC, "ECConnectorBase.update_connector_output"),),
        marks="since when kept encodings can be read: the worker's copies are over",
        why="a consumer that asks earlier has to ask again, and no event is emitted",
    ),
    _connector_target(
        # A fetch that is gone after _drain_notifs() was read; after _sweep_timeouts() it was not.
        name="transfer.fetched",
        methods=(TargetPlace(_SESSION, "ProducerSession._drain_notifs", since="0.32"),),
        marks="kept encodings were read (ECCPUConnector's ProducerSession._drain_notifs)",
        why="only that session is notified; ECMooncakeConnector's scheduler never is",
    ),
    _connector_target(
        name="transfer.lease",
        methods=(TargetPlace(_SESSION, "ProducerSession._sweep_timeouts", since="0.32"),),
        marks="kept encodings were not read in time, or evicted (ProducerSession._sweep_timeouts)",
        why="vLLM only logs it",
    ),
    _connector_target(
        name="kv.create",
        places=(TargetPlace(f"{_KV_FOLDER}.factory", "KVConnectorFactory.create_connector"),),
        marks="finds the KV connector's class",
        lost=(*QUEUE_STAGES, *COMPUTE_STAGES, "kv.transfer", "sample", "output"),
        why="connectors are third-party classes: only vLLM's factory has the instance's class",
    ),
    _connector_target(
        # Called again until blocks are allocated; only the last answer before that counts.
        name="kv.match",
        methods=(TargetPlace(_KV, "KVConnectorBase_V1.get_num_new_matched_tokens"),),
        marks="kv.transfer: how much comes from elsewhere, and since when it is on its way",
        lost=(*QUEUE_STAGES, "kv.transfer"),
        why="a connector that looks for blocks, or loads them, has no event per request",
        reads=("request",),
    ),
    _connector_target(
        # On the scheduler, not on connectors: one address, whatever the connector's class is.
        name="kv.arrive",
        places=(TargetPlace(_SCHEDULER, "Scheduler._update_from_kv_xfer_finished"),),
        marks="kv.transfer: the blocks are there; those kept for another instance are freed",
        lost=(*QUEUE_STAGES, "kv.transfer"),
        why="the only place that every connector notifies",
        reads=("kv_connector_output",),
    ),
    _connector_target(
        name="kv.keep",
        methods=(
            TargetPlace(_KV, "KVConnectorBase_V1.request_finished"),
            # The scheduler calls it instead for all SupportsHMA connectors (hybrid KV caches).
            TargetPlace(_KV, "SupportsHMA.request_finished_all_groups"),
        ),
        marks="how long blocks are kept for another instance after the answer",
        why="vLLM only counts the leases that ran out",
        reads=("request",),
    ),
    _connector_target(
        # V1 and V2 call it inside the step, before the forward or (async loads, newer V2) after it.
        name="kv.load",
        methods=(TargetPlace(_KV, "KVConnectorBase_V1.start_load_kv"),),
        marks="kv.transfer: a load inside a step",
        lost=("dispatch", "prefill.compute", "prefill.stall", "kv.transfer", "sample", "output"),
    ),
    _connector_target(
        # wait_for_save() returns when all is saved: its length is time that the step spends in it.
        name="kv.save",
        methods=(TargetPlace(_KV, "KVConnectorBase_V1.wait_for_save"),),
        marks="kv.transfer: a save that its step waits for",
        lost=("kv.transfer", "prefill.stall", "sample", "output"),
    ),
)

# In the order in which a request passes the processes; connectors, in two of them, last.
TARGETS: Final[tuple[PatchTarget, ...]] = (
    *_FRONTEND,
    *_ENGINE_CORE,
    *_WORKER,
    *_CONNECTORS,
)
# For connectors' hooks, which patch a class at run time, and for doctor's messages.
TARGETS_BY_NAME: Final[dict[str, PatchTarget]] = {target.name: target for target in TARGETS}
