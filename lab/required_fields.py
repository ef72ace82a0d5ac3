# SPDX-License-Identifier: Apache-2.0
"""Fields of vLLM's objects that the hooks read, and what goes wrong without each of them.

tests/hooks/test_target_check.py checks the rows against the sources of every release and against the
hooks themselves; scripts/compat --source checks them against a vLLM checkout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmField:
    """A field of the class `owner` under any of `names`."""

    module: str
    owner: str
    names: tuple[str, ...]
    #: What goes wrong when it is missing.
    without: str
    #: The first vLLM release that has it.
    since: str = ""

    @property
    def address(self) -> str:
        """The form used in messages: "module:Class.name", with all names that the field can have."""
        return f"{self.module}:{self.owner}.{'|'.join(self.names)}"


def _list_fields(*, without: str, fields: Mapping[str, str], since: str = "") -> list[VllmField]:
    """Fields whose loss has the same consequence.

    fields: "module:Class" -> names; a bar separates an old name of a field from a new one.
    """
    return [
        VllmField(
            module=place.partition(":")[0],
            owner=place.partition(":")[2],
            names=tuple(name.split("|")),
            without=without,
            since=since,
        )
        for place, names in fields.items()
        for name in names.split()
    ]


_CONFIG: Final = "vllm.config.vllm:VllmConfig"
_SCHEDULER: Final = "vllm.v1.core.sched.scheduler:Scheduler"
_OUTPUT: Final = "vllm.v1.core.sched.output:SchedulerOutput"
_REQUEST: Final = "vllm.v1.request:Request"
_ENGINE: Final = "vllm.v1.engine"
_EC: Final = "vllm.distributed.ec_transfer.ec_connector"
_KV: Final = "vllm.distributed.kv_transfer.kv_connector.v1"
_NO_SOURCE: Final = "the sources of media items are wrong or missing"
_NOT_KEPT: Final = "no span `ttft.ec.kept`, or one that does not end with the fetch"

FIELDS: Final[tuple[VllmField, ...]] = (
    *_list_fields(
        without="the instance's role reads `mono`; no connector's name",
        fields={_CONFIG: "ec_transfer_config kv_transfer_config"},
    ),
    *_list_fields(
        without="a scheduler setting is not reported: `ttft-otel whatif` has to be given it",
        fields={
            _CONFIG: "scheduler_config cache_config parallel_config",
            "vllm.config.scheduler:SchedulerConfig": "max_num_seqs async_scheduling",
            "vllm.config.cache:CacheConfig": "num_gpu_blocks block_size",
            "vllm.config.parallel:ParallelConfig": "data_parallel_size",
        },
    ),
    *_list_fields(
        without="role reads `mono`",
        fields={
            "vllm.config.ec_transfer:ECTransferConfig": "ec_role",
            "vllm.config.kv_transfer:KVTransferConfig": "kv_role",
        },
    ),
    *_list_fields(
        without="no connector's name",
        fields={
            "vllm.config.ec_transfer:ECTransferConfig": "ec_connector",
            "vllm.config.kv_transfer:KVTransferConfig": "kv_connector",
        },
    ),
    *_list_fields(
        without="no model's name",
        fields={
            _CONFIG: "model_config",
            "vllm.config.model:ModelConfig": "served_model_name",
        },
    ),
    *_list_fields(
        without="data-parallel rank reads 0",
        fields={
            _CONFIG: "parallel_config",
            # vLLM overrides the rank of dense models, so that the index is read first.
            "vllm.config.parallel:ParallelConfig": "data_parallel_index|data_parallel_rank",
        },
    ),
    *_list_fields(
        without="vLLM's own spans lose their parent",
        fields={
            _CONFIG: "observability_config",
            "vllm.config.observability:ObservabilityConfig": "otlp_traces_endpoint",
        },
    ),
    *_list_fields(
        without="no role, no rank; no request is admitted",
        fields={_SCHEDULER: "vllm_config requests"},
    ),
    *_list_fields(
        without="an unseen wait for a connector counts as queueing",
        fields={_SCHEDULER: "ec_connector connector"},
    ),
    *_list_fields(without="no count of KV blocks", fields={_SCHEDULER: "block_size"}),
    *_list_fields(
        without="the inputs of one stream (/v1/realtime) are not told apart",
        fields={
            f"{_ENGINE}:EngineCoreRequest": "resumable",
            f"{_ENGINE}.output_processor:OutputProcessor": "request_states",
            f"{_ENGINE}.output_processor:RequestState": "input_chunk_queue",
            "vllm.v1.request:StreamingUpdate": "sampling_params",
        },
    ),
    *_list_fields(
        without="why requests wait is wrong or `other`",
        fields={
            _SCHEDULER: (
                "scheduler_config max_num_active_reqs|max_num_running_reqs "
                "max_num_scheduled_tokens kv_cache_config kv_cache_manager running "
                "waiting deferred_waiting|skipped_waiting _pause_state "
                "finished_recving_kv_req_ids num_waiting_for_streaming_input "
                "encoder_cache_manager max_num_encoder_input_tokens lora_config"
            ),
            "vllm.v1.core.encoder_cache_manager:EncoderCacheManager": "cached num_freeable_slots",
            "vllm.config.scheduler:SchedulerConfig": (
                "policy max_num_batched_tokens enable_chunked_prefill scheduler_reserve_full_isl"
            ),
            _CONFIG: "speculative_config",
            "vllm.config.speculative:SpeculativeConfig": "max_num_new_slots_for_drafting",
            "vllm.v1.kv_cache_interface:KVCacheConfig": "kv_cache_groups",
            "vllm.v1.core.kv_cache_manager:KVCacheManager": "block_pool",
            "vllm.v1.core.block_pool:BlockPool": "get_num_free_blocks",
            _REQUEST: (
                "status priority arrival_time lora_request structured_output_request "
                "get_num_encoder_embeds"
            ),
            # Private: the public property stores the Future's result, and a hook changes nothing.
            "vllm.v1.structured_output.request:StructuredOutputRequest": "_grammar",
        },
    ),
    *_list_fields(
        without="a prompt that is held back so that answers go on has another reason",
        since="0.24",
        fields={_SCHEDULER: "prefill_capacity_bound", _REQUEST: "is_prefill_chunk"},
    ),
    *_list_fields(
        without="a prompt that is held back so that answers go on has another reason",
        since="0.33",
        fields={_SCHEDULER: "local_prefill_interval num_executed_steps last_prefill_step"},
    ),
    *_list_fields(
        without="a wait for output from before a preemption has another reason",
        since="0.29",
        fields={_REQUEST: "num_stale_output_tokens drop_stale_output"},
    ),
    *_list_fields(
        without="what the queue of a decode instance waits for is `other`",
        since="0.32",
        fields={_SCHEDULER: "kv_holding_waiting"},
    ),
    *_list_fields(
        without="a wait for a LoRA adapter's place is `other`",
        fields={"vllm.config.lora:LoRAConfig": "max_loras"},
    ),
    *_list_fields(
        without="which work held a waiting request is wrong",
        fields={
            "vllm.config.scheduler:SchedulerConfig": "async_scheduling",
            "vllm.config.parallel:ParallelConfig": "pipeline_parallel_size",
            _REQUEST: "num_output_tokens",
            _OUTPUT: "scheduled_spec_decode_tokens",
        },
    ),
    *_list_fields(
        without="no breakdown at all",
        fields={
            _OUTPUT: (
                "scheduled_new_reqs num_scheduled_tokens scheduled_encoder_inputs "
                "total_num_scheduled_tokens"
            ),
            "vllm.v1.core.sched.output:NewRequestData": "req_id mm_features",
            _REQUEST: (
                "request_id num_computed_tokens num_tokens num_prompt_tokens mm_features "
                "trace_headers"
            ),
            f"{_ENGINE}:EngineCoreRequest": "request_id trace_headers sampling_params",
            f"{_ENGINE}:EngineCoreOutput": "request_id trace_headers",
            f"{_ENGINE}:EngineCoreOutputs": "outputs",
        },
    ),
    *_list_fields(without="preemptions are not reported", fields={_OUTPUT: "preempted_req_ids"}),
    *_list_fields(
        without="without the connector's targets their stages are wrong instead of unattributed",
        fields={_OUTPUT: "ec_connector_metadata kv_connector_metadata"},
    ),
    # Without it a load is assumed to come before the forward, as in older releases.
    *_list_fields(
        without="without `kv.load` more becomes unattributed than has to",
        since="0.29",
        fields={_OUTPUT: "has_sync_kv_loads"},
    ),
    *_list_fields(
        without="under load the worker's stages are placed with a larger `ttft.clock_error_us`",
        fields={
            "vllm.v1.worker.gpu_model_runner:AsyncGPUModelRunnerOutput": "async_copy_ready_event",
            "vllm.v1.worker.gpu.async_utils:AsyncOutput": "copy_event",
        },
    ),
    *_list_fields(
        without="no request id on spans", fields={f"{_ENGINE}:EngineCoreRequest": "external_req_id"}
    ),
    *_list_fields(
        without="an end without a token looks like a first token",
        fields={f"{_ENGINE}:EngineCoreOutput": "finish_reason new_token_ids"},
    ),
    *_list_fields(
        without="no output tokens, finish reasons and time per token",
        fields={
            f"{_ENGINE}.output_processor:RequestState": "request_id detokenizer",
            f"{_ENGINE}.detokenizer:IncrementalDetokenizer": "num_output_tokens",
        },
    ),
    *_list_fields(
        without="`kv.transfer` and how long blocks are kept stay unknown",
        fields={
            "vllm.v1.outputs:KVConnectorOutput": "finished_recving finished_sending kv_connector_stats"
        },
    ),
    *_list_fields(
        without="`ttft.kv.tokens` is what the connector offered",
        fields={
            _REQUEST: "prefill_stats",
            "vllm.v1.metrics.stats:PrefillStats": "num_external_cached_tokens",
        },
    ),
    *_list_fields(
        without="of MultiConnector's children neither names nor bytes are known",
        fields={
            f"{_KV}.multi_connector:MultiConnector": "_connectors _requests_to_connector",
            f"{_KV}.metrics:KVConnectorStats": "data",
        },
    ),
    *_list_fields(
        without="`ttft.kv.source` goes by the connector's class",
        since="0.32",
        fields={f"{_KV}.base:KVConnectorBase_V1": "get_external_cache_hit_sources"},
    ),
    *_list_fields(
        without="OffloadingConnector's `ttft.kv.bytes` is absent",
        since="0.24",
        fields={
            "vllm.v1.outputs:KVConnectorOutput": "kv_connector_worker_meta",
            f"{_KV}.multi_connector:MultiKVConnectorWorkerMetadata": "metadata",
            f"{_KV}.offloading.common:OffloadingWorkerMetadata": "transfer_stats",
            f"{_KV}.offloading.common:TransferStats": "load",
            f"{_KV}.offloading.common:DirectionalTransferStats": "bytes time",
        },
    ),
    *_list_fields(
        without=_NO_SOURCE,
        fields={
            f"{_EC}.base:ECConnectorBase": "is_consumer",
            _REQUEST: "sampling_params",
            "vllm.multimodal.inputs:MultiModalFeatureSpec": "identifier mm_position",
            "vllm.multimodal.inputs:PlaceholderRange": "offset length",
        },
    ),
    *_list_fields(
        without="no role from a request; items encoded twice are not reported",
        fields={"vllm.sampling_params:SamplingParams": "extra_args"},
    ),
    *_list_fields(without=_NOT_KEPT, fields={_REQUEST: "kv_transfer_params"}),
    # From here on fields of single connectors, of which most are private: checked per release.
    *_list_fields(
        without=_NO_SOURCE,
        since="0.29",
        fields={
            f"{_EC}.cpu.connector:ECCPUConnector": "connector_scheduler",
            f"{_EC}.cpu.scheduler:ECCPUScheduler": "_cache",
            f"{_EC}.cpu.scheduler.embedding_cache:EmbeddingCache": "get",
            f"{_EC}.cpu.scheduler.embedding_cache:CacheEntry": "ready",
        },
    ),
    # Mooncake pushes: whether an item is here is known from the table of its transfers.
    *_list_fields(
        without=_NO_SOURCE,
        since="0.32",
        fields={
            f"{_EC}.mooncake_ec_connector:ECMooncakeConnector": "_scheduler",
            f"{_EC}.mooncake.scheduler:ECMooncakeScheduler": "_local_cache _transfers",
            f"{_EC}.mooncake.state:SchedulerTransferTable": "_records _hash_index",
            f"{_EC}.mooncake.state:SchedulerTransfer": "state spec",
            f"{_EC}.mooncake.metadata:ECMooncakeLoadSpec": "local nbytes",
        },
    ),
    *_list_fields(
        without=_NOT_KEPT,
        since="0.32",
        fields={
            f"{_EC}.cpu.scheduler:ECCPUScheduler": "_producer_session",
            f"{_EC}.cpu.session:ProducerSession": "_active_xfers _cache",
            f"{_EC}.cpu.session:ProducerXfer": "mm_hash",
        },
    ),
    *_list_fields(
        without="`ttft.ec.ready_us` is missing",
        since="0.29",
        fields={
            "vllm.v1.outputs:ECConnectorOutput": "ec_connector_worker_meta",
            f"{_EC}.cpu.common:ECCPUWorkerMetadata": "completed_saves",
        },
    ),
    *_list_fields(
        without="the worker's stages are missing",
        fields={"vllm.v1.outputs:ModelRunnerOutput": "req_ids"},
    ),
)
