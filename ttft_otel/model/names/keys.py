# SPDX-License-Identifier: Apache-2.0
"""Keys of span and resource attributes, and the functions that make keys of stages and reasons."""

from __future__ import annotations

from typing import Final

from ttft_otel.model import stages
from ttft_otel.model.names import span_names

# Span attributes of ours. Times are integer microseconds (_US): TraceQL compares doubles unreliably.
STAGE: Final = "ttft.stage"
PART: Final = "ttft.part"
LEG: Final = "ttft.leg"
INSTANCE: Final = "ttft.instance"  # host:port of the server behind a leg, on that leg's stages
ROLE: Final = "ttft.role"
OUTERMOST: Final = "ttft.outermost"
TOTAL_US: Final = "ttft.total_us"
UNATTRIBUTED_US: Final = "ttft.unattributed_us"
CLAMPED_US: Final = "ttft.clamped_us"
CLOCK: Final = "ttft.clock"  # which clock placed the worker's marks, one of CLOCK_WORDS
CLOCK_ERROR_US: Final = "ttft.clock_error_us"  # of a device's marks, and of another host's clock
STREAMING: Final = "ttft.streaming"
DIRECT: Final = "ttft.direct"  # the engine was called without HTTP
# Its front-end has no hooks: the TTFT ends with the first token that leaves the engine core.
ENGINE_ONLY: Final = "ttft.engine_only"
# Made by the report of another product's spans, whose name it is; not exported.
FOREIGN: Final = "ttft.foreign"
BACKGROUND: Final = "ttft.background"  # the answer only said that the request is queued
# Integer microseconds for each token after the first, of an answer with one generation.
TIME_PER_OUTPUT_TOKEN_US: Final = "ttft.time_per_output_token_us"
DIED_IN: Final = "ttft.died_in"
# Time before our outermost span: computed and shown by the report, not exported, not in the total.
BEFORE_US: Final = "ttft.before_us"
BEFORE_ERROR_US: Final = "ttft.before_error_us"
TRUNCATED: Final = "ttft.truncated"
RANK: Final = "ttft.rank"
REQUEST_ID: Final = "ttft.request_id"
CACHED_TOKENS: Final = "ttft.cached_tokens"
PREEMPTIONS: Final = "ttft.preemptions"
RECOMPUTED_TOKENS: Final = "ttft.recomputed_tokens"
PREFILL_CHUNKS: Final = "ttft.prefill.chunks"
PREFILL_OWN_TOKENS: Final = "ttft.prefill.own_tokens"
PREFILL_STEP_TOKENS: Final = "ttft.prefill.step_tokens"
ENCODER_OWN_ITEMS: Final = "ttft.encoder.own_items"
ENCODER_STEP_ITEMS: Final = "ttft.encoder.step_items"
QUEUE_REASON: Final = "ttft.queue.reason"  # of a span inside a queue, one of stages.WAIT_REASONS
STALL_REASON: Final = "ttft.stall.reason"  # of a span between chunks, likewise
# Of a link to a request that held a waiting one, or of an event where that has no trace.
HELD_BY: Final = "ttft.held_by"
HELD_BY_US: Final = "ttft.held_by.us"
HELD_BY_TOKENS: Final = "ttft.held_by.tokens"
HELD_BY_KIND: Final = "ttft.held_by.kind"  # one of stages.HOLDING_KINDS
HELD_BY_REQUEST_ID: Final = "ttft.held_by.request_id"
HELD_BY_TRUNCATED: Final = "ttft.held_by.truncated"  # too many: a larger one may be missing
ENCODER_UNFINISHED: Final = "ttft.encoder.unfinished"  # the answer left before the encoder ended
ENCODER_CACHED_ITEMS: Final = "ttft.encoder.cached_items"
KV_TOKENS: Final = "ttft.kv.tokens"
KV_BLOCKS: Final = "ttft.kv.blocks"
KV_BYTES: Final = "ttft.kv.bytes"
KV_MOVE_US: Final = "ttft.kv.move_us"
KV_CONNECTOR: Final = "ttft.kv.connector"
KV_SOURCE: Final = "ttft.kv.source"  # one of KV_SOURCES
KV_SOURCE_STORE: Final = "store"
KV_SOURCE_UNKNOWN: Final = "external_unspecified"
# vLLM's words (CacheHitSource), but for the store; the farthest last.
KV_SOURCES: Final = ("device", "host", "p2p", "disk", KV_SOURCE_STORE, KV_SOURCE_UNKNOWN)
EC_CONNECTOR: Final = "ttft.ec.connector"
EC_ITEMS: Final = "ttft.ec.items"
EC_BYTES: Final = "ttft.ec.bytes"
EC_REMOTE_ITEMS: Final = "ttft.ec.remote_items"
EC_LOCAL_ITEMS: Final = "ttft.ec.local_items"
EC_RECOMPUTED_ITEMS: Final = "ttft.ec.recomputed_items"
EC_READY_US: Final = "ttft.ec.ready_us"  # encoder's answer -> its last encoding is readable
ATTEMPT: Final = "ttft.attempt"
ROUTE_POLICY: Final = "ttft.route.policy"
ROUTE_CANDIDATES: Final = "ttft.route.candidates"
ROUTE_REASON: Final = "ttft.route.reason"
# Score of the chosen instance; its unit depends on the policy: microseconds, pairs, tokens, requests.
ROUTE_SCORE: Final = "ttft.route.score"
ROUTE_INSTANCES: Final = "ttft.route.instances"  # host:port of the candidates, best first
ROUTE_SCORES: Final = "ttft.route.scores"  # scores of the candidates, in the same order
ROUTE_CACHED_TOKENS: Final = "ttft.route.cached_tokens"
PREDICTED_MS: Final = "ttft.predicted_ms"
PREDICTION_ERROR_MS: Final = "ttft.prediction_error_ms"
FIRST_TOKEN: Final = "ttft.first_token"
FIRST_TOKEN_REASON: Final = "ttft.first_token_reason"
FIRST_TOKEN_MISMATCH: Final = "ttft.first_token_mismatch"
HANDOVER_STAGE: Final = "ttft.handover.stage"
HANDOVER_TOTAL_US: Final = "ttft.handover.total_us"

CLOCK_WORDS: Final = ("host", "device", "lengths", "none")  # by clock.CLOCK_*

# Span attributes, OpenTelemetry semantic conventions.
OPERATION: Final = "gen_ai.operation.name"
PROVIDER: Final = "gen_ai.provider.name"
MODEL: Final = "gen_ai.request.model"
RESPONSE_MODEL: Final = "gen_ai.response.model"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
CACHE_READ_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
# Seconds, double; of streams only.
TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
STREAM: Final = "gen_ai.request.stream"
ERROR_TYPE: Final = "error.type"
HTTP_METHOD: Final = "http.request.method"
HTTP_ROUTE: Final = "http.route"
HTTP_STATUS: Final = "http.response.status_code"
URL_PATH: Final = "url.path"
URL_SCHEME: Final = "url.scheme"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"
PROVIDER_VLLM: Final = "vllm"

# Values of error.type: the client left, at a server and at a router; the router was stopped before
# the answer was complete; the engine ended it.
ERROR_CANCELLED: Final = "cancelled"
ERROR_DISCONNECTED: Final = "disconnected"
ERROR_STOPPED: Final = "stopped"
ERROR_ENGINE: Final = "error"
ERROR_NO_TOKEN: Final = "no_token"
# A stream that ended before what was generated for it had: mostly its client left.
ERROR_INCOMPLETE: Final = "incomplete"
CLIENT_LEFT_ERRORS: Final = (ERROR_CANCELLED, ERROR_DISCONNECTED)

# Span attributes that the collector derives (collector/config.yaml): integers, searchable in any backend.
DERIVED_MS: Final = "ttft_ms"
DERIVED_STAGE_SUM_US: Final = "ttft_stage_sum_us"
DERIVED_UNATTRIBUTED_US: Final = "ttft_unattributed_us"

# Resource attribute of a process that sends the metrics below itself, and its value: the collector then
# makes none of its spans.
METRICS_SOURCE: Final = "ttft.metrics"
METRICS_FROM_EXPORTER: Final = "exporter"

# Resource attributes of a vLLM server: settings of its scheduler, as integers; 0 and 1 for switches.
ENGINE_MAX_SEQS: Final = "ttft.engine.max_num_seqs"
ENGINE_MAX_TOKENS: Final = "ttft.engine.max_num_batched_tokens"
ENGINE_KV_TOKENS: Final = "ttft.engine.kv_tokens"  # that its KV cache holds
ENGINE_BLOCK_TOKENS: Final = "ttft.engine.kv_block_tokens"  # of one of its blocks
ENGINE_ASYNC: Final = "ttft.engine.async_scheduling"
ENGINE_CHUNKED: Final = "ttft.engine.chunked_prefill"
ENGINE_LIMITS: Final = (ENGINE_MAX_SEQS, ENGINE_MAX_TOKENS, ENGINE_KV_TOKENS, ENGINE_BLOCK_TOKENS)
ENGINE_SETTINGS: Final = (*ENGINE_LIMITS, ENGINE_ASYNC, ENGINE_CHUNKED)


def is_refusal(error: str) -> bool:
    """Whether `error`, a value of error.type, is a status of 4xx: what the client sent was refused."""
    return len(error) == 3 and error.isdigit() and error[0] == "4"


def name_stage_attribute(stage: str) -> str:
    """The attribute with a stage's microseconds: `prefill.queue` -> `ttft.prefill.queue_us`.

    stage: full stage name, or "unattributed".
    """
    return UNATTRIBUTED_US if stage == stages.UNATTRIBUTED else f"ttft.{stage}_us"


def name_handover_attribute(stage: str) -> str:
    """The attribute with the microseconds of a stage in the handover from prefill to decode.

    stage: `decode.kv.transfer` gives `ttft.handover.decode.kv.transfer_us`.
    """
    return f"{span_names.HANDOVER}.{stage}_us"


def name_reason_attribute(stage: str, reason: str) -> str:
    """The attribute with the microseconds that a request waited for `reason` in a queue, or a stall.

    stage: `encoder.queue` and `prefill.queue` have one attribute, `ttft.queue.<reason>_us`;
    `prefill.stall` has `ttft.stall.<reason>_us`.
    """
    return f"ttft.{'stall' if stage == stages.STALL_STAGE else 'queue'}.{reason}_us"


def parse_reason_attribute(attribute: str) -> tuple[str, str] | None:
    """("queue" or "stall", reason) of an attribute of name_reason_attribute(); None for others."""
    head, _, rest = attribute.removeprefix("ttft.").partition(".")
    reason = rest.removesuffix("_us")
    known = head in ("queue", "stall") and rest.endswith("_us") and reason in stages.WAIT_REASONS
    return (head, reason) if known else None


def name_held_attribute(kind: str) -> str:
    """The attribute with the microseconds of a waiting stage in which the engine did work of `kind`."""
    return f"ttft.held.{kind}_us"


def parse_stage_attribute(attribute: str) -> str | None:
    """The stage whose microseconds `attribute` holds (`ttft.<stage>_us`); None for other attributes."""
    if not (attribute.startswith("ttft.") and attribute.endswith("_us")):
        return None
    stage = attribute.removeprefix("ttft.").removesuffix("_us")
    return stage if stages.is_known_stage(stage) else None
