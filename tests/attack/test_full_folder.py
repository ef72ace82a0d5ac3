# SPDX-License-Identifier: Apache-2.0
"""The folder of --workers on a full file system: metrics are shown, and a killed worker comes back."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from commands.router.test_router_process import run_command
from commands.router.test_worker_processes import (
    list_worker_pids,
    post_alone,
    read_metrics,
    wait_for_workers,
)
from router import fake_instances
from router.fake_instances import InstancePlan

from ttft_otel.commands.router.command import command
from ttft_otel.model.names import env_names, metric_names

REQUESTS = f'{metric_names.ROUTER_REQUESTS}_total{{result="2xx"}}'


@contextlib.contextmanager
def mount_small(options: str) -> Iterator[Path]:
    """A file system of its own, with a path short enough for sockets."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    mounting = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if subprocess.run(mounting, stderr=subprocess.DEVNULL, check=False).returncode:
        folder.rmdir()
        pytest.skip("needs root to mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
        folder.rmdir()


def fill(folder: Path) -> Path:
    """Leave no byte there; returns the file that takes it."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    return path


@pytest.mark.slow
async def test_a_full_folder(tmp_path: Path) -> None:
    """Counters do not fall meanwhile, gauges are of now, and all is exact once there is room."""
    with mount_small("size=256k") as folder:
        async with fake_instances.run_instance(InstancePlan({})) as one:
            flags = ("--backend", one.url, "--workers", "2")
            async with run_command(tmp_path, *flags, XDG_RUNTIME_DIR=str(folder)) as it:
                # One alone may answer; the other, killed before it serves, would end the router.
                await wait_for_workers(it, 2)
                for _ in range(3):
                    assert await post_alone(it) == 200
                while (await read_metrics(it)).get(REQUESTS) != 3:
                    pass
                path = fill(folder)
                assert await post_alone(it) == 200
                killed = list_worker_pids(it)[0]
                os.kill(killed, signal.SIGKILL)
                await it.wait_for_log("was ended by SIGKILL")
                while len(set(list_worker_pids(it)) - {killed}) < 2:
                    pass
                for _ in range(20):
                    metrics = await read_metrics(it)
                    assert metrics[REQUESTS] >= 3
                assert await post_alone(it) == 200
                await it.wait_for_log("metrics of this worker stay as they are")
                path.unlink()
                await wait_for_workers(it, 2, 1)
                while (await read_metrics(it)).get(REQUESTS, 0) < 4:
                    pass
                log = it.log.read_text()
                assert log.count("could not start") == log.count("Traceback") == 0


# The process that is named behind it has no byte left in either folder, and nobody else notices.
FULL_FOLDERS = """
for folder in /tmp /dev/shm; do
  mount -t tmpfs -o size=4k tmpfs "$folder" && head -c 9999 /dev/zero >"$folder/filler" 2>/dev/null
  [ -s "$folder/filler" ] || exit 1
done
exec "$@"
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "2"])
async def test_full_shared_folders(
    workers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/tmp and /dev/shm are full: a router starts, answers, traces and counts as ever."""
    with mount_small("size=4k"):
        pass  # skips where nothing can be mounted
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    wrapper = ("unshare", "--mount", "--propagation", "private", "bash", "-c", FULL_FOLDERS, "bash")
    async with fake_instances.run_instance(InstancePlan({})) as one:
        flags = ("--backend", one.url, "--workers", workers)
        env = {env_names.TTFT_OTEL: "1", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
        async with run_command(tmp_path, *flags, wrapper=wrapper, **env) as it:
            assert [await post_alone(it) for _ in range(6)] == [200] * 6
            while (await read_metrics(it)).get(REQUESTS) != 6:
                pass
            log = it.log.read_text()
            assert "Traceback" not in log and "stay as they are" not in log


def test_no_room_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said what to do."""
    with mount_small("size=64k,nr_inodes=1") as folder:
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        port = fake_instances.find_unused_url().rpartition(":")[2]
        given = ["--backend", "http://127.0.0.1:1", "--workers", "2", "--port", port]
        result = CliRunner().invoke(command, given)
        assert result.exit_code == 2 and "XDG_RUNTIME_DIR" in result.output
