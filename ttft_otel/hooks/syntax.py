# SPDX-License-Identifier: Apache-2.0
"""Parse vLLM's source files, without importing them, for the functions and fields they define.

Used by target_check.py for an installed vLLM, and by lab/source_check.py for a source tree.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Definitions:
    """What one file defines at its top level.

    functions: "function" or "Class.method" -> names of its parameters.
    fields: class -> attributes that its own body gives an instance: declared, assigned to `self` in a
        method, or methods and properties.
    bases: class -> names of its base classes, without their modules.
    """

    functions: dict[str, tuple[str, ...]] = field(default_factory=dict)
    fields: dict[str, set[str]] = field(default_factory=dict)
    bases: dict[str, tuple[str, ...]] = field(default_factory=dict)


def find_module_file(vllm: Path, module: str) -> Path | None:
    """The file of `module` ("vllm.a.b") below the package folder `vllm`; None when it is absent."""
    base = vllm.joinpath(*module.split(".")[1:])
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


def read_module(vllm: Path, module: str) -> Definitions:
    """The definitions of `module` below the package folder `vllm`; empty when it does not exist.

    Raises SyntaxError for a file that this Python cannot parse.
    """
    # By the file, not by importlib, which would import vLLM's packages, and torch with them.
    path = find_module_file(vllm, module)
    return read_definitions(path) if path is not None else Definitions()


def read_definitions(path: Path) -> Definitions:
    """The definitions of a file, cached until it changes. Raises SyntaxError as read_module()."""
    # Part of the cache's key, so that an upgrade under a running process is seen.
    state = path.stat()
    return _parse_file(path, (state.st_mtime_ns, state.st_size))


@lru_cache(maxsize=128)
def _parse_file(path: Path, _state: tuple[int, int]) -> Definitions:
    definitions = Definitions()
    # Bytes, so that the parser honours a file's own coding line.
    for node in ast.parse(path.read_bytes(), str(path)).body:
        if isinstance(node, ast.ClassDef):
            _read_class(node, definitions)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            definitions.functions[node.name] = _read_parameters(node)
    return definitions


def _read_class(node: ast.ClassDef, definitions: Definitions) -> None:
    names = definitions.fields.setdefault(node.name, set())
    definitions.bases[node.name] = tuple(_get_base_name(base) for base in node.bases)
    for item in node.body:
        if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)):
            definitions.functions[f"{node.name}.{item.name}"] = _read_parameters(item)
            names.add(item.name)
            # In any method, not only __init__: a field may be set in a helper that it calls.
            names.update(_list_names_set_on_self(item))
        elif isinstance(item, (ast.AnnAssign, ast.Assign)):
            targets = item.targets if isinstance(item, ast.Assign) else [item.target]
            names.update(target.id for target in targets if isinstance(target, ast.Name))


def _list_names_set_on_self(function: ast.AST) -> set[str]:
    return {
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def _get_base_name(base: ast.expr) -> str:
    while isinstance(base, ast.Subscript):  # Generic[T]
        base = base.value
    # Other expressions have no name: such a base is taken for one that gives no fields.
    return base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")


def _read_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, ...]:
    args = node.args
    return tuple(arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs))
