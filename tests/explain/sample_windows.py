# SPDX-License-Identifier: Apache-2.0
"""Windows of made requests with a known cause of lateness, for the tests of `ttft-otel explain`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy

from ttft_otel.explain.window.request_facts import MEDIA, RequestEvidence, RequestFacts

SECOND_NS = 1_000_000_000
LATE = 12
DELAY_US = 400_000

Change = Callable[[RequestEvidence], RequestEvidence]


def make_window(count: int = 300, seed: int = 1) -> list[RequestEvidence]:
    """Requests of one kind on two instances, a second apart, with the skew of real ones."""
    chance = numpy.random.default_rng(seed)
    window = []
    for number in range(count):
        stages = {
            "preprocess": round(2_000 * chance.lognormal(0, 0.3)),
            "prefill.queue": round(chance.exponential(5_000)),
            "prefill.compute": round(30_000 * chance.lognormal(0, 0.1)),
            "unattributed": round(chance.exponential(300)),
        }
        tokens = int(chance.integers(520, 1000))
        window.append(
            RequestEvidence(
                RequestFacts(
                    f"r{number}",
                    1_700_000_000 * SECOND_NS + number * SECOND_NS,
                    stages,
                    tokens,
                    100,
                ),
                trace_id=f"{number + 1:032x}",
                closed=True,
                reasons={"prefill.queue": {"in_step": stages["prefill.queue"]}},
                instances=dict.fromkeys(stages, f"chat-{number % 2}"),
                counts={"preemptions": 0, "chunks": 1, "recomputed_items": 0},
            )
        )
    return window


@dataclass(frozen=True)
class Cause:
    """What makes a request late: a longer stage, and what else is then different of it."""

    stage: str
    reason: str = ""
    tokens: int = 0
    cached: int = -1
    kind: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)

    def apply(self, request: RequestEvidence, us: int = DELAY_US) -> RequestEvidence:
        """The request with the cause."""
        facts = request.facts
        stages = {**facts.stages, self.stage: facts.stages.get(self.stage, 0) + us}
        reasons = dict(request.reasons)
        if self.reason:
            own = dict(reasons.get(self.stage, {}))
            reasons[self.stage] = {**own, self.reason: own.get(self.reason, 0) + us}
        elif self.stage in reasons:
            del reasons[self.stage]
        return replace(
            request,
            facts=replace(
                facts,
                stages=stages,
                tokens=self.tokens or facts.tokens,
                cached=facts.cached if self.cached < 0 else self.cached,
                kind=self.kind or facts.kind,
            ),
            reasons=reasons,
            instances={**request.instances, self.stage: request.instances["preprocess"]},
            counts={**request.counts, **self.counts},
        )


def delay_some(
    window: list[RequestEvidence], cause: Cause, every: int = 25, us: int = DELAY_US
) -> list[RequestEvidence]:
    """The window with `cause` in every 25th request."""
    return [
        cause.apply(each, us) if number % every == 0 else each for number, each in enumerate(window)
    ]


# One case for each rule; test_cause_rules.py holds that its rule fires, and no other one.
CASES: dict[str, Cause] = {
    "max_num_seqs": Cause("prefill.queue", "max_num_seqs"),
    "token_budget": Cause("prefill_decode.prefill.queue", "token_budget"),
    "kv_blocks": Cause("prefill.queue", "kv_blocks"),
    "encoder_budget": Cause("encode.encoder.queue", "encoder_budget"),
    "remote_kv": Cause("decode.prefill.queue", "remote_kv"),
    "remote_ec": Cause("prefill.queue", "remote_ec"),
    "grammar": Cause("prefill.queue", "grammar"),
    "lora": Cause("prefill.queue", "lora"),
    "priority": Cause("prefill.queue", "priority"),
    "prefill_interval": Cause("prefill.queue", "prefill_interval"),
    "stale_output": Cause("prefill.queue", "stale_output"),
    "paused": Cause("prefill.stall", "paused"),
    "in_step": Cause("prefill.queue", "in_step"),
    "unknown_wait": Cause("encoder.queue"),
    "preempted": Cause("prefill.stall", "kv_blocks"),
    "between_chunks": Cause("prefill.stall", "token_budget"),
    "media_preprocessing": Cause("preprocess", kind=MEDIA),
    "text_preprocessing": Cause("preprocess"),
    "long_prompts": Cause("prefill.compute", tokens=6000, cached=0),
    "cache_misses": Cause("prefill.compute", tokens=760, cached=0),
    "shared_steps": Cause("prefill.compute", tokens=760, cached=100),
    "encoded_again": Cause("encoder.compute", kind=MEDIA, counts={"recomputed_items": 1}),
    "encoder_work": Cause("encode.encoder.compute", kind=MEDIA),
    "kv_transfer": Cause("decode.kv.transfer"),
    "ec_transfer": Cause("ec.transfer", kind=MEDIA),
    "hop": Cause("router.hop.prefill_decode"),
    "retry": Cause("router.retry"),
    "router_itself": Cause("router.tokenize"),
    "request_body": Cause("receive"),
    "to_engine": Cause("ipc"),
    "host_of_engine": Cause("dispatch"),
    "to_client": Cause("egress"),
}


def make_case(name: str) -> list[RequestEvidence]:
    """A window whose late requests have the cause of the rule `name`."""
    window = make_window()
    if name == "cache_misses":
        # Usually half of a prompt is cached.
        window = [
            replace(each, facts=replace(each.facts, cached=each.facts.tokens // 2))
            for each in window
        ]
    return delay_some(window, CASES[name])
