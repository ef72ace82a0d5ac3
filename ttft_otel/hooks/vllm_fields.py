# SPDX-License-Identifier: Apache-2.0
"""Getters for fields of vLLM's objects, independent of vLLM's release; the other hooks use these.

Encoder-cache connectors have no common interface to what they keep about media items, so each getter looks
for the attributes that it needs (rather than for a class or release) and returns nothing where they are
absent. None of these calls a connector's methods, which could start a transfer or drain a socket.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from operator import attrgetter
from typing import Any, Final

from ttft_otel.model import stages
from ttft_otel.model.names import keys
from ttft_otel.tracing import guard

# Where a connector's blocks are, by how the names of its classes begin; stores may have several tiers.
KV_SOURCE_BY_CLASS: Final[dict[str, str]] = {
    "Nixl": "p2p",
    "MooncakeStore": keys.KV_SOURCE_STORE,
    "Mooncake": "p2p",
    "MoRIIO": "p2p",
    "Offloading": "host",
    "SimpleCPUOffload": "host",
    "LMCache": keys.KV_SOURCE_STORE,
    "FlexKV": keys.KV_SOURCE_STORE,
    "HF3FS": keys.KV_SOURCE_STORE,
    "Example": keys.KV_SOURCE_STORE,
}
MAX_ANNOUNCED: Final = 1024  # entries of a request's ec_transfer_params that are read
MAX_ENCODING_BYTES: Final = 1 << 40  # of one encoding; larger values are taken for invalid

_BASE_CLASS: Final = "ECConnectorBase"


class SchedulerFacts:
    """Constant properties of one scheduler; read once and stored on it."""

    def __init__(self, scheduler: Any) -> None:
        config = getattr(scheduler, "vllm_config", None)
        observability = getattr(config, "observability_config", None)
        #: vLLM's own tracing is on: its span needs the traceparent.
        self.vllm_traces = bool(getattr(observability, "otlp_traces_endpoint", None))
        self.rank = get_data_parallel_rank(config)
        self.ec_connector = getattr(scheduler, "ec_connector", None)
        #: The encoder-cache connector can delay requests: without such a method vLLM never sets one aside.
        self.ec_may_wait = has_own_method(type(self.ec_connector), "ensure_cache_available")
        self.kv_connector = getattr(scheduler, "connector", None)
        #: Tokens per KV block, 0 when unknown.
        self.block_size = int(getattr(scheduler, "block_size", 0) or 0)
        parallel = getattr(config, "parallel_config", None)
        #: Pipeline stages run at the same time, so that no request is in every step.
        self.is_pipeline = int(getattr(parallel, "pipeline_parallel_size", 1) or 1) > 1
        # Asked for here, because for each step getattr() with a default takes as long as the rest.
        self.can_pause = hasattr(scheduler, "_pause_state")
        #: It counts the streaming sessions that wait for input.
        self.has_sessions = hasattr(scheduler, "num_waiting_for_streaming_input")
        #: Called with the scheduler: the requests that it has set aside, () unknown.
        self.get_deferred: Callable[[Any], Any] = lambda _: ()
        for name in ("skipped_waiting", "deferred_waiting"):  # a queue; a set from vLLM 0.30 on
            if hasattr(scheduler, name):
                self.get_deferred = attrgetter(name)
        #: schedule() can hold prompts back so that answers go on; every how many steps it computes some.
        self.can_hold_prefills = hasattr(scheduler, "prefill_capacity_bound")
        self.prefill_interval = int(getattr(scheduler, "local_prefill_interval", 1) or 1)
        #: Places for LoRA adapters, 0 without any.
        self.max_loras = int(getattr(getattr(scheduler, "lora_config", None), "max_loras", 0) or 0)
        #: A request's status -> its own reason to wait: an enum's `name` is a slow property.
        self.reason_by_status: dict[Any, int] = {}
        self._read_limits(scheduler, config)

    def _read_limits(self, scheduler: Any, config: Any) -> None:
        own = getattr(scheduler, "scheduler_config", None)
        #: A step can be scheduled while another one runs.
        self.overlaps = self.is_pipeline or bool(getattr(own, "async_scheduling", False))
        #: Its policy is not first come, first served.
        self.by_priority = getattr(own, "policy", "fcfs") == "priority"
        # vLLM admits by this one; max_num_running_reqs counts the runner's slots (scheduler.py).
        places = getattr(scheduler, "max_num_active_reqs", None)
        #: Places for requests, and tokens of a step; 0 when unknown.
        self.max_running = int(places or getattr(scheduler, "max_num_running_reqs", 0) or 0)
        self.max_tokens = int(getattr(scheduler, "max_num_scheduled_tokens", 0) or 0)
        #: A step's tokens with those of drafts, which are taken out of this budget alone.
        self.max_batched = int(getattr(own, "max_num_batched_tokens", 0) or self.max_tokens)
        spec = getattr(config, "speculative_config", None)
        #: Drafts of a request.
        self.draft_slots = int(getattr(spec, "max_num_new_slots_for_drafting", 0) or 0)
        #: Prompts can be computed in parts.
        self.chunked = bool(getattr(own, "enable_chunked_prefill", True))
        #: A prompt is admitted only if there are KV blocks for all of it.
        self.reserves_prompt = bool(getattr(own, "scheduler_reserve_full_isl", False))
        groups = getattr(getattr(scheduler, "kv_cache_config", None), "kv_cache_groups", ())
        #: Kinds of KV blocks: hybrid models have several groups of layers, each with blocks of its own.
        self.cache_groups = max(1, len(groups))


def get_facts(scheduler: Any) -> SchedulerFacts:
    """The SchedulerFacts of `scheduler`, created at the first call."""
    # Kept on the scheduler itself: it ends with it, and a second engine has its own.
    try:
        return scheduler._ttft_facts  # type: ignore[no-any-return]
    except AttributeError:
        facts = scheduler._ttft_facts = SchedulerFacts(scheduler)
        return facts


def get_instance_role(config: Any) -> str:
    """The role in a VllmConfig; "" when each request decides (kv_both, ec_both).

    config: None or an incomplete one counts as a server without connectors ("mono").
    """
    transfer = getattr(config, "ec_transfer_config", None)
    ec_role = getattr(transfer, "ec_role", None) or ""
    # Before the KV role: an encoder's answer never reaches the client, whatever else it does.
    if ec_role == "ec_producer":
        return "encode"
    cache = getattr(config, "kv_transfer_config", None)
    kv_role = getattr(cache, "kv_role", None) or ""
    # kv_both is not in it: such an instance prefills for one request and decodes another.
    role_by_kv_role: dict[str, stages.Role] = {"kv_producer": "prefill", "kv_consumer": "decode"}
    if kv_role:
        return role_by_kv_role.get(kv_role, "")
    return {"ec_consumer": "prefill_decode", "": "mono"}.get(ec_role, "")


def read_identity(config: Any) -> dict[str, Any]:
    """The fields of roles.ServerIdentity that a VllmConfig gives; `config`: None where it is not known."""
    encodings = getattr(config, "ec_transfer_config", None)
    blocks = getattr(config, "kv_transfer_config", None)
    ec_role = getattr(encodings, "ec_role", None)
    # The first one under which the model is served.
    name = getattr(getattr(config, "model_config", None), "served_model_name", "")
    name = name[0] if isinstance(name, (list, tuple)) and name else name
    return {
        "role": get_instance_role(config),
        "default_role": "prefill_decode" if ec_role else "mono",
        # Cut, as all texts of unknown length that go on spans.
        "model": str(name)[:256],
        "kv_connector": str(getattr(blocks, "kv_connector", None) or "")[:256],
        "ec_connector": str(getattr(encodings, "ec_connector", None) or "")[:256],
        "takes_encodings": ec_role in ("ec_consumer", "ec_both"),
    }


def get_request_role(request: Any) -> str:
    """The role that an EngineCoreRequest's transfer parameters give this instance; "" without any.

    Routers put `kv_transfer_params` and `ec_transfer_params` into the body; vLLM's protocol classes
    copy both into SamplingParams.extra_args unchanged. Prefill is recognized by `do_remote_decode`, as
    in vLLM's NIXL connector (`is_p_node`). `consumer_zmq` names the instance to which an encoder has
    to push (Mooncake); all other `ec_transfer_params` announce encodings to an instance that prefills.
    """
    extra = getattr(getattr(request, "sampling_params", None), "extra_args", None)
    if not isinstance(extra, dict):
        return ""
    # KV first: a prefill instance's request may name encodings as well.
    blocks = extra.get("kv_transfer_params")
    if isinstance(blocks, dict):
        if blocks.get("do_remote_decode"):
            return "prefill"
        if blocks.get("do_remote_prefill"):
            return "decode"
    encodings = extra.get("ec_transfer_params")
    if isinstance(encodings, dict) and encodings:
        return "encode" if encodings.get("consumer_zmq") else "prefill_decode"
    return ""


def find_child_connector(connector: Any, request_id: str) -> tuple[Any, int]:
    """MultiConnector's child that fetches a request's blocks, with its index; else `connector` and -1."""
    children = getattr(connector, "_connectors", ())
    index = getattr(connector, "_requests_to_connector", {}).get(request_id, -1)
    return (children[index], index) if 0 <= index < len(children) else (connector, -1)


def count_external_tokens(request: Any, offered: int) -> int:
    """How many tokens of the prompt vLLM takes from a KV connector that has `offered` as many."""
    taken = getattr(request, "prefill_stats", None)
    return offered if taken is None else int(getattr(taken, "num_external_cached_tokens", offered))


def find_block_source(connector: Any, request: Any, tokens: int) -> tuple[str, str]:
    """Class of MultiConnector's child with these `tokens` ("" without one), and one of keys.KV_SOURCES."""
    child, index = find_child_connector(connector, request.request_id)
    name = type(child).__name__
    found = {}
    if ask := getattr(child, "get_external_cache_hit_sources", None):
        with guard.Guard("kv.source"):  # a connector's own code
            found = ask(request, tokens)
    # The farthest of several tiers: that one is waited for longest.
    named = {str(getattr(each, "value", each)) for each in found}  # of vLLM's CacheHitSource
    words = [word for word in keys.KV_SOURCES if word in named]
    source: str = words[-1] if words else keys.KV_SOURCE_UNKNOWN
    if source == keys.KV_SOURCE_UNKNOWN:  # older releases and connectors that do not tell
        known = (word for start, word in KV_SOURCE_BY_CLASS.items() if name.startswith(start))
        source = next(known, source)
    return (name[:256] if index >= 0 else ""), source


def list_connector_stats(output: Any) -> dict[str, dict[str, Any]]:
    """Class of each of MultiConnector's children, "" for another one -> its figures of this step."""
    stats = getattr(getattr(output, "kv_connector_stats", None), "data", None)
    if not isinstance(stats, dict):
        return {}
    children = {name: getattr(each, "data", None) for name, each in stats.items()}
    return {k: v for k, v in children.items() if isinstance(v, dict)} or {"": stats}


def read_transfer(output: Any, connector: Any, request_id: str) -> list[int]:
    """Bytes that were fetched for a request, and the longest transfer in microseconds; 0 unknown.

    output: of the step, in which no other request's blocks came.
    """
    child, index = find_child_connector(connector, request_id)
    stats = list_connector_stats(output).get(type(child).__name__ if index >= 0 else "", {})
    if moved := stats.get("bytes_transferred"):  # NIXL
        return [int(sum(moved)), int(max(stats.get("transfer_duration", ()), default=0.0) * 1e6)]
    meta = getattr(output, "kv_connector_worker_meta", None)
    if index >= 0:
        meta = getattr(meta, "metadata", {index: None})[index]
    load = getattr(getattr(meta, "transfer_stats", None), "load", None)  # OffloadingConnector
    return [int(getattr(load, "bytes", 0)), int(getattr(load, "time", 0.0) * 1e6)]


def lacks_first_token(output: Any) -> bool:
    """Whether the EngineCoreOutput `output` ends its request without giving its caller a token.

    The engine ends requests so when a KV load or an encoding fails ("error"), when it is paused or put
    to sleep ("abort"), or when it does not take them ("length"). Only an encoder-only instance stops
    without a token regularly: that output is its whole result.
    """
    # An IntEnum in v1/engine/__init__.py, whose str() is the word.
    reason = getattr(output, "finish_reason", None)
    if reason is None:
        return False
    return str(reason) == "error" or not (
        getattr(output, "new_token_ids", True) or str(reason) == "stop"
    )


def find_awaited_event(pending: Any) -> str:
    """The attribute of an async output with the event for which get_output() waits; "" when unknown."""
    for name in ("copy_event", "async_copy_ready_event"):  # V2, V1
        if hasattr(pending, name):
            return name
    return ""


def is_beam(request: Any) -> bool:
    """Whether an EngineCoreRequest is one step of a beam search (generate/beam_search/online.py).

    By its name, `<batch>-beam-<number>`, as SamplingParams do not say it; a client that gives its own
    request such a name only loses what is counted at its end.
    """
    name = str(getattr(request, "external_req_id", None) or "")
    return "-beam-" in name and name.rpartition("-beam-")[2].isdigit()


def count_output_tokens(req_state: Any) -> int:
    """Tokens of a RequestState's answer, as in the `usage` that the client gets; -1 when unknown."""
    # Not its stats: those are missing with --disable-log-stats, and count what a stop string cut off.
    count = getattr(getattr(req_state, "detokenizer", None), "num_output_tokens", None)
    return int(count()) if count is not None else -1


def read_engine_settings(config: Any) -> dict[str, int]:
    """The scheduler's settings in `config`, by keys.ENGINE_SETTINGS; what it lacks is left out."""
    scheduler = getattr(config, "scheduler_config", None)
    cache = getattr(config, "cache_config", None)
    blocks = getattr(cache, "num_gpu_blocks", None)
    size = getattr(cache, "block_size", None)
    ranks = getattr(getattr(config, "parallel_config", None), "data_parallel_size", 1)
    found = {
        keys.ENGINE_MAX_SEQS: getattr(scheduler, "max_num_seqs", None),
        keys.ENGINE_MAX_TOKENS: getattr(scheduler, "max_num_batched_tokens", None),
        keys.ENGINE_ASYNC: getattr(scheduler, "async_scheduling", None),
        keys.ENGINE_CHUNKED: getattr(scheduler, "enable_chunked_prefill", None),
        # vLLM has added up the blocks of all ranks here; each has its own.
        keys.ENGINE_KV_TOKENS: blocks * size // ranks if blocks and size and ranks else None,
        keys.ENGINE_BLOCK_TOKENS: size if blocks else None,
    }
    return {name: int(value) for name, value in found.items() if isinstance(value, int)}


def get_vllm_config(state: Any) -> Any:
    """The VllmConfig in the `state` of vLLM's app (stored there, or on its engine client), or None."""
    vllm_config = getattr(state, "vllm_config", None)
    if vllm_config is None:
        vllm_config = getattr(getattr(state, "engine_client", None), "vllm_config", None)
    return vllm_config


def get_data_parallel_rank(config: Any) -> int:
    """Data-parallel rank of this engine core; 0 when `config` does not name one."""
    parallel = getattr(config, "parallel_config", None)
    # The index first: vLLM overrides the rank for dense models (config/parallel.py).
    for name in ("data_parallel_index", "data_parallel_rank"):
        value = getattr(parallel, name, None)
        if isinstance(value, int):
            return value
    return 0


def has_own_method(kind: type, name: str) -> bool:
    """Whether the class `kind` defines the method `name` itself, not only inherits vLLM's empty one."""
    for base in kind.__mro__:
        # The first class of the MRO that has it is the one whose method is called.
        if name in vars(base):
            return base.__name__ != _BASE_CLASS
    return False


def is_consumer(connector: Any) -> bool:
    """Whether `connector` takes encodings from other instances."""
    return bool(getattr(connector, "is_consumer", False))


def get_announced_params(request: Any) -> dict[str, Any]:
    """The `ec_transfer_params` with which `request` came; {} without any.

    Read from the sampling parameters, not from the request: there ECCPUConnector removes an item whose
    transfer failed (cpu/scheduler `_fail_or_fallback`), and such an item has to count as recomputed.
    """
    extra = getattr(getattr(request, "sampling_params", None), "extra_args", None)
    params = extra.get("ec_transfer_params") if isinstance(extra, dict) else None
    return params if isinstance(params, dict) else {}


def list_announced_names(params: dict[str, Any]) -> tuple[set[str], list[int]]:
    """The items named in ec_transfer_params: their mm_hashes, and positions in the list of items.

    params: items by mm_hash (vLLM 0.32), or in a list `ec_items` (0.29, and requests of
    ECMooncakeConnector) whose entries may have no hash. At most MAX_ANNOUNCED of each are read.
    """
    # Bounded: the parameters come with the request's body, from anybody.
    names = {name for name, item in islice(params.items(), MAX_ANNOUNCED) if isinstance(item, dict)}
    places: list[int] = []
    items = params.get("ec_items")
    for place, item in enumerate(items[:MAX_ANNOUNCED] if isinstance(items, list) else ()):
        if isinstance(item, dict):
            name = item.get("mm_hash")
            if name is None:
                places.append(place)
            else:
                names.add(str(name))
    return names, places


def find_cache_test(connector: Any) -> Callable[[str], bool] | None:
    """A function that says for an mm_hash whether its encoding is in the connector's local cache.

    None where the connector has no local cache that we know.
    """
    cache = getattr(getattr(connector, "connector_scheduler", None), "_cache", None)
    if cache is not None and hasattr(cache, "get"):  # ECCPUConnector
        return lambda name: bool(getattr(cache.get(name), "ready", False))
    delegate = getattr(connector, "_scheduler", None)
    resident = getattr(delegate, "_local_cache", None)
    if isinstance(resident, set):  # ECMooncakeConnector
        return lambda name: (
            name in resident or any(map(_is_cached, list_pushed_items(connector, name)))
        )
    return None


def list_pushed_items(connector: Any, name: str) -> list[Any]:
    """ECMooncakeConnector's records of transfers of the item `name` to this instance."""
    table = getattr(getattr(connector, "_scheduler", None), "_transfers", None)
    records = getattr(table, "_records", None)
    by_hash = getattr(table, "_hash_index", None)
    if not isinstance(records, dict) or not isinstance(by_hash, dict):
        return []
    return [records[key] for key in by_hash.get(name, ()) if key in records]


def _is_cached(record: Any) -> bool:
    """Whether a pushed item is one that an earlier request had loaded."""
    state = getattr(getattr(record, "state", None), "name", "")
    return state in ("READY", "RESIDENT") or bool(getattr(record.spec, "local", False))


def find_item_bytes(connector: Any, request: Any, name: str) -> int:
    """Bytes of the item `name` that was fetched from another instance; 0 where that is unknown."""
    announced = get_announced_params(request).get(name)
    size = announced.get("size_bytes") if isinstance(announced, dict) else None
    # Without a size in the params: ECMooncakeConnector's scheduler has that of the transfer.
    if size is None:
        sizes = [
            getattr(record.spec, "nbytes", None) for record in list_pushed_items(connector, name)
        ]
        size = next((each for each in sizes if each), None)
    return size if isinstance(size, int) and 0 < size <= MAX_ENCODING_BYTES else 0
