# SPDX-License-Identifier: Apache-2.0
"""The exporter as a process: whatever ends its host, what was handed off arrives and nothing stays."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ttft_otel import handoff, names
from ttft_otel.record import Record, encode
from ttft_otel.settings import Settings

RECORDS = 50
SPANS = 4  # of one sample
ARRIVED = 30.0  # seconds; 2 on a machine that does nothing else
GONE = 10.0  # seconds after that in which the exporter must have ended

HOST = """
import pathlib, signal, sys, time
from ttft_otel import handoff
{before}
data = pathlib.Path(sys.argv[1]).read_bytes()
sender = handoff.sender()
for _ in range({records}):
    assert sender.send(data)
print("sent", flush=True)
{after}
"""


class Host(subprocess.Popen[str]):
    """A process that hands records over, says so, and goes on with `after`."""

    def __init__(self, data: Path, env: dict[str, str], before: str, after: str) -> None:
        code = HOST.format(records=RECORDS, before=textwrap.dedent(before), after=after)
        super().__init__(
            [sys.executable, "-c", code, str(data)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def sent(self) -> None:
        """Wait until it has handed all its records over."""
        assert self.stdout is not None
        assert self.stdout.readline() == "sent\n"


@pytest.fixture
def host(
    tmp_path: Path, collector: Any, sample: Callable[[], Record]
) -> Iterator[Callable[..., Host]]:
    """Start hosts that export to the collector of this test."""
    data = tmp_path / "record"
    data.write_bytes(encode(sample()))
    started: list[Host] = []

    def start(after: str = "time.sleep(60)", before: str = "", **more: str) -> Host:
        env = {**os.environ, names.ENV_ENDPOINT: collector.url, names.ENV_ON: "1", **more}
        started.append(Host(data, env, before, after))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.communicate()


def _kill_tree(host: Host) -> None:
    """What vLLM's kill_process_tree does: SIGKILL for all descendants, then the process itself."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int(
                (folder / "stat").read_text().rpartition(")")[2].split()[1]
            )
        except OSError:
            continue
    tree = {host.pid}
    while more := {child for child, parent in parents.items() if parent in tree} - tree:
        tree |= more
    for process in tree:
        os.kill(process, signal.SIGKILL)


ENDS: dict[str, Callable[[Host], object]] = {
    "SIGKILL": lambda host: host.send_signal(signal.SIGKILL),
    "SIGTERM": lambda host: host.send_signal(signal.SIGTERM),
    "SIGINT to the group": lambda host: os.killpg(host.pid, signal.SIGINT),
    "SIGTERM to the group": lambda host: os.killpg(host.pid, signal.SIGTERM),
    "SIGKILL to the group": lambda host: os.killpg(host.pid, signal.SIGKILL),
    "SIGKILL to the tree": _kill_tree,
}


@pytest.mark.parametrize("end", ENDS)
def test_host_ends(end: str, host: Any, collector: Any, eventually: Any, exporters: Any) -> None:
    """However the host is ended, everything handed off arrives and no exporter is left."""
    started = host()
    started.sent()
    eventually(lambda: not _children(started.pid))  # some 50 ms: detached
    ENDS[end](started)
    started.wait(5)
    eventually(lambda: len(collector.spans()) == RECORDS * SPANS, ARRIVED)
    eventually(lambda: not exporters(started.pid), GONE)


def _children(process: int) -> list[int]:
    """Living children; the one that detached the exporter is reaped at the next record only."""
    found = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [int(child) for child in found if _state(int(child)) not in ("", "Z")]


def test_signals_to_exporter(host: Any, collector: Any, eventually: Any, exporters: Any) -> None:
    """The exporter itself takes no notice of SIGINT, SIGTERM and SIGHUP while its host lives."""
    started = host()
    started.sent()
    eventually(lambda: len(collector.spans()) == RECORDS * SPANS)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        for process in exporters(started.pid):
            os.kill(process, number)
    time.sleep(0.2)
    assert len(exporters(started.pid)) == 1


def test_close_waits(host: Any, collector: Any) -> None:
    """When close returns in time, every record is with the collector."""
    started = host(after="sender.close(60)")
    started.sent()
    assert started.wait(70) == 0
    assert len(collector.spans()) == RECORDS * SPANS


def test_exit_is_bounded(host: Any, collector: Any, eventually: Any, exporters: Any) -> None:
    """With a collector that never answers, the host leaves after 2 s and the exporter after 5."""
    collector.hang.set()
    started = host(after="")
    started.sent()
    begin = time.monotonic()
    assert started.wait(10) == 0
    assert time.monotonic() - begin < 4
    eventually(lambda: not exporters(started.pid), GONE)
    assert time.monotonic() - begin < GONE


OUTLIVES = """
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(20)
"""


def test_fork(host: Any, collector: Any, eventually: Any, exporters: Any) -> None:
    """A forked child that outlives its host does not keep the exporter from its end of file."""
    started = host(before="import os", after=OUTLIVES)
    started.sent()
    assert started.stdout is not None
    child = int(started.stdout.readline())
    started.kill()
    started.wait(5)
    eventually(lambda: len(collector.spans()) == RECORDS * SPANS, ARRIVED)
    eventually(lambda: not exporters(started.pid), GONE)
    assert _state(child) not in ("", "Z")
    os.kill(child, signal.SIGKILL)


FORKED = """
from multiprocessing import get_context
def child():
    for _ in range({records}):
        assert handoff.sender().send(data)
process = get_context("{method}").Process(target=child)
process.start()
process.join()
assert process.exitcode == 0
"""


def test_forked_child_sends(host: Any, collector: Any, eventually: Any) -> None:
    """A child that multiprocessing forked has an exporter of its own, told of its end."""
    started = host(after=FORKED.format(records=RECORDS, method="fork"))
    started.sent()
    assert started.wait(20) == 0, started.stderr.read()
    eventually(lambda: len(collector.spans()) == 2 * RECORDS * SPANS, ARRIVED)


def _kill(sender: handoff.Sender, exporters: Any, eventually: Any) -> None:
    """SIGKILL for this process's exporter, and wait until its end of the socket is closed."""
    (victim,) = exporters(os.getpid())
    os.kill(victim, signal.SIGKILL)
    watch = select.poll()
    watch.register(sender._socket, 0)
    eventually(lambda: watch.poll(0))


def _state(process: int) -> str:
    """A process's state letter; empty when there is none."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def test_exporter_killed(
    collector: Any, sample: Callable[[], Record], eventually: Any, exporters: Any
) -> None:
    """A killed exporter is replaced at the next record, and only once in a while."""
    sender = handoff.Sender(Settings(endpoint=collector.url))
    assert sender.send(encode(sample()))
    eventually(lambda: sender.counts()["exported"] == SPANS)
    sender._next = 0.0  # as if it had been started long ago
    _kill(sender, exporters, eventually)
    assert sender.send(encode(sample()))
    eventually(lambda: sender.counts()["exported"] == 2 * SPANS)
    _kill(sender, exporters, eventually)
    assert not sender.send(encode(sample()))
    sender.close()
    assert sender.counts() == {
        "sent": 2,
        "dropped": 1,
        "lost": 0,
        "restarts": 1,
        "received": 2,
        "foreign": 0,
        "overflowed": 0,
        "exported": 2 * SPANS,
        "failed": 0,
    }


def test_imports(host: Any, eventually: Any, exporters: Any, collector: Any) -> None:
    """The exporter maps nothing of torch into its memory, nor of the protocol not asked for."""
    started = host()
    started.sent()
    eventually(lambda: collector.spans())
    (process,) = exporters(started.pid)
    maps = Path(f"/proc/{process}/maps").read_text()
    assert "torch" not in maps and "cygrpc" not in maps


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("ttft_otel.exporter.flow", ("vllm", "torch", "grpc", "numpy")),
        ("ttft_otel.handoff", ("vllm", "torch", "opentelemetry", "ttft_otel.exporter")),
    ],
)
def test_modules(module: str, absent: tuple[str, ...]) -> None:
    """The exporter knows nothing of vLLM, and the hot side nothing of the exporter and the SDK."""
    code = f"import sys, {module}\nfor name in {absent}: assert name not in sys.modules, name"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
