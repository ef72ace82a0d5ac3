# SPDX-License-Identifier: Apache-2.0
"""--discover, as people write it, rightly and wrongly."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner

from ttft_otel.commands.router.command import command
from ttft_otel.router.discovery.discovery import SourceAddress, parse_source_address


def test_parsed() -> None:
    """Each kind of --discover value is parsed with its options."""
    text = "dns://vllm.default:8000?role=encoder"
    assert parse_source_address(text) == SourceAddress(
        text, "dns", "vllm.default", port="8000", role="encode"
    )
    text = "dns://_http._tcp.vllm?scheme=https"
    assert parse_source_address(text) == SourceAddress(
        text, "dns", "_http._tcp.vllm", instance_scheme="https"
    )
    text = "k8s://prod/app=vllm,tier%20in%20(a)?port=api"
    assert parse_source_address(text) == SourceAddress(
        text, "k8s", "prod", "app=vllm,tier in (a)", port="api"
    )


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("http://vllm:8000", "names no source"),
        ("dns://vllm", "dns://SERVICE:PORT"),
        ("dns://_http._tcp.vllm:80", "which say the port"),
        ("dns://vllm:0", "is not a port"),
        ("dns://vllm:８", "is not a port"),
        ("dns://vllm:80/x", "dns://SERVICE:PORT"),
        ("dns://vllm:80?nameserver=1.2.3.4", "is not a port"),
        ("k8s://prod", "selects nothing"),
        ("k8s://prod/app=x?roles=decode", "'roles' is not one of role, port"),
        ("k8s://prod/app=x?role=decoder", "is not a role"),
        ("k8s://prod/app=x?port=0", "is not a port"),
        ("k8s://prod/app=x?scheme=tls", "the scheme of instances is http or https"),
    ],
)
def test_refused(text: str, remedy: str) -> None:
    """A wrong value is refused with a message that says what to write."""
    with pytest.raises(ValueError, match=re.escape(remedy)):
        parse_source_address(text)
    result = CliRunner().invoke(command, ["--discover", text])
    assert result.exit_code == 2 and "Traceback" not in result.output


def test_outside_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """k8s:// needs to know where the API is."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    result = CliRunner().invoke(command, ["--discover", "k8s://prod/app=x"])
    assert result.exit_code == 2
    assert "kubectl proxy" in result.output
