# SPDX-License-Identifier: Apache-2.0
"""Test-only vLLM plugins ("guests"); server_commands.py puts their folders on a server's PYTHONPATH.

The plugins are never installed: each folder holds a package and its own hand-written metadata, so
that only a server whose PYTHONPATH names the folder finds the entry points.
"""

from __future__ import annotations

from pathlib import Path

GUESTS_FOLDER = Path(__file__).parent


def join_guest_paths(*names: str) -> str:
    """The folders of the guests `names`, joined for PYTHONPATH. Raises LookupError for unknown ones."""
    folders = [GUESTS_FOLDER / name for name in names]
    for folder in folders:
        if not any(folder.glob("*.dist-info")):
            raise LookupError(f"no guest named {folder.name} in {GUESTS_FOLDER}")
    return ":".join(map(str, folders))
