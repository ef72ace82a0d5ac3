# SPDX-License-Identifier: Apache-2.0
"""Commands of README and guides, from an environment that has nothing but the wheel, outside the checkout.

Those that need a vLLM, Docker, a cluster or a checkout are named in NOT_HERE with what they need; every other
one runs, as it is shown, in a network namespace in which nothing but its own server listens.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from test_wheel import build_wheel, make_environment

from lab import uv_command
from tests.test_docs_commands import list_commands

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]
# Command, or its first words -> what it needs beside the wheel.
NOT_HERE: Final = {
    "scripts/": "a checkout",
    "docker build": "a checkout and Docker",
    "vllm serve": "vLLM",
    "pip install": "done: the wheel with the extras",
    "curl": "vLLM or the router's admin port",
    "ttft-otel stack up": "Docker",
    "ttft-otel stack smoke": "a running stack",
    "ttft-otel dashboards": "a Grafana",
    "ttft-otel bench --": "a vLLM server",
    "ttft-otel bench compare": "two results of a vLLM server",
    "ttft-otel router --discover": "a cluster",
    "ttft-otel router --config": "a file that the guide shows",
    "ttft-otel router --shared-state": "a Valkey",
    "ttft-otel router --backend https": "certificates",
    "ttft-otel router --routing-logic ttft --prefix-index": "KV events of vLLM",
}
# They run until they are interrupted.
SERVERS: Final = ("ttft-otel serve", "ttft-otel router", "ttft-otel demo --recorded")
# What only a server or a store has that is not here: refused with a sentence and a remedy.
REFUSED: Final = (
    *("doctor", "--tempo", "--join", "top --server", "--since 14:00", "--by service", "mcp"),
    *("--trace 4bf92f", "explain --request ID", "--a 2h..1h", "whatif", "--last 1 --server"),
)
START_S: Final = 60.0


def list_shown() -> list[str]:
    """Each of our commands that README and guides show, once, without variables and pipes."""
    found = dict[str, None]()
    for words in list_commands():
        while "=" in words[0]:
            words = words[1:]
        words = words[: words.index("|")] if "|" in words else words
        found[shlex.join(words)] = None
    return [each for each in found if not each.startswith(tuple(NOT_HERE))]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and the extras that its users choose."""
    wheel = build_wheel(tmp_path_factory.getbasetemp())
    return make_environment(tmp_path_factory, f"{wheel}[serve,router,bench,explain,mcp]")


def test_uvx(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    """`uvx` runs what needs no vLLM, without an environment of the user's."""
    wheel = build_wheel(tmp_path_factory.getbasetemp())
    words = ("tool", "run", "--quiet", "--from", f"{wheel}[serve,explain]", "ttft-otel")
    env = {"HOME": os.environ["HOME"], "PATH": os.environ["PATH"]}
    for command in (
        "demo --recorded --db spans.db",
        "report --db spans.db",
        "explain --db spans.db",
        "stack init stack",
    ):
        assert uv_command.run_uv(*words, *command.split(), env=env, cwd=tmp_path), command
    assert (tmp_path / "stack" / "docker-compose.yml").is_file()


@pytest.fixture(scope="module")
def alone() -> Iterator[tuple[str, ...]]:
    """Words before a command that run it where the ports of the guides are free."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("a network namespace needs root and iproute2: apt-get install iproute2")
    name = f"ttft-docs-{os.getpid()}"
    for words in (("netns", "add", name), ("-n", name, "link", "set", "lo", "up")):
        done = subprocess.run(("ip", *words), capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no network namespace: {done.stderr.strip()}")
    yield ("ip", "netns", "exec", name)
    subprocess.run(("ip", "netns", "del", name), check=True)


class Shell:
    """Runs commands of the environment in a user's folder."""

    def __init__(self, environment: Path, alone: tuple[str, ...], home: Path) -> None:
        self.bin = environment / "bin"
        self.alone = alone
        self.home = home
        self.env = {"HOME": str(home), "PATH": f"{self.bin}:/usr/bin:/bin", "PYTHONUNBUFFERED": "1"}

    def start(self, command: str) -> subprocess.Popen[str]:
        """Start a command line."""
        return subprocess.Popen(
            (*self.alone, *shlex.split(command)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            cwd=self.home,
            env=self.env,
        )

    def run(self, command: str) -> tuple[int, str]:
        """Its exit code and what it prints."""
        process = self.start(command)
        try:
            said, _ = process.communicate(timeout=120)
        finally:
            process.kill()
        return process.returncode, said

    def listens(self) -> bool:
        """Whether anything listens in the namespace."""
        found = subprocess.run(
            (*self.alone, "cat", "/proc/net/tcp"), capture_output=True, text=True, check=True
        )
        return any(line.split()[3] == "0A" for line in found.stdout.splitlines()[1:])

    def serve(self, command: str) -> str:
        """Start a server, wait until it listens, interrupt it; gives what it has printed."""
        process = self.start(command)
        try:
            deadline = time.monotonic() + START_S
            while not self.listens():
                assert process.poll() is None, process.communicate()[0]
                assert time.monotonic() < deadline, f"{command} does not listen"
                time.sleep(0.2)
            time.sleep(2)  # until it handles Ctrl-C; a user reads first
            process.send_signal(signal.SIGINT)
            said, _ = process.communicate(timeout=60)
        finally:
            process.kill()
        assert process.returncode == 0 or said.endswith("Aborted!\n"), said
        return said


def test_commands(environment: Path, alone: tuple[str, ...], tmp_path: Path) -> None:
    """Each runs: answers, or refuses in a sentence what only a server or a store could tell."""
    shell = Shell(environment, alone, tmp_path)
    # The requests that later commands ask for, in the store that they ask by default.
    store = tmp_path / ".local" / "state" / "ttft-otel" / "spans.db"
    store.parent.mkdir(parents=True)
    code, said = shell.run(f"ttft-otel demo --recorded --db {store}")
    assert code == 0, said
    answered, wrong = [], []
    for command in list_shown():
        if command.startswith(SERVERS):
            said = shell.serve(command)
            code = 0
        else:
            code, said = shell.run(command)
        refused = code != 0 and said.strip() and any(part in command for part in REFUSED)
        if "Traceback" in said or "Usage:" in said or not (code == 0 or refused):
            wrong.append(f"{command}: {code}: {said[-600:]}")
        answered += [command] if code == 0 else []

    sys.stdout.write(f"{len(list_shown())} commands, {len(answered)} answered: {answered}\n")
    assert wrong == []
    assert {each.split()[1] for each in answered} >= {
        "serve",
        "router",
        "report",
        "explain",
        "stack",
    }
