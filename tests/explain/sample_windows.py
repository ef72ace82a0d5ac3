# SPDX-License-Identifier: Apache-2.0
"""Windows of made requests with a known cause of lateness, for the tests of `ttft-otel explain`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy

from ttft_otel.explain.window.request_facts import MEDIA, RequestFacts

SECOND_NS = 1_000_000_000
LATE = 12
DELAY_US = 400_000


def make_window(count: int = 300, seed: int = 1) -> list[RequestFacts]:
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
            RequestFacts(
                f"r{number}",
                1_700_000_000 * SECOND_NS + number * SECOND_NS,
                stages,
                tokens,
                100,
                trace_id=f"{number + 1:032x}",
                reasons={"prefill.queue": {"in_step": stages["prefill.queue"]}},
                instances=dict.fromkeys(stages, f"chat-{number % 2}"),
                instance=f"chat-{number % 2}",
                step_tokens=tokens,
                compute_us=stages["prefill.compute"],
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

    def apply(self, request: RequestFacts, us: int = DELAY_US) -> RequestFacts:
        """The request with the cause."""
        stages = {**request.stages, self.stage: request.stages.get(self.stage, 0) + us}
        reasons = dict(request.reasons)
        if self.reason:
            own = dict(reasons.get(self.stage, {}))
            reasons[self.stage] = {**own, self.reason: own.get(self.reason, 0) + us}
        elif self.stage in reasons:
            del reasons[self.stage]
        return replace(
            request,
            stages=stages,
            tokens=self.tokens or request.tokens,
            cached=request.cached if self.cached < 0 else self.cached,
            kind=self.kind or request.kind,
            reasons=reasons,
            instances={**request.instances, self.stage: request.instances["preprocess"]},
        )


def delay_some(
    window: list[RequestFacts], cause: Cause, every: int = 25, us: int = DELAY_US
) -> list[RequestFacts]:
    """The window with `cause` in every 25th request."""
    return [
        cause.apply(each, us) if number % every == 0 else each for number, each in enumerate(window)
    ]


# Causes by the reason or the stage that they show in.
CASES: dict[str, Cause] = {
    "max_num_seqs": Cause("prefill.queue", "max_num_seqs"),
    "token_budget": Cause("prefill_decode.prefill.queue", "token_budget"),
    "kv_blocks": Cause("prefill.queue", "kv_blocks"),
    "lora": Cause("prefill.queue", "lora"),
    "paused": Cause("prefill.stall", "paused"),
    "media_preprocessing": Cause("preprocess", kind=MEDIA),
}
