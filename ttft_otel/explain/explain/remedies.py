# SPDX-License-Identifier: Apache-2.0
"""What helps against a cause, what that costs, and where it is written; explanation.py asks.

Input: the cause. A setting is named only for the limit that was found; what-if says whether it moves the
figure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from ttft_otel.explain import cause_kinds
from ttft_otel.explain.explain.late_case import Candidate

VLLM_DOCS: Final = "https://docs.vllm.ai/en/stable/"
CACHE_MEMORY: Final = "KV cache"  # no flag of its own: memory and data type decide


@dataclass(frozen=True, slots=True)
class Remedy:
    """What to do, and its price in words."""

    text: str  #: here with {subject}, in whose place find_remedy() puts what the cause was found in
    price: str
    source: str  #: a page of vLLM's documentation, or of ours
    settings: tuple[str, ...] = ()  #: flags of `vllm serve` that it names
    #: What what-if can try: a setting of window_answer.TRIED_SETTINGS, and its factor.
    trial: tuple[str, float] | None = None

    @property
    def sentence(self) -> str:
        return f"Try: {self.text} Price: {self.price}"

    @property
    def page(self) -> str:
        """A URL of vLLM's documentation, or a path of ours."""
        return self.source if self.source.startswith("docs/") else VLLM_DOCS + self.source


REMEDIES: Final[dict[str, Remedy]] = {
    cause_kinds.SLOW_INSTANCE: Remedy(
        "Take {subject} out, and look at its device: clocks, temperature, neighbours on the host.",
        "The others have its load meanwhile.",
        "docs/reference/router-failures.md",
    ),
    cause_kinds.SLOW_FLEET: Remedy(
        "Compare releases and settings before and after that moment.",
        "None.",
        "docs/guides/slow-ttft.md",
    ),
    cause_kinds.PROCESS_PAUSE: Remedy(
        "Look at the host of {subject} at these times: CPU limits, swapping, backups, garbage collection.",
        "None.",
        "docs/guides/troubleshooting.md",
    ),
    cause_kinds.HELD_BY_LONG_PROMPTS: Remedy(
        "Give the long prompts ({subject}) an instance of their own, or bound their part of a step: "
        "--long-prefill-token-threshold.",
        "Long prompts take longer.",
        "configuration/optimization/#chunked-prefill",
        ("--long-prefill-token-threshold",),
    ),
    cause_kinds.SET_ASIDE: Remedy(
        "Look at what was waited for: {subject}.", "None.", "docs/concepts.md"
    ),
    cause_kinds.COLD_PREFIX_CACHE: Remedy(
        "Find what emptied the cache, or changed the prompts' beginnings; send like prefixes to one "
        "instance (ttft-otel router --routing-logic prefix).",
        "An uneven load between instances.",
        "features/automatic_prefix_caching/",
    ),
    cause_kinds.LOAD_INCREASE: Remedy(
        "Add instances, or bound what comes at once.",
        "Devices; or requests that are refused.",
        "docs/guides/what-if.md",
    ),
    cause_kinds.OWN_SIZE: Remedy(
        "Shorten prompts, let them share prefixes, or use more devices (--tensor-parallel-size).",
        "Devices.",
        "configuration/optimization/#parallelism-strategies",
        ("--tensor-parallel-size",),
    ),
    cause_kinds.SLOW_HOP: Remedy(
        "Look at the network to {subject}, and at the CPU of the processes at both ends.",
        "None.",
        "configuration/optimization/#parallel-processing",
    ),
    cause_kinds.ROUTER_BUSY: Remedy(
        "Run the router with --workers, one for each free CPU core.",
        "CPU cores and memory.",
        "docs/router.md",
    ),
    cause_kinds.FAILED_ATTEMPTS: Remedy(
        "Repair or remove {subject}; a shorter --health-interval finds such an instance sooner.",
        "More probes.",
        "docs/reference/router-failures.md",
    ),
    cause_kinds.LOST_INSTANCE: Remedy(
        "Bring {subject} back.", "None.", "docs/reference/router-failures.md"
    ),
}
LIMIT_REMEDIES: Final[dict[str, Remedy]] = {
    "max_num_seqs": Remedy(
        "Raise --max-num-seqs, or add an instance.",
        "More requests share each step: time between tokens grows, and each needs KV-cache memory.",
        "configuration/optimization/#preemption",
        ("--max-num-seqs",),
        ("--max-num-seqs", 2.0),
    ),
    "max_num_batched_tokens": Remedy(
        "Raise --max-num-batched-tokens, or add an instance.",
        "Longer steps: time between tokens of running answers grows with them.",
        "configuration/optimization/#chunked-prefill",
        ("--max-num-batched-tokens",),
        ("--max-num-batched-tokens", 2.0),
    ),
    "kv_blocks": Remedy(
        "Raise --gpu-memory-utilization, halve the blocks' size with --kv-cache-dtype fp8, or lower "
        "--max-num-seqs.",
        "Less memory in reserve; fp8 changes numbers a little; fewer places make others wait for those.",
        "configuration/optimization/#preemption",
        ("--gpu-memory-utilization", "--kv-cache-dtype", "--max-num-seqs"),
        (CACHE_MEMORY, 2.0),
    ),
    "max_loras": Remedy(
        "Raise --max-loras, or send each adapter's requests to one instance.",
        "Each place takes device memory, and batches with more adapters are slower.",
        "features/lora/",
        ("--max-loras",),
    ),
    "prefill_schedule_interval": Remedy(
        "Lower --prefill-schedule-interval.",
        "Time between tokens of running answers grows: more steps compute prompts beside them.",
        "configuration/engine_args/",
        ("--prefill-schedule-interval",),
    ),
    "scheduling_policy": Remedy(
        "Set fewer requests' priority high, or turn priorities off with --scheduling-policy fcfs.",
        "Urgent requests then wait like all others.",
        "configuration/engine_args/",
        ("--scheduling-policy",),
    ),
}
# Where the cause is not known: what to look at, by Stage.rule_group.
LOOK_AT: Final[dict[str, str]] = {
    "receive": "size of the bodies, the way from the clients",
    "preprocess": "the parts media, tokenize and multimodal; CPU of the API server",
    "ipc": "size of the requests, CPU of the engine core",
    "queue": "who held them (ttft-otel report --request ID), the reason of waiting",
    "stall": "who held them between their chunks, preemptions",
    "kv": "where the blocks were (ttft.kv.source), the connector's transport, ttft.kv.move_us",
    "ec": "the connector's transport, the encoder's load",
    "engine_host": "CPU of engine core and worker, the parts of dispatch",
    "pipeline": "how evenly the pipeline's stages share the layers, the network between them",
    "encoder": "media items of a step, encoders that are missing",
    "prefill": "tokens of the steps, the device",
    "delivery": "CPU of the API server, streams of other requests; the part draft",
    "router_hop": "network, connections, the server's accept queue",
    "router_retry": "the router's log",
    "router_queue": "the queues of the instances, which --max-queue-ms keeps here",
    "router": "CPU of the router",
}


def find_remedy(cause: Candidate) -> Remedy | None:
    """What helps; None where no cause is known, or nothing is known against it."""
    found = REMEDIES.get(cause.kind)
    if cause.kind == cause_kinds.SETTING_LIMIT:
        found = LIMIT_REMEDIES.get(cause.subject)
    # Without a subject all instances alike are the cause.
    return found and replace(
        found, text=found.text.format(subject=cause.subject or "the instances")
    )
