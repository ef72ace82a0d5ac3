# SPDX-License-Identifier: Apache-2.0
"""The kinds of causes that `explain` and `diff` name, and what helps against each, at which price.

Detectors choose a kind, their JSON has it; `nothing` and `not_known` are answers, too. explanation.py and
change_answer.py ask for remedies: a setting is named only for the limit that was found; what-if says whether
it moves the figure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

SLOW_INSTANCE: Final = "slow_instance"  # one of several instances takes longer for the same work
SLOW_FLEET: Final = "slow_fleet"  # all instances take longer for the same work, since a moment
PROCESS_PAUSE: Final = "process_pause"  # a process stopped for a while, which no work explains
HELD_BY_LONG_PROMPTS: Final = "held_by_long_prompts"  # long prompts of others held the engine
SETTING_LIMIT: Final = "setting_limit"  # a setting, or the KV cache's size, bounds what runs
SET_ASIDE: Final = "set_aside"  # by the scheduler: for a pause, a grammar, blocks or encodings
COLD_PREFIX_CACHE: Final = "cold_prefix_cache"  # less of like prompts was found in the prefix cache
LOAD_INCREASE: Final = "load_increase"  # more requests came in the same time
MIX_CHANGE: Final = "mix_change"  # other requests came: larger ones, of other models or tenants
OWN_SIZE: Final = "own_size"  # the late requests are larger, and took what their size takes
INSTANCE_SHIFT: Final = "instance_shift"  # other instances served them; those of one took no longer
SLOW_HOP: Final = "slow_hop"  # the way between router and server, or between instances, took longer
LOST_INSTANCE: Final = "lost_instance"  # it served no more requests, and the others had its work
ROUTER_BUSY: Final = "router_busy"  # the router's own process took long
FAILED_ATTEMPTS: Final = "failed_attempts"  # attempts on instances that failed came first
LOST_REQUESTS: Final = "lost_requests"  # so many have no first token that the others say little
NOTHING: Final = "nothing"  # the window is as usual
NOT_KNOWN: Final = "not_known"  # none of the causes that were looked at explains most of the time
# Answers that are no cause, and have no remedy.
NO_CAUSES: Final = (NOTHING, NOT_KNOWN, LOST_REQUESTS)
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
    SLOW_INSTANCE: Remedy(
        "Take {subject} out, and look at its device: clocks, temperature, neighbours on the host.",
        "The others have its load meanwhile.",
        "docs/reference/router-failures.md",
    ),
    SLOW_FLEET: Remedy(
        "Compare releases and settings before and after that moment.",
        "None.",
        "docs/guides/slow-ttft.md",
    ),
    PROCESS_PAUSE: Remedy(
        "Look at the host of {subject} at these times: CPU limits, swapping, backups, garbage collection.",
        "None.",
        "docs/guides/troubleshooting.md",
    ),
    HELD_BY_LONG_PROMPTS: Remedy(
        "Give the long prompts ({subject}) an instance of their own, or bound their part of a step: "
        "--long-prefill-token-threshold.",
        "Long prompts take longer.",
        "configuration/optimization/#chunked-prefill",
        ("--long-prefill-token-threshold",),
    ),
    SET_ASIDE: Remedy("Look at what was waited for: {subject}.", "None.", "docs/concepts.md"),
    COLD_PREFIX_CACHE: Remedy(
        "Find what emptied the cache, or changed the prompts' beginnings; send like prefixes to one "
        "instance (ttft-otel router --routing-logic prefix).",
        "An uneven load between instances.",
        "features/automatic_prefix_caching/",
    ),
    LOAD_INCREASE: Remedy(
        "Add instances, or bound what comes at once.",
        "Devices; or requests that are refused.",
        "docs/guides/what-if.md",
    ),
    OWN_SIZE: Remedy(
        "Shorten prompts, let them share prefixes, or use more devices (--tensor-parallel-size).",
        "Devices.",
        "configuration/optimization/#parallelism-strategies",
        ("--tensor-parallel-size",),
    ),
    SLOW_HOP: Remedy(
        "Look at the network to {subject}, and at the CPU of the processes at both ends.",
        "None.",
        "configuration/optimization/#parallel-processing",
    ),
    ROUTER_BUSY: Remedy(
        "Run the router with --workers, one for each free CPU core.",
        "CPU cores and memory.",
        "docs/router.md",
    ),
    FAILED_ATTEMPTS: Remedy(
        "Repair or remove {subject}; a shorter --health-interval finds such an instance sooner.",
        "More probes.",
        "docs/reference/router-failures.md",
    ),
    LOST_INSTANCE: Remedy("Bring {subject} back.", "None.", "docs/reference/router-failures.md"),
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


def find_remedy(kind: str, subject: str) -> Remedy | None:
    """What helps against a cause; None where none is known, or nothing is known against it."""
    found = LIMIT_REMEDIES.get(subject) if kind == SETTING_LIMIT else REMEDIES.get(kind)
    # Without a subject all instances alike are the cause.
    return found and replace(found, text=found.text.format(subject=subject or "the instances"))
