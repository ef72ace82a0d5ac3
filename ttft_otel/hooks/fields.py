# SPDX-License-Identifier: Apache-2.0
"""Getters for what vLLM names differently from release to release; everything else in hooks/ uses these."""

from __future__ import annotations

from typing import Any

from ttft_otel import stages


class Facts:
    """What never changes about one scheduler; read once, hung onto it."""

    __slots__ = ("block", "loads", "rank", "tracing", "waits")

    def __init__(self, scheduler: Any) -> None:
        config = getattr(scheduler, "vllm_config", None)
        observability = getattr(config, "observability_config", None)
        # Whether the operator switched vLLM's own tracing on: its span needs the traceparent.
        self.tracing = bool(getattr(observability, "otlp_traces_endpoint", None))
        self.rank = rank(config)
        self.waits = may_wait(getattr(scheduler, "ec_connector", None))
        self.loads = getattr(scheduler, "connector", None) is not None
        self.block = int(getattr(scheduler, "block_size", 0) or 0)


def facts(scheduler: Any) -> Facts:
    """The Facts of a scheduler."""
    found = getattr(scheduler, "_ttft", None)
    if found is None:
        found = scheduler._ttft = Facts(scheduler)
    return found


def may_wait(connector: Any) -> bool:
    """Whether this encoder-cache connector can keep a request waiting (0.24 and later)."""
    for base in type(connector).__mro__:
        if "ensure_cache_available" in vars(base):
            return base.__name__ != "ECConnectorBase"
    return False


def role(config: Any) -> str:
    """The role that a VllmConfig gives an instance; "" when it does not tell (kv_both)."""
    transfer = getattr(config, "ec_transfer_config", None)
    kind = getattr(transfer, "ec_role", None) or ""
    if kind == "ec_producer":
        return "encode"
    cache = getattr(config, "kv_transfer_config", None)
    word = getattr(cache, "kv_role", None) or ""
    told: dict[str, stages.Role] = {"kv_producer": "prefill", "kv_consumer": "decode"}
    if word:
        return told.get(word, "")
    return "prefill_decode" if kind else "mono"


def connector(config: Any) -> str:
    """Name of the KV connector; "" when there is none."""
    transfer = getattr(config, "kv_transfer_config", None)
    return str(getattr(transfer, "kv_connector", None) or "")[:256]


def config(state: Any) -> Any:
    """The VllmConfig in a vLLM app's state (kept there, or on its engine client), or None."""
    found = getattr(state, "vllm_config", None)
    if found is None:
        found = getattr(getattr(state, "engine_client", None), "vllm_config", None)
    return found


def model(config: Any) -> str:
    """The name under which the model is served."""
    name = getattr(getattr(config, "model_config", None), "served_model_name", "")
    return str(name[0] if isinstance(name, (list, tuple)) and name else name)[:256]


def rank(config: Any) -> int:
    """Data-parallel rank of this engine core."""
    parallel = getattr(config, "parallel_config", None)
    for name in ("data_parallel_index", "data_parallel_rank"):
        value = getattr(parallel, name, None)
        if isinstance(value, int):
            return value
    return 0
