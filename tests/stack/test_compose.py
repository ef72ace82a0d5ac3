# SPDX-License-Identifier: Apache-2.0
"""docker-compose.yml as docker compose reads it: what listens where, what may grow, who may log in.

Read by compose's own library (tools/compose), which is what `docker compose config` runs; nothing here
starts a container.
"""

from __future__ import annotations

import functools
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lab.stack.binaries import StackBinaries
from lab.stack.program_pins import CHECKOUT
from tests.stack.test_tools import COMBINATIONS, run_program
from ttft_otel.commands import main as cli
from ttft_otel.commands.router.command import command as router
from ttft_otel.stack import stack_folder

Config = Callable[..., dict[str, Any]]

# What a user may switch on, and the services that then run beside these.
ALWAYS = {"storage", "tempo", "prometheus", "grafana"}
PROFILES = {
    (): {"collector"},
    ("sampling",): {"collector-sampling"},
    ("scale-out",): {"collector-tier1", "collector-a", "collector-b"},
    ("demo",): {"collector", "router"},
}
# An image's tag down to the patch, with or without its digest, or our own build.
PINNED = re.compile(
    r"(otel|grafana|prom)/[\w-]+:v?\d+\.\d+\.\d+(@sha256:[0-9a-f]{64})?|ttft-otel-(router|answers):local"
)


@pytest.fixture(scope="session")
def config(binaries: StackBinaries) -> Config:
    """`docker compose config` with profiles and further files."""

    @functools.cache
    def run_config(names: tuple[str, ...], words: tuple[str, ...], env: str) -> dict[str, Any]:
        paths = [CHECKOUT / name for name in names]
        found: dict[str, Any] = json.loads(
            run_program(binaries.compose, *paths, *words, env=json.loads(env))
        )
        return found

    def read_config(
        *profiles: str, files: tuple[str, ...] = (), env: dict[str, str] | None = None
    ) -> dict[str, Any]:
        words = tuple(f"+{profile}" for profile in profiles)
        return run_config(("docker-compose.yml", *files), words, json.dumps(env or {}))

    return read_config


def list_host_ports(service: dict[str, Any]) -> set[str]:
    """Ports that a service opens on the host."""
    return {port["published"] for port in service.get("ports", ())}


def find_inlet(services: dict[str, Any]) -> str:
    """The name of the only service where servers of other hosts send."""
    [inlet] = [name for name, service in services.items() if "4318" in list_host_ports(service)]
    return inlet


EACH_PROFILE = pytest.mark.parametrize(
    "profiles", PROFILES, ids=lambda profiles: "-".join(profiles) or "default"
)
ALERTS, ADMIN, SECURE = (
    f"deploy/docker-compose.{name}.yml" for name in ("alerts", "admin", "secure")
)
SECRETS = {f"TTFT_OTLP_{name}": f"/{name}" for name in ("CERT", "KEY", "TOKEN")}


@EACH_PROFILE
def test_who_runs(config: Config, profiles: tuple[str, ...]) -> None:
    """Each profile has exactly one collector where servers send; without any, the plain one runs.

    Ports are 3000, 4317 and 4318 (and the demo's router), on loopback, until TTFT_BIND says otherwise.
    """
    services = config(*profiles)["services"]
    assert set(services) == ALWAYS | PROFILES[profiles]
    inlet = find_inlet(services)
    aliases = (services[inlet]["networks"]["default"] or {}).get("aliases", ())
    assert "collector" in {inlet, *aliases}, "containers send to http://collector:4318"

    for env, address in (({}, "127.0.0.1"), ({"TTFT_BIND": "192.0.2.7"}, "192.0.2.7")):
        services = config(*profiles, env=env)["services"].values()
        found = {port for service in services for port in list_host_ports(service)}
        assert found == {"3000", "4317", "4318"} | ({"8000"} if "demo" in profiles else set())
        hosts = {port["host_ip"] for service in services for port in service.get("ports", ())}
        assert hosts == {address}
        assert not [each for each in services if each.get("network_mode") == "host"]


def test_written_folder(binaries: StackBinaries, tmp_path: Path, config: Config) -> None:
    """Compose reads the folder of `ttft-otel stack init` as it reads the checkout, with every overlay."""
    stack_folder.write_folder(tmp_path)
    env = {**SECRETS, "TTFT_GRAFANA_PASSWORD": "/file"}
    overlays = (f"deploy/docker-compose.{name}.yml" for name in stack_folder.OVERLAYS)
    files = ("docker-compose.yml", *overlays)
    text = run_program(binaries.compose, *(tmp_path / name for name in files), "+*", env=env)

    found = json.loads(text.replace(str(tmp_path), str(CHECKOUT)))
    assert found == config("*", files=files[1:], env=env)


def test_hardened(config: Config) -> None:
    """Every container: a pinned image, not root, no powers, a disk to read only, bounded memory and logs."""
    found = config("*", files=(ALERTS,))
    for name, service in found["services"].items():
        assert PINNED.fullmatch(service["image"]), name
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"], name
        assert int(service["deploy"]["resources"]["limits"]["memory"]) <= 2**30, name
        assert service["logging"]["options"].keys() == {"max-size", "max-file"}, name
        # Root for one chown, with no network and nothing but that power.
        if name == stack_folder.ONE_SHOT_SERVICE:
            assert (service["cap_add"], service["network_mode"]) == (["CHOWN"], "none")
        else:
            assert "cap_add" not in service
            assert int(service["user"].split(":")[0]) > 0, name


def test_alerts_overlay(config: Config) -> None:
    """Two more services, on loopback whatever TTFT_BIND says."""
    found = config(files=(ALERTS,), env={"TTFT_BIND": "192.0.2.7"})
    services = found["services"]
    assert set(services) == ALWAYS | PROFILES[()] | {"alertmanager", "answers"}
    for name, port in (("alertmanager", "9093"), ("answers", "4319")):
        (opened,) = services[name]["ports"]
        assert (opened["host_ip"], opened["published"]) == ("127.0.0.1", port)
        assert "healthcheck" in services[name]
    mounted = {
        each["source"]: each["target"]
        for name in ("prometheus", "alertmanager")
        for each in services[name]["volumes"]
        if "/deploy/alerts/" in each["source"]
    }
    assert len(mounted) == 2 and all(Path(source).is_file() for source in mounted)
    assert "/etc/ttft/alertmanagers/targets.yml" in mounted.values()
    words = services["answers"]["entrypoint"][1:] + services["answers"]["command"]
    cli.load_subcommand(words[0], cli.SUBCOMMANDS[words[0]]).make_context(words[0], words[1:])


def test_health(config: Config) -> None:
    """Who can be asked is asked; Grafana waits for its sources, collectors for their volume's owner."""
    services, one_shot = config("*")["services"], stack_folder.ONE_SHOT_SERVICE
    for name, service in services.items():
        collector = name.startswith("collector")  # its image has no shell and no other program
        assert ("healthcheck" in service) is not (collector or name == one_shot), name
        if collector:
            waits = service["depends_on"][one_shot]["condition"]
            assert waits == "service_completed_successfully"
    owned = {each["target"] for each in services[one_shot]["volumes"]}
    assert owned == set(services[one_shot]["entrypoint"][2:])
    queues = {
        each["source"]
        for name, service in services.items()
        for each in service.get("volumes", ())
        if name.startswith("collector") and each["type"] == "volume"
    }
    assert queues == {each["source"] for each in services[one_shot]["volumes"]}


def test_fresh_clone(config: Config) -> None:
    """Every file that is mounted or built from is in the repository."""
    tracked = set(run_program("git", "-C", CHECKOUT, "ls-files").splitlines())
    folders = {str(parent) for path in tracked for parent in Path(path).parents}
    found = config("*")
    for service in found["services"].values():
        binds = [each["source"] for each in service.get("volumes", ()) if each["type"] == "bind"]
        for source in binds:
            assert str(Path(source).relative_to(CHECKOUT)) in tracked | folders
        if "build" in service:
            assert service["build"]["dockerfile"] in tracked
    assert not found.get("secrets"), "a secret would have to be prepared"


def test_nobody_logs_in(config: Config, binaries: StackBinaries) -> None:
    """Grafana has anonymous viewers and no admin; docker-compose.admin.yml makes one, whose password is in
    a file that must be named.
    """
    env = config()["services"]["grafana"]["environment"]
    assert env["GF_AUTH_ANONYMOUS_ENABLED"] == "true"
    assert env["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert env["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert env["GF_AUTH_DISABLE_LOGIN_FORM"] == "true" and env["GF_AUTH_BASIC_ENABLED"] == "false"
    assert not [name for name in env if "PASSWORD" in name]

    found = config(files=(ADMIN,), env={"TTFT_GRAFANA_PASSWORD": "/pass"})
    grafana = found["services"]["grafana"]
    env = grafana["environment"]
    assert env["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "false"
    assert env["GF_SECURITY_ADMIN_PASSWORD__FILE"] == "/run/secrets/grafana_password"
    assert env["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    kept = [each["target"] for each in grafana["volumes"] if each["type"] == "volume"]
    assert kept == ["/var/lib/grafana"] and "/var/lib/grafana" not in str(grafana["tmpfs"])
    files = (CHECKOUT / "docker-compose.yml", CHECKOUT / ADMIN)
    assert "name a file with the password" in run_program(binaries.compose, *files, code=1)


@EACH_PROFILE
def test_secure(config: Config, profiles: tuple[str, ...]) -> None:
    """With docker-compose.secure.yml collectors ask for the token in each profile; others are on loopback."""
    env = {**SECRETS, "TTFT_BIND": "192.0.2.7"}
    secured = config(*profiles, files=(SECURE,), env=env)["services"]
    collector = secured[find_inlet(secured)]
    for service in secured.values():
        hosts = {port["host_ip"] for port in service.get("ports", ())}
        assert hosts <= {"192.0.2.7" if service is collector else "127.0.0.1"}
    plain = config(*profiles)["services"]
    without = plain[find_inlet(plain)]
    added = collector["command"][len(without["command"]) :]
    assert collector["command"][: len(without["command"])] == without["command"]
    assert added[0] == "--config=/etc/otelcol/secure.yaml"
    targets = {secret["target"] for secret in collector["secrets"]}
    text = (CHECKOUT / "collector" / "secure.yaml").read_text("utf-8")
    assert targets == set(re.findall(r"/run/secrets/\w+", text))
    assert {tuple(list_configs(each)) for each in (collector, without)} <= {*COMBINATIONS}
    # Each receiver of each collector that other hosts reach has TLS and the token.
    merged, before = merge_configs(list_configs(collector)), merge_configs(list_configs(without))
    assert set(merged["receivers"]) == {"otlp"}
    for protocol in merged["receivers"]["otlp"]["protocols"].values():
        assert protocol["auth"] == {"authenticator": "bearertokenauth"}
        assert {"cert_file", "key_file"} <= set(protocol["tls"])
    extensions = merged["service"]["extensions"]
    assert extensions == [*before["service"]["extensions"], "bearertokenauth"]
    assert set(extensions) <= set(merged["extensions"])
    assert merged["service"]["pipelines"] == before["service"]["pipelines"]


def list_configs(service: dict[str, Any]) -> list[str]:
    """Paths of a collector's configuration files, below collector/."""
    return [word.removeprefix("--config=/etc/otelcol/") for word in service["command"]]


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


def test_demo(config: Config) -> None:
    """The demo's router has variables that the router knows, and reaches the collector, with TLS, too."""
    environment = config("demo")["services"]["router"]["environment"]
    # One name, or several.
    named = [option.envvar or [] for option in router.params]
    known = {name for each in named for name in ([each] if isinstance(each, str) else each)}
    own = {name for name in environment if name.startswith("TTFT_OTEL_ROUTER_")}
    assert own and own <= known
    assert environment["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://collector:4318"

    env = {**SECRETS, "TTFT_OTLP_HEADERS": "authorization=Bearer%20x"}
    secured = config("demo", files=(SECURE,), env=env)["services"]["router"]
    environment = secured["environment"]
    assert environment["OTEL_EXPORTER_OTLP_ENDPOINT"].startswith("https://collector:")
    certificate = environment["OTEL_EXPORTER_OTLP_CERTIFICATE"].removeprefix("/run/secrets/")
    assert certificate in {secret["source"] for secret in secured["secrets"]}
    assert environment["OTEL_EXPORTER_OTLP_HEADERS"] == env["TTFT_OTLP_HEADERS"]


def test_images() -> None:
    """Our images copy what .dockerignore lets through, which is what the package is built from."""
    ignored = (CHECKOUT / ".dockerignore").read_text("utf-8").splitlines()
    passed = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    # The wheel that they build has the stack's files in it.
    stack = {name for name in stack_folder.STACK_FILES if "/" not in name} | {"grafana"}
    overlays = {"deploy/alerts", "deploy/docker-compose.*.yml", "deploy/targets"}
    package = {"ttft_otel", *stack, *overlays, "deploy/router.Dockerfile"}
    assert "*" in ignored and passed == package | {"deploy/inject"}
    assert all(any(CHECKOUT.glob(each)) for each in passed)
    for name in ("router", "vllm", "inject"):
        text = (CHECKOUT / "deploy" / f"{name}.Dockerfile").read_text("utf-8")
        bases = re.findall(r"^FROM (\S+)", text, re.M)
        assert all(re.search(r":(\d+\.\d+\.\d+|\$\{VLLM\})", base) for base in bases), bases
        assert name == "vllm" or re.search(r"^USER 10001", text, re.M)
        if name == "router":
            assert shlex.split(text.splitlines()[-1])[1:] == ["[ttft-otel,", "router]"]


def test_settings() -> None:
    """.env holds only what docker-compose.yml reads, with the defaults that it has without .env."""
    compose = (CHECKOUT / "docker-compose.yml").read_text("utf-8")
    defaults = dict(re.findall(r"\$\{(TTFT_\w+):-([^}]*)\}", compose))
    lines = [line for line in (CHECKOUT / ".env").read_text("utf-8").splitlines() if "=" in line]
    settings = dict(line.split("=", 1) for line in lines if not line.startswith("#"))
    assert settings.pop("COMPOSE_PROFILES") == "plain"
    assert settings == {name: defaults[name] for name in settings}


def test_versions_are_told() -> None:
    """The guide names every image that is shipped, for what was validated instead of it."""
    reported = (CHECKOUT / "docs" / "guides" / "dashboards.md").read_text("utf-8")
    text = (CHECKOUT / "docker-compose.yml").read_text("utf-8")
    for image in set(re.findall(r"image: (\S+/\S+)", text)):
        assert image in reported, image


def test_tempo_config() -> None:
    """Tempo's shipped file and the native one agree on what both can say."""
    shipped, native = (
        yaml.safe_load((CHECKOUT / "grafana" / "tempo" / f"{name}.yaml").read_text("utf-8"))
        for name in ("tempo", "native")
    )
    assert shipped["stream_over_http_enabled"] == native["stream_over_http_enabled"]
    limits = (each["overrides"]["defaults"]["ingestion"] for each in (shipped, native))
    assert 1 == len({(each["rate_limit_bytes"], each["burst_size_bytes"]) for each in limits})
    kept = (shipped["backend_worker"]["compaction"], native["compactor"]["compaction"])
    assert kept[0]["block_retention"] == kept[1]["block_retention"]
    refused = {"ingester", "compactor", "ingester_client", "metrics_generator_client"}
    assert not refused & set(shipped), "Tempo 3 does not start with these"
