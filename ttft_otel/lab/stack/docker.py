# SPDX-License-Identifier: Apache-2.0
"""Run the stack with `docker compose` and docker-compose.yml; command.py asks."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from typing import Any, Final

from ttft_otel.lab.stack.pins import CHECKOUT

FILE: Final = CHECKOUT / "docker-compose.yml"
ONCE: Final = "storage"  # its service that ends when it has done its work
REMEDY: Final = (
    "install Docker with its compose plugin (https://docs.docker.com/compose/install/),"
    " or run without it: scripts/stack up --native"
)


class DockerError(RuntimeError):
    """Docker is missing or said no; the message holds the remedy."""


def compose(*words: str, profiles: Sequence[str] = (), capture: bool = False) -> str:
    """Run one `docker compose` command; gives its output when captured. Raises DockerError."""
    require()
    chosen = [word for profile in profiles for word in ("--profile", profile)]
    command = ["docker", "compose", "--file", str(FILE), *chosen, *words]
    done = subprocess.run(command, text=True, capture_output=capture, check=False)
    if done.returncode:
        said = (done.stderr or "").strip() if capture else "its own words are above"
        raise DockerError(f"`{' '.join(command)}` failed: {said}")
    return done.stdout or ""


def require() -> None:
    """Raise DockerError unless there are a client with the compose plugin and a daemon."""
    for words, missing in (
        (("docker", "compose", "version"), "docker compose is missing"),
        (("docker", "info"), "the Docker daemon does not answer"),
    ):
        try:
            subprocess.run(words, capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise DockerError(f"{missing}; {REMEDY}") from error


def there() -> bool:
    """Whether the stack could run in containers here."""
    try:
        require()
    except DockerError:
        return False
    return True


def services() -> list[dict[str, Any]]:
    """What compose knows of our containers: Service, State, Health ..."""
    lines = compose("ps", "--all", "--format", "json", capture=True).splitlines()
    return [json.loads(line) for line in lines if line.strip()]
