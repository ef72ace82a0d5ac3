# SPDX-License-Identifier: Apache-2.0
"""The stack's programs: built from pinned modules with committed hashes; they check our files, and what the
chart makes of them.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from lab import chart
from lab.stack import binaries as search
from lab.stack import go_builds, program_pins
from lab.stack.binaries import StackBinaries
from lab.stack.command import main
from lab.stack.program_pins import CHECKOUT, GO_MODULES, GoTool, StackProgram
from lab.stack.stack_parts import PROMETHEUS_FLAGS, StackAddresses

COLLECTOR = CHECKOUT / "collector"
GO = pytest.mark.skipif(not shutil.which("go"), reason=f"no Go here; {go_builds.GO_REMEDY}")
# One line of a go.mod: module and version.
MODULE = re.compile(r"^(?:require )?\s*([\w./-]+\.[\w./-]+) (v\S+)", re.M)
# Every way in which compose and README put the collector's files together.
COMBINATIONS = (
    ("config.yaml",),
    ("config.yaml", "sampling.yaml"),
    ("config.yaml", "secure.yaml"),
    ("config.yaml", "sampling.yaml", "secure.yaml"),
    ("scale-out/tier1.yaml",),
    ("scale-out/tier1.yaml", "secure.yaml", "scale-out/tier1-secure.yaml"),
    ("config.yaml", "scale-out/tier2.yaml"),
    ("config.yaml", "sampling.yaml", "scale-out/tier2.yaml"),
)


def run_program(*words: str | Path, env: dict[str, str] | None = None, code: int = 0) -> str:
    """What a program prints; it must end with `code`."""
    env = {**os.environ, **(env or {})}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=env, timeout=120)
    reported = done.stdout + done.stderr
    assert done.returncode == code, reported
    return reported


def read_refusal() -> str:
    """What `scripts/stack build` says when it cannot."""
    done = CliRunner().invoke(main, ["build"])
    assert done.exit_code == 1, done.output
    return done.output


def read_required_modules(tool: str) -> dict[str, str]:
    """Module -> version, from a committed go.mod."""
    return dict(MODULE.findall((GO_MODULES / tool / "go.mod").read_text("utf-8")))


def test_manifest() -> None:
    """The collector's go.mod holds the manifest's components, at its versions, and the builder has theirs."""
    manifest = yaml.safe_load(program_pins.COLLECTOR_MANIFEST.read_text("utf-8"))
    kinds = ("receivers", "processors", "exporters", "connectors", "extensions", "providers")
    named = dict(part["gomod"].split() for kind in kinds for part in manifest[kind])
    versions = {version for name, version in named.items() if "/confmap/provider/" not in name}

    assert named.items() <= read_required_modules("collector").items()
    assert versions == {f"v{manifest['dist']['version']}"}
    assert read_required_modules("builder")["go.opentelemetry.io/collector/cmd/builder"] in versions


@GO
def test_hashes(binaries: StackBinaries) -> None:
    """What is in a program is what the committed go.sum says, module by module."""
    tools = (*program_pins.GO_TOOLS, program_pins.BUILDER_TOOL)
    for tool, program in [(each, program) for each in tools for program in each.programs]:
        sums = set((tool.module_folder / "go.sum").read_text("utf-8").splitlines())
        reported = run_program("go", "version", "-m", tool.build_folder / program.name)
        linked = [line.split()[1:] for line in reported.splitlines() if line.split()[:1] == ["dep"]]
        replaced = [
            line.split()[1:] for line in reported.splitlines() if line.split()[:1] == ["=>"]
        ]
        hashed = {" ".join(words) for words in linked + replaced if len(words) == 3}

        assert len(linked) > 3
        assert len(hashed) == len(linked)
        assert hashed <= sums


def test_versions(binaries: StackBinaries) -> None:
    """The programs run, and they are the ones that the pins name."""
    assert "version 0.159.0" in run_program(binaries.collector, "--version")
    assert "v0.315.0" == read_required_modules("prometheus")["github.com/prometheus/prometheus"]
    assert "tempo" in run_program(binaries.tempo, "--version")
    for path in (binaries.prometheus, binaries.promtool):
        assert path.name in run_program(path, "--version")


def test_collector(binaries: StackBinaries, tmp_path: Path) -> None:
    """The collector accepts its configuration, also below each overlay; every file is among these."""
    for configs in COMBINATIONS:
        words = [f"--config=file:{COLLECTOR / name}" for name in configs]
        env = {"TTFT_COLLECTOR_STORAGE": str(tmp_path)}
        assert "rror" not in run_program(binaries.collector, "validate", *words, env=env)
    files = {path.relative_to(COLLECTOR).as_posix() for path in COLLECTOR.rglob("*.yaml")}
    assert files - {"builder.yaml"} == {name for names in COMBINATIONS for name in names}


@pytest.mark.parametrize(
    "values", chart.find_values_files(), ids=lambda path: str(path.relative_to(chart.CHART))
)
def test_charts_collectors(values: Path, binaries: StackBinaries, tmp_path: Path) -> None:
    """The collector accepts it with the pods' arguments and variables, such as the second tier's list."""
    documents = [each for each in yaml.safe_load_all(chart.render_chart(values)) if each]
    collectors = [each for each in documents if "collector" in each["metadata"]["name"]]
    for document in collectors:
        if document["kind"] == "ConfigMap" and document["metadata"]["name"].endswith("collector"):
            for name, text in document["data"].items():
                (tmp_path / name).write_text(text, "utf-8")
    for document in collectors:
        if document["kind"] in ("Deployment", "StatefulSet"):
            container = document["spec"]["template"]["spec"]["containers"][0]
            env = {each["name"]: str(each["value"]) for each in container["env"]}
            env["TTFT_COLLECTOR_STORAGE"] = str(tmp_path / "queue")
            words = [each.replace("/etc/otelcol", str(tmp_path)) for each in container["args"]]
            run_program(binaries.collector, "validate", *words, env=env)


def test_tempo(binaries: StackBinaries, tmp_path: Path) -> None:
    """Tempo accepts the configuration of the native stack, with nothing to warn of."""
    config = CHECKOUT / "grafana" / "tempo" / "native.yaml"
    env = StackAddresses().build_env() | {"TTFT_TEMPO_DATA": str(tmp_path)}
    words = (f"-config.file={config}", "-config.expand-env=true", "-config.verify=true")

    assert "level=warn" not in run_program(binaries.tempo, *words, env=env)


def test_flags() -> None:
    """Prometheus is started with the same switches in a container and without."""
    compose = yaml.safe_load((CHECKOUT / "docker-compose.yml").read_text("utf-8"))
    command = compose["services"]["prometheus"]["command"]

    assert {*PROMETHEUS_FLAGS} == {
        word for word in command if word.startswith(("--web.enable", "--enable-feature"))
    }


def test_refused(binaries: StackBinaries, tmp_path: Path) -> None:
    """A compose file with a key that does not exist is refused, and the key is named."""
    odd = tmp_path / "compose.yml"
    odd.write_text("services: {a: {imag: b}}\n", "utf-8")

    assert "imag" in run_program(binaries.compose, odd, code=1)


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with an empty cache and an empty PATH; the folder on PATH."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for _, program in search.PROGRAMS_BY_ROLE.values():
        monkeypatch.delenv(program.variable, raising=False)
    (tmp_path / "bin").mkdir()
    return tmp_path / "bin"


def write_script(path: Path, text: str) -> Path:
    """A program for tests."""
    path.write_text(f"#!/bin/sh\n{text}\n", "utf-8")
    path.chmod(0o755)
    return path


def test_missing(nowhere: Path) -> None:
    """Without Go and programs, or with an old Go, one message says what to install or to name."""
    reported = read_refusal()
    assert "Go is missing" in reported
    assert "https://go.dev/dl/" in reported
    assert "TTFT_STACK_COLLECTOR" in reported
    write_script(nowhere / "go", "echo go version go1.22.1 linux/amd64")
    assert "Go 1.22 is too old; install Go 1.25" in read_refusal()


def test_found(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable comes first, PATH serves where Go is missing, and a wrong name is said."""
    tool, program = search.PROGRAMS_BY_ROLE["collector"]
    other = write_script(nowhere / "otelcol-contrib", "true")
    assert search.obtain_program("collector", str) == other

    own = write_script(nowhere / "mine", "true")
    monkeypatch.setenv(program.variable, str(own))
    assert search.locate_program(tool, program) == search.obtain_program("collector", str) == own

    monkeypatch.setenv(program.variable, "/nowhere/otelcol")
    assert "TTFT_STACK_COLLECTOR=/nowhere/otelcol is not a program" in read_refusal()


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], GoTool]:
    """Write a Go program of our own and give the GoTool that builds it, into an empty cache."""
    monkeypatch.setenv(
        "GOCACHE", run_program("go", "env", "GOCACHE").strip()
    )  # Go's own library is there
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(program_pins, "GO_MODULES", tmp_path)
    (tmp_path / "toy").mkdir()

    def make_tool(body: str) -> GoTool:
        (tmp_path / "toy" / "go.mod").write_text("module toy.invalid/toy\n\ngo 1.25\n", "utf-8")
        (tmp_path / "toy" / "main.go").write_text(
            f"package main\n\nfunc main() {{ {body} }}\n", "utf-8"
        )
        return GoTool("toy", (StackProgram("toy", ".", "TTFT_STACK_TOY"),))

    return make_tool


@GO
def test_build(toy: Callable[[str], GoTool]) -> None:
    """A build says what it does, is done once per pin however many ask at once, and runs."""
    fresh = secrets.token_hex(8)  # Go's own cache does not know it
    tool, lines = toy(f'println("{fresh}")'), list[str]()
    threads = [
        threading.Thread(target=go_builds.build_tool, args=(tool, lines.append)) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    again = list[str]()
    folder = go_builds.build_tool(tool, again.append)

    assert fresh in run_program(folder / "toy")
    assert 1 == sum("toy.invalid/toy" in line for line in lines)
    assert [] == again
    other = go_builds.build_tool(toy('println("two")'), again.append)
    assert "two" in run_program(other / "toy")
    assert fresh in run_program(folder / "toy")


@GO
def test_failed(toy: Callable[[str], GoTool]) -> None:
    """A build that fails gives the compiler's words, and is tried again the next time."""
    for _ in range(2):
        tool = toy("undefined()")
        with pytest.raises(go_builds.GoBuildError, match=r"go build toy failed(.|\n)*undefined"):
            go_builds.build_tool(tool, str)
        assert not go_builds.is_built(tool)
