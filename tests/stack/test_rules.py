# SPDX-License-Identifier: Apache-2.0
"""Prometheus's configuration, recording rules and alerts, judged by promtool and by Prometheus itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from grafana.build import pipeline_queries, ttft_queries
from lab.stack.binaries import StackBinaries
from lab.stack.program_pins import CHECKOUT
from tests.stack.running_stack import StackStarter, wait_until
from tests.stack.test_tools import run_program
from ttft_otel.stack import stack_queries

FOLDER = CHECKOUT / "grafana" / "prometheus"
CASES = sorted((FOLDER / "tests").glob("*.yml"))
RULES = sorted((*(FOLDER / "rules").glob("*.yml"), *(FOLDER / "alerts").glob("*.yml")))


def read_yaml(path: Path) -> Any:
    """A YAML file."""
    return yaml.safe_load(path.read_text("utf-8"))


def list_rules(kind: str) -> list[dict[str, Any]]:
    """All rules of a kind, `alert` or `record`."""
    groups = [group for path in RULES for group in read_yaml(path)["groups"]]
    return [rule for group in groups for rule in group["rules"] if kind in rule]


def test_config(binaries: StackBinaries) -> None:
    """promtool accepts the configuration and every rule file that it names."""
    reported = run_program(binaries.promtool, "check", "config", FOLDER / "prometheus.yml")

    assert f"SUCCESS: {len(RULES)} rule files found" in reported
    assert "is valid prometheus config" in reported and "FAILED" not in reported


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_alerts_fire_when_they_should(binaries: StackBinaries, case: Path) -> None:
    """The cases of grafana/prometheus/tests hold, as `promtool test rules` says."""
    assert "SUCCESS" in run_program(binaries.promtool, "test", "rules", case)


def test_every_alert_has_a_case() -> None:
    """Each alert is seen firing in a case, with its words, and silent in another."""
    tests = [test for case in CASES for test in read_yaml(case)["tests"]]
    seen = [each for test in tests for each in test.get("alert_rule_test", [])]
    for rule in list_rules("alert"):
        own = [each for each in seen if each["alertname"] == rule["alert"]]
        assert {bool(each["exp_alerts"]) for each in own} == {True, False}, rule["alert"]


def test_alerts_say_what_to_do() -> None:
    """Each alert has a severity, a summary, a description, and a dashboard that exists."""
    boards = {path.stem for path in (CHECKOUT / "grafana" / "dashboards").glob("*.json")}
    for rule in list_rules("alert"):
        words = rule["annotations"]
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert words["summary"] and words["description"].endswith(".")
        found = re.match(r"/d/([\w-]+)", words["dashboard"])
        assert found and found[1] in boards, rule["alert"]


def test_dropped_names_every_hop() -> None:
    """The alert on losses watches the same hops as the dashboard, under the same words."""
    [rule] = [rule for rule in list_rules("alert") if rule["alert"] == "TtftSpansDropped"]
    found = re.findall(r'increase\((\w+)\[5m]\)\), "hop", "([^"]+)"', rule["expr"])
    assert found == [(counter, hop) for hop, (counter, _) in pipeline_queries.LOSSES_BY_HOP.items()]


def test_the_slo_means_the_same_everywhere() -> None:
    """Every window is judged alike, and as the dashboard judges: by the same kinds of end."""
    rules = [rule for rule in list_rules("record") if rule["record"].startswith("ttft:over_slo:")]
    judged = {re.sub(r"\[\w+]", "[window]", rule["expr"]) for rule in rules}
    assert len(rules) == 7 and len(judged) == 1
    for rule in rules:
        assert set(re.findall(r"\[(\w+)]", rule["expr"])) == {rule["record"].rpartition("ratio")[2]}
    kinds = re.findall(r'(error_type[!=]~"[^"]*")', judged.pop())
    own = [
        re.search(r'error_type[!=]~"[^"]*"', selector)[0]  # type: ignore[index]
        for selector in (
            ttft_queries.WAITED_SELECTOR,
            ttft_queries.WAITED_SELECTOR,
            ttft_queries.FAILED_SELECTOR,
            ttft_queries.JUDGED_SELECTOR,
        )
    ]
    assert kinds == own


def test_unattributed_means_the_same_everywhere() -> None:
    """The recorded ratio picks the stages that the dashboard calls unattributed."""
    [rule] = [rule for rule in list_rules("record") if rule["record"] == pipeline_queries.RATIO]
    [pattern] = re.findall(r'ttft_stage=~"([^"]+)"', rule["expr"])
    names = ("unattributed", "encode.unattributed", "prefill_decode.unattributed", "prefill.queue")
    ours = ttft_queries.match_stage_kind("")
    assert [bool(re.fullmatch(pattern, name)) for name in names] == [True, True, True, False]
    assert [bool(re.fullmatch(ours, name)) for name in names] == [True, True, True, False]


@pytest.mark.full
def test_prometheus_runs_them(bench: StackStarter) -> None:
    """A real Prometheus loads all rules, evaluates them without an error, and records the objective."""
    prometheus = bench.start_prometheus()

    def evaluated() -> list[dict[str, Any]]:
        groups = stack_queries.fetch_json(f"{prometheus.url}/api/v1/rules")["data"]["groups"]
        found = [rule for group in groups for rule in group["rules"]]
        return found if all(rule["health"] != "unknown" for rule in found) else []

    found = wait_until(evaluated, 90)
    assert len(found) == len(list_rules("alert")) + len(list_rules("record"))
    assert {rule["health"] for rule in found} == {"ok"}
    assert prometheus.query_number("ttft:slo:budget") == pytest.approx(0.01)
