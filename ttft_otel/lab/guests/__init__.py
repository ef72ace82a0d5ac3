# SPDX-License-Identifier: Apache-2.0
"""Name the folders of the test-only vLLM plugins; recipes.py puts them on a server's PYTHONPATH.

The plugins are never installed: each folder holds a package and its own hand-written metadata, so
that only a server whose PYTHONPATH names the folder finds the entry points.
"""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent


def guests_path(*names: str) -> str:
    """The PYTHONPATH entries of the named guests, joined; an unknown name is an error."""
    folders = [HERE / name for name in names]
    for folder in folders:
        if not any(folder.glob("*.dist-info")):
            raise LookupError(f"no guest named {folder.name} in {HERE}")
    return ":".join(map(str, folders))
