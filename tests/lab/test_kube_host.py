# SPDX-License-Identifier: Apache-2.0
"""What scripts/kube changes on the machine is put back, also after a run that was killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from lab import kube_host
from lab.kube_host import MachineState

# A process that holds its namespace and tells what it sees.
TELL = "hostname; ls /proc | grep -c '^[0-9]'; sleep 1000 & echo $!; cat /proc/net/dev | wc -l"


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    """A folder in the form of /proc/sys with two of the settings."""
    for name in kube_host.SETTINGS[:2]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("0\n")
    return tmp_path


def test_changed_settings_are_put_back(kernel: Path) -> None:
    """Only what differs is written; settings that a kernel lacks are left out."""
    first, second = kube_host.SETTINGS[:2]
    before = kube_host.read_settings(kernel)
    assert before == {first: "0", second: "0"}

    (kernel / first).write_text("1\n")

    assert kube_host.restore_settings(before, kernel) == [first]
    assert kube_host.read_settings(kernel) == before
    assert kube_host.restore_settings(before, kernel) == []


def test_groups_go_from_the_inside(tmp_path: Path) -> None:
    """Groups of all hierarchies are found, each before the one that holds it; others are not touched."""
    for path in ("cpu/mine/pod/container", "memory/mine", "mine/pod", "cpu/other", "cpu/mine-too"):
        (tmp_path / path).mkdir(parents=True)

    found = kube_host.list_group_folders("mine", tmp_path)

    assert {str(path.relative_to(tmp_path)) for path in found} == {
        "cpu/mine/pod/container", "cpu/mine/pod", "cpu/mine",
        "memory/mine", "mine/pod", "mine",
    }  # fmt: skip
    for path in found:
        path.rmdir()


def test_a_killed_run_is_put_back_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder and its state file are gone, and the next one has its own."""
    monkeypatch.setattr(kube_host, "get_state_path", lambda: tmp_path / "state.json")
    monkeypatch.setattr(kube_host, "make_groups", lambda group: None)
    (left := tmp_path / "left").mkdir()
    (left / "file").write_text("of a killed run")
    state = MachineState(str(left), "ttft-kube-test-of-nobody", {})
    (tmp_path / "state.json").write_text(json.dumps(asdict(state)))

    with kube_host.borrow_machine() as mine:
        assert not left.exists()
        assert Path(mine.folder).is_dir()
        with pytest.raises(BlockingIOError), kube_host.borrow_machine():
            pass
        # The one that was refused has taken nothing away.
        assert Path(mine.folder).is_dir()

    assert not Path(mine.folder).exists()
    assert not (tmp_path / "state.json").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")
def test_processes_end_with_the_block(tmp_path: Path) -> None:
    """A node's host name, network and processes are its own, and none of them outlives it."""
    reported = tmp_path / "reported"
    mark = f"100{os.getpid()}"
    script = f"{{ {TELL.replace('1000', mark)}; }} > {reported}; echo end >> {reported}; wait"
    with kube_host.run_inside("ttft-test", ("bash", "-c", script)):
        wait_for_text(reported, "end")
        assert list_sleepers(mark)

    name, count, _, interfaces, _ = reported.read_text().split()
    assert name == "ttft-test" != os.uname().nodename
    assert int(count) < 10
    # Two lines of headings and the loopback, with the machine's own interfaces outside.
    assert int(interfaces) == 3 or "eth" not in Path("/proc/net/dev").read_text()
    assert not list_sleepers(mark)


def wait_for_text(path: Path, text: str) -> None:
    """Wait until a file ends with `text`."""
    command = f"until tail -1 {path} 2>/dev/null | grep -q {text}; do sleep 0.05; done"
    subprocess.run(("bash", "-c", command), check=True, timeout=60)


def list_sleepers(seconds: str) -> list[str]:
    """Processes that sleep so long."""
    wanted = f"sleep\0{seconds}\0".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes() == wanted:
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def test_what_is_missing_has_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without root and programs there is a line for each, and the command ends with code 2."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)

    reported = kube_host.find_lacking(tmp_path)

    assert reported[0].startswith("root")
    assert "containerd" in reported[1] and "apt-get install" in reported[1]
    done = subprocess.run(
        (sys.executable, "-m", "lab.kube_command"),
        env={"PATH": str(tmp_path)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "missing: " in done.stderr and "apt-get install" in done.stderr
