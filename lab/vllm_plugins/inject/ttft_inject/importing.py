# SPDX-License-Identifier: Apache-2.0
"""Run a function on a module right after its import, now or later; places.py and forced.py use it.

vLLM's worker modules must not be imported early: on CPU they replace parts of torch.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Patch = Callable[[ModuleType], None]


class Finder:
    """A meta-path finder that lets the others find and then adds our step to the loading."""

    def __init__(self, patches: Mapping[str, Patch]) -> None:
        """Remember what to do with which module."""
        self.patches = dict(patches)
        self.busy: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that the other finders give, with a loader that patches afterwards."""
        if name not in self.patches or name in self.busy:
            return None
        self.busy.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.busy.discard(name)
        if spec is not None and spec.loader is not None:
            patch_after(spec.loader, self.patches[name])
        return spec


def patch_after(loader: Any, patch: Patch) -> None:
    """Make this one loader object call `patch` once its module has run."""
    original = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        original(module)
        patch(module)

    loader.exec_module = exec_module


def install(patches: Mapping[str, Patch]) -> None:
    """Patch modules that are there already at once, and all others at their import."""
    for name, patch in patches.items():
        if name in sys.modules:
            patch(sys.modules[name])
    sys.meta_path.insert(0, Finder(patches))
