# SPDX-License-Identifier: Apache-2.0
"""The command line of a Python child process; handoff.py and the router's tokenizer_worker.py use it."""

from __future__ import annotations

import sys
from typing import Final

# `python -m` looks for modules in the working directory first, before Python 3.11 also with PYTHONSAFEPATH:
# whoever may write there would run code in the child.
_START: Final = (
    "import sys; sys.path[:] = [path for path in sys.path if path]; import runpy; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def build_child_command(module: str, *arguments: str) -> tuple[str, ...]:
    """Run `module` like `python -m`, but without the working directory on its import path."""
    return (sys.executable, "-c", _START, module, *arguments)
