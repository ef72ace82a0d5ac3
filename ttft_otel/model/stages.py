# SPDX-License-Identifier: Apache-2.0
"""The stages of TTFT: names, order, process, roles and a one-sentence description of each.

Defined only here. Records, spans, Server-Timing, report, collector and dashboards are checked
against this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

StageKind = Literal["host", "work", "move", "wait"]
Role = Literal["encode", "prefill", "decode", "prefill_decode", "mono", "router"]

ENCODE: Final = "encode"
PREFILL: Final = "prefill"
DECODE: Final = "decode"
PREFILL_DECODE: Final = "prefill_decode"  # answers alone, where encoders may join
MONO: Final = "mono"  # encodes, prefills and decodes
ROLES: Final[tuple[Role, ...]] = (ENCODE, PREFILL, DECODE, PREFILL_DECODE, MONO, "router")
PREFILLING_ROLES: Final[tuple[Role, ...]] = (PREFILL, PREFILL_DECODE, MONO)
ANSWERING_ROLES: Final[tuple[Role, ...]] = (DECODE, PREFILL_DECODE, MONO)
# Roles whose answer goes to another instance: the client's first token never comes from them.
INTERMEDIATE_ROLES: Final[frozenset[str]] = frozenset({ENCODE, PREFILL})
_TEXT_ROLES: Final[tuple[Role, ...]] = (PREFILL, DECODE, PREFILL_DECODE, MONO)
_SERVER_ROLES: Final[tuple[Role, ...]] = (ENCODE, *_TEXT_ROLES)


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a server's TTFT.

    kind: "host" is Python overhead, "work" computation, "move" data transfer, "wait" queueing.
    process: where it is measured: API server, engine core, worker.
    roles: the server roles that can have it.
    code: its number in EngineTimeline.steps and EngineDetails.waits; those of removed stages are not reused.
    says: the sentence that pages and dashboards show.
    """

    name: str
    kind: StageKind
    process: str
    roles: tuple[Role, ...]
    code: int
    says: str


# In the order of a request's critical path, which is also the order of breakdown.py's cursor.
STAGES: Final[tuple[Stage, ...]] = (
    Stage("receive", "host", "api", _SERVER_ROLES, 1, "Reading the body, JSON, validation."),
    Stage(
        "preprocess",
        "work",
        "api",
        _SERVER_ROLES,
        2,
        "Chat template, media, tokenizer, multimodal processor.",
    ),
    Stage(
        "ipc",
        "move",
        "api+core",
        _SERVER_ROLES,
        3,
        "From the API server into the engine core's input.",
    ),
    Stage(
        "encoder.queue",
        "wait",
        "core",
        _SERVER_ROLES,
        4,
        "Waiting for the step that encodes an item.",
    ),
    Stage(
        "prefill.queue",
        "wait",
        "core",
        _SERVER_ROLES,
        5,
        "Waiting for the step that takes a first chunk.",
    ),
    Stage(
        "kv.transfer",
        "move",
        "core+worker",
        _TEXT_ROLES,
        6,
        "Waiting for KV blocks, or loading them inside a step.",
    ),
    Stage(
        "dispatch",
        "host",
        "core+worker",
        _SERVER_ROLES,
        7,
        "Rest of scheduling, RPC to the worker, input preparation.",
    ),
    Stage(
        "ec.transfer", "move", "core+worker", _SERVER_ROLES, 8, "Encoder-cache save, wait and load."
    ),
    Stage(
        "encoder.compute",
        "work",
        "worker",
        _SERVER_ROLES,
        9,
        "The encoder's forward pass, for the step's whole batch.",
    ),
    Stage(
        "prefill.compute",
        "work",
        "worker",
        _TEXT_ROLES,
        10,
        "Forward passes over this prompt's chunks.",
    ),
    Stage(
        "prefill.stall",
        "wait",
        "worker",
        _TEXT_ROLES,
        11,
        "Between chunks: turnaround, other steps, preemption.",
    ),
    Stage("sample", "work", "worker", _TEXT_ROLES, 12, "Logits and sampler of the last chunk."),
    Stage(
        "output",
        "move",
        "worker+core+api",
        _SERVER_ROLES,
        13,
        "From the worker to the API server, and detokenization.",
    ),
    Stage(
        "egress",
        "host",
        "api",
        _SERVER_ROLES,
        14,
        "Until the first body chunk is handed to the HTTP server.",
    ),
)
UNATTRIBUTED: Final = "unattributed"

# Parts are details inside a stage: child spans only. Adding them to stages would count time twice.
STAGE_PARTS: Final[dict[str, tuple[str, ...]]] = {
    "preprocess": ("media", "tokenize", "multimodal"),
    "output": ("collect", "transport", "detokenize"),
}

# Why a scheduling step left a waiting request out, in the order of EngineDetails.reasons. Only
# append: a code is a position. Time in a queue, and between chunks, is divided among them.
WAIT_REASONS: Final[dict[str, str]] = {
    "in_step": "It came while a step ran; the first step after that decides.",
    "max_num_seqs": "As many requests run as max_num_seqs allows.",
    "token_budget": "The step has no tokens left (max_num_batched_tokens).",
    "kv_blocks": "Too few free KV blocks, or requests were preempted for lack of them.",
    "encoder_budget": "The encoder's budget of the step, or the encoder cache, is used up.",
    "remote_kv": "Its KV blocks come from another instance.",
    "remote_ec": "Its encodings come from another instance.",
    "grammar": "Its grammar is being compiled.",
    "lora": "Other LoRA adapters take all places (max_loras).",
    "priority": "A request that came later, with a higher priority, runs in its place.",
    "paused": "The scheduler is paused.",
    "other": "None of these, or this release of vLLM does not tell.",
}
WAIT_REASON_NAMES: Final[tuple[str, ...]] = tuple(WAIT_REASONS)
# What the engine worked on while a request waited, in the order of EngineTimeline.held. Only
# append. Time in a queue, and between chunks, is divided among them, too.
HOLDING_KINDS: Final[dict[str, str]] = {
    "prefill": "Prompts of other requests.",
    "decode": "Tokens of other requests' answers.",
    "encoder": "Media items of other requests.",
    "own": "Its own earlier chunks, or its own media items.",
    "idle": "No step ran, nor was it a step's turnaround: nothing could be scheduled, or a pause.",
}
HOLDING_KIND_NAMES: Final[tuple[str, ...]] = tuple(HOLDING_KINDS)
QUEUE_STAGES: Final[tuple[str, ...]] = ("encoder.queue", "prefill.queue")
STALL_STAGE: Final = "prefill.stall"

# The router's own stages. A leg is one request from the router to a server of one role; stages of a
# leg are prefixed by that role: `encode.preprocess`.
ROUTER_STAGES: Final[dict[str, str]] = {
    "router.receive": "Reading and parsing the client's request.",
    "router.tokenize": "Reading the prompt's tokens, for policies that route by them.",
    "router.lookup": "Looking up which instances have how much of the prompt cached.",
    "router.route": "Choosing an instance for each leg.",
    "router.retry": "Time spent in attempts that failed.",
    "router.hop": "A leg minus what its server accounts for; carries the leg: router.hop.encode.",
    "router.egress": "From the leg's first bytes until the client's are given to the server.",
}

# Built once: each span and each header looks names up.
STAGE_NAMES: Final[tuple[str, ...]] = tuple(stage.name for stage in STAGES)
STAGES_BY_NAME: Final[dict[str, Stage]] = {stage.name: stage for stage in STAGES}
STAGES_BY_CODE: Final[dict[int, Stage]] = {stage.code: stage for stage in STAGES}

# Names kept from the original TTFT report: each is the sum of the stages on its right.
REPORT_FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "enc_queue_time_ms": ("encoder.queue",),
    "enc_compute_time_ms": ("encoder.compute",),
    "emb_cache_transfer_time_ms": ("ec.transfer",),
    "prefill_queue_time_ms": ("prefill.queue",),
    "prefill_compute_time_ms": ("prefill.compute",),
}

# One per role, so that service maps show the instances of a request as nodes of their own.
SERVICE_NAMES: Final[dict[Role, str]] = {
    "encode": "vllm-encoder",
    "prefill": "vllm-prefill",
    "decode": "vllm-decode",
    "prefill_decode": "vllm-prefill-decode",
    "mono": "vllm",
    "router": "ttft-otel-router",
}


def split_stage(name: str) -> tuple[str, str]:
    """Split a full stage name into leg and stage: `encode.preprocess` -> ("encode", "preprocess").

    name: a stage, a stage with its leg's prefix, or anything else, which is returned unchanged.
    The leg is "" for a server's own stage and for the router's own stages.
    """
    if name in ROUTER_STAGES or name.startswith("router.hop."):
        return "", name
    leg, dot, stage = name.partition(".")
    # Stage names have dots, too: `encoder.compute` is no stage `compute` of a leg.
    if dot and leg in ROLES and stage in (*STAGE_NAMES, UNATTRIBUTED):
        return leg, stage
    return "", name


# All names that can be: headers come from other servers, and names become labels.
_PLAIN_NAMES: Final = (*STAGE_NAMES, UNATTRIBUTED)
KNOWN_NAMES: Final = frozenset(
    (
        *_PLAIN_NAMES,
        *ROUTER_STAGES,
        *(f"router.hop.{role}" for role in ROLES),
        *(f"{role}.{stage}" for role in ROLES for stage in _PLAIN_NAMES),
    )
)


def is_known_stage(name: str) -> bool:
    """Whether `name` is the full name of a stage, with or without a leg's prefix."""
    return name in KNOWN_NAMES
