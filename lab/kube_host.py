# SPDX-License-Identifier: Apache-2.0
"""What a Kubernetes node changes on the machine, and how it is put back; kube_command.py runs it inside.

The node lives in namespaces of its own (processes, mounts, network, host name): when its first process
ends, the kernel ends all others and removes mounts, bridges and iptables rules. What remains are control
groups, a few settings of the kernel and a folder. They are written down before, so that what a killed run
left is put back by the next one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from lab.tiny_models import get_cache_root

# kubelet sets them, and none belongs to a namespace.
SETTINGS: Final = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)
CONTROL_GROUPS: Final = Path("/sys/fs/cgroup")
PROGRAMS: Final = (
    "containerd", "ctr", "runc", "dockerd", "docker", "iptables", "conntrack", "dnsmasq",
    "debootstrap", "nsenter", "unshare", "setpriv", "ip", "openssl",
)  # fmt: skip
PACKAGES: Final = (
    "docker.io containerd containernetworking-plugins iptables conntrack dnsmasq-base debootstrap"
    " busybox-static util-linux iproute2 openssl"
)
STOP_TIMEOUT_S: Final = 30.0  # seconds for the kernel to end all processes of a namespace
GROUP_TIMEOUT_S: Final = 20.0  # seconds until the kernel has emptied the groups of dead processes
# Bash is the first process: it collects those whose parents have ended. A mount that begins inside is seen
# by later containers (shared), and by nobody outside. /run and /var/log are the node's own.
FIRST_PROCESS: Final = """
mount --make-rshared / && mount -t tmpfs tmpfs /run && mount -t tmpfs tmpfs /var/log || exit 1
hostname "$1" || exit 1
shift
"$@" &
wait $!
"""


@dataclass(frozen=True, slots=True)
class MachineState:
    """What was there before, and what a node makes. settings: below /proc/sys, with their values."""

    folder: str
    group: str
    settings: dict[str, str]


def get_state_path() -> Path:
    """Where the state of the run in progress is kept."""
    return get_cache_root() / "kube-node" / "state.json"


def find_lacking(plugins: Path) -> list[str]:
    """What this machine lacks, each with its remedy. plugins: folder of the network plugins."""
    found = []
    if os.geteuid():
        found.append("root: a node makes namespaces and control groups; run it as root")
    missing = [name for name in PROGRAMS if not shutil.which(name)]
    if not (plugins / "bridge").is_file():
        missing.append(f"{plugins}/bridge")
    if not Path("/bin/busybox").is_file():
        missing.append("/bin/busybox")
    if missing:
        remedy = f"apt-get install --no-install-recommends {PACKAGES}"
        found.append(f"{', '.join(missing)}: {remedy}")
    if not (CONTROL_GROUPS / "memory").is_dir():
        # kubelet is given the file system driver, whose groups are made for every controller.
        found.append("control groups v1: this trial has been made for them alone")
    return found


def read_settings(root: Path = Path("/proc/sys")) -> dict[str, str]:
    """The kernel's settings that kubelet changes, those that it has."""
    return {name: (root / name).read_text().strip() for name in SETTINGS if (root / name).is_file()}


def restore_settings(settings: dict[str, str], root: Path = Path("/proc/sys")) -> list[str]:
    """Put back what differs; gives the names of what was put back."""
    changed = [
        name
        for name, value in settings.items()
        if (root / name).is_file() and (root / name).read_text().strip() != value
    ]
    for name in changed:
        (root / name).write_text(settings[name])
    return changed


def list_group_folders(group: str, root: Path = CONTROL_GROUPS) -> list[Path]:
    """Folders of a control group and of those below it, in all hierarchies, the deepest first."""
    found = [
        path
        for top in (*root.glob(f"*/{group}"), *root.glob(group))
        for path in (top, *top.rglob("*"))
        if path.is_dir()
    ]
    return sorted(found, key=lambda path: len(path.parts), reverse=True)


def remove_groups(group: str) -> list[Path]:
    """Remove a control group with all below it, once it is empty; gives what refused to go."""
    deadline = time.monotonic() + GROUP_TIMEOUT_S
    while left := list_group_folders(group):
        for path in left:
            with contextlib.suppress(OSError):
                path.rmdir()
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return left


def make_groups(group: str) -> None:
    """Make a control group in all hierarchies; kubelet wants its root to be there."""
    for top in CONTROL_GROUPS.iterdir():
        if (top / "cgroup.procs").is_file():
            (top / group).mkdir(exist_ok=True)
    # A new group of this controller has neither cores nor memory.
    cpuset = CONTROL_GROUPS / "cpuset"
    for name in ("cpuset.cpus", "cpuset.mems"):
        if (cpuset / group / name).is_file():
            (cpuset / group / name).write_text((cpuset / name).read_text())


def clean_up(state: MachineState) -> list[str]:
    """Put back and remove all that `state` names; gives what remains. Processes have ended by then."""
    restore_settings(state.settings)
    remaining = [str(path) for path in remove_groups(state.group)]
    shutil.rmtree(state.folder, ignore_errors=True)
    if Path(state.folder).exists():
        remaining.append(state.folder)
    get_state_path().unlink(missing_ok=True)
    return remaining


@contextmanager
def borrow_machine() -> Iterator[MachineState]:
    """The machine for one node, put back when the block ends. Raises BlockingIOError if another one runs."""
    path = get_state_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.is_file():
            # Of a run that was killed; its processes ended with it.
            clean_up(MachineState(**json.loads(path.read_text("utf-8"))))
        name = f"ttft-kube-{os.urandom(4).hex()}"
        state = MachineState(str(path.parent / name), name, read_settings())
        path.write_text(json.dumps(asdict(state)), "utf-8")
        try:
            Path(state.folder).mkdir()
            make_groups(state.group)
            yield state
        finally:
            clean_up(state)


def build_inside_command(host_name: str, words: Sequence[str]) -> tuple[str, ...]:
    """A command line that runs `words` in namespaces of their own, which end with this process."""
    spaces = ("--mount", "--net", "--pid", "--uts", "--ipc", "--fork", "--mount-proc")
    return (
        "setpriv", "--pdeathsig", "KILL", "unshare", *spaces, "--kill-child",
        "--propagation", "private", "bash", "-c", FIRST_PROCESS, "bash", host_name, *words,
    )  # fmt: skip


@contextmanager
def run_inside(host_name: str, words: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A command in namespaces of its own while the block runs; nothing of them is left afterwards."""
    process = subprocess.Popen(
        build_inside_command(host_name, words), stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield process
    finally:
        stop_first_process(process)


def stop_first_process(outside: subprocess.Popen[bytes]) -> None:
    """End the namespaces' first process, so that `outside`, its parent, ends after all others have."""
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{outside.pid}/task/{outside.pid}/children").read_text().split()
        for pid in map(int, children):
            os.kill(pid, signal.SIGKILL)
    try:
        outside.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        outside.kill()
        outside.wait()
