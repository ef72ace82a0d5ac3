# SPDX-License-Identifier: Apache-2.0
"""Every command that README and guides show, against the commands that there are."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from lab import compat, demo
from lab.stack import command as stack
from tests.test_docs import BLOCK, README, ROOT, list_constants
from ttft_otel.commands import main as cli
from ttft_otel.hooks import target_check

GUIDES = [ROOT / "docs" / "quickstart.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]


def list_commands() -> list[list[str]]:
    """Every command in the bash blocks of the README and of the guides, in words."""
    texts = [README, *(page.read_text("utf-8") for page in GUIDES)]
    blocks = [text for page in texts for kind, text in BLOCK.findall(page) if kind == "bash"]
    lines = [line for text in blocks for line in text.replace("\\\n", " ").splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def check_own(arguments: list[str]) -> None:
    """A subcommand of ours that this version has, with flags that it has."""
    name, *rest = arguments
    door = cli.SUBCOMMANDS[name]
    cli.load_subcommand(name, door).make_context(name, rest)  # parses, and does not run it


def check_script(name: str) -> Callable[[list[str]], None]:
    """A script that can be executed, with flags that it has."""

    def check(arguments: list[str]) -> None:
        assert os.access(ROOT / name, os.X_OK)
        known = {"scripts/demo": demo.run_demo, "scripts/compat": compat.run_compat}
        if name in known:
            known[name].make_context(name, list(arguments))
        assert name in known or all(flag in (ROOT / name).read_text("utf-8") for flag in arguments)

    return check


def check_pip(arguments: list[str]) -> None:
    """Only this project, with extras that it has."""
    install, wanted = arguments
    found = re.fullmatch(r"\.(?:\[([\w,]+)])?", wanted)
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    assert install == "install" and found
    for extra in (found[1] or "").split(","):
        assert not extra or f"\n{extra} = [" in project


def read_vllm(*patterns: str) -> str:
    """Files of the installed vLLM, one after another."""
    package = target_check.find_vllm_folder()
    if package is None:
        pytest.skip("no vLLM here; run scripts/install")
    paths = [path for pattern in patterns for path in package.glob(pattern)]
    return "\n".join(path.read_text("utf-8") for path in paths)


def check_vllm(arguments: list[str]) -> None:
    """`vllm serve` with flags of the installed vLLM; values that are JSON are JSON."""
    source = read_vllm("engine/arg_utils.py", "**/cli_args.py")
    assert arguments[0] == "serve"
    for word in arguments:
        if word.startswith("--"):
            field = word.removeprefix("--").removeprefix("no-").replace("-", "_")
            assert re.search(rf"\b{field}\b", source), word
        if word.startswith("{"):
            more = json.loads(word).get("ec_connector_extra_config", {})
            connectors = read_vllm("distributed/**/*.py")
            assert all(f'"{key}"' in connectors for key in more), more


def check_curl(arguments: list[str]) -> None:
    """A local address, headers that mean something, a body that is JSON."""
    pairs = list(zip(arguments, arguments[1:], strict=False))
    headers = [value.partition(":")[0] for flag, value in pairs if flag == "-H"]
    assert any(word.startswith("http://127.0.0.1:") for word in arguments)
    assert set(headers) <= {"content-type", "X-API-Key", *list_constants().values()}
    assert all(json.loads(value) for flag, value in pairs if flag == "-d")


def check_docker(arguments: list[str]) -> None:
    """`docker compose up -d` with profiles that docker-compose.yml has (test_compose.py reads each), or
    a build from a Dockerfile that is there."""
    if arguments[0] == "build":
        flag, file, tag, _, folder = arguments[1:]
        assert (flag, tag, folder) == ("-f", "-t", ".") and (ROOT / file).is_file()
        return
    text = (ROOT / "docker-compose.yml").read_text("utf-8")
    known = {each for found in re.findall(r"profiles: \[(.*)]", text) for each in found.split(", ")}
    compose, *chosen, up, detached = arguments
    assert (compose, up, detached) == ("compose", "up", "-d")
    assert set(chosen[::2]) <= {"--profile"} and set(chosen[1::2]) <= known


def check_stack(arguments: list[str]) -> None:
    """A subcommand of scripts/stack, with flags that it has."""
    name, *rest = arguments
    stack.main.commands[name].make_context(name, rest)


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "docker": check_docker,
    "scripts/stack": check_stack,
    "ttft-otel": check_own,
    "pip": check_pip,
    "vllm": check_vllm,
    "curl": check_curl,
    "scripts/demo": check_script("scripts/demo"),
    "scripts/test": check_script("scripts/test"),
    "scripts/compat": check_script("scripts/compat"),
}


@pytest.mark.parametrize("words", list_commands(), ids=" ".join)
def test_commands(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command that README and guides show exists, with its flags, variables and files."""
    monkeypatch.chdir(tmp_path)
    for page in GUIDES:
        for kind, text in BLOCK.findall(page.read_text("utf-8")):
            if kind == "yaml":
                Path(text.splitlines()[0].removeprefix("# ")).write_text(text, "utf-8")

    words = words[: words.index("|")] if "|" in words else words
    for name in words:
        if name.endswith((".json", ".jsonl", ".txt")):
            Path(name).touch()
    while "=" in words[0]:
        name = words[0].partition("=")[0]
        assert name in list_constants("env_names.").values() or f'"{name}"' in read_vllm("envs.py")
        words = words[1:]

    CHECKS[words[0]](words[1:])


def test_commands_told() -> None:
    """README and guides show every subcommand, and the two commands that everybody needs."""
    shown = [words[1] if words[0] == "ttft-otel" else words[0] for words in list_commands()]

    assert {*cli.SUBCOMMANDS, "scripts/demo", "scripts/test"} <= set(shown)
