# SPDX-License-Identifier: Apache-2.0
"""What a rule of `ttft-otel explain` is; wait_rules.py and work_rules.py have them, cause_rules.py asks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ttft_otel.explain.explain.cause_findings import Finding
from ttft_otel.model.stages import find_rule_group

QUEUE: Final = ("queue",)
STALL: Final = ("stall",)
WAITS: Final = (*QUEUE, *STALL)


@dataclass(frozen=True, slots=True)
class FigureBound:
    """`name` of cause_findings.FIGURES lies in [at_least, below)."""

    name: str
    at_least: float = float("-inf")
    below: float = float("inf")


@dataclass(frozen=True, slots=True)
class CauseRule:
    """One cause, and its remedy.

    groups: of stages, by Stage.rule_group. reasons: of waiting, one of which has most of it; () for
    stages without reasons, ("",) where a queue tells none. bounds: all hold. settings: flags of
    `vllm serve`, () where the remedy is none. trial: a setting that what-if can try, of
    remedy_prediction.TOLD_SETTINGS, and by how much it is multiplied. source: a page of vLLM's
    documentation, or of ours.
    """

    name: str
    groups: tuple[str, ...]
    sentence: str
    remedy: str
    price: str
    source: str
    reasons: tuple[str, ...] = ()
    bounds: tuple[FigureBound, ...] = ()
    settings: tuple[str, ...] = ()
    trial: tuple[str, float] | None = None

    def fits(self, finding: Finding) -> bool:
        """Whether the rule is about this finding."""
        group = find_rule_group(finding.word)
        return (
            group in self.groups
            and (finding.reason in self.reasons if self.reasons else group not in WAITS)
            and all(
                bound.at_least <= finding.figures[bound.name] < bound.below for bound in self.bounds
            )
        )
