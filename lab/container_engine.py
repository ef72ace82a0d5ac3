# SPDX-License-Identifier: Apache-2.0
"""A Docker engine of a test's own, in a network namespace of its own; tests/containers starts it.

Its bridges, iptables rules and published ports are in that namespace, on whose loopback the stack listens,
and its images, containers and volumes in the test's folder: nothing of the machine's own Docker is seen or
touched, and stop() leaves nothing. Needs root, dockerd and nsenter.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from lab.local_servers import exit_on_sigterm
from lab.stack.program_pins import CHECKOUT

PROGRAMS: Final = ("dockerd", "docker", "containerd", "runc", "iptables", "nsenter", "debootstrap")
PACKAGES: Final = "docker.io iptables util-linux debootstrap busybox-static"
START_TIMEOUT_S: Final = 60.0  # seconds until the engine answers
STOP_TIMEOUT_S: Final = 60.0  # seconds for the engine to stop its containers
COMMAND_TIMEOUT_S: Final = 280.0  # seconds for one command
NAMESPACES: Final = Path("/run/netns")


class EngineError(RuntimeError):
    """The engine did not start, or a command failed; the message has its words."""


def find_missing() -> str:
    """What this machine lacks to run an engine, with the remedy; "" if nothing."""
    if os.geteuid():
        return "an engine of its own needs root"
    missing = [name for name in PROGRAMS if not shutil.which(name)]
    if missing:
        return f"no {', '.join(missing)}: apt-get install --no-install-recommends {PACKAGES}"
    return ""


class ContainerEngine:
    """dockerd below `folder`. compose: the plugin `docker compose`, as a program; None: without it."""

    def __init__(self, folder: Path, compose: Path | None = None) -> None:
        self.folder = folder
        self.compose = compose
        self.namespace = f"ttft-{os.urandom(4).hex()}"
        self.process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    @property
    def env(self) -> dict[str, str]:
        """What makes `docker` talk to this engine."""
        # The legacy builder: BuildKit's plugin is a download of its own.
        return {
            "DOCKER_HOST": f"unix://{self.folder / 'docker.sock'}",
            "DOCKER_CONFIG": str(self.folder / "config"),
            "DOCKER_BUILDKIT": "0",
        }

    def start(self) -> None:
        """Start it, with what it had if it ran before, and wait until it answers. Raises EngineError."""
        if not (NAMESPACES / self.namespace).exists():
            self._prepare()
        self._log = (self.folder / "dockerd.log").open("ab")
        words = (
            "dockerd", "--data-root", self.folder / "data", "--exec-root", self.folder / "exec",
            "-H", f"unix://{self.folder / 'docker.sock'}", "--pidfile", self.folder / "pid",
        )  # fmt: skip
        self.process = subprocess.Popen(
            self.enter_network(words), stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise EngineError((self.folder / "dockerd.log").read_text()[-3000:])
            time.sleep(0.3)

    def run_inside(
        self, *words: str | Path, env: Mapping[str, str] | None = None, check: bool = True
    ) -> str:
        """What a program prints that runs in the engine's network, from the checkout.

        Raises EngineError when it fails, unless `check` is false.
        """
        done = subprocess.run(
            self.enter_network(words),
            env={**os.environ, **self.env, **(env or {})},
            cwd=CHECKOUT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
        )
        if check and done.returncode:
            command = " ".join(map(str, words))
            raise EngineError(f"{command} ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def run_docker(self, *words: str, env: Mapping[str, str] | None = None) -> str:
        """What `docker` prints. Raises EngineError."""
        return self.run_inside("docker", *words, env=env)

    def import_image(self, root: Path, name: str, *changes: str) -> None:
        """Make a folder the only layer of an image. changes: lines of a Dockerfile. Raises EngineError."""
        chosen = [word for line in changes for word in ("--change", line)]
        with subprocess.Popen(
            ("tar", "--create", "--numeric-owner", "--directory", root, "."), stdout=subprocess.PIPE
        ) as tar:
            done = subprocess.run(
                ("docker", "import", *chosen, "-", name),
                env={**os.environ, **self.env},
                stdin=tar.stdout,
                capture_output=True,
                text=True,
            )
        if done.returncode or tar.returncode:
            raise EngineError(f"docker import {name}: {done.stderr}")

    def stop_engine(self) -> None:
        """End the engine; images, volumes and what it knows of containers stay."""
        assert self.process is not None and self._log is not None
        self.process.terminate()
        try:
            self.process.wait(STOP_TIMEOUT_S)
        finally:
            self._log.close()

    def stop(self) -> None:
        """Remove containers, end the engine, and take away all that it left; idempotent."""
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(EngineError, subprocess.TimeoutExpired):
                found = self.run_docker("ps", "--all", "--quiet").split()
                if found:
                    self.run_docker("rm", "--force", "--volumes", *found)
            self.stop_engine()
        # What a killed engine leaves: containerd, shims and their containers, all with our folder's name.
        for pid in list_pids_that_name(str(self.folder)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for place in list_mounts_below(self.folder):
            subprocess.run(("umount", "--lazy", place), check=False, capture_output=True)
        subprocess.run(("ip", "netns", "del", self.namespace), check=False, capture_output=True)
        # The first `ip netns add` on a machine mounts the folder on itself.
        if NAMESPACES.is_dir() and not any(NAMESPACES.iterdir()):
            subprocess.run(("umount", NAMESPACES), check=False, capture_output=True)
        shutil.rmtree(self.folder / "data", ignore_errors=True)
        shutil.rmtree(self.folder / "exec", ignore_errors=True)
        # The kernel keeps empty groups of the engine, the innermost first; those in use refuse to go.
        groups = [path for path in Path("/sys/fs/cgroup").glob("*/docker/**/") if path.is_dir()]
        for group in sorted(groups, reverse=True):
            with contextlib.suppress(OSError):
                group.rmdir()

    def _prepare(self) -> None:
        plugins = self.folder / "config" / "cli-plugins"
        plugins.mkdir(parents=True)
        if self.compose:
            (plugins / "docker-compose").symlink_to(self.compose)
        subprocess.run(("ip", "netns", "add", self.namespace), check=True)
        subprocess.run(self.enter_network(("ip", "link", "set", "lo", "up")), check=True)

    def _answers(self) -> bool:
        """Whether the engine answers."""
        return bool(self.run_inside("docker", "info", "--format", "{{.ID}}", check=False).strip())

    def enter_network(self, words: Sequence[str | Path]) -> tuple[str, ...]:
        """A command line in the engine's network; `ip netns exec` would hide the control groups."""
        return ("nsenter", f"--net={NAMESPACES / self.namespace}", "--", *map(str, words))


@contextmanager
def run_engine(folder: Path, compose: Path | None = None) -> Iterator[ContainerEngine]:
    """An engine, ready when the block begins, gone without a trace when it ends."""
    engine = ContainerEngine(folder, compose)
    with exit_on_sigterm():
        try:
            engine.start()
            yield engine
        finally:
            engine.stop()


def list_pids_that_name(text: str) -> list[int]:
    """Processes with `text` in their command line, ours apart."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if text.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
    return found


def list_mounts_below(folder: Path) -> list[str]:
    """Mount points below a folder, the deepest first."""
    places = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    return sorted((each for each in places if each.startswith(f"{folder}/")), reverse=True)
