# SPDX-License-Identifier: Apache-2.0
"""Run uv, which builds packages and makes environments; release.py and tests of the wheel call it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from lab.tiny_models import get_cache_root

TIMEOUT_S: Final = 600.0
NETWORK_ERROR: Final = re.compile(
    r"error sending request|failed to fetch|dns error|connection|timed out|network", re.I
)


class UvError(RuntimeError):
    """uv failed; the message has its words."""


class UvMissingError(UvError):
    """uv, or what it would have to download, cannot be had here; the message says which."""


def find_uv() -> str:
    """Path of uv. Raises UvMissingError."""
    program = shutil.which("uv") or str(get_cache_root() / "uv" / "bin" / "uv")
    if not os.access(program, os.X_OK):
        raise UvMissingError("uv is missing; run scripts/install")
    return program


def run_uv(
    *arguments: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> str:
    """Run uv, without a network from its cache; gives its output.

    env: instead of this process's. cwd: the folder in which it runs. Raises UvError, UvMissingError.
    """
    program, online_error = find_uv(), ""
    for offline in ("", "1"):
        command = (program, *arguments)
        given = {**(os.environ if env is None else env)} | ({"UV_OFFLINE": "1"} if offline else {})
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, env=given, cwd=cwd
        )
        if not done.returncode:
            return done.stdout
        if offline:
            break
        online_error = (done.stderr or done.stdout).strip()
        if not NETWORK_ERROR.search(online_error):
            raise UvError(online_error)
    raise UvMissingError(
        f"no package index here, and uv's cache is not warm: {online_error[-300:]}"
    )
