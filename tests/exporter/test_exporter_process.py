# SPDX-License-Identifier: Apache-2.0
"""The exporter as a process: whatever ends its host, what was handed off arrives and nothing stays."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.session_processes import find_exporters
from ttft_otel.model.names import env_names
from ttft_otel.model.record import Record, encode_record
from ttft_otel.tracing import handoff
from ttft_otel.tracing.settings import Settings

RECORDS = 50
SPANS = 4  # of one sample
ARRIVED_S = 30.0  # seconds; 2 on a machine that does nothing else
GONE_S = 10.0  # seconds after that in which the exporter must have ended

HOST_CODE = """
import pathlib, signal, sys, time
from ttft_otel.tracing import handoff
{before}
data = pathlib.Path(sys.argv[1]).read_bytes()
sender = handoff.get_sender()
for _ in range({records}):
    assert sender.send(data)
print("sent", flush=True)
{after}
"""


HostProcess = subprocess.Popen[str]


@pytest.fixture
def start_host(
    tmp_path: Path, collector: Any, make_record: Callable[[], Record]
) -> Iterator[Callable[..., HostProcess]]:
    """Start hosts that export to the collector of this test, wait until they have sent, run `after`."""
    data = tmp_path / "record"
    data.write_bytes(encode_record(make_record()))
    started: list[HostProcess] = []

    def start_process(after: str = "time.sleep(60)", before: str = "") -> HostProcess:
        env = {
            **os.environ,
            env_names.OTEL_EXPORTER_OTLP_ENDPOINT: collector.url,
            env_names.TTFT_OTEL: "1",
        }
        # Importing vLLM on a CPU preloads torch's libgomp into every process that this one starts.
        env.pop("LD_PRELOAD", None)
        code = HOST_CODE.format(records=RECORDS, before=before, after=after)
        host = HostProcess(
            [sys.executable, "-c", code, str(data)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(host)
        assert host.stdout is not None and host.stdout.readline() == "sent\n"
        return host

    yield start_process
    for each in started:
        each.kill()
        each.communicate()


def _kill_tree(host: HostProcess) -> None:
    """As vLLM's kill_process_tree: SIGKILL to all descendants, then to the process itself."""
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


HOST_ENDS: dict[str, Callable[[HostProcess], object]] = {
    "SIGKILL": lambda start_host: start_host.send_signal(signal.SIGKILL),
    "SIGTERM": lambda start_host: start_host.send_signal(signal.SIGTERM),
    "SIGINT to the group": lambda start_host: os.killpg(start_host.pid, signal.SIGINT),
    "SIGTERM to the group": lambda start_host: os.killpg(start_host.pid, signal.SIGTERM),
    "SIGKILL to the group": lambda start_host: os.killpg(start_host.pid, signal.SIGKILL),
    "SIGKILL to the tree": _kill_tree,
}
# Of the others only the signal's number, or its way, is another one.
EVERYDAY_ENDS = ("SIGTERM to the group", "SIGKILL to the tree")


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(end, marks=[] if end in EVERYDAY_ENDS else pytest.mark.full)
        for end in HOST_ENDS
    ],
)
def test_host_ends(end: str, start_host: Any, collector: Any, eventually: Any) -> None:
    """However the host is ended, everything handed off arrives and no exporter is left."""
    started = start_host()
    eventually(lambda: not _list_children(started.pid))  # some 50 ms: detached
    HOST_ENDS[end](started)
    started.wait(5)
    eventually(lambda: len(collector.spans) == RECORDS * SPANS, ARRIVED_S)
    eventually(lambda: not find_exporters([started.pid]), GONE_S)


def _list_children(process: int) -> list[int]:
    """Living children; the one that detached the exporter is reaped at the next record only."""
    found = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [int(child) for child in found if _read_state(int(child)) not in ("", "Z")]


def test_process(start_host: Any, collector: Any, eventually: Any) -> None:
    """The exporter takes no notice of SIGINT, SIGTERM and SIGHUP while its host lives, no thread of it
    interrupts the host to run, and it maps nothing of torch, nor of the protocol not asked for.
    """
    started = start_host()
    eventually(lambda: len(collector.spans) == RECORDS * SPANS, ARRIVED_S)
    (exporter,) = find_exporters([started.pid])
    assert _list_policies(exporter) == {os.SCHED_BATCH}
    maps = Path(f"/proc/{exporter}/maps").read_text()
    assert "torch" not in maps and "cygrpc" not in maps
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(exporter, number)
    time.sleep(0.2)
    assert find_exporters([started.pid]) == [exporter]


SET_IDLE_CODE = "import os\nos.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))"


def test_policy(start_host: Any, collector: Any, eventually: Any) -> None:
    """A policy that the host was given stays."""
    started = start_host(before=SET_IDLE_CODE)
    eventually(lambda: len(collector.spans) == RECORDS * SPANS, ARRIVED_S)
    (exporter,) = find_exporters([started.pid])
    assert _list_policies(exporter) == {os.SCHED_IDLE}


def _list_policies(process: int) -> set[int]:
    """Scheduling policies of a process's threads, of which there are several."""
    threads = [int(task.name) for task in Path(f"/proc/{process}/task").iterdir()]
    assert len(threads) > 1
    return {os.sched_getscheduler(thread) for thread in threads}


def test_close_waits(start_host: Any, collector: Any) -> None:
    """When close returns in time, every record is with the collector."""
    started = start_host(after="sender.close(60)")
    assert started.wait(70) == 0
    assert len(collector.spans) == RECORDS * SPANS


def test_exit_is_bounded(start_host: Any, collector: Any, eventually: Any) -> None:
    """With a collector that never answers, the host leaves after 2 s and the exporter after 5."""
    collector.hang.set()
    started = start_host(after="")
    begin = time.monotonic()
    assert started.wait(10) == 0
    assert time.monotonic() - begin < 4
    eventually(lambda: not find_exporters([started.pid]), GONE_S)
    assert time.monotonic() - begin < GONE_S


OUTLIVING_CHILD_CODE = """
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(20)
"""


def test_fork(start_host: Any, collector: Any, eventually: Any) -> None:
    """A forked child that outlives its host does not keep the exporter from its end of file."""
    started = start_host(before="import os", after=OUTLIVING_CHILD_CODE)
    assert started.stdout is not None
    child = int(started.stdout.readline())
    started.kill()
    started.wait(5)
    eventually(lambda: len(collector.spans) == RECORDS * SPANS, ARRIVED_S)
    eventually(lambda: not find_exporters([started.pid]), GONE_S)
    assert _read_state(child) not in ("", "Z")
    os.kill(child, signal.SIGKILL)


FORKED_CHILD_CODE = """
from multiprocessing import get_context
def child():
    for _ in range({records}):
        assert handoff.get_sender().send(data)
process = get_context("fork").Process(target=child)
process.start()
process.join()
assert process.exitcode == 0
"""


def test_forked_child_sends(start_host: Any, collector: Any, eventually: Any) -> None:
    """A child that multiprocessing forked has an exporter of its own, told of its end."""
    started = start_host(after=FORKED_CHILD_CODE.format(records=RECORDS))
    assert started.wait(20) == 0, started.stderr.read()
    eventually(lambda: len(collector.spans) == 2 * RECORDS * SPANS, ARRIVED_S)


def _kill_exporter(sender: handoff.RecordSender, eventually: Any) -> None:
    """SIGKILL for this process's exporter, and wait until its end of the socket is closed."""
    (victim,) = find_exporters([os.getpid()])
    os.kill(victim, signal.SIGKILL)
    watch = select.poll()
    watch.register(sender._socket, 0)
    eventually(lambda: watch.poll(0))


def _read_state(process: int) -> str:
    """A process's state letter; empty when there is none."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def test_exporter_killed(
    collector: Any, make_record: Callable[[], Record], eventually: Any
) -> None:
    """A killed exporter is replaced at the next record, but only once in a while; what it had is lost."""
    sender = handoff.RecordSender(Settings(endpoint=collector.url))
    assert sender.send(encode_record(make_record()))
    eventually(lambda: sender.get_counts()["finished"] == 1)
    sender._next_start_at = 0.0  # as if it had been started long ago
    _kill_exporter(sender, eventually)
    collector.hang.set()
    assert sender.send(encode_record(make_record()))
    eventually(lambda: sender.get_counts()["received"] == 2)
    _kill_exporter(sender, eventually)
    assert not sender.send(encode_record(make_record()))
    sender.close()
    counted = {"sent": 2, "dropped": 1, "lost": 1, "restarts": 1, "received": 2, "finished": 1}
    expected = dict.fromkeys(sender.get_counts(), 0) | counted | {"exported": SPANS}
    assert sender.get_counts() == expected


def test_what_a_killed_exporter_held_is_counted(
    collector: Any, make_record: Callable[[], Record], eventually: Any
) -> None:
    """A batch and what waits behind it are lost where the collector is silent: also after several deaths."""
    collector.hang.set()
    held = 150
    sender = handoff.RecordSender(Settings(endpoint=collector.url))
    record = encode_record(make_record())
    for death in (1, 2):
        sender._next_start_at = 0.0
        for _ in range(held):
            assert sender.send(record)
        eventually(lambda due=death * held: sender.get_counts()["received"] == due)
        sender._next_start_at = float("inf")
        _kill_exporter(sender, eventually)
        assert not sender.send(record)
        counts = sender.get_counts()
        assert counts["lost"] == counts["sent"] - counts["finished"] == death * held
    sender.close()


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("ttft_otel.exporter.export_worker", ("vllm", "torch", "grpc", "numpy")),
        ("ttft_otel.tracing.handoff", ("vllm", "torch", "opentelemetry", "ttft_otel.exporter")),
    ],
)
def test_modules(module: str, absent: tuple[str, ...]) -> None:
    """The exporter knows nothing of vLLM, and the hot side nothing of the exporter and the SDK."""
    code = f"import sys, {module}\nfor name in {absent}: assert name not in sys.modules, name"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
