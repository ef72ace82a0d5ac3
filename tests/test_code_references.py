# SPDX-License-Identifier: Apache-2.0
"""Files and functions that CONTRIBUTING.md and docs/architecture.md name are in the checkout."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
# Paths of the package may be written without its folder.
BASES = (ROOT, ROOT / "ttft_otel")

CODE = re.compile(r"`([^`\n]+)`")
BLOCK_LINE = re.compile(r"^ {4}(?! )(.*)$", re.M)
FILE_NAME = re.compile(r"[\w./-]+\.(?:py|md|svg|json|yml|yaml|toml|txt)")
FOLDER = re.compile(r"[\w.-]+(?:/[\w.-]+)*/|[\w.-]+(?:/[\w.-]+)+")
FUNCTION = re.compile(r"[A-Za-z_][\w.]*\(\)")
MODULE_MEMBER = re.compile(r"([a-z_]+)\.([A-Z]\w+|[a-z]+_\w+)")
# A word in capitals stands for a name that the reader puts in.
PLACEHOLDER = re.compile(r"(?:^|/)[A-Z_]+$")


def list_code_words(text: str) -> Iterator[str]:
    """Words of code spans and of indented blocks, without comments."""
    for span in (*CODE.findall(text), *BLOCK_LINE.findall(text)):
        yield from span.split(" # ")[0].split()


def list_missing_paths(text: str) -> list[str]:
    """Files and folders that are named and are not there; placeholders and other places apart."""
    missing = []
    for word in list_code_words(text):
        path = PLACEHOLDER.sub("", word)
        is_path = FILE_NAME.fullmatch(path) or FOLDER.fullmatch(path)
        if is_path and not path.startswith(("../", ".venv/")):
            if not any((base / path).exists() for base in BASES):
                missing.append(word)
    return missing


def list_definitions(path: Path) -> set[str]:
    """Functions, methods (Class.method), classes and constants that a file defines."""
    found = set()
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{item.name}"
                for item in node.body
                if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
            }
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def list_missing_functions(text: str) -> list[str]:
    """Functions, written `name()`, that no file named on the same line defines."""
    missing = []
    for line in text.splitlines():
        words = CODE.findall(line)
        files = [word for word in words if word.endswith(".py")]
        paths = [base / file for file in files for base in BASES if (base / file).is_file()]
        defined = {name for path in paths for name in list_definitions(path)}
        names = [word[:-2] for word in words if FUNCTION.fullmatch(word)]
        missing += [name for name in names if name not in defined]
    return missing


def list_missing_members(text: str) -> list[str]:
    """`module.member` of a module of the package that does not define it."""
    missing = []
    for word in CODE.findall(text):
        found = MODULE_MEMBER.fullmatch(word)
        paths = sorted((ROOT / "ttft_otel").rglob(f"{found[1]}.py")) if found else []
        if found and paths and not any(found[2] in list_definitions(path) for path in paths):
            missing.append(word)
    return missing


@pytest.mark.parametrize("page", [CONTRIBUTING, ARCHITECTURE], ids=lambda page: page.stem)
def test_references(page: Path) -> None:
    """Every path is there, every function in the file beside it, every member in its module."""
    text = page.read_text("utf-8")

    assert list_missing_paths(text) == []
    assert list_missing_functions(text) == []
    assert list_missing_members(text) == []


def test_walk() -> None:
    """Each step of the walk on docs/architecture.md names one file and one function."""
    walk = ARCHITECTURE.read_text("utf-8").partition("## One request through the code")[2]
    rows = [line for line in walk.splitlines() if line.startswith("| ") and "**" not in line]
    steps = [row for row in rows if ".py`" in row]

    assert len(steps) >= 20
    assert rows[1:] == steps, "the first row is the heading"
    assert all(
        len(re.findall(r"\.py`", row)) == len(re.findall(r"\(\)`", row)) == 1 for row in steps
    )


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("`tests/live`, `hooks/worker/`, `plugin.py`, `docker-compose.yml`", []),
        ("`tests/dead`, `hooks/aims/`, `nouns.py`", ["tests/dead", "hooks/aims/", "nouns.py"]),
        ("    scripts/lint  # tests/dead\n    scripts/comb", ["scripts/comb"]),
        ("`tests/stack/tools/NAME`, `tests/stack/toys/NAME`", ["tests/stack/toys/NAME"]),
        ("`../vllm`, `--json`, `lab.style`, 3/4, `word`", []),
    ],
)
def test_missing_paths(text: str, missing: list[str]) -> None:
    """What counts as a path, and what is found missing."""
    assert list_missing_paths(text) == missing


def test_missing_functions() -> None:
    """A function must be in the file of its line, a member in its module."""
    assert list_missing_functions("`tracing/asgi.py` `TracingMiddleware.__call__()`") == []
    assert list_missing_functions("`tracing/asgi.py` `TracingMiddleware.call()`") == [
        "TracingMiddleware.call"
    ]
    assert list_missing_functions("`tracing/clock.py` `start_context()`") == ["start_context"]
    assert list_missing_functions("`start_context()`") == ["start_context"]
    assert list_missing_members("`engine_timeline.TIMELINE_VERSION`, `breakdown.Marks`") == []
    assert list_missing_members("`carrier.AGE_LIMIT`, `other.thing`") == ["carrier.AGE_LIMIT"]
