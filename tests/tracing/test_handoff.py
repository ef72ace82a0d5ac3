# SPDX-License-Identifier: Apache-2.0
"""The sender in the host process: it never waits, counts what it drops, survives forks; its child."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ttft_otel.model.names import env_names
from ttft_otel.router.errors import UnreadablePrompt
from ttft_otel.router.routing.prompts.prompt_parts import TokenizeQuestion
from ttft_otel.router.routing.prompts.prompt_reader import TokenizerWorker
from ttft_otel.tracing import handoff
from ttft_otel.tracing.handoff import RecordSender, build_child_command
from ttft_otel.tracing.settings import Settings

# Detaches itself and reads like the exporter, and writes down what it got.
READER_CODE = """
import os, socket, sys
if os.fork():
    os._exit(0)
with open({log!r}, "a") as log:
    log.write(f"start {{os.getpid()}}\\n")
    log.flush()
    source = socket.socket(fileno=int(sys.argv[1]))
    while data := source.recv(1 << 20):
        log.write(f"record {{len(data)}}\\n")
        log.flush()
    log.write("end\\n")
"""


@pytest.fixture
def reader_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Let senders start a reader that only writes down what happens to it."""
    log = tmp_path / "log"
    (tmp_path / "reader.py").write_text(READER_CODE.format(log=str(log)))
    monkeypatch.setattr(handoff, "EXPORTER_MODULE", "reader")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield log
    for line in log.read_text().splitlines() if log.exists() else ():
        if line.startswith("start"):
            try:
                os.kill(int(line.split()[1]), signal.SIGKILL)
            except ProcessLookupError:
                pass


@pytest.fixture
def sender() -> Iterator[RecordSender]:
    """A sender of this test's own."""
    made = RecordSender(Settings(queue_bytes=1 << 16))
    yield made
    made.close(10)


def _read_lines(log: Path, word: str) -> list[str]:
    return [line for line in log.read_text().splitlines() if line.startswith(word)]


def test_close_waits(reader_log: Path, sender: RecordSender) -> None:
    """Everything sent is read before close returns; closing twice is closing once.

    No empty message is sent: on this socket it would mean the end.
    """
    for length in range(101):
        assert sender.send(b"x" * length) is bool(length)
    sender.close(10)
    sender.close(10)
    assert _read_lines(reader_log, "record") == [f"record {length}" for length in range(1, 101)]
    assert sender.get_counts()["sent"] == 100


def test_full(
    reader_log: Path, sender: RecordSender, eventually: Callable[[Callable[[], object]], None]
) -> None:
    """A reader that stands still costs records, counted, and never a wait."""
    assert sender.send(b"x")
    eventually(lambda: reader_log.exists() and _read_lines(reader_log, "record"))
    reader = int(_read_lines(reader_log, "start")[0].split()[1])
    os.kill(reader, signal.SIGSTOP)
    begin = time.perf_counter()
    taken = sum(sender.send(b"x" * 1000) for _ in range(1000))
    assert time.perf_counter() - begin < 1
    assert 0 < taken < 1000
    assert sender.get_counts()["dropped"] == 1000 - taken
    assert taken * 1000 <= 2 * sender.capacity  # the kernel keeps what it promised
    os.kill(reader, signal.SIGCONT)
    eventually(lambda: len(_read_lines(reader_log, "record")) == taken + 1)
    assert sender.send(b"x")


def test_too_big(reader_log: Path, sender: RecordSender) -> None:
    """A record that the socket cannot take whole is dropped, the next one passes."""
    assert not sender.send(b"x" * (1 << 22))
    assert sender.send(b"x")
    assert (sender.sent, sender.dropped) == (1, 1)


def test_no_reader_at_all(monkeypatch: pytest.MonkeyPatch, sender: RecordSender) -> None:
    """Where no process can be started, records are dropped and counted; the caller never notices."""
    monkeypatch.setenv("TTFT_OTEL_GUARD", "keep")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert not sender.send(b"x")
    assert not sender.send(b"x")
    assert (sender.sent, sender.dropped) == (0, 2)


DEFAULT, TRACES = (
    env_names.OTEL_EXPORTER_OTLP_ENDPOINT,
    env_names.OTEL_EXPORTER_OTLP_TRACES_ENDPOINT,
)


@pytest.mark.parametrize(
    ("endpoint", "env", "expected"),
    [
        ("http://127.0.0.1:4318", {}, {DEFAULT: "http://127.0.0.1:4318"}),
        ("http://c/v1/traces", {TRACES: "http://c/v1/traces"}, {TRACES: "http://c/v1/traces"}),
        ("http://127.0.0.1:4318", {TRACES: "nonsense"}, {DEFAULT: "http://127.0.0.1:4318"}),
    ],
)
def test_environment(
    endpoint: str, env: dict[str, str], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exporter is given what Settings made of the variables, mistakes mended; not to trace itself."""
    for name in (DEFAULT, TRACES):
        monkeypatch.delenv(name, raising=False)
    for name, value in (env | {env_names.TTFT_OTEL: "1"}).items():
        monkeypatch.setenv(name, value)
    found = handoff._build_environment(Settings(endpoint=endpoint))
    names = (DEFAULT, TRACES, env_names.TTFT_OTEL)
    assert {name: found[name] for name in names if name in found} == expected


FORK_CODE = """
import os
from ttft_otel.tracing import handoff
ours = handoff.get_sender()
assert ours.send(b"parent")
child = os.fork()
if not child:
    theirs = handoff.get_sender()
    assert theirs is not ours and theirs.get_counts()["sent"] == 0
    assert theirs.send(b"child") and ours.send(b"the old one is a fresh one too")
    theirs.close(10)
    ours.close(10)
    os._exit(0 if theirs.sent == ours.sent == 1 else 1)
assert os.waitpid(child, 0)[1] == 0
assert ours.send(b"parent")
ours.close(10)
assert ours.sent == 2
"""


def test_fork(reader_log: Path) -> None:
    """A forked child has a sender, a socket and an exporter of its own; the parent's go on."""
    code = f"from ttft_otel.tracing import handoff\nhandoff.EXPORTER_MODULE = 'reader'\n{FORK_CODE}"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=30)
    assert len(_read_lines(reader_log, "start")) == len(_read_lines(reader_log, "end")) == 3
    assert len(_read_lines(reader_log, "record")) == 4


def test_module_door(reader_log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """get_sender() is one per process and get_counts() is its counters; empty before."""
    monkeypatch.setattr(handoff, "_process_sender", None)
    assert handoff.get_counts() == {}
    assert handoff.get_sender() is handoff.get_sender()
    assert handoff.get_counts()["sent"] == 0


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that appears when a module of the working directory is imported."""
    log = tmp_path / "imported"
    folder = tmp_path / "shared"
    folder.mkdir()
    for name in ("argparse", "msgspec", "signal", "ttft_otel", "asyncio"):
        (folder / f"{name}.py").write_text(
            f"open({str(log)!r}, 'w').close()\nraise SystemExit(9)\n"
        )
    monkeypatch.chdir(folder)
    # As in Python 3.10, which does not know it.
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    return log


def test_command(planted: Path) -> None:
    """What `python -m` would import from the working directory is not."""
    usual = subprocess.run((sys.executable, "-m", "json.tool", "--help"), capture_output=True)
    assert usual.returncode == 9 and planted.exists()
    planted.unlink()
    command = build_child_command("json.tool", "--help")
    ours = subprocess.run(command, capture_output=True, text=True)
    assert ours.returncode == 0 and "usage:" in ours.stdout
    assert not planted.exists()


async def test_working_directory(planted: Path) -> None:
    """Neither the exporter nor the router's tokenizer process imports anything of it."""
    sender = RecordSender(Settings(queue_bytes=1 << 16))
    assert sender.send(b"no record")
    sender.close(20)
    assert sender.get_counts()["foreign"] == 1  # it has run, and read what is no record
    worker = TokenizerWorker()
    try:
        await worker.ask_child(TokenizeQuestion("", "completion", b'{"prompt": [1]}', 1))
    except UnreadablePrompt as error:
        assert error.reason != "died"
    finally:
        await worker.close()
    assert not planted.exists()
