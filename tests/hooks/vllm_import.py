# SPDX-License-Identifier: Apache-2.0
"""Import vLLM into the tests' own process; fixtures and drivers of its parts begin here."""

from __future__ import annotations

import gc
import importlib
import sys
import warnings
from types import ModuleType


def import_from_vllm(*names: str) -> list[ModuleType]:
    """The modules `names`, of vLLM or such as import it, without the warnings of other people's code.

    Six seconds of CPU the first time; three more if garbage were looked for meanwhile, and as many
    if vLLM's million of objects were looked through with later garbage.
    """
    if all(name in sys.modules for name in names):
        return [sys.modules[name] for name in names]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()  # what tests have left would else be frozen, too
        gc.disable()
        try:
            return [importlib.import_module(name) for name in names]
        finally:
            gc.freeze()
            gc.enable()
