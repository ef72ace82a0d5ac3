# SPDX-License-Identifier: Apache-2.0
"""deploy/docker-compose.secure.yml and deploy/docker-compose.admin.yml on top of the stack, in containers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab.certificates import make_certificate
from lab.container_engine import EngineError
from tests.containers.conftest import GRAFANA, ContainerStack, wait_for

pytestmark = pytest.mark.full

SECURE = "deploy/docker-compose.secure.yml"
ADMIN = "deploy/docker-compose.admin.yml"
TOKEN = "a-token-for-tests"
PASSWORD = "a-password-for-tests"
SPAN = {
    "traceId": "5b8efff798038103d269b633813fc60c",
    "spanId": "eee19b7ec3c1b174",
    "name": "secured",
    "kind": 2,
    "startTimeUnixNano": "1",
    "endTimeUnixNano": "2",
}


@pytest.fixture
def secrets_env(tmp_path: Path) -> dict[str, str]:
    """The variables of the secure overlay, with files that the collector's user may read."""
    certificate, key = make_certificate(tmp_path, "IP:127.0.0.1,DNS:collector")
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n", "utf-8")
    for path in (certificate, key, token):
        path.chmod(0o644)
    return {
        "TTFT_OTLP_CERT": str(certificate),
        "TTFT_OTLP_KEY": str(key),
        "TTFT_OTLP_TOKEN": str(token),
        "TTFT_BIND": "0.0.0.0",
    }


@pytest.mark.parametrize("profile", ["plain", "sampling", "scale-out"])
def test_secure(stack: ContainerStack, secrets_env: dict[str, str], profile: str) -> None:
    """On every address the collector asks for TLS and the token, and the dashboards stay on loopback."""
    stack.start(profile, SECURE, env=secrets_env)
    places = {line.split()[3] for line in stack.engine.run_inside("ss", "-Hltn").splitlines()}
    assert {"0.0.0.0:4317", "0.0.0.0:4318", "127.0.0.1:3000"} <= places
    assert "0.0.0.0:3000" not in places

    def send_span(token: str, certificate: str) -> str:
        body = {"resourceSpans": [{"scopeSpans": [{"spans": [SPAN]}]}]}
        return stack.engine.run_inside(
            "curl", "-sS", "-o", "/dev/null", "-w", "%{http_code}", *certificate.split(),
            "-H", f"Authorization: Bearer {token}", "-H", "Content-Type: application/json",
            "-d", json.dumps(body), "https://127.0.0.1:4318/v1/traces",
        )  # fmt: skip

    trusted = f"--cacert {secrets_env['TTFT_OTLP_CERT']}"
    assert wait_for(lambda: send_span(TOKEN, trusted)) == "200"
    assert send_span("another", trusted) == "401"
    with pytest.raises(EngineError, match="certificate"):
        send_span(TOKEN, "")
    with pytest.raises(EngineError):
        stack.engine.run_inside(
            "curl", "-sS", "--fail", "http://127.0.0.1:4318/v1/traces", "-d", "{}"
        )


def test_admin(stack: ContainerStack, tmp_path: Path) -> None:
    """The password is that of the file, and what he changes outlives the containers."""
    secret = tmp_path / "password"
    secret.write_text(PASSWORD, "utf-8")
    secret.chmod(0o644)
    env = {"TTFT_GRAFANA_PASSWORD": str(secret)}
    stack.start("plain", ADMIN, env=env)
    jar = tmp_path / "cookies"

    def log_in(password: str) -> str:
        body = json.dumps({"user": "admin", "password": password})
        return stack.engine.run_inside(
            "curl", "-sS", "-o", "/dev/null", "-w", "%{http_code}", "-c", str(jar),
            "-H", "Content-Type: application/json", "-d", body, f"{GRAFANA}/login",
        )  # fmt: skip

    assert log_in("admin") == "401"
    assert log_in(PASSWORD) == "200"
    folder = json.dumps({"uid": "mine", "title": "Mine"})
    options = ("-b", str(jar), "-H", "Content-Type: application/json")
    stack.fetch(f"{GRAFANA}/api/folders", *options, "-d", folder)
    stack.stop()
    stack.start("plain", ADMIN, env=env)

    assert wait_for(lambda: log_in(PASSWORD)) == "200"
    assert stack.fetch(f"{GRAFANA}/api/folders/mine", *options)["title"] == "Mine"
