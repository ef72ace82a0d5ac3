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


LONG = "def read_all():\n" + "    print()\n" * style.MAX_FUNCTION_LINES
USUAL = "def read_file():\n" + "    print()\n" * (style.MAX_FUNCTION_LINES - 1)
NAMES = "def read(): ...\ndef _write(): ...\ndef read_file(): ...\ndef write_file(): ..."
STATE = (
    "from collections import deque\nNAMES: Final = {'a': 1}\nORDER = (1, 2)\nopen_steps = []\n"
    "runs: dict[str, int] = {}\nqueue: Final = deque()\ncount = 0\n"
    "def add_one():\n    global count\n    count += 1"
)
# Modules by their path, beside one with a function; a figure, what it is then, and the places that count.
CASES: dict[str, tuple[dict[str, str], str, float, list[str]]] = {
    # Private ones too; properties and dunders do not count.
    "functions of one word": (
        {"package/files": f"{NAMES}\nclass File:\n    @property\n    def size(self): ...\n"
         "    def __init__(self): ..."},
        "one_word_functions_percent", 40.0, ["package/files.py:2 read", "package/files.py:3 write"],
    ),
    # Once; twice in one file it does not count.
    "class names in several files": (
        {**dict.fromkeys(("package/first", "package/second", "package/third"), "class Server: ..."),
         "package/fourth": "class Client: ...\nclass Client: ..."},
        "class_names_in_several_files", 1,
        ["Server: package/first.py, package/second.py, package/third.py"],
    ),
    # Unless every package has such a module.
    "module names in two folders": (
        {f"package/{folder}/{module}": "" for folder in ("one", "two")
         for module in ("state", *style.SHARED_MODULES)},
        "module_names_used_twice", 1, ["state: package/one/state.py, package/two/state.py"],
    ),
    "product lines": (  # docstring, class, functions, last line
        {"package/files": f"class File: ...\n{LONG}{USUAL}", "tests/test_files": ""},
        "product_lines", 1 + 1 + 61 + 60 + 1 + 2, [],
    ),
    "test lines": ({"tests/test_files": "class FakeFile: ..."}, "test_lines", 2, []),
    "classes": (
        {"package/files": "class File: ...", "tests/test_files": "class FakeFile: ..."},
        "classes", 1, ["package/files.py:2 File"],
    ),
    "long functions": (
        {"package/files": f"class File: ...\n{LONG}{USUAL}"},
        "functions_over_60_lines", 1, ["package/files.py:3 read_all 61"],
    ),
    # In whatever form it is imported; one that two import does not count.
    "modules with one importer": (
        {"package/names": "A = 1", "package/sums": "A = 1",
         "package/first": "from package import names, sums",
         "package/second": "from package.names import A\nimport package.first"},
        "modules_with_one_importer", 2,
        ["package.sums: package.first", "package.first: package.second"],
    ),
    # What functions bind anew or fill, in the hooks' folder alone; tables and tuples do not count.
    "state of modules": (
        {"package/elsewhere": STATE, f"{style.STATELESS_FOLDER}/tracer": STATE},
        "module_globals_in_hooks", 4,
        [f"{style.STATELESS_FOLDER}/tracer.py {name}" for name in
         ("count", "open_steps", "runs", "queue")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_figures(measured_folder: Path, case: str) -> None:
    """Each figure counts what it is there for, and tells where that is."""
    modules, figure, expected, told = CASES[case]
    for name, source in {"package/other": "def open_file(): ...", **modules}.items():
        write_module(measured_folder.parent, name, source)

    figures, places = style.measure_style()

    assert figures[figure] == expected
    assert not told or sorted(places[figure]) == sorted(told)


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
