# SPDX-License-Identifier: Apache-2.0
"""Each Python that pyproject.toml names: what needs no vLLM imports, and tests of units pass.

tests/model and parts of tests/exporter and tests/explain: they measure no times, and need nothing that came
after 3.10.
vLLM itself is installed for one Python alone.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Final

import pytest

from lab import uv_command

ROOT: Final = Path(__file__).parents[1]
VERSIONS: Final = re.findall(
    r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text(encoding="utf-8")
)
EXTRAS: Final = "router,serve,bench,explain,mcp"
TEST_PACKAGES: Final = (
    *("pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "hypothesis", "jsonschema"),
)
UNITS: Final = (
    *("tests/model", "tests/exporter/spans", "tests/exporter/metrics"),
    *(
        "tests/explain/test_diff.py::test_cause",
        "tests/explain/test_stored_windows.py::test_holders",
    ),
)
IMPORT_COMMANDS: Final = """
import sys
from ttft_otel.commands import main
for name, door in main.SUBCOMMANDS.items():
    main.load_subcommand(name, door)
print("%d.%d" % sys.version_info[:2], len(main.SUBCOMMANDS))
"""


def find_python(version: str) -> str:
    """A Python of this version that is here, or that uv downloads. Skips without."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for path in sorted(root.glob(f"versions/{version}.*/bin/python")):
        return str(path)
    try:
        uv_command.run_uv("python", "install", "--quiet", version)
        return version
    except uv_command.UvError as error:
        pytest.skip(f"no Python {version}, and uv cannot get it: {str(error)[-200:]}")


def test_versions() -> None:
    """The classifiers begin with the oldest Python that may install the package, and leave none out."""
    project = (ROOT / "pyproject.toml").read_text("utf-8")

    assert VERSIONS == ["3.10", "3.11", "3.12", "3.13"]
    assert f'requires-python = ">={VERSIONS[0]}"' in project
    assert f'python_version = "{VERSIONS[0]}"' in project  # what mypy checks by


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", VERSIONS)
def test_python(version: str, tmp_path: Path) -> None:
    """Every command is imported, and the tests of units pass."""
    python = find_python(version)
    environment = tmp_path / "environment"
    try:
        uv_command.run_uv("venv", "--quiet", "--python", python, environment)
        wanted = (f"{ROOT}[{EXTRAS}]", *TEST_PACKAGES)
        uv_command.run_uv("pip", "install", "--quiet", "--python", environment, *wanted)
    except uv_command.UvMissingError as error:
        pytest.skip(str(error))
    program = str(environment / "bin" / "python")
    run = {"cwd": ROOT, "capture_output": True, "text": True, "check": False}
    loaded = subprocess.run((program, "-I", "-c", IMPORT_COMMANDS), **run)
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.split()[0] == version
    marks = ("-m", "not slow and not full and not live", "-p", "no:cacheprovider")
    tested = subprocess.run(
        (
            program,
            "-m",
            "pytest",
            "-q",
            "--tb=short",
            *marks,
            "--hypothesis-profile",
            "quick",
            *UNITS,
        ),
        **run,
    )
    assert tested.returncode == 0, tested.stdout[-4000:]
    assert int(re.findall(r"(\d+) passed", tested.stdout)[-1]) > 500
