# SPDX-License-Identifier: Apache-2.0
"""What workers keep in files: a folder that goes with the last of them, counters that never fall."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ttft_otel.model.names import metric_names
from ttft_otel.router.workers import worker_socket
from ttft_otel.router.workers.metrics_files import MAX_GAUGE_AGE_S, MetricsFiles

# A supervisor that waits, with the child that it has forked.
RUNNING = """
import os, sys, time
from ttft_otel.router.workers.worker_socket import make_private_folder
folder = make_private_folder()
(folder / "worker-0.sock").touch()
child = os.fork()
if child:
    print(folder, child, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("runtime_folder", ["", "/nowhere", "/" + "x" * 200])
def test_the_folder_is_private(monkeypatch: pytest.MonkeyPatch, runtime_folder: str) -> None:
    """Nobody else may enter it, and a socket's path in it is short enough."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime_folder)
    folder = worker_socket.make_private_folder()
    try:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert all(stat.S_IMODE(each.stat().st_mode) == 0o600 for each in folder.iterdir())
        assert len(str(folder / "worker-255.sock")) < 108
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where folders are made; its path is short, which pytest's own ones are not."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        yield Path(name)


def test_orphans_leave_nothing(parent: Path) -> None:
    """Each removes what is its own, and the last one the folder."""
    folder = worker_socket.make_private_folder()
    for name in ("worker-0.sock", "worker-0.metrics", "worker-1.metrics"):
        (folder / name).touch()

    worker_socket.leave_folder(folder, 0)
    names = sorted(each.name for each in folder.iterdir())
    assert names == [worker_socket.LOCK_NAME, "worker-1.metrics"]

    worker_socket.leave_folder(folder, 1)
    assert not [*parent.iterdir()]


def test_what_killed_routers_left(parent: Path) -> None:
    """The next one removes it, once no process of the killed one runs, and nothing of others."""
    process = subprocess.Popen((sys.executable, "-c", RUNNING), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        name, child = process.stdout.readline().split()
    old = Path(name)
    unknown = parent / f"{worker_socket.FOLDER_PREFIX}of-another-release"
    unknown.mkdir()
    (parent / f"{worker_socket.FOLDER_PREFIX}link").symlink_to(parent)
    try:
        worker_socket.sweep_folders(parent)
        assert old.exists()
        process.kill()
        process.wait()
        worker_socket.sweep_folders(parent)
        assert (old / "worker-0.sock").exists()  # its worker still runs
    finally:
        process.kill()
        os.kill(int(child), signal.SIGKILL)
    for _ in range(600):
        worker_socket.sweep_folders(parent)
        if not old.exists():
            break
        time.sleep(0.05)  # until the kernel has let go of the lock
    assert not old.exists() and unknown.exists() and parent.exists()


URL = "http://127.0.0.1:1"


def build_metrics(requests: int, in_flight: int, breaker: float, reloads: int) -> Iterator[Metric]:
    """What a worker has: a part of the requests, an opinion, and a reload like the others."""
    ended = CounterMetricFamily(metric_names.ROUTER_ATTEMPTS, "Ended.", labels=["instance"])
    ended.add_metric([URL], requests)
    yield ended
    yield GaugeMetricFamily(metric_names.ROUTER_REQUESTS_IN_FLIGHT, "Under way.", value=in_flight)
    yield GaugeMetricFamily(metric_names.ROUTER_BREAKER_OPEN, "Open.", value=breaker)
    yield CounterMetricFamily(metric_names.ROUTER_RELOADS, "Reloads.", value=reloads)


def read_values(files: MetricsFiles) -> dict[str, float]:
    """All that is shown, without labels."""
    return {each.name: each.value for metric in files.collect_all() for each in metric.samples}


def test_workers_are_one(tmp_path: Path) -> None:
    """Parts are added up; of what all have seen the most counts."""
    one, other = MetricsFiles(tmp_path, 0), MetricsFiles(tmp_path, 1)
    one.write_own(build_metrics(5, 1, 0.0, 2), {URL})
    other.write_own(build_metrics(7, 2, 1.0, 2), {URL})

    assert read_values(one) == read_values(other)
    assert read_values(one) == {
        f"{metric_names.ROUTER_ATTEMPTS}_total": 12,
        metric_names.ROUTER_REQUESTS_IN_FLIGHT: 3,
        metric_names.ROUTER_BREAKER_OPEN: 1,
        f"{metric_names.ROUTER_RELOADS}_total": 2,
    }


def test_a_successor_goes_on_counting(tmp_path: Path) -> None:
    """Counters of a dead worker stay, also before its successor has written anything; gauges do not."""
    MetricsFiles(tmp_path, 0).write_own(build_metrics(5, 3, 1.0, 0), {URL})
    successor = MetricsFiles(tmp_path, 0)
    assert read_values(successor)[f"{metric_names.ROUTER_ATTEMPTS}_total"] == 5

    for requests in (0, 1, 2):
        successor.write_own(build_metrics(requests, 0, 0.0, 0), {URL})

        values = read_values(successor)
        assert values[f"{metric_names.ROUTER_ATTEMPTS}_total"] == 5 + requests
        assert values[metric_names.ROUTER_REQUESTS_IN_FLIGHT] == 0


def test_gauges_of_a_silent_worker_are_left_out(tmp_path: Path) -> None:
    """Nothing is under way at a worker that has been dead for long; what it counted stays."""
    one, other = MetricsFiles(tmp_path, 0), MetricsFiles(tmp_path, 1)
    one.write_own(build_metrics(5, 1, 0.0, 0), {URL})
    other.write_own(build_metrics(7, 2, 1.0, 0), {URL})
    path = tmp_path / "worker-1.metrics"
    long_ago_s = path.stat().st_mtime - MAX_GAUGE_AGE_S - 1
    os.utime(path, (long_ago_s, long_ago_s))

    values = read_values(one)

    assert values[f"{metric_names.ROUTER_ATTEMPTS}_total"] == 12
    assert (
        values[metric_names.ROUTER_REQUESTS_IN_FLIGHT],
        values[metric_names.ROUTER_BREAKER_OPEN],
    ) == (1, 0)


def test_series_of_removed_instances_are_not_inherited(tmp_path: Path) -> None:
    """Else instances that come and go would fill /metrics for ever."""
    MetricsFiles(tmp_path, 0).write_own(build_metrics(5, 0, 0.0, 0), {URL})

    successor = MetricsFiles(tmp_path, 0)
    successor.write_own(iter(()), {"http://127.0.0.1:2"})

    assert f"{metric_names.ROUTER_ATTEMPTS}_total" not in read_values(successor)


def test_a_broken_file_is_nothing(tmp_path: Path) -> None:
    """Whatever lies there, /metrics answers."""
    (tmp_path / "worker-1.metrics").write_bytes(b"\xff")
    one = MetricsFiles(tmp_path, 0)
    one.write_own(build_metrics(5, 1, 0.0, 0), {URL})

    assert read_values(one)[metric_names.ROUTER_REQUESTS_IN_FLIGHT] == 1
