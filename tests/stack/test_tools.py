# SPDX-License-Identifier: Apache-2.0
"""scripts/stack. The programs are built from pinned modules with committed hashes; they check our files, and
what the chart makes of them; `up`, status, smoke and down, as an operator runs them.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, Self

import pytest
import yaml
from click.testing import CliRunner

from lab import chart, session_processes
from lab.stack import binaries as search
from lab.stack import go_builds, grafana_server, native_stack, native_state, program_pins
from lab.stack.binaries import StackBinaries
from lab.stack.command import main
from lab.stack.program_pins import CHECKOUT, GO_MODULES, GoTool, StackProgram
from lab.stack.stack_parts import PROMETHEUS_FLAGS, StackAddresses
from tests.stack.running_stack import wait_until

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


STACK: Final = (sys.executable, "-m", "lab.stack")
LOOPBACK: Final = "0100007F"  # 127.0.0.1, the lowest byte first
PARTS: Final = ("prometheus", "tempo", "collector")
# Spans become metrics when the collector flushes: not fifteen seconds for a test.
ENV: Final = {**os.environ, "TTFT_METRICS_INTERVAL": "1s"}


class StackTerminal:
    """A running `up --native`, stopped at the end of the block whatever the test did to it.

    out: the file with its output.
    """

    def __init__(self, data: Path) -> None:
        self.data = data
        self.out = data.parent / f"{data.name}.out"
        with self.out.open("wb") as sink:
            words = (*STACK, "up", "--free-ports", "--data", str(data))
            self.process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=ENV
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)

    def read_output(self) -> str:
        """All that it has printed."""
        return self.out.read_text("utf-8")

    def run_command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run another command of scripts/stack on the same data folder, as from a second terminal."""
        command = (*STACK, *words, "--data", str(self.data))
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)

    def read_programs(self) -> dict[str, int]:
        """Name -> process id, from the state file, once it is written."""
        found = wait_until(lambda: native_state.read_state(self.data), 60)
        assert found
        return {name: pid for name, (pid, _) in found.programs.items()}


def list_processes(leaders: Iterable[int]) -> list[int]:
    """Process ids of programs and of their children that run."""
    return [pid for leader in leaders for pid in session_processes.list_session_pids(leader)]


def list_listening_addresses(leader: int) -> set[str]:
    """Addresses on which a program and its children listen, as /proc writes them."""
    found = set()
    for pid in list_processes([leader]):
        links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
        own = {link[8:-1] for link in links if link.startswith("socket:[")}
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and words[9] in own:
                    found.add(words[1].partition(":")[0])
    return found


@pytest.fixture(scope="module")
def up(
    binaries: StackBinaries, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StackTerminal]:
    """A native stack on free ports, ready."""
    with StackTerminal(tmp_path_factory.mktemp("native") / "data") as made:
        ended = made.process.poll
        wait_until(lambda: "Ctrl-C stops everything" in made.read_output() or ended(), 150)
        assert ended() is None, made.read_output()
        yield made


def test_up(up: StackTerminal) -> None:
    """Its terminal and `status` show each part, ready, on the loopback alone; a second `up` is refused."""
    reported = up.read_output()
    for part in PARTS:
        assert re.search(rf"^{part} +http://127.0.0.1:\d+ +ready after \d", reported, re.M)
    assert "scripts/stack smoke" in reported
    assert "Dashboards: http://" in reported or grafana_server.GRAFANA_REMEDY in reported

    status = up.run_command("status", "--json")
    found: dict[str, Any] = json.loads(status.stdout)
    assert status.returncode == 0 and found["ready"] is True
    assert {*PARTS} <= {part["name"] for part in found["parts"]}
    assert all(part["ready"] for part in found["parts"])

    for leader in up.read_programs().values():
        assert list_listening_addresses(leader) == {LOOPBACK}

    again = up.run_command("up")
    assert again.returncode == 1
    assert "scripts/stack down stops it" in again.stderr
    assert up.process.poll() is None


def test_smoke(up: StackTerminal) -> None:
    """One trace goes through every hop, and each says so."""
    done = up.run_command("smoke", "--json", "--timeout", "30")
    verdicts = {each["hop"]: each for each in json.loads(done.stdout)}

    assert 0 == done.returncode, verdicts
    assert {
        "collector takes OTLP",
        "Tempo finds it by TraceQL",
        "Prometheus has its TTFT",
    } <= verdicts.keys()


@pytest.mark.full
def test_lost(up: StackTerminal) -> None:
    """While a part does not answer, status and smoke name it and its remedy."""
    stopped = up.read_programs()["tempo"]
    os.kill(stopped, signal.SIGSTOP)
    try:
        hung = up.run_command("smoke", "--timeout", "1")
    finally:
        os.kill(stopped, signal.SIGCONT)

    assert 1 == hung.returncode
    assert re.search(r"FAIL +Tempo finds it.*collector's log", hung.stdout)
    assert re.search(r"ok +collector takes OTLP", hung.stdout)


def test_down(up: StackTerminal) -> None:
    """Down stops it from another terminal, also what a killed `up` left: no process, port or state."""
    leaders = up.read_programs().values()
    up.process.kill()
    up.process.wait(60)
    assert len(list_processes(leaders)) >= len(PARTS)
    done = up.run_command("down")

    assert (0, "The stack is down.\n") == (done.returncode, done.stdout)
    wait_until(lambda: not list_processes(leaders), 10)
    assert 1 == up.run_command("status").returncode
    assert "no stack on these data" in up.run_command("down").stdout


def test_interrupt(binaries: StackBinaries, tmp_path: Path) -> None:
    """Ctrl-C during the start stops everything and is not an error."""
    with StackTerminal(tmp_path / "data") as started:
        leaders = started.read_programs()
        started.process.send_signal(signal.SIGINT)
        code = started.process.wait(60)

    assert 0 == code
    assert "Stopped." in started.read_output()
    assert not list_processes(leaders.values())
    assert native_state.read_state(tmp_path / "data") is None


@pytest.mark.full
def test_died(binaries: StackBinaries, tmp_path: Path) -> None:
    """When a part ends, all parts are stopped, and the terminal shows that part's last output."""
    log = tmp_path / "data" / "logs" / "collector.log"
    with StackTerminal(tmp_path / "data") as started:
        leaders = started.read_programs()
        wait_until(lambda: log.exists() and "Starting" in log.read_text("utf-8"), 60)
        os.kill(leaders["collector"], signal.SIGKILL)
        code = started.process.wait(60)

    assert 1 == code
    assert re.search(
        r"collector ended with code -9 after(.|\n)*collector.log(.|\n)*Starting",
        started.read_output(),
    )
    assert not list_processes(leaders.values())


def test_sampling(binaries: StackBinaries, tmp_path: Path) -> None:
    """Tail sampling is the collector's overlay."""
    commands = native_stack.build_native_commands(
        StackAddresses.choose_free(), tmp_path, sampling=True, say=str
    )
    collector = next(each for each in commands if each.name == "collector")

    assert any(word.endswith("/sampling.yaml") for word in collector.argv)


def test_taken(binaries: StackBinaries, tmp_path: Path) -> None:
    """A port that somebody else has is named, before anything is started."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 4318))
        other.listen()
        words = (*STACK, "up", "--data", str(tmp_path / "data"))
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)

    assert 1 == done.returncode
    assert "4318 (collector_http)" in done.stderr
    assert "--free-ports" in done.stderr
