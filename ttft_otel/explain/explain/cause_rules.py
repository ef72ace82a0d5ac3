# SPDX-License-Identifier: Apache-2.0
"""The rules of `ttft-otel explain`: which finding means what, what to change, and what that costs.

cause_findings.py finds the stage, its reason and the figures; find_rule() looks the answer up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ttft_otel.explain.explain.cause_findings import Finding
from ttft_otel.model.stages import find_rule_group

QUEUE: Final = ("queue",)
STALL: Final = ("stall",)
WAITS: Final = (*QUEUE, *STALL)
# Open ends of a rule's bounds.
ANY_LESS: Final = float("-inf")
ANY_MORE: Final = float("inf")
VLLM_DOCS: Final = "https://docs.vllm.ai/en/stable/"


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseRule:
    """One cause, and its remedy. A rule fits a finding when all of its conditions hold."""

    name: str
    groups: tuple[str, ...]  #: of stages, by Stage.rule_group
    sentence: str
    remedy: str
    price: str  #: in words: what the setting trades, from the page that `source` names
    source: str  #: a page of vLLM's documentation, or of ours
    #: Of waiting, one of which has most of it; () for stages without reasons, ("",) where a queue names none.
    reasons: tuple[str, ...] = ()
    #: Figure (of cause_findings.FIGURES) -> the lowest value, and the first one that is too high.
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    settings: tuple[str, ...] = ()  #: flags of `vllm serve`; () where the remedy is none
    #: A setting that what-if can try, of remedy_prediction.SETTING_ATTRIBUTES, and its factor.
    trial: tuple[str, float] | None = None

    def fits(self, finding: Finding) -> bool:
        """Whether the rule is about this finding."""
        group = find_rule_group(finding.word)
        return (
            group in self.groups
            and (finding.reason in self.reasons if self.reasons else group not in WAITS)
            and all(
                at_least <= finding.figures[name] < below
                for name, (at_least, below) in self.bounds.items()
            )
        )


RULES: Final[tuple[CauseRule, ...]] = (
    # Stages that wait, by the reasons of stages.WAIT_REASONS.
    CauseRule(
        name="max_num_seqs",
        groups=QUEUE,
        sentence=(
            "All places of the batch were taken (max_num_seqs): requests waited until an "
            "answer had ended."
        ),
        remedy="Raise --max-num-seqs, or add an instance.",
        price="More requests share each step: time between tokens grows, and each needs KV-cache memory.",
        source="configuration/optimization/#preemption",
        reasons=("max_num_seqs",),
        settings=("--max-num-seqs",),
        trial=("--max-num-seqs", 2.0),
    ),
    CauseRule(
        name="token_budget",
        groups=QUEUE,
        sentence=(
            "The steps had no tokens left (max_num_batched_tokens): other prompts, and "
            "decodes, came first."
        ),
        remedy="Raise --max-num-batched-tokens; or add an instance, or give long prompts one of their own.",
        price="Longer steps: time between tokens of running answers grows with them.",
        source="configuration/optimization/#chunked-prefill",
        reasons=("token_budget",),
        settings=("--max-num-batched-tokens",),
        trial=("--max-num-batched-tokens", 2.0),
    ),
    CauseRule(
        name="kv_blocks",
        groups=QUEUE,
        sentence="There were too few free KV blocks: running answers filled the cache.",
        remedy=(
            "Raise --gpu-memory-utilization, halve the blocks' size with --kv-cache-dtype fp8, or lower "
            "--max-num-seqs."
        ),
        price=(
            "Less memory in reserve; fp8 changes numbers a little; fewer places make others "
            "wait for those."
        ),
        source="configuration/optimization/#preemption",
        reasons=("kv_blocks",),
        settings=("--gpu-memory-utilization", "--kv-cache-dtype", "--max-num-seqs"),
        trial=("KV cache", 2.0),
    ),
    CauseRule(
        name="encoder_budget",
        groups=WAITS,
        sentence=(
            "The encoder's budget of a step was used up: other requests' media items were "
            "encoded first."
        ),
        remedy="Raise --max-num-batched-tokens, which is the encoder's budget too, or add encoder instances.",
        price="Longer steps: time between tokens grows; an encoder instance is a device more.",
        source="features/disagg_encoder/",
        reasons=("encoder_budget",),
        settings=("--max-num-batched-tokens",),
    ),
    CauseRule(
        name="remote_kv",
        groups=WAITS,
        sentence="KV blocks were still on their way from another instance.",
        remedy=(
            "Look at the connector's transport, and at the prefill instance; "
            "--kv-transfer-config chooses it."
        ),
        price=(
            "A faster transport is hardware (RDMA); the first transfer of two instances "
            "includes a handshake."
        ),
        source="features/disagg_prefill/",
        reasons=("remote_kv",),
        settings=("--kv-transfer-config",),
    ),
    CauseRule(
        name="remote_ec",
        groups=WAITS,
        sentence="Encodings were still on their way from the encoder instance.",
        remedy="Look at the encoder's load and at the connector; --ec-transfer-config chooses it.",
        price="A faster transport is hardware; more encoder instances are devices.",
        source="features/disagg_encoder/",
        reasons=("remote_ec",),
        settings=("--ec-transfer-config",),
    ),
    CauseRule(
        name="grammar",
        groups=WAITS,
        sentence="The grammar of structured output was being compiled.",
        remedy="Send fewer different schemas (a compiled one is cached), or smaller ones.",
        price="None for the server; clients have to agree on schemas.",
        source="features/structured_outputs/",
        reasons=("grammar",),
    ),
    CauseRule(
        name="lora",
        groups=WAITS,
        sentence="All places for LoRA adapters were taken by others.",
        remedy="Raise --max-loras, or send each adapter's requests to one instance.",
        price="Each place takes device memory, and batches with more adapters are slower.",
        source="features/lora/",
        reasons=("lora",),
        settings=("--max-loras",),
    ),
    CauseRule(
        name="priority",
        groups=WAITS,
        sentence="Requests with a higher priority that came later ran first.",
        remedy="Set fewer requests' priority high, or turn priorities off with --scheduling-policy fcfs.",
        price="Urgent requests then wait like all others.",
        source="configuration/engine_args/",
        reasons=("priority",),
        settings=("--scheduling-policy",),
    ),
    CauseRule(
        name="prefill_interval",
        groups=WAITS,
        sentence="Prompts were held back so that answers go on (prefill_schedule_interval).",
        remedy="Lower --prefill-schedule-interval.",
        price="Time between tokens of running answers grows: more steps compute prompts beside them.",
        source="configuration/engine_args/",
        reasons=("prefill_interval",),
        settings=("--prefill-schedule-interval",),
    ),
    CauseRule(
        name="stale_output",
        groups=WAITS,
        sentence="They were preempted, and waited for what a step had computed before that.",
        remedy="Raise --gpu-memory-utilization, or lower --max-num-seqs: then fewer are preempted.",
        price="Less memory in reserve; fewer places make others wait for those.",
        source="configuration/optimization/#preemption",
        reasons=("stale_output",),
        settings=("--gpu-memory-utilization", "--max-num-seqs"),
    ),
    CauseRule(
        name="paused",
        groups=WAITS,
        sentence="The scheduler was paused, or the engine asleep.",
        remedy=(
            "Find who calls /pause or /sleep, for example an update of weights; send no "
            "requests meanwhile."
        ),
        price="None.",
        source="features/sleep_mode/",
        reasons=("paused",),
    ),
    CauseRule(
        name="in_step",
        groups=QUEUE,
        sentence="They came while a step ran, and waited for its end: steps were long.",
        remedy="Lower --max-num-batched-tokens, so that steps are shorter.",
        price="Long prompts take more steps, and throughput falls.",
        source="configuration/optimization/#chunked-prefill",
        reasons=("in_step",),
        settings=("--max-num-batched-tokens",),
        trial=("--max-num-batched-tokens", 0.5),
    ),
    CauseRule(
        name="unknown_wait",
        groups=WAITS,
        sentence="They waited in the scheduler, and this server does not tell for what.",
        remedy=(
            "`ttft-otel doctor --url` says what is not measured; a newer ttft-otel in the "
            "server may tell."
        ),
        price="None.",
        source="docs/guides/troubleshooting.md",
        reasons=("", "other"),
    ),
    CauseRule(
        name="preempted",
        groups=STALL,
        sentence=(
            "Between two chunks there were no free KV blocks: requests were preempted, and "
            "computed again."
        ),
        remedy="Raise --gpu-memory-utilization, or lower --max-num-seqs.",
        price="Less memory in reserve; fewer places make others wait for those.",
        source="configuration/optimization/#preemption",
        reasons=("kv_blocks",),
        settings=("--gpu-memory-utilization", "--max-num-seqs"),
        trial=("KV cache", 2.0),
    ),
    CauseRule(
        name="between_chunks",
        groups=STALL,
        sentence="Between two chunks of the prompt, steps worked for other requests.",
        remedy="Raise --max-num-batched-tokens, so that a prompt needs fewer chunks.",
        price="Longer steps: time between tokens of running answers grows with them.",
        source="configuration/optimization/#chunked-prefill",
        reasons=("token_budget", "in_step", "max_num_seqs"),
        settings=("--max-num-batched-tokens",),
        trial=("--max-num-batched-tokens", 2.0),
    ),
    # Stages that compute, move or run on the host.
    CauseRule(
        name="media_preprocessing",
        groups=("preprocess",),
        sentence="Media were loaded, decoded and made ready on the server's CPU.",
        remedy=(
            "Send smaller media, or bound them with --mm-processor-kwargs; repeated ones are cached "
            "(--mm-processor-cache-gb); --api-server-count adds processes."
        ),
        price="Smaller images lose detail; each API server takes memory, and a cache of its own.",
        source="configuration/optimization/#parallel-processing",
        bounds={"media_share": (0.5, ANY_MORE)},
        settings=("--mm-processor-kwargs", "--mm-processor-cache-gb", "--api-server-count"),
    ),
    CauseRule(
        name="text_preprocessing",
        groups=("preprocess",),
        sentence="Chat template and tokenizer took long: the API server's CPU was busy.",
        remedy="Raise --api-server-count, and give the server more CPU cores.",
        price="CPU cores and memory.",
        source="configuration/optimization/#parallel-processing",
        bounds={"media_share": (ANY_LESS, 0.5)},
        settings=("--api-server-count",),
    ),
    CauseRule(
        name="long_prompts",
        groups=("prefill",),
        sentence="Their prompts are longer: computing takes what it takes.",
        remedy="Shorten prompts, let them share prefixes, or use more devices (--tensor-parallel-size).",
        price="Devices; or an instance of their own for long prompts.",
        source="configuration/optimization/#parallelism-strategies",
        bounds={"tokens_ratio": (1.5, ANY_MORE)},
        settings=("--tensor-parallel-size",),
    ),
    CauseRule(
        name="cache_misses",
        groups=("prefill",),
        sentence="Less of their prompts was found in the prefix cache.",
        remedy=(
            "Send like prefixes to one instance (`ttft-otel router --routing-logic prefixaware`), keep "
            "--enable-prefix-caching on, and give the cache memory."
        ),
        price="An uneven load between instances; memory.",
        source="features/automatic_prefix_caching/",
        bounds={"tokens_ratio": (ANY_LESS, 1.5), "cached_drop": (0.2, ANY_MORE)},
        settings=("--enable-prefix-caching",),
    ),
    CauseRule(
        name="shared_steps",
        groups=("prefill",),
        sentence=(
            "Prompts are as long as others, but their steps took longer: they were shared "
            "with other requests."
        ),
        remedy="Lower --max-num-batched-tokens, or add an instance.",
        price="Long prompts take more steps; an instance is a device more.",
        source="configuration/optimization/#chunked-prefill",
        bounds={"tokens_ratio": (ANY_LESS, 1.5), "cached_drop": (ANY_LESS, 0.2)},
        settings=("--max-num-batched-tokens",),
        trial=("--max-num-batched-tokens", 0.5),
    ),
    CauseRule(
        name="encoded_again",
        groups=("encoder",),
        sentence="Media were encoded again although an encoder had encoded them.",
        remedy="Check the encoder-cache connector on both sides (--ec-transfer-config).",
        price="None: the work is done twice now.",
        source="features/disagg_encoder/",
        bounds={"recomputed_items": (1e-9, ANY_MORE)},
        settings=("--ec-transfer-config",),
    ),
    CauseRule(
        name="encoder_work",
        groups=("encoder",),
        sentence="The encoder took long: more or larger media, or a batch shared with other requests'.",
        remedy="Send smaller media (--mm-processor-kwargs), or add encoder instances.",
        price="Smaller images lose detail; an encoder instance is a device more.",
        source="features/disagg_encoder/",
        bounds={"recomputed_items": (ANY_LESS, 1e-9)},
        settings=("--mm-processor-kwargs",),
    ),
    CauseRule(
        name="kv_transfer",
        groups=("kv",),
        sentence="KV blocks took long from the prefill instance, or from an offloaded cache.",
        remedy="Look at the transport between the instances, and at the connector (--kv-transfer-config).",
        price="A faster transport is hardware (RDMA).",
        source="features/disagg_prefill/",
        settings=("--kv-transfer-config",),
    ),
    CauseRule(
        name="ec_transfer",
        groups=("ec",),
        sentence="Encodings took long to be saved, moved or loaded.",
        remedy="Look at the transport, and at the connector's cache (--ec-transfer-config).",
        price="A faster transport is hardware; a larger cache is memory.",
        source="features/disagg_encoder/",
        settings=("--ec-transfer-config",),
    ),
    CauseRule(
        name="hop",
        groups=("router_hop",),
        sentence=(
            "The time passed between router and server: network, connections, or the "
            "server's accept queue."
        ),
        remedy=(
            "Raise --api-server-count, give the server's API process a core of its own, and "
            "look at the network."
        ),
        price="CPU cores and memory.",
        source="configuration/optimization/#parallel-processing",
        settings=("--api-server-count",),
    ),
    CauseRule(
        name="retry",
        groups=("router_retry",),
        sentence="Attempts on instances that failed came first.",
        remedy=(
            "Repair or remove those instances; a shorter --health-interval of the router "
            "finds them sooner."
        ),
        price="More probes.",
        source="docs/reference/router-failures.md",
    ),
    CauseRule(
        name="router_itself",
        groups=("router",),
        sentence="The router's own process was busy.",
        remedy="Run it with --workers, one for each free CPU core.",
        price="CPU cores and memory.",
        source="docs/router.md",
    ),
    CauseRule(
        name="request_body",
        groups=("receive",),
        sentence="The request's body came slowly, or is large.",
        remedy="Send media as URLs and not inline, from clients that are closer.",
        price="The server then loads the media itself.",
        source="features/multimodal_inputs/",
    ),
    CauseRule(
        name="to_engine",
        groups=("ipc",),
        sentence="The way into the engine core took long: large inputs, or a busy core.",
        remedy=(
            "Send smaller media, give the engine core a CPU core of its own, and lower "
            "--api-server-count."
        ),
        price="Fewer API servers have less time for preprocessing.",
        source="configuration/optimization/#parallel-processing",
        settings=("--api-server-count",),
    ),
    CauseRule(
        name="host_of_engine",
        groups=("engine_host",),
        sentence="The engine's host program took long around the step: scheduling, inputs, sampling.",
        remedy="Give engine core and worker a CPU core each; lower --max-num-seqs for smaller batches.",
        price="Fewer places make requests wait for those.",
        source="configuration/optimization/#chunked-prefill",
        settings=("--max-num-seqs",),
    ),
    CauseRule(
        name="to_client",
        groups=("delivery",),
        sentence="The first token waited on its way out: the API server was busy with other answers.",
        remedy="Raise --api-server-count.",
        price="CPU cores and memory.",
        source="configuration/optimization/#parallel-processing",
        settings=("--api-server-count",),
    ),
)


def find_rule(finding: Finding) -> CauseRule | None:
    """The rule for a finding; None where none has an answer."""
    # Tests hold that no two rules fit one finding: the order is the reader's.
    return next((rule for rule in RULES if rule.fits(finding)), None)


def describe_source(rule: CauseRule) -> str:
    """The page that a rule rests on: a URL of vLLM's documentation, or a path of ours."""
    return rule.source if rule.source.startswith("docs/") else VLLM_DOCS + rule.source
