# SPDX-License-Identifier: Apache-2.0
"""Prometheus's configuration, recording rules and alerts, judged by promtool and by Prometheus itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from grafana.build import counters, queries
from tests.stack.bench import Prometheus, until
from tests.stack.test_tools import said
from ttft_otel.lab.stack import ask, parts
from ttft_otel.lab.stack.binaries import Binaries
from ttft_otel.lab.stack.pins import CHECKOUT

FOLDER = CHECKOUT / "grafana" / "prometheus"
CASES = sorted((FOLDER / "tests").glob("*.yml"))
RULES = sorted((*(FOLDER / "rules").glob("*.yml"), *(FOLDER / "alerts").glob("*.yml")))


def read(path: Path) -> Any:
    """A YAML file."""
    return yaml.safe_load(path.read_text("utf-8"))


def rules(kind: str) -> list[dict[str, Any]]:
    """All rules of a kind, `alert` or `record`."""
    groups = [group for path in RULES for group in read(path)["groups"]]
    return [rule for group in groups for rule in group["rules"] if kind in rule]


def test_config(binaries: Binaries) -> None:
    """promtool accepts the configuration and every rule file that it names."""
    told = said(binaries.promtool, "check", "config", FOLDER / "prometheus.yml")

    assert f"SUCCESS: {len(RULES)} rule files found" in told


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_alerts_fire_when_they_should(binaries: Binaries, case: Path) -> None:
    """The cases of grafana/prometheus/tests hold, as `promtool test rules` says."""
    assert "SUCCESS" in said(binaries.promtool, "test", "rules", case)


def test_every_alert_has_a_case() -> None:
    """Each alert is seen firing in a case, with its words, and silent in another."""
    tests = [test for case in CASES for test in read(case)["tests"]]
    seen = [each for test in tests for each in test.get("alert_rule_test", [])]
    for rule in rules("alert"):
        own = [each for each in seen if each["alertname"] == rule["alert"]]
        assert {bool(each["exp_alerts"]) for each in own} == {True, False}, rule["alert"]


def test_alerts_say_what_to_do() -> None:
    """Each alert has a severity, a summary, a description, and a dashboard that exists."""
    boards = {path.stem for path in (CHECKOUT / "grafana" / "dashboards").glob("*.json")}
    for rule in rules("alert"):
        words = rule["annotations"]
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert words["summary"] and words["description"].endswith(".")
        found = re.match(r"/d/([\w-]+)", words["dashboard"])
        assert found and found[1] in boards, rule["alert"]


def test_dropped_names_every_hop() -> None:
    """The alert on losses watches the same hops as the dashboard, under the same words."""
    [rule] = [rule for rule in rules("alert") if rule["alert"] == "TtftSpansDropped"]
    found = re.findall(r'increase\((\w+)\[5m]\)\), "hop", "([^"]+)"', rule["expr"])
    assert found == [(counter, hop) for hop, (counter, _) in counters.HOPS.items()]


def test_unattributed_means_the_same_everywhere() -> None:
    """The recorded ratio picks the stages that the dashboard calls unattributed."""
    [rule] = [rule for rule in rules("record") if rule["record"] == counters.RATIO]
    [pattern] = re.findall(r'ttft_stage=~"([^"]+)"', rule["expr"])
    names = ("unattributed", "encode.unattributed", "prefill_decode.unattributed", "prefill.queue")
    ours = queries.kind("")
    assert [bool(re.fullmatch(pattern, name)) for name in names] == [True, True, True, False]
    assert [bool(re.fullmatch(ours, name)) for name in names] == [True, True, True, False]


def test_prometheus_runs_them(prometheus: Prometheus) -> None:
    """A real Prometheus loads all rules, evaluates them without an error, and records the objective."""

    def evaluated() -> list[dict[str, Any]]:
        groups = ask.get(f"{prometheus.url}/api/v1/rules")["data"]["groups"]
        found = [rule for group in groups for rule in group["rules"]]
        return found if all(rule["health"] != "unknown" for rule in found) else []

    found = until(evaluated, 90)
    assert len(found) == len(rules("alert")) + len(rules("record"))
    assert {rule["health"] for rule in found} == {"ok"}
    assert prometheus.number("ttft:slo:budget") == pytest.approx(0.01)


def test_flags_are_those_of_the_container() -> None:
    """The native Prometheus and the one in docker-compose.yml have the same features switched on."""
    compose = read(CHECKOUT / "docker-compose.yml")
    words = compose["services"]["prometheus"]["command"]
    switches = {word for word in words if "enable" in word}
    assert switches == set(parts.PROMETHEUS_FLAGS)
