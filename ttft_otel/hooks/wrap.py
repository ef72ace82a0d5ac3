# SPDX-License-Identifier: Apache-2.0
"""Patch the targets of hooks/targets.py as their modules are imported; the only code that patches.

install.py makes the Patcher of a process and gives it the hooks of all files. Nothing of vLLM is imported
from here: each process patches only modules that it imports itself.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeAlias

from ttft_otel.hooks.targets import TARGETS, TARGETS_BY_NAME, PatchTarget, TargetPlace
from ttft_otel.tracing import guard
from ttft_otel.tracing.guard import AnyCall, Hook


@dataclass(slots=True)
class Patch:
    """One installed wrapper: attribute `name` of `owner`, what it was before, and the wrapper."""

    owner: Any
    name: str
    original: Any
    wrapper: Any
    hook: Hook


PlacedHook: TypeAlias = tuple[PatchTarget, TargetPlace, Hook]


class Patcher(importlib.abc.MetaPathFinder):
    """Patches the targets of one process, and knows what it has patched.

    It stands in sys.meta_path, where it patches a module right after the ordinary loader has executed it.
    """

    def __init__(self) -> None:
        #: Target name -> its wrappers.
        self.installed: dict[str, list[Patch]] = {}
        #: Targets that a test has switched off.
        self.disabled: set[str] = set()
        #: The owners of the hooks' state in this process; tests look for what is left.
        self.tracers: tuple[Any, ...] = ()
        # Module -> what is to be patched in it once it is imported.
        self._waiting: dict[str, list[PlacedHook]] = {}

    def is_active(self, target: str) -> bool:
        """Whether `target` is patched in this process and not switched off."""
        return target in self.installed and target not in self.disabled

    def is_switched_off(self, target: str) -> bool:
        """Whether a test has switched off `target`, which was patched."""
        return target in self.installed and target in self.disabled

    def install_hooks(self, hooks: dict[str, Hook]) -> None:
        """Patch modules that are imported already, and the others when they are imported. Idempotent.

        hooks: target name -> hook; targets without a hook are skipped.
        """
        waiting: dict[str, list[PlacedHook]] = {}
        for target in TARGETS:
            hook = hooks.get(target.name)
            if hook is None:
                continue
            for place in target.places:
                waiting.setdefault(place.module, []).append((target, place, hook))
        for module in list(waiting):
            loaded = sys.modules.get(module)
            # vLLM loads plugins after some of its own modules: those are in sys.modules already.
            if loaded is not None and getattr(loaded, "__spec__", None) is not None:
                self._patch_module(loaded, waiting.pop(module))
        self._waiting = waiting
        # First in the list, because the search ends with the first finder that finds the module.
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def _patch_module(self, module: ModuleType, entries: Iterable[PlacedHook]) -> None:
        for target, place, hook in entries:
            # One by one: a release that breaks one target keeps all the others.
            with guard.Guard(f"install {target.name}"):
                self._patch_place(module, target, place, hook)

    def _patch_place(
        self, module: ModuleType, target: PatchTarget, place: TargetPlace, hook: Hook
    ) -> None:
        owner: Any = module
        # "Class.method" or a function: the owner is a class or the module itself.
        *outer, name = place.name.split(".")
        for part in outer:
            owner = getattr(owner, part, None)
        # getattr_static sees staticmethod and classmethod objects, which have to be wrapped as such.
        raw = inspect.getattr_static(owner, name, None) if owner is not None else None
        # A method that is only inherited would be patched at the subclass, beside its base's patch.
        if raw is None or (outer and name not in vars(owner)):
            return
        # A renamed parameter would only raise at the first request; here the target counts as missing.
        # Compiled code may have no signature; a hook that reads no parameter needs none.
        if not target.reads or (
            inspect.signature(_unwrap_kind(raw)).parameters.keys() >= {*target.reads}
        ):
            self.patch_attribute(target, owner, name, hook)

    def patch_attribute(self, target: PatchTarget, owner: Any, name: str, hook: Hook) -> None:
        """Patch the attribute `name` of `owner` once; static and class methods stay such."""
        raw = inspect.getattr_static(owner, name)
        # Factories hand out the same class for each connector, and plugins may be loaded twice.
        if hasattr(_unwrap_kind(raw), "__ttft_otel__"):
            return
        wrapper = _build_wrapper(target.name, raw, hook)
        setattr(owner, name, wrapper)
        self.installed.setdefault(target.name, []).append(Patch(owner, name, raw, wrapper, hook))
        if hook.extend is not None:
            hook.extend(owner)

    def patch_methods(
        self,
        kind: type[Any],
        hooks: Mapping[str, Hook],
        has_method: Callable[[type[Any], str, str], bool] = lambda kind, _, name: hasattr(
            kind, name
        ),
    ) -> None:
        """Patch those methods of the connector's class `kind` that it has.

        hooks: target name -> hook. has_method: asked about class, target and method.
        """
        for target_name, hook in hooks.items():
            target = TARGETS_BY_NAME[target_name]
            for place in target.methods:
                name = place.name.rpartition(".")[2]
                if has_method(kind, target_name, name):
                    self.patch_attribute(target, kind, name, hook)

    def switch(self, off: Iterable[str] = (), fail: Iterable[str] = ()) -> None:
        """For tests: remove the targets `off`, make the hooks of `fail` raise, install all others."""
        self.disabled.clear()
        self.disabled.update(off)
        failing = set(fail)
        for name, patches in self.installed.items():
            for patch in patches:
                value = patch.original if name in self.disabled else patch.wrapper
                if name in failing:
                    # Without `ready`, so that it fails without a traced request, too.
                    hook = Hook(
                        _raise_error, _raise_error, runs_after_error=patch.hook.runs_after_error
                    )
                    value = _build_wrapper(name, patch.original, hook)
                setattr(patch.owner, patch.name, value)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The ordinary spec of a module that is to be patched; None for all others."""
        entries = self._waiting.get(fullname)
        spec = self._find_ordinary_spec(fullname, path, target) if entries else None
        if entries is None or spec is None or spec.loader is None:
            return None
        loader = spec.loader
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            # Only here: find_spec() is also called by code that checks whether the module exists.
            self._waiting.pop(fullname, None)
            self._patch_module(module, entries)

        # Replaced on the loader instance, which is for this module alone and keeps its type.
        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _find_ordinary_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> importlib.machinery.ModuleSpec | None:
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None) if finder is not self else None
            spec = find(fullname, path, target) if find is not None else None
            if isinstance(spec, importlib.machinery.ModuleSpec):
                return spec
        return None


def find_patcher() -> Patcher | None:
    """The Patcher of this process, None where no hooks are installed."""
    return next((each for each in sys.meta_path if isinstance(each, Patcher)), None)


def _unwrap_kind(raw: Any) -> AnyCall:
    call: AnyCall = raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw
    return call


def _build_wrapper(place: str, raw: Any, hook: Hook) -> Any:
    """Build the wrapper of `raw`, which stays a static or class method if it is one.

    Its attribute __ttft_otel__ marks it, so that it is not wrapped again.
    """
    call = _unwrap_kind(raw)
    wrapper: AnyCall = hook.wrap(place, call, hook)
    wrapper.__dict__["__ttft_otel__"] = place
    return wrapper if call is raw else type(raw)(wrapper)


def _raise_error(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("hook made to fail by a test")
