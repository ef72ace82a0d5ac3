# SPDX-License-Identifier: Apache-2.0
"""docker-compose.yml with deploy/docker-compose.secure.yml, read as YAML: no profile leaves a door open.

tests/stack/test_compose.py reads the same files by compose's own library, which needs Go.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

CHECKOUT = Path(__file__).parents[1]
PUBLIC = "${TTFT_BIND:-127.0.0.1}:"  # what TTFT_BIND opens to other hosts
TOKEN_FILES = {"otlp_cert", "otlp_key", "otlp_token"}


class ComposeLoader(yaml.SafeLoader):
    """YAML with compose's `!override`: the value replaces that of the file before."""


class Replacement(list[Any]):
    """A list marked with `!override`."""


ComposeLoader.add_constructor(
    "!override", lambda loader, node: Replacement(loader.construct_sequence(node, deep=True))
)


def load_yaml(path: Path) -> Any:
    """A YAML file."""
    return yaml.load(path.read_text("utf-8"), ComposeLoader)


def merge_services(base: dict[str, Any], override: dict[str, Any]) -> dict[str, Any]:
    """Merge as compose does: maps by key, lists appended, other values and commands replaced."""
    merged = dict(base)
    for key, value in override.items():
        old = merged.get(key)
        if isinstance(value, Replacement) or old is None or key == "command":
            merged[key] = list(value) if isinstance(value, list) else value
        elif isinstance(value, dict):
            merged[key] = merge_services(old, value)
        elif isinstance(value, list):
            merged[key] = [*old, *value]
        else:
            merged[key] = value
    return merged


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """The services of docker-compose.yml, of all profiles."""
    services: dict[str, Any] = load_yaml(CHECKOUT / "docker-compose.yml")["services"]
    return services


@pytest.fixture(scope="module")
def secured(plain: dict[str, Any]) -> dict[str, Any]:
    """The same with docker-compose.secure.yml."""
    return merge_services(
        plain, load_yaml(CHECKOUT / "deploy" / "docker-compose.secure.yml")["services"]
    )


def is_public(service: dict[str, Any]) -> bool:
    """Whether other hosts may reach a port of the service."""
    return any(not port.startswith("127.0.0.1:") for port in service.get("ports", ()))


def merge_configs(paths: list[str]) -> dict[str, Any]:
    """A collector's configuration of several files: maps are merged, lists replaced."""

    def merge(base: Any, more: Any) -> Any:
        if not (isinstance(base, dict) and isinstance(more, dict)):
            return more
        return base | {key: merge(base.get(key), value) for key, value in more.items()}

    merged: dict[str, Any] = {}
    for path in paths:
        text = (CHECKOUT / "collector" / path).read_text("utf-8")
        merged = merge(merged, yaml.safe_load(re.sub(r"\$\{[^}]*\}", "x", text)))
    return merged


def list_configs(service: dict[str, Any]) -> list[str]:
    """Paths of a collector's configuration files, below collector/."""
    return [word.removeprefix("--config=/etc/otelcol/") for word in service["command"]]


def test_only_collectors_are_public(plain: dict[str, Any], secured: dict[str, Any]) -> None:
    """TTFT_BIND opens what asks for a token; all else that has ports is on loopback, in each profile."""
    public = {name for name, service in secured.items() if is_public(service)}
    assert public == {"collector", "collector-sampling", "collector-tier1"}
    assert {name for name, service in plain.items() if is_public(service)} > public
    for name in public:
        assert secured[name]["ports"] == [f"{PUBLIC}{port}:{port}" for port in (4317, 4318)]


def test_public_collectors_ask_for_a_token(plain: dict[str, Any], secured: dict[str, Any]) -> None:
    """Each collector with ports has TLS and the token on each receiver, and runs the extension for it."""
    for name, service in secured.items():
        if not (name.startswith("collector") and is_public(service)):
            continue
        assert set(service["secrets"]) == TOKEN_FILES, name
        config, before = (
            merge_configs(list_configs(service)),
            merge_configs(list_configs(plain[name])),
        )
        assert set(config["receivers"]) == {"otlp"}, name
        for protocol in config["receivers"]["otlp"]["protocols"].values():
            assert protocol["auth"] == {"authenticator": "bearertokenauth"}, name
            assert {"cert_file", "key_file"} <= set(protocol["tls"]), name
        extensions = config["service"]["extensions"]
        assert extensions == [*before["service"]["extensions"], "bearertokenauth"], name
        assert set(extensions) <= set(config["extensions"]), name
        assert config["service"]["pipelines"] == before["service"]["pipelines"], name


def test_demo_router_sends_over_tls(secured: dict[str, Any]) -> None:
    """The demo's router reaches a collector that asks for TLS and a token."""
    router = secured["router"]
    environment = router["environment"]
    assert environment["OTEL_EXPORTER_OTLP_ENDPOINT"].startswith("https://collector:")
    certificate = environment["OTEL_EXPORTER_OTLP_CERTIFICATE"].removeprefix("/run/secrets/")
    assert certificate in router["secrets"]
    assert environment["OTEL_EXPORTER_OTLP_HEADERS"] == "${TTFT_OTLP_HEADERS:-}"


@pytest.mark.parametrize(
    "name", ["docker-compose.yml", "deploy/router.Dockerfile", "deploy/inject.Dockerfile"]
)
def test_images_are_pinned(name: str) -> None:
    """An image is pinned by digest, or down to its patch release; CONTRIBUTING says how both are renewed."""
    text = (CHECKOUT / name).read_text("utf-8")
    images = re.findall(r"^\s*(?:image:|FROM) (\S+)", text, re.M)
    assert images
    for image in images:
        own = image == "ttft-otel-router:local"
        assert own or re.search(r"@sha256:[0-9a-f]{64}$|:v?\d+\.\d+\.\d+[\w.-]*$", image), image
    assert "digest" in (CHECKOUT / "CONTRIBUTING.md").read_text("utf-8")
