# SPDX-License-Identifier: Apache-2.0
"""README and docs against the code: links, vocabulary, variables, numbers, and every command shown."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from ttft_otel import cli, names, original, settings, stages, timing
from ttft_otel.hooks import ledger
from ttft_otel.lab import compat, demo
from ttft_otel.lab.stack import command as stack
from ttft_otel.router import config
from ttft_otel.router.command import command as router

ROOT = Path(__file__).parents[1]
PAGES = [
    pytest.param(path, id=str(path.relative_to(ROOT)))
    for path in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))
]
README = (ROOT / "README.md").read_text("utf-8")
STAGES = (ROOT / "docs" / "stages.md").read_text("utf-8")
TEXT = "\n".join(page.values[0].read_text("utf-8") for page in PAGES)  # type: ignore[union-attr]

LINK = re.compile(r"\[[^]]*]\(([^)\s]+)\)")
WORD = re.compile(r"`([^`\n]+)`")
OURS = re.compile(r"ttft\.[a-z_]+(?:\.[a-z_]+)*")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def section(page: str, heading: str) -> str:
    """The text below a heading, up to the next one."""
    found = re.search(
        rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL
    )
    assert found, heading
    return found[1]


def rows(text: str) -> list[list[str]]:
    """The cells of every table row, without headings and rulers."""
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def bare(cell: str) -> str:
    """A cell's text without the code marks."""
    return cell.strip("` |")


def constants(prefix: str = "") -> dict[str, str]:
    """The public names in names.py, by their constant."""
    return {
        key: value
        for key, value in vars(names).items()
        if key.isupper() and isinstance(value, str) and key.startswith(prefix)
    }


def slug(heading: str) -> str:
    """The anchor that a heading gets."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES)
def test_links(page: Path) -> None:
    """Every relative link leads to a file that is there, and to a heading in it."""
    broken = []
    for link in LINK.findall(page.read_text("utf-8")):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = (page.parent / path).resolve() if path else page
        headings = (
            {slug(each) for each in re.findall(r"^#+ (.+)$", target.read_text("utf-8"), re.M)}
            if target.suffix == ".md" and target.is_file()
            else set()
        )
        if not target.exists() or (anchor and anchor not in headings):
            broken.append(link)

    assert not broken


def test_decisions() -> None:
    """ADRs are numbered without a gap, dated, in one form, and the README leads to each."""
    pages = sorted((ROOT / "docs" / "adr").glob("*.md"))

    assert [int(page.name[:3]) for page in pages] == list(range(1, len(pages) + 1))
    for page in pages:
        text = page.read_text("utf-8")
        assert text.startswith(f"# {page.name[:3]} ")
        assert re.search(r"^Status: \w+ · Date: \d{4}-\d\d-\d\d", text, re.MULTILINE)
        headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
        assert headings == ["Context", "Decision", "Consequences"]
        assert f"docs/adr/{page.name}" in README


def test_stages() -> None:
    """The table of stages is stages.py: names, order, kinds, processes, roles, sentences."""
    everyone = stages.BY_NAME["receive"].roles
    expected = [
        [
            f"`{stage.name}`",
            stage.kind,
            stage.process,
            "all" if stage.roles == everyone else ", ".join(stage.roles),
            stage.says,
        ]
        for stage in stages.STAGES
    ]
    found = [row for row in rows(section(STAGES, "Stages of a server")) if len(row) == 6]

    assert expected == [row[:5] for row in found]
    assert all(row[5].rstrip("| ") for row in found)


def test_parts() -> None:
    """The table of parts is stages.py's."""
    found = [row for row in rows(section(STAGES, "Stages of a server")) if len(row) == 2]

    assert {bare(name): tuple(WORD.findall(parts)) for name, parts in found} == stages.PARTS


def test_router_stages() -> None:
    """The router's stages are those of stages.py, in its words."""
    found = rows(section(STAGES, "Stages of the router"))

    assert {bare(name): says.rstrip(" |") for name, says in found} == stages.ROUTER


def test_services() -> None:
    """Each role's service name is the one that spans get."""
    found = [row for row in rows(section(STAGES, "Attributes")) if len(row) == 2]

    assert {bare(role): bare(name) for role, name in found} == stages.SERVICES


def test_report_fields() -> None:
    """The report's fields are the sums that original.py makes."""
    found = {bare(row[0]): row[1] for row in rows(section(STAGES, "Report fields"))}
    sums = {field: tuple(WORD.findall(text)) for field, text in found.items()}

    assert stages.REPORT == {field: sums[field] for field in stages.REPORT}
    assert set(found) == {
        *stages.REPORT,
        *(original.TTFT_MS, original.UNATTRIBUTED_MS, original.STAGES),
    }


def test_names() -> None:
    """Every attribute, header, metric and variable is documented somewhere."""
    told = {word.removesuffix("_total") for word in WORD.findall(TEXT)}

    assert [] == sorted(set(constants().values()) - told)


@pytest.mark.parametrize("page", PAGES)
def test_vocabulary(page: Path) -> None:
    """Every `ttft.*` word in a page is a name of ours."""
    words = {word for word in WORD.findall(page.read_text("utf-8")) if OURS.fullmatch(word)}
    known = set(constants().values())

    assert [] == sorted(word for word in words - known if names.stage_of(word) is None)


def test_variables() -> None:
    """The README's table has every variable that users may set, with its real default."""
    table = {bare(row[0]): row[1] for row in rows(section(README, "Reference")) if len(row) == 3}
    plain = settings.Settings()
    defaults = {
        names.ENV_ENDPOINT: plain.endpoint,
        names.ENV_PROTOCOL: plain.protocol,
        names.ENV_SAMPLER: plain.sampler,
        names.ENV_SAMPLER_ARG: str(plain.ratio),
        names.ENV_TRUST: str(int(plain.trust)),
        names.ENV_QUEUE: str(plain.queue),
    }

    assert set(constants("ENV_").values()) <= set(table)
    assert table[names.ENV_ON] == "off" and not plain.on
    assert defaults == {name: bare(table[name]) for name in defaults}


def test_router_flags() -> None:
    """The README's table of flags is --help's: names, defaults, words; variables follow the rule."""
    usual = router.make_context("router", ["--backend", "http://127.0.0.1:1"]).params | {
        "backend": ()
    }
    expected = []
    for option in router.params:
        assert isinstance(option, click.Option)
        value = usual.get(str(option.name))
        empty = value is None or value is False or value in ((), "")
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        expected.append([f"`{option.opts[0]}`", "–" if empty else f"`{shown}`", option.help])
        variable = config.ENV + option.opts[0][2:].upper().replace("-", "_")
        variables = option.envvar if isinstance(option.envvar, list) else [option.envvar]
        assert variables[0] == variable

    assert rows(section(README, "Router")) == expected


def test_picture() -> None:
    """The README's waterfall adds up, and all its stages are ours."""
    picture = next(text for kind, text in BLOCK.findall(README) if not kind)
    found = {
        line.split()[0]: round(float(line.split()[-1]) * 1000) for line in picture.splitlines()
    }
    whole = found.pop(names.TIMING_TTFT)

    assert all(stages.known(name) for name in found)
    assert sum(found.values()) == whole


def test_timing() -> None:
    """The Server-Timing shown is one that a server writes: it reads back, and it closes."""
    text = re.search(r"^    (receive;.*?)\n\n", STAGES, re.MULTILINE | re.DOTALL)
    assert text
    line = " ".join(text[1].split())
    found = timing.read(line)

    assert found is not None
    assert timing.write(found.stages, found.unattributed, found.ttft) == line


def commands() -> list[list[str]]:
    """Every command in the README's bash blocks, in words."""
    blocks = [text for kind, text in BLOCK.findall(README) if kind == "bash"]
    lines = [line for text in blocks for line in text.replace("\\\n", " ").splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def check_own(arguments: list[str]) -> None:
    """A subcommand of ours that this version has, with flags that it has."""
    name, *rest = arguments
    door = cli.DOORS[name]
    cli.load(name, door).make_context(name, rest)  # parses, and does not run it


def check_script(name: str) -> Callable[[list[str]], None]:
    """A script that can be executed, with flags that it has."""

    def check(arguments: list[str]) -> None:
        assert os.access(ROOT / name, os.X_OK)
        known = {"scripts/demo": demo.command, "scripts/compat": compat.command}
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


def check_vllm(arguments: list[str]) -> None:
    """`vllm serve` with flags of the installed vLLM; values that are JSON are JSON."""
    package = ledger.root()
    if package is None:
        pytest.skip("no vLLM here; run scripts/install")
    files = [package / "engine" / "arg_utils.py", *package.rglob("cli_args.py")]
    source = "\n".join(path.read_text("utf-8") for path in files)
    assert arguments[0] == "serve"
    for word in arguments:
        if word.startswith("--"):
            field = word.removeprefix("--").removeprefix("no-").replace("-", "_")
            assert re.search(rf"\b{field}\b", source), word
        if word.startswith("{"):
            assert json.loads(word)


def vllm_variables() -> str:
    """Where vLLM declares its own variables."""
    package = ledger.root()
    if package is None:
        pytest.skip("no vLLM here; run scripts/install")
    return (package / "envs.py").read_text("utf-8")


def check_curl(arguments: list[str]) -> None:
    """A local address, headers that mean something, a body that is JSON."""
    pairs = list(zip(arguments, arguments[1:], strict=False))
    headers = [value.partition(":")[0] for flag, value in pairs if flag == "-H"]
    assert any(word.startswith("http://127.0.0.1:") for word in arguments)
    assert set(headers) <= {"content-type", *constants().values()}
    assert [json.loads(value) for flag, value in pairs if flag == "-d"]


def check_docker(arguments: list[str]) -> None:
    """`docker compose up -d` with profiles that docker-compose.yml has; test_compose.py reads each."""
    text = (ROOT / "docker-compose.yml").read_text("utf-8")
    profiles = {
        each for found in re.findall(r"profiles: \[(.*)]", text) for each in found.split(", ")
    }
    words = iter(arguments)
    assert next(words) == "compose"
    rest = []
    for word in words:
        if word == "--profile":
            assert next(words) in profiles
        else:
            rest.append(word)
    assert rest == ["up", "-d"]


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
}


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_commands(words: list[str]) -> None:
    """Every command that the README shows exists, with its flags and variables."""
    while "=" in words[0]:
        name = words[0].partition("=")[0]
        assert name in constants("ENV_").values() or f'"{name}"' in vllm_variables()
        words = words[1:]

    CHECKS[words[0]](words[1:])


def test_commands_told() -> None:
    """The README shows every subcommand, and the two commands that everybody needs."""
    shown = [words[1] if words[0] == "ttft-otel" else words[0] for words in commands()]

    assert {*cli.DOORS, "scripts/demo", "scripts/test"} <= set(shown)
