# SPDX-License-Identifier: Apache-2.0
"""Grafana with our files, provisioned or added to a running one; viewers cannot change anything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.stack import backend_queries, grafana_import, stack_parts
from lab.stack import grafana_server as lab
from lab.stack.stack_parts import StackAddresses
from tests.stack.running_stack import RunningGrafana, StackStarter

UIDS = {"prometheus": "Prometheus", "tempo": "Tempo"}


@pytest.fixture(scope="module")
def provisioned(bench: StackStarter, grafana_home: Path | None) -> RunningGrafana:
    """A Grafana with our files; nothing answers behind its data sources."""
    return bench.start_grafana(grafana_home, StackAddresses.choose_free())


@pytest.fixture
def foreign(
    bench: StackStarter, grafana_home: Path | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[str]:
    """The URL of a Grafana that knows nothing of us, with the name of its admin."""
    if grafana_home is None:
        pytest.skip("GRAFANA_URL is no Grafana to experiment with; set GRAFANA_HOME")
    monkeypatch.setattr(lab, "PROVISIONING", tmp_path)
    plain = lab.GRAFANA_INI.replace(
        "disable_initial_admin_creation = true", "admin_password = secret"
    )
    monkeypatch.setattr(lab, "GRAFANA_INI", plain)
    addresses = StackAddresses.choose_free()
    with bench.start_grafana(grafana_home, addresses, is_provisioned=False) as running:
        yield running.url.replace("http://", "http://admin:secret@")


def test_provisioned(provisioned: RunningGrafana) -> None:
    """Anybody sees both dashboards and may ask both data sources, whose uids links rely on."""
    boards = {
        board["uid"]
        for board in backend_queries.fetch_json(f"{provisioned.url}/api/search", type="dash-db")
    }

    assert {path.stem for path in stack_parts.DASHBOARDS.glob("*.json")} == boards
    for uid in UIDS:
        with pytest.raises(
            backend_queries.BackendQueryError, match="answered 50[0-9]"
        ):  # through to where nobody listens
            backend_queries.fetch_json(
                f"{provisioned.url}/api/datasources/proxy/uid/{uid}/api/v1/query"
            )


def test_nobody(provisioned: RunningGrafana) -> None:
    """There is no admin login, and an anonymous viewer can change nothing."""
    admin = provisioned.url.replace("http://", "http://admin:admin@")

    with pytest.raises(backend_queries.BackendQueryError, match="answered 401"):
        backend_queries.fetch_json(f"{admin}/api/org")
    with pytest.raises(backend_queries.BackendQueryError, match="answered 40[13]"):
        backend_queries.send_body(
            f"{provisioned.url}/api/folders", b'{"title": "mine"}', grafana_import.JSON_CONTENT_TYPE
        )


def test_adopted(foreign: str) -> None:
    """A Grafana that runs already gets the same files, also twice; its password is not printed."""
    at = StackAddresses.choose_free()
    public = grafana_import.strip_credentials(foreign)

    assert not grafana_import.import_dashboards(public, at)
    assert [True, True] == [
        grafana_import.import_dashboards(foreign, at),
        grafana_import.import_dashboards(foreign, at),
    ]
    found = {each["uid"]: each for each in backend_queries.fetch_json(f"{foreign}/api/datasources")}
    assert UIDS == {uid: each["name"] for uid, each in found.items()}
    assert stack_parts.format_loopback_url(at.tempo) == found["tempo"]["url"]
    assert "$__tags" in found["tempo"]["jsonData"]["tracesToMetrics"]["queries"][0]["query"]
    assert "secret" not in public
    boards = {
        board["uid"] for board in backend_queries.fetch_json(f"{public}/api/search", type="dash-db")
    }
    assert {path.stem for path in stack_parts.DASHBOARDS.glob("*.json")} == boards
