# SPDX-License-Identifier: Apache-2.0
"""Count which room of the package imports which, from syntax trees; architecture_picture.py draws it.

A room is a layer of single files, or a folder. Imports that only type checkers follow count, too.
"""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final

PACKAGE: Final = Path(__file__).resolve().parents[1] / "ttft_otel"
ROUTER: Final = PACKAGE / "router"
# Room -> the rooms from which its files may import: from those that people call down to the one that
# imports nothing. The only place of this order; tests/test_layers.py proves it.
PACKAGE_ROOMS: Final[Mapping[str, tuple[str, ...]]] = {
    "commands": (
        "explain", "bench", "report", "router", "stack", "hooks", "exporter", "http", "tracing", "model",
    ),
    "testing": ("exporter", "tracing", "model"),
    "plugin": ("hooks",),
    "distro": ("model",),
    "explain": ("report", "router", "tracing", "model"),
    "bench": ("http", "tracing", "model"),
    "report": ("exporter", "http", "tracing", "model"),
    "router": ("exporter", "http", "tracing", "model"),
    "stack": ("exporter", "model"),
    "hooks": ("tracing", "model"),
    "exporter": ("tracing", "model"),
    "http": ("tracing", "model"),
    "tracing": ("model",),
    "model": (),
}  # fmt: skip
# The router's rooms, likewise; its single files are below all of them.
ROUTER_ROOMS: Final = (
    "shared_state", "workers", "control", "proxy", "disagg", "routing", "discovery", "upstream",
)  # fmt: skip
RoomImports = Counter[tuple[str, str]]  # (importing room, imported room) -> files that import


@functools.cache  # parsed once, although most callers ask for all files anew
def list_imported_names(path: Path, package: Path) -> tuple[str, ...]:
    """Dotted names that a file imports; `from a import b` gives a.b. Relative ones are resolved."""
    folder = (package.name, *path.relative_to(package).parts[:-1])
    names = list[str]()
    # All of the file: imports inside functions count like those at the top.
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # One dot is the file's own folder, each further one a folder up.
            base = folder[: len(folder) - node.level + 1] if node.level else ()
            module = ".".join((*base, node.module) if node.module else base)
            names += (f"{module}.{alias.name}" for alias in node.names)
    return tuple(names)


def find_unit(path: Path, folder: Path) -> str:
    """The file or folder directly below `folder` that `path` is or lies in; "" for its __init__."""
    first = path.relative_to(folder).parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


def count_imports(
    folder: Path, rooms: Mapping[str, tuple[str, ...]], package: Path = PACKAGE
) -> RoomImports:
    """How many files of a room import from another one, for the rooms below `folder`."""
    room_of_unit = {unit: room for room, units in rooms.items() for unit in units}
    prefix = (package.name, *folder.relative_to(package).parts)
    counts: RoomImports = Counter()
    for path in sorted(folder.rglob("*.py")):
        own_room = room_of_unit.get(find_unit(path, folder))
        # Files are counted, not statements: ten imports of one
        # file are one reason to draw an arrow.
        imported_rooms = set()
        for name in list_imported_names(path, package):
            parts = name.split(".")
            if own_room and tuple(parts[: len(prefix)]) == prefix and len(parts) > len(prefix):
                imported_rooms.add(room_of_unit.get(parts[len(prefix)], own_room))
        counts.update((own_room, room) for room in imported_rooms if own_room and room != own_room)
    return counts


def count_package_imports() -> RoomImports:
    """The package's rooms."""
    return count_imports(PACKAGE, {room: (room,) for room in PACKAGE_ROOMS})


def list_router_rooms(folder: Path = ROUTER, package: Path = PACKAGE) -> dict[str, tuple[str, ...]]:
    """The router's rooms in the order in which they are drawn: folders, then single files.

    Files are ordered so that one comes after those that import it, as far as that is possible.
    """
    files = sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
    counts = count_imports(folder, {name: (name,) for name in files}, package)
    ordered: list[str] = []
    while files:
        # Files that no other one imports come first; in a circle the first by name breaks it.
        free = [name for name in files if not any(counts[other, name] for other in files)]
        ordered += free or files[:1]
        files = [name for name in files if name not in ordered]
    rooms: dict[str, tuple[str, ...]] = {f"{name}/": (name,) for name in ROUTER_ROOMS}
    rooms.update((name, (name,)) for name in ordered)
    return rooms


def count_router_imports() -> RoomImports:
    """The router's rooms."""
    return count_imports(ROUTER, list_router_rooms())
