# SPDX-License-Identifier: Apache-2.0
"""Names keep to the limits of lab/style.py, and each limit notices what it is there for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lab import style


@pytest.fixture
def measured_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that is measured instead of the checkout; each test writes files into it."""
    monkeypatch.setattr(style, "ROOT", tmp_path)
    monkeypatch.setattr(style, "FOLDERS", ("package",))
    monkeypatch.setattr(style, "PACKAGE", "package")
    (tmp_path / "package").mkdir()
    return tmp_path / "package"


def write_module(folder: Path, name: str, source: str) -> None:
    """Write `source` as the module `name` (a path without suffix) below `folder`."""
    path = folder / f"{name}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'"""A module."""\n{source}\n', "utf-8")


def test_limits() -> None:
    """The checkout is within each limit; the message lists the places that count."""
    figures, places = style.measure_style()

    assert figures["files"] > 200, "not the whole tree was measured"
    over = [name for name, limit in style.FIGURE_LIMITS.items() if figures[name] > limit]
    assert not over, "\n".join(f"{name}: {place}" for name in over for place in places[name])


def test_one_word_functions(measured_folder: Path) -> None:
    """Functions and methods of one word count, private ones too; properties and dunders do not."""
    names = ("read", "_write", "read_file", "write_file")
    functions = "\n".join(f"def {name}(): ..." for name in names)
    methods = "class File:\n    @property\n    def size(self): ...\n    def __init__(self): ..."
    write_module(measured_folder, "files", f"{functions}\n{methods}")

    figures, places = style.measure_style()

    assert figures["functions"] == 4
    assert figures["one_word_functions_percent"] == 50.0
    assert [place.split()[1] for place in places["one_word_functions_percent"]] == ["read", "write"]


def test_shared_class_names(measured_folder: Path) -> None:
    """A class name in several files counts once; twice in one file it does not count."""
    for module in ("first", "second", "third"):
        write_module(measured_folder, module, "class Server: ...\ndef read_file(): ...")
    write_module(measured_folder, "fourth", "class Client: ...\nclass Client: ...")

    figures, places = style.measure_style()

    assert figures["class_names_in_several_files"] == 1
    assert places["class_names_in_several_files"] == [
        "Server: package/first.py, package/second.py, package/third.py"
    ]


def test_shared_module_names(measured_folder: Path) -> None:
    """A module name in two folders counts, unless every package has such a module."""
    for folder in ("one", "two"):
        for module in ("state", *style.SHARED_MODULES):
            write_module(measured_folder, f"{folder}/{module}", "def read_file(): ...")

    figures, places = style.measure_style()

    assert figures["module_names_used_twice"] == 1
    assert places["module_names_used_twice"] == [
        "state: package/one/state.py, package/two/state.py"
    ]


def test_sizes(measured_folder: Path) -> None:
    """Lines of the package and of tests, classes, functions of more than 60 lines; with their places."""
    long = "def read_all():\n" + "    print()\n" * style.MAX_FUNCTION_LINES
    usual = "def read_file():\n" + "    print()\n" * (style.MAX_FUNCTION_LINES - 1)
    write_module(measured_folder, "files", f"class File: ...\n{long}{usual}")
    write_module(measured_folder.parent / "tests", "test_files", "class FakeFile: ...")

    figures, places = style.measure_style()

    assert figures["product_lines"] == 1 + 1 + 61 + 60 + 1  # docstring, class, functions, last line
    assert figures["test_lines"] == 2
    assert places["classes"] == ["package/files.py:2 File"]
    assert places["functions_over_60_lines"] == ["package/files.py:3 read_all 61"]


def test_modules_with_one_importer(measured_folder: Path) -> None:
    """A module counts that one other module imports, in whatever form; one that two import does not."""
    write_module(measured_folder, "names", "A = 1\ndef read_file(): ...")
    write_module(measured_folder, "sums", "A = 1")
    write_module(measured_folder, "first", "from package import names, sums")
    write_module(measured_folder, "second", "from package.names import A\nimport package.first")

    _, places = style.measure_style()

    assert places["modules_with_one_importer"] == [
        "package.sums: package.first",
        "package.first: package.second",
    ]


def test_module_state(measured_folder: Path) -> None:
    """What functions bind anew or fill counts, in the hooks' folder alone; tables and tuples do not."""
    source = (
        "from collections import deque\nNAMES: Final = {'a': 1}\nORDER = (1, 2)\nopen_steps = []\n"
        "runs: dict[str, int] = {}\nqueue: Final = deque()\ncount = 0\n"
        "def add_one():\n    global count\n    count += 1"
    )
    write_module(measured_folder, "elsewhere", source)
    write_module(measured_folder.parent / style.STATELESS_FOLDER, "tracer", source)

    figures, places = style.measure_style()

    assert figures["module_globals_in_hooks"] == 4
    names = {place.split()[1] for place in places["module_globals_in_hooks"]}
    assert names == {"count", "open_steps", "runs", "queue"}


def test_docs_words(measured_folder: Path) -> None:
    """Words of README, CONTRIBUTING and all pages below docs/ count, others do not."""
    root = measured_folder.parent
    (root / "docs" / "guides").mkdir(parents=True)
    for page in ("README.md", "CONTRIBUTING.md", "docs/guides/start.md", "CHANGELOG.md"):
        (root / page).write_text("three plain words\n", encoding="utf-8")
    write_module(measured_folder, "files", "def read_file(): ...")

    figures, places = style.measure_style()

    assert figures["docs_words"] == 9
    assert len(places["docs_words"]) == 3


def test_exit_code(
    measured_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over one limit the command returns 1 and marks that figure; within all of them, 0."""
    monkeypatch.setattr(sys, "argv", ["style"])
    write_module(measured_folder, "clean", "def read_file(): ...")
    assert style.main() == 0
    assert "MISSED" not in capsys.readouterr().out

    write_module(measured_folder.parent / style.STATELESS_FOLDER, "state", "running = {}")

    assert style.main() == 1
    missed = [line for line in capsys.readouterr().out.splitlines() if line.endswith("MISSED")]
    assert [line.split()[0] for line in missed] == ["module_globals_in_hooks"]
