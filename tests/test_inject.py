# SPDX-License-Identifier: Apache-2.0
"""The folder that is injected into a vLLM container: found by PYTHONPATH alone, and hiding nothing.

deploy/inject/build_folder makes it, as deploy/inject.Dockerfile does; live/test_alone.py injects it, too.
Needs uv and its cache, or a network.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any, Final

import pytest
from exporter.conftest import OtlpCollector
from test_wheel import ROOT, build_wheel, run_uv

from lab.uv_command import NETWORK_ERROR, find_uv
from ttft_otel.model.names import env_names

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
