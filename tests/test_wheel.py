# SPDX-License-Identifier: Apache-2.0
"""The wheel as users get it: what is in it, and that it works in an environment with nothing else.

uv builds it and installs it twice, with all extras of users and without any. Needs uv and, until
uv's cache is warm, the package index; a skip says which of them is missing.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final

import pytest
from router import small_tokenizer

from lab import uv_command
from lab.release_files import copy_files, list_tracked_files
from ttft_otel.bench.request_factory import draw_data_url
from ttft_otel.commands import main as cli
from ttft_otel.stack import stack_files

ROOT = Path(__file__).parents[1]
EXTRAS: Final = ("router", "tokenize", "serve", "bench", "explain", "mcp")
WITH_EXTRAS: Final = pytest.param(",".join(EXTRAS), marks=pytest.mark.full)
# The extra that a folder's modules may need; every other module must import without any.
EXTRA_OF_FOLDER: Final = {
    "http": "serve",  # uvicorn, which `router` has, too
    "router": "router",
    "report": "serve",
    "bench": "bench",
    "explain": "explain",
}
# Module -> why it cannot be imported without vLLM. None: hooks look vLLM up when it is imported.
EXEMPT_MODULES: Final[dict[str, str]] = {
    "ttft_otel.distro": "only opentelemetry-instrument loads it, which brings what it imports",
}
MAX_WHEEL_BYTES: Final = (
    1_050_000  # 915 000 when this was written, 70 000 of them the stack's files
)

# Each module of the package, imported in one process: module -> what was raised, or "".
IMPORT_ALL: Final = """
import importlib, json, pkgutil, sys
import ttft_otel
result = {}
for module in pkgutil.walk_packages(ttft_otel.__path__, "ttft_otel."):
    try:
        importlib.import_module(module.name)
        result[module.name] = ""
    except ImportError as error:
        result[module.name] = error.name or str(error)
foreign = {"vllm", "torch", "transformers", "pytest", "lab"} & set(sys.modules)
print(json.dumps({"modules": result, "file": ttft_otel.__file__, "foreign": sorted(foreign)}))
"""
# The help of each of the subcommands in sys.argv[1], in one process: words -> exit code, stdout, stderr.
HELP_ALL: Final = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from ttft_otel.commands.main import main
found = {}
for words in json.loads(sys.argv[1]):
    out, error = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(error):
            main([*words.split(), "--help"], prog_name="ttft-otel")
    except SystemExit as end:
        found[words] = (end.code, out.getvalue(), error.getvalue())
print(json.dumps(found))
"""
LOAD_PLUGIN: Final = """
from importlib.metadata import entry_points
(plugin,) = entry_points(group="vllm.general_plugins")
assert callable(plugin.load())
"""


def run_uv(*arguments: str | Path) -> None:
    """Run uv; without a network, from its cache. Skips when neither will do."""
    try:
        uv_command.run_uv(*arguments)
    except uv_command.UvMissingError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the files that git knows: no leftover gets into it."""
    return build_wheel(tmp_path_factory.getbasetemp())


@functools.cache
def build_wheel(work: Path) -> Path:
    """Build the wheel below `work`, once for all that need it; skips where that cannot be."""
    # A folder of its own: who comes after a skip builds again.
    source = Path(tempfile.mkdtemp(dir=work))
    copy_files(ROOT, list_tracked_files(ROOT), source)
    run_uv("build", "--quiet", "--wheel", "--out-dir", work / "dist", source)
    (built,) = (work / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module", params=["", WITH_EXTRAS], ids=["plain", "extras"])
def environment(
    request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """An environment with the wheel, the parameter's extras and nothing else."""
    wanted = f"{wheel}[{request.param}]" if request.param else str(wheel)
    return make_environment(tmp_path_factory, wanted)


def make_environment(tmp_path_factory: pytest.TempPathFactory, wanted: str) -> Path:
    """A new environment with what is wanted alone."""
    folder = tmp_path_factory.mktemp("environment")
    run_uv("venv", "--quiet", "--python", sys.executable, folder)
    run_uv("pip", "install", "--quiet", "--python", folder, wanted)
    return folder


@pytest.fixture
def extras(environment: Path, request: pytest.FixtureRequest) -> set[str]:
    """The extras that the environment has."""
    return set(request.node.callspec.params["environment"].split(",")) - {""}


def run_program(
    environment: Path, *words: str, more: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A program of the environment, in its folder and without this process's Python settings.

    more: further variables.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env |= more or {}
    command = (str(environment / "bin" / words[0]), *words[1:])
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=environment, env=env, timeout=60
    )


def import_all_modules(environment: Path) -> dict[str, Any]:
    """What IMPORT_ALL prints in the environment."""
    done = run_program(environment, "python", "-I", "-c", IMPORT_ALL)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_contents(wheel: Path, record_property: Callable[[str, object], None]) -> None:
    """The wheel holds the package's files, all of them, and nothing of the rest of the checkout."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
    folders = {PurePosixPath(name).parts[0] for name in names}
    size = wheel.stat().st_size
    record_property("wheel_bytes", size)
    sys.stdout.write(f"{wheel.name}: {size} bytes, {len(names)} files\n")

    stack = [f"{name}/" if (ROOT / name).is_dir() else name for name in stack_files.STACK_FILES]
    assert {name for name in names if name.startswith("ttft_otel/")} == {
        path if path.startswith("ttft_otel/") else f"ttft_otel/_stack/{path}"
        for path in list_tracked_files(ROOT)
        if path.startswith(("ttft_otel/", *stack))
    }
    assert {re.sub(r"-[^-]*\.dist-info$", "", folder) for folder in folders} == {"ttft_otel"}
    assert size <= MAX_WHEEL_BYTES


def test_help(environment: Path) -> None:
    """`ttft-otel --help` and --version need no extra; the help lists every subcommand."""
    reported = run_program(environment, "ttft-otel", "--help")
    version = run_program(environment, "ttft-otel", "--version")

    assert (reported.returncode, reported.stderr) == (0, "")
    assert all(re.search(rf"^  {name} ", reported.stdout, re.M) for name in cli.SUBCOMMANDS)
    assert (version.returncode, version.stderr) == (0, "")


def test_subcommand_help(environment: Path, extras: set[str]) -> None:
    """A subcommand's --help exits with 0; without its extra it says what to install, with 1."""
    wanted = [*cli.SUBCOMMANDS, "bench compare"]
    done = run_program(environment, "python", "-I", "-c", HELP_ALL, json.dumps(wanted))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)

    assert list(found) == wanted
    for words, (status, output, error) in found.items():
        extra = cli.SUBCOMMANDS[words.split()[0]].extra
        if extra and extra not in extras:
            assert (status, output) == (1, "")
            assert f"pip install 'ttft-otel[{extra}]'" in error
        else:
            assert (status, error) == (0, "")
            assert output.startswith(f"Usage: ttft-otel {words} ")


@pytest.mark.parametrize(
    ("line", "expected"),
    [("ttft-otel re", ["report"]), ("ttft-otel d", ["demo", "diff", "dashboards", "doctor"])],
)
def test_completion(environment: Path, line: str, expected: list[str]) -> None:
    """A shell completes subcommands, and options of those whose packages are there, with any extras."""
    asked = {"_TTFT_OTEL_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": "1"}
    done = run_program(environment, "ttft-otel", more=asked)
    asked |= {"COMP_WORDS": "ttft-otel diff --fa", "COMP_CWORD": "2"}
    option = run_program(environment, "ttft-otel", more=asked)

    assert done.stdout.split() == [f"plain,{name}" for name in expected]
    assert (done.stderr, option.stderr) == ("", "")
    assert option.stdout.split() in (["plain,--fail-if"], [])


def test_imports(environment: Path, extras: set[str]) -> None:
    """Every module imports without vLLM, and only those of a folder that has an extra need it."""
    found = import_all_modules(environment)
    failed = {
        module: error
        for module, error in found["modules"].items()
        if error and module not in EXEMPT_MODULES
    }

    assert found["file"].startswith(str(environment)), "not the installed package"
    assert found["foreign"] == []
    assert {"ttft_otel.plugin", "ttft_otel.hooks.install"} <= set(found["modules"])
    assert [error for error in failed.values() if error.startswith(("ttft_otel", "vllm"))] == []
    importable = {each.module for each in cli.SUBCOMMANDS.values() if each.extra in {"", *extras}}
    assert not importable & set(failed)
    # A command's modules need what the command needs, so that their folder as a whole has no extra.
    folders = {module.split(".")[1] for module in failed} - {"commands"}
    assert folders == {name for name, extra in EXTRA_OF_FOLDER.items() if extra not in extras}


@pytest.mark.parametrize("environment", [WITH_EXTRAS], ids=["extras"], indirect=True)
def test_local_tokenizer(environment: Path, tmp_path: Path) -> None:
    """With the extra `tokenize` the child loads a tokenizer and counts an image's placeholders."""
    model = small_tokenizer.build_tokenizer(tmp_path, model_type="qwen2_5_vl")
    python = str(environment / "bin" / "python")
    child = small_tokenizer.TokenizerChild(small_tokenizer.start_child_process(python, environment))
    image = {"type": "image_url", "image_url": {"url": draw_data_url(1, 280, 140)}}
    try:
        loaded = child.read_prompt(model)
        read = child.read_prompt(model, "chat", messages=[{"role": "user", "content": [image]}])
    finally:
        status = child.close()

    assert (loaded.error, loaded.detail) == ("", "")
    assert (read.error, read.item_tokens, status) == ("", (50,), 0)  # 280 x 140 / 28²


def test_stack(environment: Path, tmp_path: Path) -> None:
    """`stack init` needs no checkout; compose builds its images from what it has written."""
    written = run_program(environment, "ttft-otel", "stack", "init", str(tmp_path / "stack"))
    status = run_program(environment, "ttft-otel", "stack", "status", str(tmp_path / "stack"))
    run_uv("build", "--quiet", "--wheel", "--out-dir", tmp_path, tmp_path / "stack")
    (rebuilt,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(rebuilt) as archive:
        names = set(archive.namelist())

    assert (written.returncode, written.stderr) == (0, "")
    assert "differ" not in status.stdout + status.stderr
    assert {"ttft_otel/_stack/docker-compose.yml", "ttft_otel/commands/serve.py"} <= names


def test_plugin(environment: Path) -> None:
    """The entry point that vLLM loads in each of its processes is there and needs no extra."""
    done = run_program(environment, "python", "-I", "-c", LOAD_PLUGIN)

    assert done.returncode == 0, done.stderr
