# SPDX-License-Identifier: Apache-2.0
"""The rules of `ttft-otel explain`: which finding means what, what to change, and what that costs.

cause_findings.py finds the stage, its reason and the figures; find_rule() looks the answer up.
"""

from __future__ import annotations

from typing import Final

from ttft_otel.explain.explain.cause_findings import Finding
from ttft_otel.explain.explain.rule_shape import CauseRule
from ttft_otel.explain.explain.wait_rules import WAIT_RULES
from ttft_otel.explain.explain.work_rules import WORK_RULES

VLLM_DOCS: Final = "https://docs.vllm.ai/en/stable/"
RULES: Final = (*WAIT_RULES, *WORK_RULES)


def find_rule(finding: Finding) -> CauseRule | None:
    """The rule for a finding; None where none has an answer."""
    # Tests hold that no two rules fit one finding: the order is the reader's.
    return next((rule for rule in RULES if rule.fits(finding)), None)


def describe_source(rule: CauseRule) -> str:
    """The page that a rule rests on: a URL of vLLM's documentation, or a path of ours."""
    return rule.source if rule.source.startswith("docs/") else VLLM_DOCS + rule.source
