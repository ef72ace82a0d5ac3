# SPDX-License-Identifier: Apache-2.0
"""Prometheus's configuration, recording rules and alerts, judged by promtool and by Prometheus itself; and an
alert comes with its answer: Prometheus, Alertmanager and `serve`, all three real, as they are shipped.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from grafana.build import pipeline_queries, ttft_queries
from lab import free_ports
from lab.http_servers import HttpServerThread, SilentHandler
from lab.server_commands import HOST, ServerCommand
from lab.stack import stack_parts
from lab.stack.binaries import StackBinaries
from lab.stack.program_pins import CHECKOUT
from lab.stack.stack_parts import StackAddresses
from tests.report.sample_records import fill_database, make_leg_record
from tests.stack.running_stack import StackPart, StackStarter, wait_until
from tests.stack.test_tools import run_program
from ttft_otel.model.record import Record
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


def test_alerts() -> None:
    """Each alert is seen firing in a case, with its words, and silent in another; it has a severity, a
    summary, a description, and a dashboard that exists.
    """
    tests = [test for case in CASES for test in read_yaml(case)["tests"]]
    seen = [each for test in tests for each in test.get("alert_rule_test", [])]
    boards = {path.stem for path in (CHECKOUT / "grafana" / "dashboards").glob("*.json")}
    for rule in list_rules("alert"):
        own = [each for each in seen if each["alertname"] == rule["alert"]]
        assert {bool(each["exp_alerts"]) for each in own} == {True, False}, rule["alert"]
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


ALERTMANAGER_CONFIG = CHECKOUT / "deploy" / "alerts" / "alertmanager.yml"
ALERT = "TtftBudgetBurnsFast"
LATE_US = 2_500_000


class Inbox(HttpServerThread):
    """Where people get alerts: a webhook that keeps the first one of each name."""

    alerts: dict[str, dict[str, Any]]


class InboxHandler(SilentHandler):
    """Handles one connection."""

    server: Inbox

    def do_POST(self) -> None:
        """Keep them."""
        for each in json.loads(self.read_body())["alerts"]:
            self.server.alerts.setdefault(each["labels"]["alertname"], each)
        self.send_answer(200)


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    """An empty one."""
    with Inbox(InboxHandler) as made:
        made.alerts = {}
        yield made


def make_late_records() -> list[Record]:
    """A hundred requests of the model `chat` in the last ten minutes, of which ten waited in the queue."""
    begin_s = int(time.time()) - 500
    return [
        make_leg_record(
            "mono",
            {
                "prefill.queue": LATE_US if number % 10 == 3 else 5000,
                "prefill.compute": 30_000 + 37 * number,
            },
            start_ns=(begin_s + 4 * number) * 10**9,
            request_id=f"r{number}",
            model="chat",
        )
        for number in range(100)
    ]


def write_prometheus_config(folder: Path, alertmanager_port: int) -> Path:
    """The shipped configuration, with our alert true for `chat` from the first evaluation on."""
    shipped = stack_parts.PROMETHEUS_CONFIG
    (folder / "alertmanagers").mkdir(parents=True)
    (folder / "alertmanagers" / "targets.yml").write_text(
        json.dumps([{"targets": [f"{HOST}:{alertmanager_port}"]}]), "utf-8"
    )
    (folder / "rules").symlink_to(shipped.parent / "rules")
    text = shipped.read_text("utf-8")
    assert "evaluation_interval: 15s" in text
    config = folder / shipped.name
    config.write_text(text.replace("evaluation_interval: 15s", "evaluation_interval: 1s"), "utf-8")
    groups = yaml.safe_load((shipped.parent / "alerts" / "ttft.yml").read_text("utf-8"))
    (rule,) = (
        rule for group in groups["groups"] for rule in group["rules"] if rule["alert"] == ALERT
    )
    rule |= {
        "expr": 'label_replace(ttft:slo:seconds, "gen_ai_request_model", "chat", "", "")',
        "for": "0s",
    }
    (folder / "alerts").mkdir()
    (folder / "alerts" / "ttft.yml").write_text(
        yaml.safe_dump({"groups": [{"name": "now", "rules": [rule]}]}), "utf-8"
    )
    return config


def write_alertmanager_config(path: Path, serve_port: int, inbox_url: str) -> Path:
    """The shipped configuration, with these addresses and without the wait for more alerts of a group."""
    config = yaml.safe_load(ALERTMANAGER_CONFIG.read_text("utf-8"))
    config["route"] |= {"group_wait": "1s", "group_interval": "1s"}
    for receiver in config["receivers"]:
        if receiver["name"] == "people":
            receiver["webhook_configs"] = [{"url": inbox_url}]
        else:
            (webhook,) = receiver["webhook_configs"]
            assert webhook["url"] == "http://answers:4319/api/alerts"
            webhook["url"] = f"http://{HOST}:{serve_port}/api/alerts"
    path.write_text(yaml.safe_dump(config), "utf-8")
    return path


def test_answered(
    bench: StackStarter, binaries: StackBinaries, inbox: Inbox, tmp_path: Path
) -> None:
    """People get the alert as it is, and the answer as an alert of its own that wakes nobody."""
    serve_port, alertmanager_port = (free_ports.find_free_port() for _ in range(2))
    alertmanager_url = f"http://{HOST}:{alertmanager_port}"
    config = write_alertmanager_config(tmp_path / "am.yml", serve_port, inbox.url)
    words = (
        sys.executable, "-m", "ttft_otel.commands.main", "serve", "--grpc-port=-1",
        f"--http-port={serve_port}", f"--db={fill_database(tmp_path / 'spans.db', *make_late_records())}",
        f"--alertmanager={alertmanager_url}", "--page-url=http://pages.example",
    )  # fmt: skip
    commands = [
        ServerCommand("serve", words, {}, serve_port, "/healthz"),
        ServerCommand(
            "alertmanager",
            (
                str(binaries.alertmanager), f"--config.file={config}",
                f"--storage.path={tmp_path / 'am'}", "--cluster.listen-address=",
                f"--web.listen-address={HOST}:{alertmanager_port}",
            ),
            {}, alertmanager_port, "/-/ready",
        ),
    ]  # fmt: skip
    addresses = StackAddresses.choose_free()
    serve, alertmanager = (
        StackPart(command, addresses, bench.make_folder(command.name)) for command in commands
    )
    prometheus_config = write_prometheus_config(tmp_path / "prometheus", alertmanager_port)
    with serve, alertmanager:
        serve.start()
        alertmanager.start()
        with bench.start_prometheus(addresses, prometheus_config):
            original = wait_until(lambda: inbox.alerts.get(ALERT), 60)
            answer = wait_until(lambda: inbox.alerts.get("TtftExplanation"), 60)
        assert f"alert {ALERT}: " in serve.log
    assert original["labels"]["severity"] == "page"
    assert original["annotations"]["slo_seconds"] == "1"
    labels = answer["labels"]
    assert (labels["explains"], labels["gen_ai_request_model"]) == (ALERT, "chat")
    assert labels["severity"] == "info"
    words_said = " ".join(answer["annotations"].values())
    assert "10 of 100 requests were later than 1000 ms" in words_said
    assert "prefill.queue has" in words_said
    assert answer["generatorURL"].startswith("http://pages.example/why?from=")
