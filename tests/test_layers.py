# SPDX-License-Identifier: Apache-2.0
"""The package's rooms import one way; proved from the imports' syntax trees."""

from __future__ import annotations

import ast
import functools
import graphlib
from pathlib import Path

import pytest

import ttft_otel
from lab.room_imports import (
    PACKAGE_ROOMS,
    ROUTER_ROOMS,
    count_imports,
    count_package_imports,
    find_unit,
    list_imported_names,
)

ROOT = Path(ttft_otel.__file__).parent
OUTSIDE = ("lab", "benchmarks", "grafana", "tests")  # in no wheel
FOREIGN = {"vllm", "torch", "transformers"}
# Tokenizers and chat templates, in a process of their own and without torch.
CHILD = {
    Path("router/routing/prompts/tokenizer_child.py"),
    Path("router/routing/prompts/prompt_parts.py"),
}

FILES = sorted(path for path in ROOT.rglob("*.py") if "__pycache__" not in path.parts)
# In no wheel, and of the same shape.
BESIDE = [
    path
    for folder in ("lab", "benchmarks", "grafana/build")
    for path in sorted((ROOT.parent / folder).rglob("*.py"))
    if "__pycache__" not in path.parts
]


@functools.cache
def list_imports(path: Path) -> frozenset[str]:
    """Every module that a file imports anywhere, as a dotted name; `from a import b` gives a.b too."""
    names = list_imported_names(path, ROOT)
    return frozenset((*names, *(name.rpartition(".")[0] or name for name in names)))


def test_one_way() -> None:
    """A file lies in a room, and imports only from that and from those that its room may use."""
    assert {find_unit(path, ROOT) for path in FILES} <= {*PACKAGE_ROOMS, ""}
    wrong = [(own, used) for own, used in count_package_imports() if used not in PACKAGE_ROOMS[own]]
    assert not wrong, "lab/room_imports.py: the order"


def test_order() -> None:
    """No room may import from one above it, so that there is no circle of rooms."""
    order = list(PACKAGE_ROOMS)

    assert not [
        (room, used)
        for room, below in PACKAGE_ROOMS.items()
        for used in below
        if order.index(used) <= order.index(room)
    ]


def test_router_rooms() -> None:
    """The router's rooms import downwards only, so that there is no cycle of rooms either."""
    files = {path.stem for path in (ROOT / "router").glob("*.py")} - {"__init__"}
    arrows = count_imports(
        ROOT / "router", {room: (room,) for room in ROUTER_ROOMS} | {"files": tuple(files)}
    )
    order = [*ROUTER_ROOMS, "files"]

    assert {room for arrow in arrows for room in arrow} == set(order)
    assert not [arrow for arrow in arrows if order.index(arrow[0]) > order.index(arrow[1])]


def test_errors_have_one_home() -> None:
    """The router's error classes are in errors.py, which needs nothing but Python."""
    home = ROOT / "router" / "errors.py"
    homeless = [
        f"{path.name}: {node.name}"
        for path in (ROOT / "router").rglob("*.py")
        if path != home
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.ClassDef)
        and any(
            "Error" in ast.unparse(base) or "Exception" in ast.unparse(base) for base in node.bases
        )
    ]

    assert not homeless
    assert not [name for name in list_imports(home) if name.startswith("ttft_otel")]


@pytest.mark.parametrize("room", ["model", "tracing"])
def test_hot(room: str) -> None:
    """What runs inside vLLM per request imports no OpenTelemetry.

    A configuration file is read by OpenTelemetry's own reader: once, at the start, and only if there is one.
    """
    paths = [path for path in (ROOT / room).rglob("*.py") if path.name != "config_file.py"]
    imported = [name for path in paths for name in list_imports(path)]

    assert not [name for name in imported if name.startswith("opentelemetry")]


def test_pure() -> None:
    """The model reads no clock, no socket and no environment."""
    imported = {name for path in (ROOT / "model").rglob("*.py") for name in list_imports(path)}

    assert not imported & {"time", "socket", "os", "threading", "asyncio"}


def test_foreign() -> None:
    """Only hooks/ may import vllm or torch, and besides it the child's two transformers; nobody imports
    what only a checkout has.
    """
    for path in FILES:
        allowed = {"transformers"} if path.relative_to(ROOT) in CHILD else set()
        allowed |= FOREIGN if find_unit(path, ROOT) == "hooks" else set()
        used = {name.partition(".")[0] for name in list_imports(path)}
        assert not used & {*FOREIGN, *OUTSIDE} - allowed, path


def test_no_cycle() -> None:
    """Modules of the package import one another without a cycle, at import time."""
    graph = {get_module_name(path): list_imported_modules(path) for path in FILES}

    # Raises CycleError, which names the modules of a circle.
    graphlib.TopologicalSorter(graph).prepare()


def get_module_name(path: Path) -> str:
    """A file's dotted module name."""
    parts = ("ttft_otel", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def list_imported_modules(path: Path) -> set[str]:
    """Modules of the package that a file names in imports."""
    return {
        module
        for module in list_imports(path)
        if module in list_modules() and module != get_module_name(path)
    }


@functools.cache
def list_modules() -> frozenset[str]:
    """The dotted names of the package's files; a folder's name alone does not count."""
    return frozenset(get_module_name(each) for each in FILES if each.name != "__init__.py")


def test_shape() -> None:
    """A file opens with its licence and a sentence; its name is made of words."""
    for path in (*FILES, *BESIDE):
        text = path.read_text(encoding="utf-8")
        assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n"), path
        assert ast.get_docstring(ast.parse(text)), path
        assert path.stem.replace("_", "").isalpha(), path
