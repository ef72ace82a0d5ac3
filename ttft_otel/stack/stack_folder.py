# SPDX-License-Identifier: Apache-2.0
"""A stack's folder for commands/stack.py: files from the wheel or a checkout, and `docker compose` there.

A folder has the layout of the repository, and the package itself, of which compose builds images.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from ttft_otel import __version__

PACKAGE: Final = Path(__file__).resolve().parents[1]
# In the wheel they lie below ttft_otel/_stack: pyproject.toml's force-include has the same list.
STACK_FILES: Final = (
    ".dockerignore",
    ".env",
    "LICENSE",
    "README.md",
    "collector",
    "deploy/alerts",
    "deploy/docker-compose.admin.yml",
    "deploy/docker-compose.alerts.yml",
    "deploy/docker-compose.secure.yml",
    "deploy/router.Dockerfile",
    "deploy/targets",
    "docker-compose.yml",
    "grafana/dashboards",
    "grafana/prometheus",
    "grafana/provisioning",
    "grafana/tempo",
    "hatch_build.py",
    "pyproject.toml",
)
STAMP_FILE: Final = ".ttft-otel.json"  # version and digests of what was written
NAMED_FILES: Final = 3  # so many are named in a message


class StackError(RuntimeError):
    """Files are not there, a folder cannot take them, or Docker reports an error; the text has the remedy."""


def find_root() -> Path:
    """The folder that has STACK_FILES. Raises StackError."""
    packed = PACKAGE / "_stack"
    # An editable install has none: its files are those of the checkout.
    root = packed if packed.is_dir() else PACKAGE.parent
    if not (root / "docker-compose.yml").is_file():
        raise StackError(
            "this installation has no files of the stack; install ttft-otel from its wheel again"
        )
    return root


def list_files() -> dict[str, Path]:
    """Path within a folder -> the file that it is a copy of. Raises StackError."""
    root = find_root()
    found = dict[str, Path]()
    for name in STACK_FILES:
        path = root / name
        for each in path.rglob("*") if path.is_dir() else (path,):
            found[each.relative_to(root).as_posix()] = each
    for each in PACKAGE.rglob("*"):
        inside = each.relative_to(PACKAGE)
        if not {"__pycache__", "_stack"} & set(inside.parts):
            found[f"ttft_otel/{inside.as_posix()}"] = each
    return {name: path for name, path in sorted(found.items()) if path.is_file()}


def compute_digest(path: Path) -> str:
    """The digest of a file's content; "" where there is none."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def read_stamp(folder: Path) -> tuple[str, dict[str, str]]:
    """The version that wrote a folder, and its files' digests. Raises StackError."""
    try:
        stamp = json.loads((folder / STAMP_FILE).read_text("utf-8"))
        return str(stamp["version"]), dict(stamp["files"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise StackError(
            f"{folder} was not written by `ttft-otel stack init {folder}`: run that first"
        ) from error


def compare_folder(folder: Path) -> tuple[str, list[str], list[str]]:
    """The version that wrote a folder, files that this package has otherwise, and files that were edited.

    Raises StackError for a folder without a stamp.
    """
    version, written = read_stamp(folder)
    new = {name: compute_digest(path) for name, path in list_files().items()}
    outdated = [name for name in {**new, **written} if new.get(name) != written.get(name)]
    edited = [name for name in written if compute_digest(folder / name) != written[name]]
    return version, sorted(outdated), sorted(edited)


def write_folder(folder: Path, force: bool = False) -> list[str]:
    """Write all files, or bring a folder to this version; gives the files that a user edited, which are kept.

    force: replace those, too. Raises StackError where other files are in the way, and OSError.
    """
    files = list_files()
    written = read_stamp(folder)[1] if (folder / STAMP_FILE).exists() else {}
    new = {name: compute_digest(path) for name, path in files.items()}
    kept = [
        name
        for name in files
        if compute_digest(folder / name) not in ("", new[name], written.get(name))
    ]
    if kept and not written and not force:
        raise StackError(
            f"{folder} has other files of these names ({', '.join(kept[:NAMED_FILES])}); "
            "choose another folder, or --force to replace them"
        )
    for name, source in files.items():
        if force or name not in kept:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    # A rule that this version no longer has would go on firing.
    for name in written.keys() - files.keys():
        if compute_digest(folder / name) == written[name]:
            (folder / name).unlink()
    stamp = json.dumps({"version": __version__, "files": new}, indent=1)
    (folder / STAMP_FILE).write_text(f"{stamp}\n", "utf-8")
    return [] if force else kept


COMPOSE_FILE: Final = "docker-compose.yml"
OVERLAYS: Final = ("admin", "alerts", "secure")  # deploy/docker-compose.NAME.yml
ONE_SHOT_SERVICE: Final = "storage"  # its service that ends when it has done its work
PORTS: Final = {3000: "Grafana", 4317: "OTLP over gRPC", 4318: "OTLP over HTTP"}
DOCKER_REMEDY: Final = (
    "install Docker with its compose plugin (https://docs.docker.com/compose/install/);"
    " a checkout runs the stack without it: scripts/stack up"
)


def run_compose(
    folder: Path,
    *arguments: str,
    profiles: Sequence[str] = (),
    overlays: Sequence[str] = (),
    capture: bool = False,
) -> str:
    """Run one `docker compose` command; returns its output when captured. Raises StackError."""
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
        raise StackError(f"`{' '.join(command)}` failed: {said}")
    return done.stdout or ""


def require_docker() -> None:
    """Raise StackError unless there are a client with the compose plugin and a daemon."""
    # The plugin can be there without a daemon; each has another remedy.
    for words, missing in (
        (("docker", "compose", "version"), "docker compose is missing"),
        (("docker", "info"), "the Docker daemon does not answer"),
    ):
        try:
            subprocess.run(words, capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise StackError(f"{missing}; {DOCKER_REMEDY}") from error


def require_free_ports() -> None:
    """Raise StackError where another program has a port of the stack."""
    taken = list[str]()
    for port, user in PORTS.items():
        with socket.socket() as probe:
            # Connected and not bound: a port in TIME_WAIT is free for Docker.
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                taken.append(f"{port} ({user})")
    if taken:
        raise StackError(
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
