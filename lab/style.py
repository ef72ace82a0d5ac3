# SPDX-License-Identifier: Apache-2.0
"""Measure names and sizes of the code; scripts/style runs it.

Reads the Python files of the package, the laboratory, the benchmarks and the dashboards' build; of tests/
only the number of lines. The exit code is 1 when a figure is over its limit.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from lab.room_imports import list_imported_names

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("ttft_otel", "lab", "benchmarks", "grafana/build")
PACKAGE = "ttft_otel"
MAX_FUNCTION_LINES = 60
# Conventional names that may occur in several packages.
SHARED_MODULES = {"__init__", "__main__", "command", "app"}
FIGURE_LIMITS = {
    "one_word_functions_percent": 40.0,
    "class_names_in_several_files": 2,
    "module_names_used_twice": 4,
    "module_globals_in_hooks": 0,
    "docs_words": 45_000,
}
# Its state is owned by objects: no module-level name is bound anew, or to a container that is filled later.
STATELESS_FOLDER = "ttft_otel/hooks"
FILLED_TYPES = ("deque", "dict", "list", "set", "Counter", "OrderedDict", "defaultdict", "count")


def find_sources() -> list[Path]:
    """All Python files that are measured; lab/vllm_plugins are packages of their own."""
    return [
        path
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "vllm_plugins" not in path.parts
    ]


Measured: TypeAlias = "tuple[dict[str, Any], dict[str, list[str]]]"  # figures; places behind them


@functools.cache
def parse_file(path: Path) -> ast.Module:
    """The syntax tree of a file; every measure needs those of all files."""
    return ast.parse(path.read_bytes())


def list_functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions and methods of a module, without those whose name Python or a library gives."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            # Names such as __enter__ are Python's, not ours.
            if not (node.name.startswith("__") and node.name.endswith("__")):
                yield node


def is_property(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether `function` is a property, whose name is a noun."""
    names = {node.id for node in function.decorator_list if isinstance(node, ast.Name)}
    # `@x.setter` is an attribute of a name.
    names |= {node.attr for node in function.decorator_list if isinstance(node, ast.Attribute)}
    return bool(names & {"property", "cached_property", "setter"})


def measure_names() -> Measured:
    """Names of functions, classes and modules of all measured files."""
    functions: list[tuple[str, str]] = []
    classes: defaultdict[str, list[str]] = defaultdict(list)
    modules: defaultdict[str, list[str]] = defaultdict(list)
    sources = find_sources()
    for path in sources:
        where = str(path.relative_to(ROOT))
        if path.stem not in SHARED_MODULES:
            modules[path.stem].append(where)
        for node in ast.walk(parse_file(path)):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(where)
        functions += [
            (function.name.strip("_"), f"{where}:{function.lineno}")
            for function in list_functions(parse_file(path))
            if not is_property(function)
        ]
    # One word cannot be verb and object, as CONTRIBUTING.md wants it.
    single = [(name, place) for name, place in functions if "_" not in name]
    shared_classes = {name: places for name, places in classes.items() if len(set(places)) > 1}
    shared_modules = {name: places for name, places in modules.items() if len(places) > 1}
    figures = {
        "files": len(sources),
        "functions": len(functions),
        "one_word_functions_percent": round(100 * len(single) / len(functions), 1),
        "class_names_in_several_files": len(shared_classes),
        "module_names_used_twice": len(shared_modules),
    }
    places = {
        "one_word_functions_percent": [f"{place} {name}" for name, place in single],
        "class_names_in_several_files": [
            f"{name}: {', '.join(sorted(set(where)))}" for name, where in shared_classes.items()
        ],
        "module_names_used_twice": [
            f"{name}: {', '.join(where)}" for name, where in shared_modules.items()
        ],
    }
    return figures, places


def list_folder_lines(folder: str) -> list[tuple[int, str]]:
    """Lines and path of each Python file below `folder`, the longest first."""
    root = ROOT / folder
    found = [
        (len(path.read_bytes().splitlines()), str(path.relative_to(ROOT)))
        for path in sorted(root.rglob("*.py"))
    ]
    return sorted(found, reverse=True)


def list_long_functions() -> list[str]:
    """Places of the functions that are longer than MAX_FUNCTION_LINES."""
    found = []
    for path in find_sources():
        for function in list_functions(parse_file(path)):
            lines = (function.end_lineno or function.lineno) - function.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                where = f"{path.relative_to(ROOT)}:{function.lineno}"
                found.append(f"{where} {function.name} {lines}")
    return found


def list_modules_with_one_importer() -> list[str]:
    """Modules of the package that exactly one other module of it imports, with that importer."""
    package = ROOT / PACKAGE
    importers: defaultdict[str, set[str]] = defaultdict(set)
    paths = {
        ".".join((PACKAGE, *path.relative_to(package).with_suffix("").parts)): path
        for path in sorted(package.rglob("*.py"))
    }
    for module, path in paths.items():
        for name in list_imported_names(path, package):
            # `from module import name` gives module.name.
            imported = name if name in paths else name.rpartition(".")[0]
            if imported in paths and imported != module:
                importers[imported].add(module)
    return [f"{module}: {min(found)}" for module, found in importers.items() if len(found) == 1]


def list_module_state() -> list[str]:
    """Module-level names of STATELESS_FOLDER that functions bind anew, or that are filled later."""
    return [
        f"{path.relative_to(ROOT)} {name}"
        for path in sorted((ROOT / STATELESS_FOLDER).rglob("*.py"))
        for name in _list_state_names(parse_file(path))
    ]


def _list_state_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield from node.names
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        value = node.value
        is_constant = isinstance(node, ast.AnnAssign) and "Final" in ast.unparse(node.annotation)
        if isinstance(value, ast.Call):
            is_filled = ast.unparse(value.func).rpartition(".")[2] in FILLED_TYPES
            is_filled = is_filled and not (is_constant and value.args)
        elif isinstance(value, ast.Dict):
            is_filled = not (is_constant and value.keys)
        else:
            is_filled = isinstance(value, ast.List | ast.Set | ast.ListComp | ast.SetComp)
        if is_filled:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [ast.unparse(target) for target in targets]
            yield from (name for name in names if not name.startswith("__"))  # __all__


def measure_sizes() -> Measured:
    """Sizes of the package and of its tests, and what in it is longer or smaller than it should be."""
    product = list_folder_lines(PACKAGE)
    tests = list_folder_lines("tests")
    classes = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in sorted((ROOT / PACKAGE).rglob("*.py"))
        for node in ast.walk(parse_file(path))
        if isinstance(node, ast.ClassDef)
    ]
    places = {
        "product_lines": [f"{lines} {path}" for lines, path in product],
        "classes": classes,
        "test_lines": [f"{lines} {path}" for lines, path in tests],
        "functions_over_60_lines": list_long_functions(),
        "modules_with_one_importer": list_modules_with_one_importer(),
        "module_globals_in_hooks": list_module_state(),
    }
    figures = {name: len(found) for name, found in places.items()}
    figures["product_lines"] = sum(lines for lines, _ in product)
    figures["test_lines"] = sum(lines for lines, _ in tests)
    return figures, places


def measure_docs() -> Measured:
    """Words of README, CONTRIBUTING and the pages below docs/, as `wc -w` counts them; the longest first."""
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    words = {page: len(page.read_text(encoding="utf-8").split()) for page in pages if page.exists()}
    longest = sorted(words.items(), key=lambda item: -item[1])
    places = [f"{page.relative_to(ROOT)} {number}" for page, number in longest]
    return {"docs_words": sum(words.values())}, {"docs_words": places}


def measure_style() -> Measured:
    """Figures by name, and for those that are lists of places, the places."""
    figures: dict[str, Any] = {}
    places: dict[str, list[str]] = {}
    for measure in (measure_names, measure_sizes, measure_docs):
        found, found_places = measure()
        figures |= found
        places |= found_places
    return figures, places


def main() -> int:
    """Print the figures; 1 if one is over its limit."""
    parser = argparse.ArgumentParser(description=__doc__, epilog="Example: scripts/style --json")
    parser.add_argument(
        "--json", action="store_true", help="{figure: {value, goal, met}} on stdout"
    )
    parser.add_argument("--list", metavar="FIGURE", help="the places behind one figure")
    options = parser.parse_args()
    figures, places = measure_style()
    if options.list:
        if options.list not in places:
            parser.error(f"--list takes one of {', '.join(places)}")
        sys.stdout.write("\n".join(places[options.list]) + "\n")
        return 0
    judged = {
        name: {
            "value": value,
            "goal": FIGURE_LIMITS.get(name),
            "met": name not in FIGURE_LIMITS or value <= FIGURE_LIMITS[name],
        }
        for name, value in figures.items()
    }
    if options.json:
        sys.stdout.write(json.dumps(judged, indent=2) + "\n")
    else:
        for name, figure in judged.items():
            goal = "" if figure["goal"] is None else f"   at most {figure['goal']}"
            missed = "" if figure["met"] else "   MISSED"
            sys.stdout.write(f"{name:46} {figure['value']:>8}{goal}{missed}\n")
    return 0 if all(figure["met"] for figure in judged.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
