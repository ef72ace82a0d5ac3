# SPDX-License-Identifier: Apache-2.0
"""The stages of TTFT: names, order, process, roles, colour and a one-sentence description of each.

Defined only here. Records, spans, Server-Timing, report, collector and dashboards are checked against this
table. The colours are the same on pages, in the terminal and in exported files: the hue stands for the kind
(host, work, move, wait), the shade for the stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

StageKind = Literal["host", "work", "move", "wait"]
Role = Literal["render", "encode", "prefill", "decode", "prefill_decode", "mono", "router"]

RENDER: Final = "render"  # makes a prompt's tokens for an instance that takes tokens
ENCODE: Final = "encode"
PREFILL: Final = "prefill"
DECODE: Final = "decode"
PREFILL_DECODE: Final = "prefill_decode"  # answers alone, where encoders may join
MONO: Final = "mono"  # encodes, prefills and decodes
PREFILLING_ROLES: Final[tuple[Role, ...]] = (PREFILL, PREFILL_DECODE, MONO)
ANSWERING_ROLES: Final[tuple[Role, ...]] = (DECODE, PREFILL_DECODE, MONO)
# Roles whose answer goes to another instance: the client's first token never comes from them.
INTERMEDIATE_ROLES: Final[frozenset[str]] = frozenset({RENDER, ENCODE, PREFILL})
_TEXT_ROLES: Final[tuple[Role, ...]] = (PREFILL, DECODE, PREFILL_DECODE, MONO)
_SERVER_ROLES: Final[tuple[Role, ...]] = (ENCODE, *_TEXT_ROLES)
_FRONT_ROLES: Final[tuple[Role, ...]] = (RENDER, *_SERVER_ROLES)
ROLES: Final[tuple[Role, ...]] = (*_FRONT_ROLES, "router")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of a server's TTFT. What any folder has to know of a stage is here and nowhere else.

    Attributes:
        name: as in spans; a leg's prefix may stand before it (split_stage()).
        code: its number in EngineTimeline.steps and EngineDetails.waits; no number is used twice.
        kind: "host" is Python overhead, "work" computation, "move" data transfer, "wait" queueing.
        process: where it is measured: API server, engine core, worker.
        roles: the server roles that can have it.
        says: the sentence that pages and dashboards show.
        color: #rrggbb, a mid-tone that is readable on white and on near-black; the hue stands for the kind.
        rule_group: which rules of `explain` answer for it.
        replayed: what-if's model of the engine makes it anew ("modelled"), or it stays as recorded: before
            the engine has the request, inside the engine ("inside"), or after its last step.
        lost_with: the narrowest group of patch targets without which it is unattributed (hooks/targets.py).
        injected_at: places at which tests delay vLLM to show that the delay is in this stage and in no other.
        ends_as: what `ttft.died_in` says of a request that ended in it; "" where that cannot be told.
        in_worker: whether it is an interval that the worker measures inside a step.
        service_of: encode, prefill: an instance cannot begin with the next item, or prompt, meanwhile; the
            router learns instances' speed from it.
    """

    name: str
    code: int
    kind: StageKind
    process: str
    roles: tuple[Role, ...]
    says: str
    color: str
    rule_group: str
    replayed: Literal["before", "modelled", "inside", "after"]
    lost_with: Literal["compute", "worker", "engine", "server"]
    injected_at: tuple[str, ...]
    ends_as: str = ""
    in_worker: bool = False
    service_of: tuple[Role, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterStage:
    """One of the router's own stages; the attributes are those of Stage."""

    name: str
    kind: StageKind
    says: str
    color: str
    rule_group: str


# In the order of a request's critical path, which is also the order of breakdown.py's cursor.
STAGES: Final[tuple[Stage, ...]] = (
    Stage(
        name="receive",
        code=1,
        kind="host",
        process="api",
        roles=_FRONT_ROLES,
        says="Reading the body, JSON, validation.",
        color="#94a3b8",
        rule_group="receive",
        replayed="before",
        lost_with="server",
        injected_at=("receive",),
        ends_as="receive",
    ),
    Stage(
        name="preprocess",
        code=2,
        kind="work",
        process="api",
        roles=_FRONT_ROLES,
        says="Chat template, media, tokenizer, multimodal processor.",
        color="#c084fc",
        rule_group="preprocess",
        replayed="before",
        lost_with="server",
        injected_at=("media", "tokenize", "multimodal"),
        ends_as="preprocess",
    ),
    Stage(
        name="ipc",
        code=3,
        kind="move",
        process="api+core",
        roles=_SERVER_ROLES,
        says="From the API server into the engine core's input.",
        color="#5fd4e6",
        rule_group="ipc",
        replayed="before",
        lost_with="server",
        injected_at=("ipc",),
    ),
    Stage(
        name="encoder.queue",
        code=4,
        kind="wait",
        process="core",
        roles=_SERVER_ROLES,
        says="Waiting for the step that encodes an item.",
        color="#fcc63d",
        rule_group="queue",
        replayed="modelled",
        lost_with="engine",
        injected_at=("queue",),
        ends_as="prefill.queue",
    ),
    Stage(
        name="prefill.queue",
        code=5,
        kind="wait",
        process="core",
        roles=_SERVER_ROLES,
        says="Waiting for the step that takes a first chunk.",
        color="#f59e0b",
        rule_group="queue",
        replayed="modelled",
        lost_with="engine",
        injected_at=("queue",),
        ends_as="prefill.queue",
    ),
    Stage(
        name="kv.transfer",
        code=6,
        kind="move",
        process="core+worker",
        roles=_TEXT_ROLES,
        says="Waiting for KV blocks, or loading them inside a step.",
        color="#0e9488",
        rule_group="kv",
        replayed="before",
        lost_with="worker",
        injected_at=("kv_wait", "kv_load"),
        ends_as="kv.transfer",
        in_worker=True,
    ),
    Stage(
        name="dispatch",
        code=7,
        kind="host",
        process="core+worker",
        roles=_SERVER_ROLES,
        says="Rest of scheduling, RPC to the worker, input preparation, of each of its steps.",
        color="#7587a0",
        rule_group="engine_host",
        replayed="modelled",
        lost_with="compute",
        injected_at=("schedule", "dispatch", "other_rank"),
        ends_as="dispatch",
        service_of=("encode", "prefill"),
    ),
    Stage(
        name="pipeline",
        code=15,
        kind="work",
        process="core+worker",
        roles=_TEXT_ROLES,
        says="Earlier pipeline stages and their queues, until the last one's forward pass.",
        color="#7f6be0",
        rule_group="pipeline",
        replayed="inside",
        lost_with="compute",
        injected_at=("pipeline",),
        ends_as="prefill.compute",
        service_of=("prefill",),
    ),
    Stage(
        name="ec.transfer",
        code=8,
        kind="move",
        process="core+worker",
        roles=_SERVER_ROLES,
        says="Encoder-cache save, wait and load.",
        color="#14b8c4",
        rule_group="ec",
        replayed="before",
        lost_with="worker",
        injected_at=("ec_wait", "ec_asked", "ec_load", "ec_save", "ec_copy"),
        ends_as="ec.transfer",
        in_worker=True,
        service_of=("encode",),
    ),
    Stage(
        name="encoder.compute",
        code=9,
        kind="work",
        process="worker",
        roles=_SERVER_ROLES,
        says="The encoder's forward pass, for the step's whole batch.",
        color="#8b5cf6",
        rule_group="encoder",
        replayed="modelled",
        lost_with="compute",
        injected_at=("encoder",),
        ends_as="encoder.compute",
        in_worker=True,
        service_of=("encode",),
    ),
    Stage(
        name="prefill.compute",
        code=10,
        kind="work",
        process="worker",
        roles=_TEXT_ROLES,
        says="Forward passes over this prompt's chunks.",
        color="#5b5bf0",
        rule_group="prefill",
        replayed="modelled",
        lost_with="compute",
        injected_at=("forward",),
        ends_as="prefill.compute",
        in_worker=True,
        service_of=("prefill",),
    ),
    Stage(
        name="prefill.stall",
        code=11,
        kind="wait",
        process="worker",
        roles=_TEXT_ROLES,
        says="Between chunks: steps that left the request out, preemption.",
        color="#ea6a12",
        rule_group="stall",
        replayed="modelled",
        lost_with="compute",
        injected_at=("queue",),
        ends_as="prefill.compute",
        service_of=("prefill",),
    ),
    Stage(
        name="sample",
        code=12,
        kind="work",
        process="worker",
        roles=_TEXT_ROLES,
        says="Logits and sampler of the last chunk.",
        color="#a33bd6",
        rule_group="engine_host",
        replayed="modelled",
        lost_with="engine",
        injected_at=("sample",),
        ends_as="prefill.compute",
        service_of=("prefill",),
    ),
    Stage(
        name="output",
        code=13,
        kind="move",
        process="worker+core+api",
        roles=_SERVER_ROLES,
        says="From the worker to the API server, and detokenization.",
        color="#38bd8f",
        rule_group="delivery",
        replayed="after",
        lost_with="engine",
        injected_at=("output",),
        ends_as="output",
    ),
    Stage(
        name="egress",
        code=14,
        kind="host",
        process="api",
        roles=_SERVER_ROLES,
        says="Until the first body chunk is handed to the HTTP server.",
        color="#5d7089",
        rule_group="delivery",
        replayed="after",
        lost_with="server",
        injected_at=("egress",),
    ),
)
UNATTRIBUTED: Final = "unattributed"
# What a client waited beyond the sum: network, accept queue, and the load generator itself.
OUTSIDE: Final = "outside"
RETRY: Final = "router.retry"
HOLD: Final = "router.queue"

# Parts are details inside a stage: child spans only. Adding them to stages would count time twice.
STAGE_PARTS: Final[dict[str, tuple[str, ...]]] = {
    "preprocess": ("media", "tokenize", "multimodal"),
    "dispatch": ("turnaround", "schedule", "previous_step", "ipc", "prepare", "dp_sync"),
    "output": ("draft", "collect", "transport", "detokenize"),
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
    "prefill_interval": "Prompts wait so that answers go on (--prefill-schedule-interval).",
    "stale_output": "What a step computed before its preemption is still on its way.",
}
WAIT_REASON_NAMES: Final[tuple[str, ...]] = tuple(WAIT_REASONS)
# Why a request waited in router.queue, as ttft.queue.reason says it: the predicted queue of each instance was
# longer than --max-queue-ms; and one that came later, with a higher priority, went first.
HELD_BY_QUEUES: Final = "max_queue"
HELD_BY_PRIORITY: Final = "priority"
# What the engine worked on while a request waited; EngineTimeline.held has all but `idle`, in this order.
# Only append: a code is a position. Time in a queue, and between chunks, is divided among them, too.
HOLDING_KINDS: Final[dict[str, str]] = {
    "prefill": "Prompts of other requests.",
    "decode": "Tokens of other requests' answers.",
    "encoder": "Media items of other requests.",
    "own": "Its own earlier chunks, or its own media items.",
    "idle": "No step ran, nor was it a step's turnaround: nothing could be scheduled, or a pause.",
    "other_rank": "Requests of another data-parallel rank, for which this one ran a batch without requests.",
}
HOLDING_KIND_NAMES: Final[tuple[str, ...]] = tuple(HOLDING_KINDS)
QUEUE_STAGES: Final[tuple[str, ...]] = ("encoder.queue", "prefill.queue")
STALL_STAGE: Final = "prefill.stall"

# The router's own stages. A leg is one request from the router to a server of one role; stages of a
# leg are prefixed by that role: `encode.preprocess`.
_ROUTER_ROWS: Final = (
    RouterStage(
        name="router.receive",
        kind="host",
        says="Reading and parsing the client's request.",
        color="#b3bfcf",
        rule_group="router",
    ),
    RouterStage(
        name="router.tokenize",
        kind="work",
        says="Reading the prompt's tokens, for policies that route by them.",
        color="#a78bda",
        rule_group="router",
    ),
    RouterStage(
        name="router.lookup",
        kind="move",
        says="Looking up which instances have how much of the prompt cached.",
        color="#4cc3d9",
        rule_group="router",
    ),
    RouterStage(
        name="router.route",
        kind="host",
        says="Choosing an instance for each leg.",
        color="#8796ac",
        rule_group="router",
    ),
    RouterStage(
        name=HOLD,
        kind="wait",
        says="Held until an instance's predicted queue is within --max-queue-ms.",
        color="#d9a514",
        rule_group="router_queue",
    ),
    RouterStage(
        name=RETRY,
        kind="wait",
        says="Time spent in attempts that failed.",
        color="#e0403a",
        rule_group="router_retry",
    ),
    RouterStage(
        name="router.hop",
        kind="move",
        says="A leg minus what its server accounts for; carries the leg: router.hop.encode.",
        color="#0a8fb8",
        rule_group="router_hop",
    ),
    RouterStage(
        name="router.egress",
        kind="host",
        says="From the leg's first bytes until the client's are given to the server.",
        color="#64748b",
        rule_group="router",
    ),
)
ROUTER_STAGES: Final[dict[str, RouterStage]] = {stage.name: stage for stage in _ROUTER_ROWS}

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
    "render": "vllm-render",
    "encode": "vllm-encoder",
    "prefill": "vllm-prefill",
    "decode": "vllm-decode",
    "prefill_decode": "vllm-prefill-decode",
    "mono": "vllm",
    "router": "ttft-otel-router",
}
_ROLE_ORDER: Final[dict[str, int]] = {role: turn for turn, role in enumerate(ROLES)}
_ROUTER_ORDER: Final[dict[str, int]] = {name: turn for turn, name in enumerate(ROUTER_STAGES)}


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


def strip_leg(name: str) -> str:
    """The stage `name` without its leg: `encode.preprocess` -> preprocess, `router.hop.x` -> router.hop."""
    # `router.receive` is a stage, not `receive` of a leg "router".
    if name in ROUTER_STAGES:
        return name
    return "router.hop" if name.startswith("router.hop.") else split_stage(name)[1]


def find_leg(name: str) -> str:
    """The leg of the full stage name `name`; "" for a server's or the router's own stage."""
    if name.startswith("router.hop."):
        return name.removeprefix("router.hop.")
    return "" if name in ROUTER_STAGES else split_stage(name)[0]


def find_stage(name: str) -> Stage | RouterStage | None:
    """The row of the full stage name `name`; None for "unattributed" and unknown names."""
    word = strip_leg(name)
    return STAGES_BY_NAME.get(word) or ROUTER_STAGES.get(word)


def find_kind(name: str) -> str:
    """The kind of the stage `name`: host, work, move or wait; "" for "unattributed"."""
    stage = find_stage(name)
    return stage.kind if stage else ""


def find_rule_group(name: str) -> str:
    """Which rules of `explain` answer for the stage `name`; "" for "unattributed"."""
    stage = find_stage(name)
    return stage.rule_group if stage else ""


def describe_stage(name: str) -> str:
    stage = find_stage(name)
    return stage.says if stage else "What no mark accounts for."


def rank_stage(name: str) -> tuple[int, int, int]:
    """Sort key of the stage `name`: order of the critical path, leg after leg, `unattributed`, `outside`."""
    word = strip_leg(name)
    if word == "router.egress":
        return (2, 0, 0)
    if word in (UNATTRIBUTED, OUTSIDE):
        return (3, int(word == OUTSIDE), 0)
    leg = find_leg(name)
    role_order = _ROLE_ORDER.get(leg, len(_ROLE_ORDER))
    # Before the leg's own stages, at whose edges it lies.
    if word == "router.hop":
        return (1, role_order, -1)
    # The router's others come before the first leg.
    if word in _ROUTER_ORDER:
        return (0, 0, _ROUTER_ORDER[word])
    if leg == "encode" and word == "ec.transfer":
        word = "encoder.compute"  # on an encoder the transfer is the save that follows the encoding
    # Doubled, so that an encoder's save fits between two
    place = 2 * STAGE_NAMES.index(word) if word in STAGE_NAMES else 99
    place += strip_leg(name) != word
    return (1, role_order, place)


STAGE_COLORS: Final[dict[str, str]] = {
    **{stage.name: stage.color for stage in STAGES},
    **{stage.name: stage.color for stage in ROUTER_STAGES.values()},
    UNATTRIBUTED: "#9a9a9a",
}
KIND_LABELS: Final[dict[str, str]] = {
    "work": "computing",
    "wait": "waiting",
    "move": "moving data",
    "host": "host code",
}
# Hues that no stage has. In legends a square is a server, a circle a stage.
ROLE_COLORS: Final[dict[str, str]] = {
    "router": "#6b7c93",
    "encode": "#db2777",
    "prefill": "#b45309",
    "decode": "#15803d",
    "prefill_decode": "#2563eb",
    "mono": "#4d7c0f",
}
ROLE_SHORT: Final[dict[str, str]] = {
    "router": "R",
    "encode": "E",
    "prefill": "P",
    "decode": "D",
    "prefill_decode": "PD",
    "mono": "mono",
}


def find_color(name: str) -> str:
    """The stage's colour as #rrggbb, for outputs without style sheets; grey when `name` is unknown."""
    return STAGE_COLORS.get(strip_leg(name), STAGE_COLORS[UNATTRIBUTED])


def get_css_class(name: str) -> str:
    """The stage's class in the style sheet; unknown names share that of "unattributed"."""
    word = strip_leg(name)
    # A dot in a class name would begin another class in CSS.
    return "s-" + (word if word in STAGE_COLORS else UNATTRIBUTED).replace(".", "-")


def build_style_sheet() -> str:
    """The colours as a style sheet: one class per stage, one per role."""
    lines = [
        f".{get_css_class(word)}{{fill:{hue};background-color:{hue}}}"
        for word, hue in STAGE_COLORS.items()
    ]
    # Hatched as well: grey alone is hard to tell from a stage's grey.
    lines.append(f"rect.s-{UNATTRIBUTED}{{fill:url(#hatch)}}")
    lines += [
        f".r-{role}{{fill:{hue};background-color:{hue}}}" for role, hue in ROLE_COLORS.items()
    ]
    return "\n".join(lines) + "\n"
