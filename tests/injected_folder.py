# SPDX-License-Identifier: Apache-2.0
"""The folder that is injected, made by the image's own script, and a Python to inject it into.

test_inject.py and live/test_alone.py use it. Needs uv and its cache, or a network.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Final

import pytest
from test_wheel import ROOT, build_wheel, run_uv

from lab.uv_command import NETWORK_ERROR, find_uv

PYTHON: Final = f"python{sys.version_info.major}.{sys.version_info.minor}"


def build_injected_folder(work: Path) -> Path:
    """The folder for this Python, below `work`; skips the test where its packages cannot be had."""
    wheel = build_wheel(work.parent)
    script = ROOT / "deploy" / "inject" / "build_folder"
    command = (script, work / "injected", wheel, PYTHON.removeprefix("python"))
    uv = Path(find_uv())
    for offline in ("0", "1"):
        env = {**os.environ, "PATH": f"{uv.parent}:{os.environ['PATH']}", "UV_OFFLINE": offline}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if not done.returncode:
            return work / "injected"
        if offline == "0":
            assert NETWORK_ERROR.search(done.stderr), done.stderr
    pytest.skip(f"no package index here, and uv's cache is not warm: {done.stderr[-300:]}")


def make_host_python(folder: Path) -> Path:
    """The interpreter of an environment that has this one's packages, by links, but no ttft-otel."""
    run_uv("venv", "--quiet", "--python", sys.executable, folder)
    (site,) = folder.glob("lib/python*/site-packages")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "ttft" not in path.name and not (site / path.name).exists():
            (site / path.name).symlink_to(path)
    return folder / "bin" / "python"
