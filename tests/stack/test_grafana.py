# SPDX-License-Identifier: Apache-2.0
"""Grafana with our files: from provisioning, or given to one that runs already; nobody else may change it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack.bench import Bench, Grafana
from ttft_otel.lab.stack import adopt, ask, parts
from ttft_otel.lab.stack import grafana as lab
from ttft_otel.lab.stack.parts import Addresses

UIDS = {"prometheus": "Prometheus", "tempo": "Tempo"}


@pytest.fixture(scope="module")
def provisioned(bench: Bench, grafana_home: Path | None) -> Grafana:
    """A Grafana with our files; nothing answers behind its data sources."""
    return bench.grafana(grafana_home, Addresses.free())


@pytest.fixture
def foreign(
    bench: Bench, grafana_home: Path | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[str]:
    """The URL of a Grafana that knows nothing of us, with the name of its admin."""
    if grafana_home is None:
        pytest.skip("GRAFANA_URL is no Grafana to experiment with; set GRAFANA_HOME")
    monkeypatch.setattr(lab, "PROVISIONING", tmp_path)
    plain = lab.SETTINGS.replace("disable_initial_admin_creation = true", "admin_password = secret")
    monkeypatch.setattr(lab, "SETTINGS", plain)
    with bench.grafana(grafana_home, Addresses.free()) as running:
        yield running.url.replace("http://", "http://admin:secret@")


def test_provisioned(provisioned: Grafana) -> None:
    """Anybody sees both dashboards and may ask both data sources, whose uids links rely on."""
    boards = {board["uid"] for board in ask.get(f"{provisioned.url}/api/search", type="dash-db")}

    assert {path.stem for path in parts.DASHBOARDS.glob("*.json")} == boards
    for uid in UIDS:
        with pytest.raises(
            ask.AskError, match="answered 50[0-9]"
        ):  # through to where nobody listens
            ask.get(f"{provisioned.url}/api/datasources/proxy/uid/{uid}/api/v1/query")


def test_nobody(provisioned: Grafana) -> None:
    """There is no admin to guess, and a viewer changes nothing."""
    admin = provisioned.url.replace("http://", "http://admin:admin@")

    with pytest.raises(ask.AskError, match="answered 401"):
        ask.get(f"{admin}/api/org")
    with pytest.raises(ask.AskError, match="answered 40[13]"):
        ask.post(f"{provisioned.url}/api/folders", b'{"title": "mine"}', adopt.KIND)


def test_adopted(foreign: str) -> None:
    """One that runs already gets the same, twice without harm; its password stays off the screen."""
    at = Addresses.free()
    public = adopt.public(foreign)

    assert not adopt.adopt(public, at)
    assert [True, True] == [adopt.adopt(foreign, at), adopt.adopt(foreign, at)]
    found = {each["uid"]: each for each in ask.get(f"{foreign}/api/datasources")}
    assert UIDS == {uid: each["name"] for uid, each in found.items()}
    assert parts.url(at.tempo) == found["tempo"]["url"]
    assert "$__tags" in found["tempo"]["jsonData"]["tracesToMetrics"]["queries"][0]["query"]
    assert "secret" not in public
    boards = {board["uid"] for board in ask.get(f"{public}/api/search", type="dash-db")}
    assert {path.stem for path in parts.DASHBOARDS.glob("*.json")} == boards
