# SPDX-License-Identifier: Apache-2.0
"""The vocabulary of stages: the only home of their names, order, owners and one-sentence meanings.

Everything else (records, spans, Server-Timing, report, collector, dashboards) is checked against it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["host", "work", "move", "wait"]
Role = Literal["encode", "prefill", "decode", "prefill_decode", "mono", "router"]

ROLES: Final[tuple[Role, ...]] = ("encode", "prefill", "decode", "prefill_decode", "mono", "router")
_TEXT: Final[tuple[Role, ...]] = ("prefill", "decode", "prefill_decode", "mono")
_ALL: Final[tuple[Role, ...]] = ("encode", *_TEXT)


@dataclass(frozen=True, slots=True)
class Stage:
    """One piece of a server's TTFT; `code` is its number in the engine's carrier, never reused."""

    name: str
    kind: Kind
    process: str
    roles: tuple[Role, ...]
    code: int
    says: str


STAGES: Final[tuple[Stage, ...]] = (
    Stage("receive", "host", "api", _ALL, 1, "Reading the body, JSON, validation."),
    Stage(
        "preprocess", "work", "api", _ALL, 2, "Template, media, tokenizer, multimodal processor."
    ),
    Stage("ipc", "move", "api+core", _ALL, 3, "From the API server into the engine core's input."),
    Stage("encoder.queue", "wait", "core", _ALL, 4, "Waiting for the step that encodes an item."),
    Stage(
        "prefill.queue", "wait", "core", _ALL, 5, "Waiting for the step that takes a first chunk."
    ),
    Stage("kv.transfer", "move", "core+worker", _TEXT, 6, "KV blocks on their way."),
    Stage("dispatch", "host", "core+worker", _ALL, 7, "Scheduling tail, RPC, input preparation."),
    Stage("ec.transfer", "move", "core+worker", _ALL, 8, "Encoder-cache save, wait and load."),
    Stage("encoder.compute", "work", "worker", _ALL, 9, "The encoder's run, whole batch."),
    Stage(
        "prefill.compute", "work", "worker", _TEXT, 10, "Forward passes over this prompt's chunks."
    ),
    Stage(
        "prefill.stall",
        "wait",
        "worker",
        _TEXT,
        11,
        "Between chunks: turnaround, other steps, preemption.",
    ),
    Stage("sample", "work", "worker", _TEXT, 12, "Logits and sampler of the last chunk."),
    Stage("output", "move", "worker+core+api", _ALL, 13, "First token's way back, detokenized."),
    Stage("egress", "host", "api", _ALL, 14, "Until the first body chunk is given to the server."),
)
UNATTRIBUTED: Final = "unattributed"

# Parts lie inside a stage; they are never summed and never become metrics.
PARTS: Final[dict[str, tuple[str, ...]]] = {
    "preprocess": ("media", "tokenize", "multimodal"),
    "output": ("collect", "transport", "detokenize"),
}

# The router's own stages; legs' stages are always prefixed by their role: `encode.preprocess`.
ROUTER: Final[dict[str, str]] = {
    "router.receive": "Reading and parsing the client's request.",
    "router.tokenize": "Reading the prompt's tokens, for policies that route by them.",
    "router.lookup": "Looking up which instances have how much of the prompt cached.",
    "router.route": "Choosing an instance for each leg.",
    "router.retry": "Lost in attempts that failed.",
    "router.hop": "A leg minus what its server accounts for; carries the leg: router.hop.encode.",
    "router.egress": "From the leg's first bytes until the client's are given to the server.",
}

NAMES: Final[tuple[str, ...]] = tuple(stage.name for stage in STAGES)
BY_NAME: Final[dict[str, Stage]] = {stage.name: stage for stage in STAGES}
BY_CODE: Final[dict[int, Stage]] = {stage.code: stage for stage in STAGES}

# Names kept from the original TTFT report: each is the sum of the stages on its right.
REPORT: Final[dict[str, tuple[str, ...]]] = {
    "enc_queue_time_ms": ("encoder.queue",),
    "enc_compute_time_ms": ("encoder.compute",),
    "emb_cache_transfer_time_ms": ("ec.transfer",),
    "prefill_queue_time_ms": ("prefill.queue",),
    "prefill_compute_time_ms": ("prefill.compute",),
}

SERVICES: Final[dict[Role, str]] = {
    "encode": "vllm-encoder",
    "prefill": "vllm-prefill",
    "decode": "vllm-decode",
    "prefill_decode": "vllm-prefill-decode",
    "mono": "vllm",
    "router": "ttft-otel-router",
}


def split(name: str) -> tuple[str, str]:
    """Take a stage's full name apart: `encode.preprocess` -> ("encode", "preprocess").

    The leg is "" for a server's own stage and for the router's own stages.
    """
    if name in ROUTER or name.startswith("router.hop."):
        return "", name
    leg, dot, stage = name.partition(".")
    if dot and leg in ROLES and stage in (*NAMES, UNATTRIBUTED):
        return leg, stage
    return "", name


_BARE: Final = (*NAMES, UNATTRIBUTED)
_KNOWN: Final = frozenset(
    (
        *_BARE,
        *ROUTER,
        *(f"router.hop.{role}" for role in ROLES),
        *(f"{role}.{stage}" for role in ROLES for stage in _BARE),
    )
)


def known(name: str) -> bool:
    """Tell whether a full stage name belongs to the vocabulary."""
    return name in _KNOWN
