# SPDX-License-Identifier: Apache-2.0
"""Fields of vLLM's objects that the hooks read, and what goes wrong without each of them.

tests/hooks/test_target_check.py checks the rows against the sources of every release and against the
hooks themselves; scripts/compat --source checks them against a vLLM checkout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class VllmField:
    """A field of the class `owner` under any of `names`.

    without: what goes wrong when it is missing. since: the first vLLM release that has it.
    """

    module: str
    owner: str
    names: tuple[str, ...]
    without: str
    since: str = ""

    @property
    def address(self) -> str:
        """The form used in messages: "module:Class.name", with all names that the field can have."""
        return f"{self.module}:{self.owner}.{'|'.join(self.names)}"


# Fields of one class whose loss has the same consequence are given in one string.
def _make_fields(
    module: str, owner: str, names: str, without: str, since: str = ""
) -> list[VllmField]:
    return [VllmField(module, owner, tuple(n.split("|")), without, since) for n in names.split()]


# Shorthands of modules, and of consequences that several rows have.
_OUTPUT: Final = "vllm.v1.core.sched.output"
_EC: Final = "vllm.distributed.ec_transfer.ec_connector"
_NO_SOURCE: Final = "the sources of media items are wrong or missing"
_NOT_KEPT: Final = "no span `ttft.ec.kept`, or one that does not end with the fetch"
_ENGINE: Final = "vllm.v1.engine"
_NO_REASON: Final = "why requests wait is wrong or `other`"
_NO_HOLDER: Final = "which work held a waiting request is wrong"
_NO_TRACE: Final = "no breakdown at all"
_NO_SETTING: Final = "a scheduler setting is not told: `ttft-otel whatif` has to be given it"
_NO_END: Final = "no output tokens, finish reasons and time per token"

FIELDS: Final[tuple[VllmField, ...]] = (
    *_make_fields(
        "vllm.config.vllm",
        "VllmConfig",
        "ec_transfer_config kv_transfer_config",
        "the instance's role reads `mono`; no connector's name",
    ),
    *_make_fields(
        "vllm.config.vllm",
        "VllmConfig",
        "scheduler_config cache_config parallel_config",
        _NO_SETTING,
    ),
    *_make_fields(
        "vllm.config.scheduler", "SchedulerConfig", "max_num_seqs async_scheduling", _NO_SETTING
    ),
    *_make_fields("vllm.config.cache", "CacheConfig", "num_gpu_blocks block_size", _NO_SETTING),
    *_make_fields("vllm.config.parallel", "ParallelConfig", "data_parallel_size", _NO_SETTING),
    *_make_fields("vllm.config.ec_transfer", "ECTransferConfig", "ec_role", "role reads `mono`"),
    *_make_fields(
        "vllm.config.ec_transfer", "ECTransferConfig", "ec_connector", "no connector's name"
    ),
    *_make_fields("vllm.config.kv_transfer", "KVTransferConfig", "kv_role", "role reads `mono`"),
    *_make_fields(
        "vllm.config.kv_transfer", "KVTransferConfig", "kv_connector", "no connector's name"
    ),
    *_make_fields("vllm.config.vllm", "VllmConfig", "model_config", "no model's name"),
    *_make_fields("vllm.config.model", "ModelConfig", "served_model_name", "no model's name"),
    *_make_fields(
        "vllm.config.vllm", "VllmConfig", "parallel_config", "data-parallel rank reads 0"
    ),
    # data_parallel_index first: vLLM overrides the rank of dense models.
    *_make_fields(
        "vllm.config.parallel",
        "ParallelConfig",
        "data_parallel_index|data_parallel_rank",
        "data-parallel rank reads 0",
    ),
    *_make_fields(
        "vllm.config.vllm",
        "VllmConfig",
        "observability_config",
        "vLLM's own spans lose their parent",
    ),
    *_make_fields(
        "vllm.config.observability",
        "ObservabilityConfig",
        "otlp_traces_endpoint",
        "vLLM's own spans lose their parent",
    ),
    *_make_fields(
        "vllm.v1.core.sched.scheduler",
        "Scheduler",
        "vllm_config requests",
        "no role, no rank; no request is admitted",
    ),
    *_make_fields(
        "vllm.v1.core.sched.scheduler",
        "Scheduler",
        "ec_connector connector",
        "an unseen wait for a connector counts as queueing",
    ),
    *_make_fields(
        "vllm.v1.core.sched.scheduler", "Scheduler", "block_size", "no count of KV blocks"
    ),
    *_make_fields(
        "vllm.v1.core.sched.scheduler",
        "Scheduler",
        # A bar separates an old name from a new one; `skipped_waiting` was renamed in 0.30.
        "scheduler_config max_num_active_reqs|max_num_running_reqs max_num_scheduled_tokens "
        "kv_cache_config kv_cache_manager running waiting deferred_waiting|skipped_waiting "
        "_pause_state finished_recving_kv_req_ids num_waiting_for_streaming_input",
        _NO_REASON,
    ),
    *_make_fields(
        "vllm.config.scheduler",
        "SchedulerConfig",
        "policy max_num_batched_tokens enable_chunked_prefill scheduler_reserve_full_isl",
        _NO_REASON,
    ),
    *_make_fields("vllm.config.scheduler", "SchedulerConfig", "async_scheduling", _NO_HOLDER),
    *_make_fields("vllm.config.parallel", "ParallelConfig", "pipeline_parallel_size", _NO_HOLDER),
    *_make_fields("vllm.v1.request", "Request", "num_output_tokens", _NO_HOLDER),
    *_make_fields(_OUTPUT, "SchedulerOutput", "scheduled_spec_decode_tokens", _NO_HOLDER),
    *_make_fields("vllm.config.vllm", "VllmConfig", "speculative_config", _NO_REASON),
    *_make_fields(
        "vllm.config.speculative",
        "SpeculativeConfig",
        "max_num_new_slots_for_drafting",
        _NO_REASON,
    ),
    *_make_fields("vllm.v1.kv_cache_interface", "KVCacheConfig", "kv_cache_groups", _NO_REASON),
    *_make_fields("vllm.v1.core.kv_cache_manager", "KVCacheManager", "block_pool", _NO_REASON),
    *_make_fields("vllm.v1.core.block_pool", "BlockPool", "get_num_free_blocks", _NO_REASON),
    *_make_fields(
        "vllm.v1.request",
        "Request",
        "status priority arrival_time lora_request structured_output_request",
        _NO_REASON,
    ),
    # Private: the public property stores the Future's result, and a hook changes nothing.
    *_make_fields(
        "vllm.v1.structured_output.request", "StructuredOutputRequest", "_grammar", _NO_REASON
    ),
    *_make_fields(
        _OUTPUT,
        "SchedulerOutput",
        "scheduled_new_reqs num_scheduled_tokens scheduled_encoder_inputs total_num_scheduled_tokens",
        _NO_TRACE,
    ),
    *_make_fields(_OUTPUT, "SchedulerOutput", "preempted_req_ids", "preemptions are not reported"),
    *_make_fields(
        _OUTPUT,
        "SchedulerOutput",
        "ec_connector_metadata kv_connector_metadata",
        "without the connector's targets their stages are wrong instead of unattributed",
    ),
    *_make_fields(
        _OUTPUT,
        "SchedulerOutput",
        # Without it a load is assumed to come before the forward, as in older releases.
        "has_sync_kv_loads",
        "without `kv.load` more becomes unattributed than has to",
        since="0.29",
    ),
    *_make_fields(_OUTPUT, "NewRequestData", "req_id mm_features", _NO_TRACE),
    *_make_fields(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner",
        "speculative_config",
        "one event more for each step with a traced prompt",
    ),
    *_make_fields(
        "vllm.v1.request",
        "Request",
        "request_id num_computed_tokens num_tokens num_prompt_tokens mm_features trace_headers",
        _NO_TRACE,
    ),
    *_make_fields(
        _ENGINE, "EngineCoreRequest", "request_id trace_headers sampling_params", _NO_TRACE
    ),
    *_make_fields(_ENGINE, "EngineCoreRequest", "external_req_id", "no request id on spans"),
    *_make_fields(_ENGINE, "EngineCoreOutput", "request_id trace_headers", _NO_TRACE),
    *_make_fields(
        _ENGINE,
        "EngineCoreOutput",
        "finish_reason new_token_ids",
        "an end without a token looks like a first token",
    ),
    *_make_fields(_ENGINE, "EngineCoreOutputs", "outputs", _NO_TRACE),
    *_make_fields(f"{_ENGINE}.output_processor", "RequestState", "request_id detokenizer", _NO_END),
    *_make_fields(f"{_ENGINE}.detokenizer", "IncrementalDetokenizer", "num_output_tokens", _NO_END),
    *_make_fields(
        "vllm.v1.outputs",
        "KVConnectorOutput",
        "finished_recving finished_sending kv_connector_stats",
        "`kv.transfer` and how long blocks are kept stay unknown",
    ),
    *_make_fields(f"{_EC}.base", "ECConnectorBase", "is_consumer", _NO_SOURCE),
    *_make_fields(
        "vllm.sampling_params",
        "SamplingParams",
        "extra_args",
        "no role from a request; items encoded twice are not reported",
    ),
    *_make_fields("vllm.v1.request", "Request", "sampling_params", _NO_SOURCE),
    *_make_fields("vllm.v1.request", "Request", "kv_transfer_params", _NOT_KEPT),
    *_make_fields(
        "vllm.multimodal.inputs", "MultiModalFeatureSpec", "identifier mm_position", _NO_SOURCE
    ),
    *_make_fields("vllm.multimodal.inputs", "PlaceholderRange", "offset length", _NO_SOURCE),
    # From here on fields of single connectors, of which most are private: checked per release.
    *_make_fields(
        f"{_EC}.cpu.connector", "ECCPUConnector", "connector_scheduler", _NO_SOURCE, "0.29"
    ),
    *_make_fields(f"{_EC}.cpu.scheduler", "ECCPUScheduler", "_cache", _NO_SOURCE, "0.29"),
    *_make_fields(
        f"{_EC}.cpu.scheduler.embedding_cache", "EmbeddingCache", "get", _NO_SOURCE, "0.29"
    ),
    *_make_fields(
        f"{_EC}.cpu.scheduler.embedding_cache", "CacheEntry", "ready", _NO_SOURCE, "0.29"
    ),
    # Mooncake pushes: whether an item is here is known from the table of its transfers.
    *_make_fields(
        f"{_EC}.mooncake_ec_connector", "ECMooncakeConnector", "_scheduler", _NO_SOURCE, "0.32"
    ),
    *_make_fields(
        f"{_EC}.mooncake.scheduler",
        "ECMooncakeScheduler",
        "_local_cache _transfers",
        _NO_SOURCE,
        "0.32",
    ),
    *_make_fields(
        f"{_EC}.mooncake.state",
        "SchedulerTransferTable",
        "_records _hash_index",
        _NO_SOURCE,
        "0.32",
    ),
    *_make_fields(f"{_EC}.mooncake.state", "SchedulerTransfer", "state spec", _NO_SOURCE, "0.32"),
    *_make_fields(
        f"{_EC}.mooncake.metadata", "ECMooncakeLoadSpec", "local nbytes", _NO_SOURCE, "0.32"
    ),
    *_make_fields(f"{_EC}.cpu.scheduler", "ECCPUScheduler", "_producer_session", _NOT_KEPT, "0.32"),
    # The pinned reads; _drain_notifs() and _sweep_timeouts() remove them.
    *_make_fields(
        f"{_EC}.cpu.session", "ProducerSession", "_active_xfers _cache", _NOT_KEPT, "0.32"
    ),
    *_make_fields(f"{_EC}.cpu.session", "ProducerXfer", "mm_hash", _NOT_KEPT, "0.32"),
    *_make_fields(
        "vllm.v1.outputs",
        "ECConnectorOutput",
        # Tells the scheduler which copies out of the device have ended.
        "ec_connector_worker_meta",
        "`ttft.ec.ready_us` is missing",
        "0.29",
    ),
    *_make_fields(
        f"{_EC}.cpu.common",
        "ECCPUWorkerMetadata",
        "completed_saves",
        "`ttft.ec.ready_us` is missing",
        "0.29",
    ),
    *_make_fields(
        "vllm.v1.outputs", "ModelRunnerOutput", "req_ids", "the worker's stages are missing"
    ),
)
