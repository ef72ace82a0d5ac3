# SPDX-License-Identifier: Apache-2.0
"""Run the stack with `docker compose` and docker-compose.yml."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from typing import Any, Final

from lab.stack.program_pins import CHECKOUT

COMPOSE_FILE: Final = CHECKOUT / "docker-compose.yml"
ONE_SHOT_SERVICE: Final = "storage"  # its service that ends when it has done its work
DOCKER_REMEDY: Final = (
    "install Docker with its compose plugin (https://docs.docker.com/compose/install/),"
    " or run without it: scripts/stack up --native"
)


class DockerError(RuntimeError):
    """Docker is missing or reported an error; the message has the remedy."""


def run_compose(*arguments: str, profiles: Sequence[str] = (), capture: bool = False) -> str:
    """Run one `docker compose` command; returns its output when captured. Raises DockerError."""
    require_docker()
    chosen = [word for profile in profiles for word in ("--profile", profile)]
    # The file by its path: the command may be run from any folder.
    command = ["docker", "compose", "--file", str(COMPOSE_FILE), *chosen, *arguments]
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


def is_docker_available() -> bool:
    """Whether the stack could run in containers here."""
    try:
        require_docker()
    except DockerError:
        return False
    return True


def list_services() -> list[dict[str, Any]]:
    """The state of our containers, as `docker compose ps` gives it: Service, State, Health ..."""
    # --all, because the one-shot service has ended. One JSON document a line since compose 2.21.
    lines = run_compose("ps", "--all", "--format", "json", capture=True).splitlines()
    return [json.loads(line) for line in lines if line.strip()]
