# SPDX-License-Identifier: Apache-2.0
"""Grafana with our files, provisioned or added to a running one; viewers cannot change anything."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lab.stack import grafana_import, stack_parts
from lab.stack import grafana_server as lab
from lab.stack.stack_parts import StackAddresses
from tests.stack.running_stack import RunningGrafana, StackStarter
from ttft_otel.commands.stack import dashboards
from ttft_otel.stack import stack_queries

UIDS = {"prometheus": "Prometheus", "tempo": "Tempo"}
BOARDS = {path.stem for path in stack_parts.DASHBOARDS.glob("*.json")}


@pytest.fixture(scope="module")
def provisioned(bench: StackStarter, grafana_home: Path | None) -> RunningGrafana:
    """A Grafana with our files; nothing answers behind its data sources."""
    return bench.start_grafana(grafana_home, StackAddresses.choose_free())


@pytest.fixture(scope="module")
def foreign(
    bench: StackStarter, grafana_home: Path | None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The URL of a Grafana that knows nothing of us, with the name of its admin."""
    if grafana_home is None:
        pytest.skip("GRAFANA_URL is no Grafana to experiment with; set GRAFANA_HOME")
    plain = lab.GRAFANA_INI.replace(
        "disable_initial_admin_creation = true", "admin_password = secret"
    )
    addresses = StackAddresses.choose_free()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lab, "PROVISIONING", tmp_path_factory.mktemp("none"))
        patch.setattr(lab, "GRAFANA_INI", plain)
        with bench.start_grafana(grafana_home, addresses, is_provisioned=False) as running:
            yield running.url.replace("http://", "http://admin:secret@")


def list_boards(url: str) -> set[str]:
    """Uids of the dashboards that a Grafana shows to who asks."""
    return {each["uid"] for each in stack_queries.fetch_json(f"{url}/api/search", type="dash-db")}


def test_provisioned(provisioned: RunningGrafana) -> None:
    """Anybody sees both dashboards and may ask both data sources, whose uids links rely on."""
    assert list_boards(provisioned.url) == BOARDS
    for uid in UIDS:  # through to where nobody listens
        query = f"{provisioned.url}/api/datasources/proxy/uid/{uid}/api/v1/query"
        with pytest.raises(stack_queries.BackendQueryError, match="answered 50[0-9]"):
            stack_queries.fetch_json(query)

    # There is no admin login, and an anonymous viewer can change nothing.
    admin = provisioned.url.replace("http://", "http://admin:admin@")
    with pytest.raises(stack_queries.BackendQueryError, match="answered 401"):
        stack_queries.fetch_json(f"{admin}/api/org")
    with pytest.raises(stack_queries.BackendQueryError, match="answered 40[13]"):
        stack_queries.send_body(
            f"{provisioned.url}/api/folders",
            b'{"title": "mine"}',
            stack_queries.JSON_CONTENT_TYPE,
        )


def test_command(foreign: str, tmp_path: Path) -> None:
    """`ttft-otel dashboards` imports both, by user or by token, and prints no password."""
    (password := tmp_path / "password").write_text("secret\n", "utf-8")
    (wrong := tmp_path / "wrong").write_text("guess\n", "utf-8")
    url = foreign.replace(":secret@", "@")
    json_type = stack_queries.JSON_CONTENT_TYPE
    account = json.loads(
        stack_queries.send_body(
            f"{foreign}/api/serviceaccounts", b'{"name": "importer", "role": "Admin"}', json_type
        )
    )
    tokens = f"{foreign}/api/serviceaccounts/{account['id']}/tokens"
    made = json.loads(stack_queries.send_body(tokens, b'{"name": "once"}', json_type))
    (token := tmp_path / "token").write_text(made["key"], "utf-8")
    public = stack_queries.strip_credentials(foreign)

    def run(grafana: str, file: Path) -> Result:
        return CliRunner().invoke(dashboards, ["--grafana", grafana, "--token-file", str(file)])

    by_user, by_token, refused = run(url, password), run(public, token), run(url, wrong)

    assert (by_user.exit_code, by_token.exit_code) == (0, 0), by_user.output + by_token.output
    assert f"{public}/d/ttft\n" in by_token.output and "secret" not in by_user.output
    assert ("data source" in by_user.output) == ("data source" in by_token.output)
    assert list_boards(foreign) == BOARDS
    assert refused.exit_code == 1 and "answered 401" in refused.output


def test_adopted(foreign: str) -> None:
    """A Grafana that runs already gets the same files, also twice; its password is not printed."""
    at = StackAddresses.choose_free()
    public = stack_queries.strip_credentials(foreign)

    assert not grafana_import.import_dashboards(public, at)
    assert [True, True] == [
        grafana_import.import_dashboards(foreign, at),
        grafana_import.import_dashboards(foreign, at),
    ]
    found = {each["uid"]: each for each in stack_queries.fetch_json(f"{foreign}/api/datasources")}
    assert UIDS == {uid: each["name"] for uid, each in found.items()}
    assert stack_parts.format_loopback_url(at.tempo) == found["tempo"]["url"]
    assert "$__tags" in found["tempo"]["jsonData"]["tracesToMetrics"]["queries"][0]["query"]
    assert "secret" not in public
    assert list_boards(public) == BOARDS
