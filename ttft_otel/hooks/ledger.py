# SPDX-License-Identifier: Apache-2.0
"""Hold the ledger against an installed vLLM without importing it: syntax trees of its own files.

doctor, the start line and tests/hooks/test_ledger.py ask; targets/ is what is checked.
"""

from __future__ import annotations

import ast
import importlib.util
import logging
from functools import lru_cache
from pathlib import Path

from ttft_otel import __version__, settings
from ttft_otel.hooks.targets import TARGETS, Place, Target

log = logging.getLogger("ttft_otel")


def root() -> Path | None:
    """The installed vllm package's folder."""
    spec = importlib.util.find_spec("vllm")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def check(vllm: Path) -> dict[str, str]:
    """Target -> "" when at least one of its places is there, else what is missing."""
    return {target.name: _target(vllm, target) for target in TARGETS if target.places}


def places(vllm: Path, target: Target) -> dict[str, str]:
    """Each place of a target -> "" when it is there, else what is missing."""
    return {
        f"{place.module}:{place.name}": _place(vllm, place, target.reads) for place in target.places
    }


def _target(vllm: Path, target: Target) -> str:
    answers = list(places(vllm, target).values())
    return "" if "" in answers else answers[0]


def _place(vllm: Path, place: Place, reads: tuple[str, ...]) -> str:
    where = f"{place.module}:{place.name}"
    if not place.module.startswith("vllm."):
        return ""
    path = vllm.joinpath(*place.module.split(".")[1:]).with_suffix(".py")
    if not path.is_file():
        return where
    found = _functions(path).get(place.name)
    if found is None:
        return where
    lost = [word for word in reads if word not in found]
    return f"{where}({', '.join(lost)})" if lost else ""


@lru_cache(maxsize=64)
def _functions(path: Path) -> dict[str, tuple[str, ...]]:
    """Dotted function name -> its parameters, for a file's functions and its classes' methods."""
    found: dict[str, tuple[str, ...]] = {}
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    found[f"{node.name}.{item.name}"] = _parameters(item)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found[node.name] = _parameters(node)
    return found


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, ...]:
    args = node.args
    return tuple(arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs))


def announce(role: str) -> None:
    """The one line at start: version, role, targets, endpoint; what is wrong with the settings."""
    vllm = root()
    states = check(vllm) if vllm is not None else {}
    lost = [f"{name} ({what})" for name, what in states.items() if what]
    now = settings.current()
    log.info(
        "ttft-otel %s: role %s, %d of %d targets active%s, exporting %s to %s",
        __version__,
        role,
        len(states) - len(lost),
        len(states),
        f", missing: {'; '.join(lost)}" if lost else "",
        now.protocol,
        now.endpoint,
    )
    for line in now.wrong:
        log.warning("ttft-otel: %s", line)
