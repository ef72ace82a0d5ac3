# SPDX-License-Identifier: Apache-2.0
"""docs/img/architecture.svg against the code that it is drawn from, and how imports are counted."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from lab import architecture_picture, room_imports


def test_picture_is_current() -> None:
    """The committed picture is the one that the script draws now."""
    drawn = architecture_picture.draw_architecture()

    assert ElementTree.fromstring(drawn).tag == "{http://www.w3.org/2000/svg}svg"
    assert architecture_picture.PICTURE.read_text("utf-8") == drawn, (
        "run: .venv/bin/python -m lab.architecture_picture"
    )


def test_router_rooms() -> None:
    """Every folder and file of the router is a room."""
    found = {
        path.stem
        for path in room_imports.ROUTER.iterdir()
        if (path / "__init__.py").is_file() or path.suffix == ".py"
    }

    assert {
        unit for units in room_imports.list_router_rooms().values() for unit in units
    } == found - {"__init__"}


def test_count_imports(tmp_path: Path) -> None:
    """Files count once a room; relative imports, those inside functions, and a file's own room too."""
    package = tmp_path / "package"
    sources = {
        "low": "",
        "high/__init__": "",
        "high/first": "from package import low\nfrom package.low import name\nimport json",
        "high/second": "def read_file():\n    from .. import low\n    from . import first",
        "alone": "import package.high.first",
    }
    for name, source in sources.items():
        path = package / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, "utf-8")
    rooms = {"low": ("low",), "high": ("high",)}

    assert room_imports.count_imports(package, rooms, package) == {("high", "low"): 2}


def test_file_order(tmp_path: Path) -> None:
    """Single files of a folder stand below those that import them, also where two form a cycle."""
    sources = {
        "alpha": "",
        "beta": "alpha",
        "gamma": "beta",
        "delta": "epsilon",
        "epsilon": "delta",
    }
    for name, imported in sources.items():
        text = f"from {tmp_path.name} import {imported}" if imported else ""
        (tmp_path / f"{name}.py").write_text(text, "utf-8")
    names = [
        name
        for name in room_imports.list_router_rooms(tmp_path, tmp_path)
        if not name.endswith("/")
    ]

    assert names.index("gamma") < names.index("beta") < names.index("alpha")
    assert sorted(names) == sorted(sources)
