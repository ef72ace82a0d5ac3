# SPDX-License-Identifier: Apache-2.0
"""Every rule of `ttft-otel explain` fires on its own case and on no other; its settings exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.explain.sample_windows import CASES, make_case
from ttft_otel.explain.explain.cause_findings import (
    FIGURES,
    Finding,
    build_finding,
    divide_difference,
)
from ttft_otel.explain.explain.cause_rules import RULES, CauseRule, describe_source, find_rule
from ttft_otel.explain.window.late_requests import split_window
from ttft_otel.hooks import target_check
from ttft_otel.model.stages import STAGE_NAMES, WAIT_REASON_NAMES

ROOT = Path(__file__).parents[3]


def find_case(name: str) -> Finding:
    """The finding of a rule's case."""
    return divide_difference(split_window(make_case(name), slo_us=300_000)).finding


def test_every_rule_has_a_case() -> None:
    """No rule without a case, and no case without a rule."""
    assert [rule.name for rule in RULES] == list(CASES)


@pytest.mark.parametrize("name", CASES)
def test_fires_alone(name: str) -> None:
    """On its case a rule fires, and no other one does."""
    finding = find_case(name)
    assert [rule.name for rule in RULES if rule.fits(finding)] == [name], finding
    rule = find_rule(finding)
    assert rule is not None and rule.name == name
    assert finding.stage == CASES[name].stage


def test_every_stage_and_reason_has_a_rule() -> None:
    """Whatever stage a server can be late in, and for whatever reason: one rule has the answer."""
    figures = dict.fromkeys(FIGURES, 0.0) | {"tokens_ratio": 1.0}
    for stage in STAGE_NAMES:
        waits = stage.endswith((".queue", ".stall"))
        for reason in ("", *WAIT_REASON_NAMES) if waits else ("",):
            fitting = [
                rule for rule in RULES if rule.fits(Finding(stage, stage, reason, figures=figures))
            ]
            assert len(fitting) == 1, (stage, reason, fitting)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule.name))
def test_settings_and_sources(rule: CauseRule) -> None:
    """A remedy names flags of the installed vLLM only, and says where that is written."""
    package = target_check.find_vllm_folder()
    if package is None:
        pytest.skip("no vLLM here; run scripts/install")
    files = [package / "engine" / "arg_utils.py", *package.rglob("cli_args.py")]
    source = "\n".join(path.read_text("utf-8") for path in files)
    for flag in rule.settings:
        assert flag in rule.remedy or flag in rule.price
        assert re.search(rf"\b{flag.removeprefix('--').replace('-', '_')}\b", source), flag
    named = re.findall(r"--[a-z-]+", rule.remedy)
    # The router's own flags are in no list of vLLM's.
    assert set(named) - {"--url", "--routing-logic", "--workers", "--health-interval"} <= {
        *rule.settings
    }
    page = describe_source(rule)
    assert (
        (ROOT / page).is_file()
        if page.startswith("docs/")
        else page.startswith("https://docs.vllm.ai/")
    )
    assert rule.price and rule.sentence.endswith(".")


def test_a_wait_without_reasons_is_unknown() -> None:
    """The router's spans came first: that usual requests have a reason says nothing of this one."""
    compared = split_window(make_case("in_step"), slo_us=300_000)
    for reasons in ((("in_step", -0.001),), (("in_step", 0.0), ("priority", -0.1)), ()):
        finding = build_finding("prefill.queue", reasons, (), compared)
        rule = find_rule(finding)
        assert rule is not None and rule.name == "unknown_wait", reasons
