# SPDX-License-Identifier: Apache-2.0
"""The only patching code: install the ledger's targets as their modules are imported, and take them out.

plugin.py calls `install`; the hook files say what happens before and after each host call. A process
pays only for the modules it imports itself: nothing of vLLM is imported from here.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, TypeAlias

from ttft_otel import guard
from ttft_otel.hooks.targets import TARGETS, Place, Target

Call: TypeAlias = Callable[..., Any]
Ready: TypeAlias = "list[Any] | dict[Any, Any] | tuple[int, ...]"
ALWAYS: Final[tuple[int, ...]] = (1,)


@dataclass(frozen=True, slots=True)
class Hook:
    """What we do around one host call.

    before(*args) -> token, after(token, result, *args); either may be absent. When `ready` (a
    container shared with the hook's file) is empty the host's call is all that happens.
    """

    before: Call | None = None
    after: Call | None = None
    ready: Ready = ALWAYS
    arrives: bool = False  # runs at the end also when the host raised (result None)
    replace: Call | None = None  # frontend.app only: what the caller gets instead of the result


@dataclass(slots=True)
class Patch:
    """One installed wrapper: where it sits, what was there, and whether it is in place."""

    target: Target
    owner: Any
    name: str
    original: Any
    wrapper: Any
    hook: Hook


installed: dict[str, list[Patch]] = {}
missing: dict[str, str] = {}  # target -> what was not found
out: set[str] = set()  # targets that a test has taken out


def active(target: str) -> bool:
    """Whether a target is patched in this process and not switched off."""
    return target in installed and target not in out


def install(hooks: dict[str, Hook]) -> None:
    """Patch what is imported already, and the rest as it is imported. Idempotent."""
    waiting: dict[str, list[tuple[Target, Place, Hook]]] = {}
    for target in TARGETS:
        hook = hooks.get(target.name)
        if hook is None:
            continue
        for place in target.places:
            waiting.setdefault(place.module, []).append((target, place, hook))
    for module in list(waiting):
        loaded = sys.modules.get(module)
        if loaded is not None and getattr(loaded, "__spec__", None) is not None:
            _patch(loaded, waiting.pop(module))
    if waiting and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(waiting))


def _patch(module: ModuleType, entries: Iterable[tuple[Target, Place, Hook]]) -> None:
    for target, place, hook in entries:
        with guard.Guard(f"install {target.name}"):
            _one(module, target, place, hook)


def _one(module: ModuleType, target: Target, place: Place, hook: Hook) -> None:
    owner: Any = module
    *outer, name = place.name.split(".")
    for part in outer:
        owner = getattr(owner, part, None)
    raw = inspect.getattr_static(owner, name, None) if owner is not None else None
    if raw is None or (outer and name not in vars(owner)):
        _miss(target, f"{place.module}:{place.name}")
        return
    call = raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw
    lost = [word for word in target.reads if word not in inspect.signature(call).parameters]
    if lost:
        _miss(target, f"{place.module}:{place.name}({', '.join(lost)})")
        return
    put(target, owner, name, hook)


def _miss(target: Target, what: str) -> None:
    if target.name not in installed:
        missing[target.name] = what


def put(target: Target, owner: Any, name: str, hook: Hook) -> None:
    """Patch one attribute of `owner` once; keeps static and class methods what they are."""
    raw = inspect.getattr_static(owner, name)
    call = raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw
    if hasattr(call, "__ttft_otel__"):
        return
    patch = Patch(target, owner, name, raw, _again(raw, _wrap(target.name, call, hook)), hook)
    setattr(owner, name, patch.wrapper)
    installed.setdefault(target.name, []).append(patch)
    missing.pop(target.name, None)


def _again(raw: Any, wrapper: Call) -> Any:
    return type(raw)(wrapper) if isinstance(raw, (staticmethod, classmethod)) else wrapper


def _wrap(place: str, original: Call, hook: Hook) -> Call:
    """Build the wrapper and name the target on it, by which it is known again."""
    wrapper: Call
    if hook.replace is not None:
        wrapper = guard.replaced(place, original, hook.replace)
    elif hook.arrives and hook.before is not None and hook.after is not None:
        wrapper = guard.arriving(place, original, hook.before, hook.after, hook.ready)
    else:
        wrapper = guard.around(place, original, hook.before, hook.after, hook.ready)
    wrapper.__dict__["__ttft_otel__"] = place
    return wrapper


def switch(off: Iterable[str] = (), fail: Iterable[str] = ()) -> None:
    """Test-only: take the targets `off` out, make the hooks of `fail` raise; all else is in place."""
    out.clear()
    out.update(off)
    broken = set(fail)
    for name, patches in installed.items():
        for patch in patches:
            value = patch.original if name in out else patch.wrapper
            if name in broken:
                raw = patch.original
                call = raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw
                hook = Hook(_fail, _fail, ALWAYS, patch.hook.arrives)
                value = _again(raw, _wrap(name, call, hook))
            setattr(patch.owner, patch.name, value)


def _fail(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("hook made to fail by a test")


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the ordinary finders find a module, and patches it right after its body has run."""

    def __init__(self, waiting: dict[str, list[tuple[Target, Place, Hook]]]) -> None:
        self.waiting = waiting

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        entries = self.waiting.get(fullname)
        spec = self._ordinary(fullname, path, target) if entries else None
        if entries is None or spec is None or spec.loader is None:
            return None
        loader = spec.loader
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            # Not earlier: whoever only asks whether the module exists comes by here too.
            self.waiting.pop(fullname, None)
            _patch(module, entries)

        # On the loader instance: it serves this module alone, and keeps its type.
        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _ordinary(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> importlib.machinery.ModuleSpec | None:
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None) if finder is not self else None
            spec = find(fullname, path, target) if find is not None else None
            if isinstance(spec, importlib.machinery.ModuleSpec):
                return spec
        return None
