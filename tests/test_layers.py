# SPDX-License-Identifier: Apache-2.0
"""The package's layers, one way, proved from the imports' syntax trees."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

import ttft_otel
from lab.room_imports import list_imported_names

ROOT = Path(ttft_otel.__file__).parent
MAX_LINES = 300

# The order of ttft_otel/__init__.py's docstring; a unit is a file or a folder of the package.
WORDS = (
    *("stages", "names", "endpoints", "clock", "settings", "guard", "otlp_exporter"),
    *("child_command", "command_options", "metric_labels"),
)
SHAPE = ("record",)
HOT = (
    *(
        "context",
        "engine_timeline",
        "carrier",
        "clock_offsets",
        "media_items",
        "request_trace",
        "roles",
        "recorder",
    ),
    *(
        "record_parts",
        "measurement",
        "trace_measurement",
        "kept_spans",
        "handoff",
        "meter",
        "first_chunk",
        "asgi",
    ),
)
PURE = (
    *(
        "breakdown",
        "intervals",
        "byte_budget",
        "wait_reasons",
        "held_waits",
        "failed_stage",
        "leg_partition",
        "timing",
    ),
    *("ttft_report", "palette"),
)
SIDES = ("hooks", "exporter", "router", "report", "bench")
ANSWERS = ("explain",)  # reads what the report has stored
DOORS = (
    *("plugin", "cli", "doctor", "doctor_clock", "doctor_media", "doctor_metrics", "size"),
    "testing",
)
LEVEL = {
    unit: level
    for level, units in enumerate((WORDS, SHAPE, (*HOT, *PURE), SIDES, ANSWERS, DOORS))
    for unit in units
}
# The router's rooms, the ground floor first; a room is a folder of router/, and "" its own files.
ROOMS = (
    *("", "upstream", "discovery", "routing", "disagg", "proxy", "control", "workers", "peers"),
    "cli",
)
FORBIDDEN_ROOMS = {("upstream", "routing"), ("disagg", "proxy")}  # rooms that stay apart for ever
OUTSIDE = ("lab", "benchmarks", "grafana", "tests")  # in no wheel
FOREIGN = {"vllm", "torch", "transformers"}
# Tokenizers and chat templates, in a process of their own and without torch.
CHILD = {
    Path("router/routing/prompts/model_tokenizer.py"),
    Path("router/routing/prompts/model_processor.py"),
}

FILES = sorted(path for path in ROOT.rglob("*.py") if "__pycache__" not in path.parts)
NAMED = [pytest.param(path, id=str(path.relative_to(ROOT))) for path in FILES]
# In no wheel, and of the same shape.
BESIDE = [
    pytest.param(path, id=str(path.relative_to(ROOT.parent)))
    for folder in ("lab", "benchmarks", "grafana/build")
    for path in sorted((ROOT.parent / folder).rglob("*.py"))
    if "__pycache__" not in path.parts
]


def unit_of(path: Path) -> str:
    """The unit that a file belongs to; "" for the package's own __init__."""
    first = path.relative_to(ROOT).parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


def list_imports(path: Path) -> Iterator[str]:
    """Every module that a file imports anywhere, as a dotted name; `from a import b` gives a.b too."""
    for name in list_imported_names(path, ROOT):
        yield name.rpartition(".")[0] or name
        yield name


def list_units(path: Path) -> set[str]:
    """The units of this package that a file imports."""
    names = (name.split(".") for name in list_imports(path))
    return {
        parts[1]
        for parts in names
        if parts[0] == "ttft_otel" and len(parts) > 1 and parts[1] in LEVEL
    }


@pytest.mark.parametrize("path", NAMED)
def test_known(path: Path) -> None:
    """Every file has its place in the layers."""
    assert unit_of(path) in {*LEVEL, ""}


@pytest.mark.parametrize("path", NAMED)
def test_one_way(path: Path) -> None:
    """A file imports from its own layer or below; side folders never meet."""
    own = unit_of(path)
    if own == "":
        return
    level = LEVEL[own]

    above = {unit for unit in list_units(path) if LEVEL[unit] > level}
    beside = {unit for unit in list_units(path) & set(SIDES) if own in SIDES and unit != own}

    assert not above
    assert not beside


def find_room(module: str) -> str | None:
    """The room of a module of the router; None for every other module."""
    parts = module.split(".")
    if parts[:2] != ["ttft_otel", "router"]:
        return None
    return parts[2] if len(parts) > 2 and (ROOT / "router" / parts[2]).is_dir() else ""


def list_room_arrows() -> set[tuple[str, str]]:
    """Which room imports from which other one."""
    arrows = set()
    for path in FILES:
        own = find_room(get_module_name(path))
        if own is None or path.name == "__init__.py":
            continue
        targets = {
            room
            for module in list_imported_modules(path)
            if (room := find_room(module)) is not None
        }
        arrows |= {(own, target) for target in targets - {own}}
    return arrows


def test_rooms() -> None:
    """The router's rooms import downwards only, so that there is no cycle of rooms either."""
    arrows = list_room_arrows()

    assert {room for arrow in arrows for room in arrow} == set(ROOMS)
    assert not [arrow for arrow in arrows if ROOMS.index(arrow[0]) < ROOMS.index(arrow[1])]
    assert not arrows & FORBIDDEN_ROOMS


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


@pytest.mark.parametrize("unit", HOT)
def test_hot(unit: str) -> None:
    """What runs inside vLLM per request imports no exporter and no OpenTelemetry."""
    path = ROOT / f"{unit}.py"

    assert "exporter" not in list_units(path)
    assert not [name for name in list_imports(path) if name.startswith("opentelemetry")]


@pytest.mark.parametrize("unit", PURE)
def test_pure(unit: str) -> None:
    """Pure files import nothing that reads a clock, a socket or the environment."""
    forbidden = {*HOT, "clock", "settings", "guard"}

    assert not list_units(ROOT / f"{unit}.py") & forbidden


@pytest.mark.parametrize("path", NAMED)
def test_foreign(path: Path) -> None:
    """Only hooks/ may import vllm or torch, and besides it the child's two transformers."""
    if unit_of(path) == "hooks":
        return
    allowed = {"transformers"} if path.relative_to(ROOT) in CHILD else set()

    assert not {name.partition(".")[0] for name in list_imports(path)} & FOREIGN - allowed


@pytest.mark.parametrize("path", NAMED)
def test_lab(path: Path) -> None:
    """The package imports nothing that only a checkout has."""
    assert not {name.partition(".")[0] for name in list_imports(path)} & set(OUTSIDE)


def test_no_cycle() -> None:
    """Modules of the package import one another without a cycle, at import time."""
    graph = {get_module_name(path): list_imported_modules(path) for path in FILES}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail, module))
        if module not in done:
            for target in graph.get(module, set()):
                visit(target, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


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


@pytest.mark.parametrize("path", [*NAMED, *BESIDE])
def test_shape(path: Path) -> None:
    """A file opens with its licence and a sentence, and is short."""
    text = path.read_text(encoding="utf-8")

    assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n")
    assert ast.get_docstring(ast.parse(text))
    assert text.count("\n") <= MAX_LINES
    assert path.stem.replace("_", "").isalpha(), "words"
