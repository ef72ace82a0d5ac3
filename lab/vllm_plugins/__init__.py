# SPDX-License-Identifier: Apache-2.0
"""vLLM plugins for tests alone; server_commands.py puts their folders on a server's PYTHONPATH.

The plugins are never installed: each folder holds a package and its own hand-written metadata, so
that only a server whose PYTHONPATH names the folder finds the entry points.
"""

from __future__ import annotations

from pathlib import Path

PLUGINS_FOLDER = Path(__file__).parent


def join_plugin_paths(*names: str) -> str:
    """The folders of the plugins `names`, joined for PYTHONPATH. Raises LookupError for unknown ones."""
    folders = [PLUGINS_FOLDER / name for name in names]
    for folder in folders:
        if not any(folder.glob("*.dist-info")):
            raise LookupError(f"no plugin named {folder.name} in {PLUGINS_FOLDER}")
    return ":".join(map(str, folders))
