# SPDX-License-Identifier: Apache-2.0
"""The package's layers, one way, proved from the imports' syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import ttft_otel

ROOT = Path(ttft_otel.__file__).parent
LONGEST = 300

# The order of ttft_otel/__init__.py's docstring; a unit is a file or a folder of the package.
WORDS = ("stages", "names", "clock", "settings", "guard")
SHAPE = ("record",)
HOT = ("context", "carrier", "trip", "recorder", "handoff", "meter", "asgi")
PURE = ("breakdown", "timing", "original", "palette")
SIDES = ("hooks", "exporter", "router", "report", "bench")
DOORS = ("plugin", "cli", "doctor", "testing")
LEVEL = {
    unit: level
    for level, units in enumerate((WORDS, SHAPE, (*HOT, *PURE), SIDES, DOORS))
    for unit in units
}
LAB = "lab"
MAY_LAB = ("cli", LAB)
FOREIGN = {"vllm", "torch", "transformers"}
# Tokenizers and chat templates, in a process of their own and without torch.
CHILD = Path("router/prompts/model.py")

FILES = sorted(path for path in ROOT.rglob("*.py") if "__pycache__" not in path.parts)
NAMED = [pytest.param(path, id=str(path.relative_to(ROOT))) for path in FILES]
GUESTS = ROOT / "lab" / "guests"  # injected into other people's processes: no part of the layers


def unit_of(path: Path) -> str:
    """The unit that a file belongs to; "" for the package's own __init__."""
    first = path.relative_to(ROOT).parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports anywhere, as a dotted name; `from a import b` gives a.b too."""
    package = ("ttft_otel", *path.relative_to(ROOT).parts[:-1])
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, node.module) if node.module else base)
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def units(path: Path) -> set[str]:
    """The units of this package that a file imports."""
    names = (name.split(".") for name in imports(path))
    known = {*LEVEL, LAB}
    return {
        parts[1]
        for parts in names
        if parts[0] == "ttft_otel" and len(parts) > 1 and parts[1] in known
    }


@pytest.mark.parametrize("path", NAMED)
def test_known(path: Path) -> None:
    """Every file has its place in the layers."""
    assert unit_of(path) in {*LEVEL, LAB, ""}


@pytest.mark.parametrize("path", NAMED)
def test_one_way(path: Path) -> None:
    """A file imports from its own layer or below; side folders never meet."""
    own = unit_of(path)
    if own in ("", LAB):
        return
    level = LEVEL[own]

    above = {unit for unit in units(path) - {LAB} if LEVEL[unit] > level}
    beside = {unit for unit in units(path) & set(SIDES) if own in SIDES and unit != own}

    assert not above
    assert not beside


@pytest.mark.parametrize("unit", HOT)
def test_hot(unit: str) -> None:
    """What runs inside vLLM per request imports no exporter and no OpenTelemetry."""
    path = ROOT / f"{unit}.py"

    assert "exporter" not in units(path)
    assert not [name for name in imports(path) if name.startswith("opentelemetry")]


@pytest.mark.parametrize("unit", PURE)
def test_pure(unit: str) -> None:
    """Pure files import nothing that reads a clock, a socket or the environment."""
    forbidden = {*HOT, "clock", "settings", "guard"}

    assert not units(ROOT / f"{unit}.py") & forbidden


@pytest.mark.parametrize("path", NAMED)
def test_foreign(path: Path) -> None:
    """Only hooks/ and lab/ may import vllm or torch, and besides them one file transformers."""
    if unit_of(path) in ("hooks", LAB):
        return
    allowed = {"transformers"} if path.relative_to(ROOT) == CHILD else set()

    assert not {name.partition(".")[0] for name in imports(path)} & FOREIGN - allowed


@pytest.mark.parametrize("path", NAMED)
def test_lab(path: Path) -> None:
    """The laboratory is imported by the command line alone (and by tests and scripts)."""
    if unit_of(path) in MAY_LAB:
        return

    assert LAB not in units(path)


def test_no_cycle() -> None:
    """Modules of the package import one another without a cycle, at import time."""
    graph = {name(path): top(path) for path in FILES if GUESTS not in path.parents}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail, module))
        if module not in done:
            for target in graph.get(module, set()):
                visit(target, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def name(path: Path) -> str:
    """A file's dotted module name."""
    parts = ("ttft_otel", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def top(path: Path) -> set[str]:
    """Modules of the package that a file names in imports; a folder's name alone does not count."""
    files = {name(each) for each in FILES if each.name != "__init__.py"}
    return {module for module in imports(path) if module in files and module != name(path)}


@pytest.mark.parametrize("path", NAMED)
def test_shape(path: Path) -> None:
    """A file opens with its licence and a sentence, and is short."""
    text = path.read_text(encoding="utf-8")

    assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n")
    assert ast.get_docstring(ast.parse(text))
    assert text.count("\n") <= LONGEST
    assert path.stem.strip("_").isalpha(), "one word"
