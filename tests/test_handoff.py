# SPDX-License-Identifier: Apache-2.0
"""The sender's manners in someone's process: it never waits, counts what it drops, survives forks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ttft_otel import handoff, names
from ttft_otel.handoff import Sender
from ttft_otel.settings import Settings

# Detaches itself and reads like the exporter, and writes down what it got.
READER = """
import os, socket, sys
if os.fork():
    os._exit(0)
with open({log!r}, "a") as log:
    log.write(f"start {{os.getpid()}} {{os.environ.get('TTFT_OTEL')}}\\n")
    log.flush()
    source = socket.socket(fileno=int(sys.argv[1]))
    while data := source.recv(1 << 20):
        log.write(f"record {{len(data)}}\\n")
        log.flush()
    log.write("end\\n")
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Let senders start a reader that only writes down what happens to it."""
    log = tmp_path / "log"
    (tmp_path / "reader.py").write_text(READER.format(log=str(log)))
    monkeypatch.setattr(handoff, "MODULE", "reader")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield log
    for line in log.read_text().splitlines() if log.exists() else ():
        if line.startswith("start"):
            try:
                os.kill(int(line.split()[1]), signal.SIGKILL)
            except ProcessLookupError:
                pass


@pytest.fixture
def sender() -> Iterator[Sender]:
    """A sender of this test's own."""
    made = Sender(Settings(queue=1 << 16))
    yield made
    made.close(10)


def _wait(check: Callable[[], object]) -> None:
    until = time.monotonic() + 10
    while not (found := check()) and time.monotonic() < until:
        time.sleep(0.01)
    assert found


def _lines(log: Path, word: str) -> list[str]:
    return [line for line in log.read_text().splitlines() if line.startswith(word)]


def test_close_waits(log: Path, sender: Sender) -> None:
    """Everything sent is read before close returns, and closing twice is closing once."""
    for length in range(1, 101):
        assert sender.send(b"x" * length)
    sender.close(10)
    sender.close(10)
    assert _lines(log, "record") == [f"record {length}" for length in range(1, 101)]
    assert sender.counts()["sent"] == 100


def test_after_close(log: Path, sender: Sender) -> None:
    """After closing, nothing starts again: records are dropped and counted."""
    sender.close()
    assert not sender.send(b"x")
    assert sender.dropped == 1 and sender.starts == 0
    assert not log.exists()


def test_starts_lazily(log: Path, sender: Sender) -> None:
    """No record, no process, no socket."""
    assert sender.counts()["sent"] == 0
    assert sender._socket is None
    assert not log.exists()


def test_start_is_quick(log: Path, sender: Sender) -> None:
    """The first send starts the exporter without waiting for it: 1 to 3 ms when idle."""
    begin = time.thread_time()  # this thread's own: the machine may be busy with others
    assert sender.send(b"x")
    assert time.thread_time() - begin < 0.02


def test_full(log: Path, sender: Sender) -> None:
    """A reader that stands still costs records, counted, and never a wait."""
    assert sender.send(b"x")
    _wait(lambda: log.exists() and _lines(log, "record"))
    reader = int(_lines(log, "start")[0].split()[1])
    os.kill(reader, signal.SIGSTOP)
    begin = time.perf_counter()
    taken = sum(sender.send(b"x" * 1000) for _ in range(1000))
    assert time.perf_counter() - begin < 1
    assert 0 < taken < 1000
    assert sender.counts()["dropped"] == 1000 - taken
    assert taken * 1000 <= 2 * sender.capacity  # the kernel keeps what it promised
    os.kill(reader, signal.SIGCONT)
    _wait(lambda: len(_lines(log, "record")) == taken + 1)
    assert sender.send(b"x")


def test_too_big(log: Path, sender: Sender) -> None:
    """A record that the socket cannot take whole is dropped, the next one passes."""
    assert not sender.send(b"x" * (1 << 22))
    assert sender.send(b"x")
    assert (sender.sent, sender.dropped) == (1, 1)


def test_empty(log: Path, sender: Sender) -> None:
    """No empty message is sent: on this socket it would mean the end."""
    assert sender.send(b"x")
    assert not sender.send(b"")
    assert sender.send(b"y")
    sender.close(10)
    assert len(_lines(log, "record")) == 2


def test_reader_dies(log: Path, sender: Sender) -> None:
    """What a killed reader had not read is lost and counted; a new one starts, but not at once."""
    assert sender.send(b"x")
    _wait(lambda: log.exists() and _lines(log, "record"))
    os.kill(int(_lines(log, "start")[0].split()[1]), signal.SIGKILL)
    _wait(lambda: not sender.send(b"x"))  # it is some time until the socket is closed
    assert not sender.send(b"x")
    assert sender.starts == 1
    assert sender.counts()["lost"] == sender.sent  # this reader acknowledges nothing
    sender._next = 0.0
    assert sender.send(b"x")
    assert sender.counts()["restarts"] == 1


def test_no_reader_at_all(monkeypatch: pytest.MonkeyPatch, sender: Sender) -> None:
    """Where no process can be started, records are dropped and counted; the caller never notices."""
    monkeypatch.setenv("TTFT_OTEL_GUARD", "keep")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert not sender.send(b"x")
    assert not sender.send(b"x")
    assert (sender.sent, sender.dropped) == (0, 2)


def test_environment(log: Path, sender: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exporter is not told to trace itself."""
    monkeypatch.setenv(names.ENV_ON, "1")
    assert sender.send(b"x")
    sender.close(10)
    assert _lines(log, "start")[0].endswith(" None")


@pytest.mark.parametrize(
    ("settings", "env", "expected"),
    [
        (Settings(), {}, {names.ENV_ENDPOINT: "http://127.0.0.1:4318"}),
        (
            Settings(endpoint="http://c/v1/traces"),
            {names.ENV_TRACES_ENDPOINT: "http://c/v1/traces"},
            {names.ENV_TRACES_ENDPOINT: "http://c/v1/traces"},
        ),
        (
            Settings(endpoint="http://127.0.0.1:4318"),
            {names.ENV_TRACES_ENDPOINT: "nonsense"},
            {names.ENV_ENDPOINT: "http://127.0.0.1:4318"},
        ),
    ],
)
def test_endpoint(
    settings: Settings,
    env: dict[str, str],
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The exporter is given what Settings made of the environment, mistakes mended."""
    for name in (names.ENV_ENDPOINT, names.ENV_TRACES_ENDPOINT):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    found = handoff._environment(settings)
    given = {names.ENV_ENDPOINT, names.ENV_TRACES_ENDPOINT} & found.keys()
    assert {name: found[name] for name in given} == expected


FORK = """
import os
from ttft_otel import handoff
ours = handoff.sender()
assert ours.send(b"parent")
child = os.fork()
if not child:
    theirs = handoff.sender()
    assert theirs is not ours and theirs.counts()["sent"] == 0
    assert theirs.send(b"child") and ours.send(b"the old one is a fresh one too")
    theirs.close(10)
    ours.close(10)
    os._exit(0 if theirs.sent == ours.sent == 1 else 1)
assert os.waitpid(child, 0)[1] == 0
assert ours.send(b"parent")
ours.close(10)
assert ours.sent == 2
"""


def test_fork(log: Path) -> None:
    """A forked child has a sender, a socket and an exporter of its own; the parent's go on."""
    code = f"from ttft_otel import handoff\nhandoff.MODULE = 'reader'\n{FORK}"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=30)
    assert len(_lines(log, "start")) == len(_lines(log, "end")) == 3
    assert len(_lines(log, "record")) == 4


def test_module_door(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`sender()` is one per process and `counts()` is its counters; empty before."""
    monkeypatch.setattr(handoff, "_own", None)
    assert handoff.counts() == {}
    assert handoff.sender() is handoff.sender()
    assert handoff.counts()["sent"] == 0
