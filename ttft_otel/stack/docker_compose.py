# SPDX-License-Identifier: Apache-2.0
"""Run a stack's folder with `docker compose`, for commands/stack.py."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

COMPOSE_FILE: Final = "docker-compose.yml"
OVERLAYS: Final = ("admin", "alerts", "secure")  # deploy/docker-compose.NAME.yml
ONE_SHOT_SERVICE: Final = "storage"  # its service that ends when it has done its work
PORTS: Final = {3000: "Grafana", 4317: "OTLP over gRPC", 4318: "OTLP over HTTP"}
DOCKER_REMEDY: Final = (
    "install Docker with its compose plugin (https://docs.docker.com/compose/install/);"
    " a checkout runs the stack without it: scripts/stack up"
)


class DockerError(RuntimeError):
    """Docker is missing or reported an error; the message has the remedy."""


def run_compose(
    folder: Path,
    *arguments: str,
    profiles: Sequence[str] = (),
    overlays: Sequence[str] = (),
    capture: bool = False,
) -> str:
    """Run one `docker compose` command; returns its output when captured. Raises DockerError."""
    require_docker()
    files = [COMPOSE_FILE, *(f"deploy/docker-compose.{name}.yml" for name in overlays)]
    # Files by their path: the command may be run from any folder.
    chosen = [word for name in files for word in ("--file", str(folder / name))]
    chosen += [word for profile in profiles for word in ("--profile", profile)]
    command = ["docker", "compose", *chosen, *arguments]
    # Not captured, compose draws its progress on the terminal itself.
    done = subprocess.run(command, text=True, capture_output=capture, check=False)
    if done.returncode:
        said = (done.stderr or "").strip() if capture else "its own words are above"
        raise DockerError(f"`{' '.join(command)}` failed: {said}")
    return done.stdout or ""


def require_docker() -> None:
    """Raise DockerError unless there are a client with the compose plugin and a daemon."""
    # The plugin can be there without a daemon; each has another remedy.
    for words, missing in (
        (("docker", "compose", "version"), "docker compose is missing"),
        (("docker", "info"), "the Docker daemon does not answer"),
    ):
        try:
            subprocess.run(words, capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise DockerError(f"{missing}; {DOCKER_REMEDY}") from error


def require_free_ports(ports: Sequence[int] = tuple(PORTS)) -> None:
    """Raise DockerError where another program has a port of the stack."""
    taken = list[str]()
    for port in ports:
        with socket.socket() as probe:
            # Connected and not bound: a port in TIME_WAIT is free for Docker.
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                taken.append(f"{port} ({PORTS.get(port, 'stack')})")
    if taken:
        raise DockerError(
            f"ports in use: {', '.join(taken)}; stop what has them "
            "(`ttft-otel serve` listens on 4317 and 4318)"
        )


def list_services(folder: Path) -> list[dict[str, Any]]:
    """The state of our containers, as `docker compose ps` gives it: Service, State, Health ..."""
    # --all, because the one-shot service has ended. One JSON document a line since compose 2.21.
    lines = run_compose(folder, "ps", "--all", "--format", "json", capture=True).splitlines()
    return [json.loads(line) for line in lines if line.strip()]


def is_ready(service: dict[str, Any]) -> bool:
    """Whether one container of list_services() does its work; without a health check: whether it runs."""
    condition = service.get("Health") or service.get("State", "")
    # Volumes get their owner from a service that then ends.
    done = service.get("Service") == ONE_SHOT_SERVICE and service.get("ExitCode") == 0
    return condition in ("healthy", "running") or done
