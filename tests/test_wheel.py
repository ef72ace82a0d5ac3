# SPDX-License-Identifier: Apache-2.0
"""The wheel as users get it: what is in it, and that it works in an environment with nothing else.

uv builds it and installs it twice, with all extras of users and without any. Commands of README and
guides run from it outside the checkout, in a network namespace in which nothing but their own server
listens; those that need a vLLM, Docker, a cluster or a checkout are named in NOT_HERE. Needs uv and,
until uv's cache is warm, the package index; a skip says which of them is missing.

The folder that is injected into a vLLM container is made of it by deploy/inject/build_folder, as
deploy/inject.Dockerfile does: PYTHONPATH alone finds it, and it hides nothing. live/test_alone.py injects it,
too. Each Python that pyproject.toml names imports what needs no vLLM, and passes tests of units: tests/model
and parts of tests/exporter and tests/explain measure no times, and need nothing that came after 3.10.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final

import pytest
from exporter.conftest import OtlpCollector
from router import small_tokenizer

from lab import uv_command
from lab.release_files import copy_files, list_tracked_files
from lab.uv_command import NETWORK_ERROR, find_uv
from tests.test_docs import list_commands
from ttft_otel.bench.request_factory import draw_data_url
from ttft_otel.commands import main as cli
from ttft_otel.model.names import env_names
from ttft_otel.stack import stack_folder

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
FIND_PLUGIN: Final = """
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

    stack = [f"{name}/" if (ROOT / name).is_dir() else name for name in stack_folder.STACK_FILES]
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
    done = run_program(environment, "python", "-I", "-c", FIND_PLUGIN)

    assert done.returncode == 0, done.stderr


# Command, or its first words -> what it needs beside the wheel.
NOT_HERE: Final = {
    "scripts/": "a checkout",
    "docker build": "a checkout and Docker",
    "vllm serve": "vLLM",
    "pip install": "done: the wheel with the extras",
    "curl": "vLLM or the router's admin port",
    "ttft-otel stack up": "Docker",
    "ttft-otel stack smoke": "a running stack",
    "ttft-otel dashboards": "a Grafana",
    "ttft-otel bench --": "a vLLM server",
    "ttft-otel bench compare": "two results of a vLLM server",
    "ttft-otel router --discover": "a cluster",
    "ttft-otel router --config": "a file that the guide shows",
    "ttft-otel router --shared-state": "a Valkey",
    "ttft-otel router --backend https": "certificates",
    "ttft-otel router --routing-logic ttft --prefix-index": "KV events of vLLM",
}
# They run until they are interrupted.
SERVERS: Final = ("ttft-otel serve", "ttft-otel router")
RECORDED_PAGE: Final = "ttft-otel demo --recorded"  # with --db it shows none, and ends
# What only a server or a store has that is not here: refused with a sentence and a remedy.
REFUSED: Final = (
    *("doctor", "--tempo", "--join", "top --server", "--since 14:00", "--by service", "mcp"),
    *("--trace 4bf92f", "explain --request ID", "--a 2h..1h", "whatif", "--last 1 --server"),
)
START_S: Final = 60.0


def list_shown() -> list[str]:
    """Each of our commands that README and guides show, once, without variables and pipes."""
    found = dict[str, None]()
    for words in list_commands():
        while "=" in words[0]:
            words = words[1:]
        words = words[: words.index("|")] if "|" in words else words
        found[shlex.join(words)] = None
    return [each for each in found if not each.startswith(tuple(NOT_HERE))]


@pytest.mark.full
def test_uvx(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    """`uvx` runs what needs no vLLM, without an environment of the user's."""
    wheel = build_wheel(tmp_path_factory.getbasetemp())
    words = ("tool", "run", "--quiet", "--from", f"{wheel}[serve,explain]", "ttft-otel")
    env = {"HOME": os.environ["HOME"], "PATH": os.environ["PATH"]}
    demo = "demo --recorded --db spans.db"
    for command in (demo, "report --db spans.db", "explain --db spans.db", "stack init stack"):
        assert uv_command.run_uv(*words, *command.split(), env=env, cwd=tmp_path), command
    assert (tmp_path / "stack" / "docker-compose.yml").is_file()


@pytest.fixture(scope="module")
def alone() -> Iterator[tuple[str, ...]]:
    """Words before a command that run it where the ports of the guides are free."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("a network namespace needs root and iproute2: apt-get install iproute2")
    name = f"ttft-docs-{os.getpid()}"
    for words in (("netns", "add", name), ("-n", name, "link", "set", "lo", "up")):
        done = subprocess.run(("ip", *words), capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no network namespace: {done.stderr.strip()}")
    yield ("ip", "netns", "exec", name)
    subprocess.run(("ip", "netns", "del", name), check=True)


class Shell:
    """Runs commands of the environment in a user's folder."""

    def __init__(self, environment: Path, alone: tuple[str, ...], home: Path) -> None:
        self.alone = alone
        self.start = functools.partial(
            subprocess.Popen[str],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            cwd=home,
            env={
                "HOME": str(home),
                "PATH": f"{environment / 'bin'}:/usr/bin:/bin",
                "PYTHONUNBUFFERED": "1",
            },
        )

    def listens(self) -> bool:
        """Whether anything listens in the namespace."""
        found = subprocess.run(
            (*self.alone, "cat", "/proc/net/tcp"), capture_output=True, text=True, check=True
        )
        return any(line.split()[3] == "0A" for line in found.stdout.splitlines()[1:])

    def run(self, command: str) -> tuple[int, str]:
        """Its exit code and what it prints; a server is interrupted once it listens, which is no error."""
        is_server = command.startswith(SERVERS) or command == RECORDED_PAGE
        process = self.start((*self.alone, *shlex.split(command)))
        try:
            deadline = time.monotonic() + START_S
            while is_server and not self.listens():
                assert process.poll() is None, process.communicate()[0]
                assert time.monotonic() < deadline, f"{command} does not listen"
                time.sleep(0.2)
            if is_server:
                time.sleep(2)  # until it handles Ctrl-C; a user reads first
                process.send_signal(signal.SIGINT)
            said, _ = process.communicate(timeout=120)
        finally:
            process.kill()
        assert not is_server or process.returncode == 0 or said.endswith("Aborted!\n"), said
        return 0 if is_server else process.returncode, said


@pytest.mark.parametrize("environment", [WITH_EXTRAS], ids=["extras"], indirect=True)
@pytest.mark.timeout(1200)
def test_commands(environment: Path, alone: tuple[str, ...], tmp_path: Path) -> None:
    """Each runs: answers, or refuses in a sentence what only a server or a store could tell."""
    shell = Shell(environment, alone, tmp_path)
    # The requests that later commands ask for, in the store that they ask by default.
    store = tmp_path / ".local" / "state" / "ttft-otel" / "spans.db"
    store.parent.mkdir(parents=True)
    code, said = shell.run(f"ttft-otel demo --recorded --db {store}")
    assert code == 0, said
    answered, wrong = [], []
    for command in list_shown():
        code, said = shell.run(command)
        refused = code != 0 and said.strip() and any(part in command for part in REFUSED)
        if "Traceback" in said or "Usage:" in said or not (code == 0 or refused):
            wrong.append(f"{command}: {code}: {said[-600:]}")
        answered += [command] if code == 0 else []

    sys.stdout.write(f"{len(list_shown())} commands, {len(answered)} answered: {answered}\n")
    assert wrong == []
    needed = {"serve", "router", "report", "explain", "stack"}
    assert {each.split()[1] for each in answered} >= needed


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


# As vLLM does it in every process, by name; then what a test wants to know.
LOAD_PLUGIN: Final = """
import importlib.metadata, importlib.util, json, os, sys
before = set(sys.modules)
points = importlib.metadata.entry_points(group="vllm.general_plugins")
for point in points:
    if point.dist.name == "ttft-otel-inject":
        point.load()()
"""
# Where every package of the environment would be imported from, and every distribution's version.
FIND_PACKAGES: Final = """
found = {}
for name in importlib.metadata.packages_distributions():
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        continue
    found[name] = spec and (spec.origin or list(spec.submodule_search_locations)[0])
versions = {dist.name: importlib.metadata.version(dist.name) for dist in importlib.metadata.distributions()}
print(json.dumps({"found": found, "versions": versions, "path": sys.path}))
"""
SEND_RECORD: Final = """
import logging
from ttft_otel.tracing import handoff
from ttft_otel.commands.doctor import _make_probe_record
from ttft_otel.model.record import encode_record
assert handoff.get_sender().send(encode_record(_make_probe_record()))
handoff.get_sender().close(60)
counts = handoff.get_counts()
print(json.dumps({"counts": counts, "opentelemetry": "opentelemetry.sdk" in sys.modules}))
"""


@pytest.fixture(scope="module")
def injected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder for this Python."""
    return build_injected_folder(tmp_path_factory.mktemp("injected"))


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python without ttft-otel that has the packages of this one: vLLM's, where it is installed."""
    return make_host_python(tmp_path_factory.mktemp("host"))


def run_python(python: Path, code: str, path: Path | None, **env: str) -> Any:
    """What `code` prints, as JSON, and the standard error; `path` is all of PYTHONPATH."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "PYTEST", "OTEL", "TTFT"))
    }
    kept |= {"PYTHONPATH": str(path)} if path else {}
    done = subprocess.run(
        (python, "-c", LOAD_PLUGIN + code),
        env=kept | env,
        cwd=python.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_nothing_is_hidden(injected: Path, host: Path) -> None:
    """Every package and version of the host is the one that it is without us; ours come last."""
    plain, _ = run_python(host, FIND_PACKAGES, None, TTFT_OTEL="1")
    with_us, _ = run_python(host, FIND_PACKAGES, injected, TTFT_OTEL="1")
    ours = {"ttft_otel", "ttft_otel_inject"}

    changed = {
        name for name, place in plain["found"].items() if with_us["found"].get(name) != place
    }
    assert len(plain["found"]) > 20 and changed <= ours
    assert plain["versions"].items() <= with_us["versions"].items()
    assert with_us["path"][-1] == str(injected / PYTHON)
    assert [place for place in with_us["path"] if place not in plain["path"]] == [
        str(injected),
        str(injected / PYTHON),
    ]
    beside = {each.name.split("-")[0] for each in injected.iterdir()}
    assert beside - {"__pycache__"} == {"ttft_otel_inject", "ttft_otel_inject.py", PYTHON}


def test_traced(injected: Path, tmp_path: Path) -> None:
    """A Python with nothing but what vLLM has of our needs sends spans, with PYTHONPATH and TTFT_OTEL."""
    run_uv("venv", "--quiet", "--python", sys.executable, tmp_path / "bare")
    bare = tmp_path / "bare" / "bin" / "python"
    run_uv("pip", "install", "--quiet", "--python", bare, "msgspec", "prometheus-client")
    collector = OtlpCollector()
    try:
        reported, _ = run_python(
            bare,
            SEND_RECORD,
            injected,
            **{env_names.TTFT_OTEL: "1", env_names.OTEL_EXPORTER_OTLP_ENDPOINT: collector.url},
        )
    finally:
        collector.close()

    assert reported["counts"]["exported"] == 1 and reported["counts"]["failed"] == 0
    assert len(collector.spans) == 1
    assert not reported["opentelemetry"]  # only in the exporter's process


def test_off(injected: Path, host: Path) -> None:
    """Without TTFT_OTEL neither a module of ours nor a folder is added."""
    code = "print(json.dumps([sorted(set(sys.modules) - before), sys.path]))"
    (modules, path), stderr = run_python(host, code, injected)

    assert "ttft_otel_inject" in modules
    assert not [name for name in modules if name.split(".")[0] == "ttft_otel"]
    assert str(injected / PYTHON) not in path and not stderr


@pytest.mark.parametrize("broken", ["missing", "empty"])
def test_wrong_version(injected: Path, host: Path, tmp_path: Path, broken: str) -> None:
    """Without a folder for this Python, or with one that is cut off, one line says so; nothing fails."""
    folder = tmp_path / "injected"
    shutil.copytree(injected, folder, ignore=shutil.ignore_patterns(PYTHON))
    if broken == "empty":
        (folder / PYTHON).mkdir()
    _, stderr = run_python(host, "print(0)", folder, TTFT_OTEL="1")

    (line,) = stderr.splitlines()
    assert str(folder / PYTHON) in line and "runs without tracing" in line


VERSIONS: Final = re.findall(
    r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text(encoding="utf-8")
)
UNIT_EXTRAS: Final = "router,serve,bench,explain,mcp"
TEST_PACKAGES: Final = (
    *("pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "hypothesis", "jsonschema"),
)
UNITS: Final = (
    *("tests/model", "tests/exporter/test_request_metrics.py", "tests/exporter/test_spans.py"),
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
        wanted = (f"{ROOT}[{UNIT_EXTRAS}]", *TEST_PACKAGES)
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
    assert int(re.findall(r"(\d+) passed", tested.stdout)[-1]) > 450
