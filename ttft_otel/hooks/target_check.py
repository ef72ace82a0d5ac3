# SPDX-License-Identifier: Apache-2.0
"""Check which patch targets (hooks/targets.py) an installed vLLM has, by parsing its sources.

Used by doctor, for the log line at the start, and by tests/hooks/test_target_check.py.
"""

from __future__ import annotations

import ast
import importlib.util
import logging
import os
from functools import lru_cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final

from ttft_otel import __version__
from ttft_otel.hooks.targets import TARGETS, TargetPlace
from ttft_otel.tracing import settings

log = logging.getLogger("ttft_otel")
RUST_FRONTEND: Final = "VLLM_USE_RUST_FRONTEND"  # vLLM's variable
RUST_FRONTEND_LIMITS: Final = (
    "its stages are unattributed, and those of the engine core end with the first token that leaves it: "
    "docs/limits.md"
)


def find_module_file(vllm: Path, module: str) -> Path | None:
    """The file of `module` ("vllm.a.b") below the package folder `vllm`; None when it is absent."""
    base = vllm.joinpath(*module.split(".")[1:])
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


def list_functions(tree: ast.Module) -> dict[str, tuple[str, ...]]:
    """ "function" or "Class.method" that a file defines at its top level -> names of its parameters."""
    functions: dict[str, tuple[str, ...]] = {}
    for node in tree.body:
        owner = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for item in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)):
                args = item.args
                functions[owner + item.name] = tuple(
                    arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)
                )
    return functions


@lru_cache(maxsize=128)  # several targets are in one file
def _read_functions(path: Path) -> dict[str, tuple[str, ...]]:
    # Bytes, so that the parser honours a file's own coding line.
    return list_functions(ast.parse(path.read_bytes(), str(path)))


def find_vllm_folder() -> Path | None:
    """The folder of the installed vllm package; None when it is not installed."""
    # For a top-level package find_spec() imports nothing.
    spec = importlib.util.find_spec("vllm")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def check_targets(vllm: Path) -> dict[str, str]:
    """Target name -> "" when at least one of its places exists in `vllm`, else what is missing.

    vllm: the package's folder. Targets without an address of their own are left out.
    """
    found = {}
    for target in TARGETS:
        answers = [check_place(vllm, place, target.reads) for place in target.places]
        # Connectors' methods have no place: their class is known when vLLM's factory creates it.
        if answers:
            # Releases and runners differ in where a function is: one place suffices.
            found[target.name] = "" if "" in answers else answers[0]
    return found


def check_place(vllm: Path, place: TargetPlace, reads: tuple[str, ...]) -> str:
    """What is missing of a function or its parameters; "" when all is there.

    vllm: the package's folder. reads: names of the parameters that our hook reads. Raises SyntaxError for a
    file that this Python cannot parse.
    """
    address = place.address
    # FastAPI's method is public, and not below the folder that is parsed here.
    if not place.module.startswith("vllm."):
        return ""
    # By the file, not by importlib, which would import vLLM's packages, and torch with them.
    path = find_module_file(vllm, place.module)
    parameters = _read_functions(path).get(place.name) if path is not None else None
    if parameters is None:
        return address
    # Parameters as well: a hook that reads one by name would fail in every call.
    missing = [word for word in reads if word not in parameters]
    return f"{address}({', '.join(missing)})" if missing else ""


def find_unhooked_runners() -> dict[str, str]:
    """Class -> package of the model runners of installed platforms whose execute_model() passes our hooks.

    As report_unhooked_runner() finds them in a worker; here without importing them.
    """
    found: dict[str, str] = {}
    for point in entry_points(group="vllm.platform_plugins"):
        package = point.module.partition(".")[0]
        spec = importlib.util.find_spec(package) if package != "vllm" else None
        for folder in (spec.submodule_search_locations if spec is not None else None) or ():
            for path in Path(folder).rglob("*.py"):
                text = path.read_bytes()
                if b"def execute_model" in text:
                    names = _list_unhooked_runners(text)
                    found |= dict.fromkeys(names, package)
    return found


def _list_unhooked_runners(source: bytes) -> list[str]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # a template, or for another Python: it is in no worker
        return []
    return [
        kind.name
        for kind in tree.body
        if isinstance(kind, ast.ClassDef) and kind.name.endswith("Runner")
        for item in kind.body
        if isinstance(item, ast.FunctionDef)
        and item.name == "execute_model"
        and "super().execute_model(" not in ast.unparse(item)
    ]


def has_rust_frontend() -> bool:
    """Whether vLLM starts its Rust front-end in this environment, in which none of our code runs."""
    return os.environ.get(RUST_FRONTEND, "0").strip() not in ("", "0")


def log_start_line(role: str) -> None:
    """Log version, `role`, active targets and endpoint in one line, and problems of the settings."""
    vllm = find_vllm_folder()
    states = check_targets(vllm) if vllm is not None else {}
    # Missing ones are named at the start: later nobody can find out why a stage is unattributed.
    lost = [f"{name} ({what})" for name, what in states.items() if what]
    chosen = settings.get_settings()
    log.info(
        "ttft-otel %s: role %s, %d of %d targets active%s, exporting %s (by %s) to %s",
        __version__,
        role,
        len(states) - len(lost),
        len(states),
        f", missing: {'; '.join(lost)}" if lost else "",
        chosen.protocol,
        chosen.protocol_reason,
        chosen.endpoint,
    )
    for line in chosen.problems:
        log.warning("ttft-otel: %s", line)
