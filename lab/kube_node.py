# SPDX-License-Identifier: Apache-2.0
"""A Kubernetes node with its control plane, in the namespaces that kube_host.py made; kube_trial.py uses it.

All parts are the real ones, but for names: dnsmasq answers them from a list of the Services, which
publish_names() writes, in place of CoreDNS. Every part has the admin's rights.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from lab import kube_configs
from lab.kube_cluster import ClusterCommandError, KubeCluster
from lab.kube_configs import NODE_ADDRESS, NODE_NAME, NODE_NETWORK, SERVICE_NETWORK
from lab.local_servers import LocalServer, LocalServerError, stop_servers
from lab.server_commands import HOST, ServerCommand

READY_TIMEOUT_S: Final = 180.0  # seconds until the node is ready; a busy machine needs one
IMAGES_NAMESPACE: Final = "k8s.io"  # containerd's, of what Kubernetes runs
SUB_FOLDERS: Final = ("network.d", "names", "pod-logs", "volume-plugins", "kubelet")
ROUTES: Final = (
    ("link", "set", "lo", "up"),
    ("link", "add", "node0", "type", "veth", "peer", "name", "node1"),
    ("link", "set", "node1", "up"),
    ("address", "add", NODE_NETWORK, "dev", "node0"),
    ("link", "set", "node0", "up"),
    # kube-proxy translates these addresses; a packet needs a route before.
    ("route", "add", SERVICE_NETWORK, "dev", "node0"),
)


class NodeProgram(LocalServer):
    """A part of the node that says by a command whether it is ready, or not at all."""

    def __init__(
        self, name: str, argv: Sequence[str], log: Path, probe: Sequence[str] = ("true",)
    ) -> None:
        super().__init__(ServerCommand(name, tuple(argv), {}, 0), log)
        self.probe = probe

    def is_healthy(self) -> bool:
        """Whether it runs and its probe succeeds."""
        return self.is_alive and not subprocess.run(self.probe, capture_output=True).returncode


class KubeNode:
    """One node below `folder`. programs: control plane, node. group: its control group, which exists."""

    def __init__(self, folder: Path, group: str, programs: Path, node_programs: Path) -> None:
        self.folder = folder
        self.group = group
        self.node_programs = node_programs
        self.cluster = KubeCluster(folder, programs, NODE_ADDRESS)
        self.ctr = ("ctr", "--address", str(folder / "containerd.sock"), "-n", IMAGES_NAMESPACE)
        self._programs: list[LocalServer] = []

    def start(self, archives: Sequence[Path], say: Callable[[str], None]) -> None:
        """Start everything, with the images of `archives`, and wait until the node is ready.

        Raises LocalServerError, ClusterCommandError, TimeoutError.
        """
        for words in ROUTES:
            subprocess.run(("ip", *words), check=True)
        self._write_configs()
        say("etcd and API server")
        self.cluster.start()
        say("containerd and its images")
        self._start_program(
            "containerd",
            ("containerd", "--config", str(self.folder / "containerd.toml")),
            (*self.ctr, "version"),
        )
        for archive in archives:
            self._run_checked(*self.ctr, "images", "import", str(archive))
        say("controllers, scheduler, proxy, kubelet")
        for name, argv in self._list_commands().items():
            self._start_program(name, argv)
        self._wait_until_ready()

    def publish_names(self) -> None:
        """Let pods find the Services that there are now by their names."""
        services = json.loads(self.cluster.run_kubectl("get", "services", "-A", "-o", "json"))
        target = self.folder / "names" / "services"
        draft = self.folder / "services.new"
        draft.write_text(kube_configs.render_hosts(services), "utf-8")
        draft.replace(target)

    def wait_for(self, what: str, holds: Callable[[], bool], timeout_s: float) -> float:
        """Seconds until `holds` says so. Raises TimeoutError, and LocalServerError for a part that ended."""
        started = time.monotonic()
        while not holds():
            for program in self._programs:
                if not program.is_alive:
                    raise LocalServerError(program.describe_failure(time.monotonic() - started))
            if time.monotonic() - started > timeout_s:
                raise TimeoutError(f"{what}: not within {timeout_s:.0f} s\n{self.describe_pods()}")
            time.sleep(0.5)
        return time.monotonic() - started

    def describe_pods(self) -> str:
        """Pods and the last events, for messages about what did not happen."""
        texts = []
        for words in (
            ("get", "pods", "-A", "-o", "wide"),
            ("get", "events", "-A", "--sort-by=.lastTimestamp"),
        ):
            try:
                texts.append("\n".join(self.cluster.run_kubectl(*words).splitlines()[-25:]))
            except ClusterCommandError as error:
                texts.append(str(error))
        return "\n".join(texts)

    def get_objects(self, *words: str) -> list[dict[str, Any]]:
        """What `kubectl get` finds."""
        found: list[dict[str, Any]] = json.loads(
            self.cluster.run_kubectl("get", *words, "-o", "json")
        )["items"]
        return found

    def stop(self) -> None:
        """End all parts; pods end with the namespace."""
        stop_servers(self._programs, timeout_s=5)
        self.cluster.stop()

    def _write_configs(self) -> None:
        for name in SUB_FOLDERS:
            (self.folder / name).mkdir()
        (self.folder / "resolv.conf").write_text(f"nameserver {NODE_ADDRESS}\n")
        (self.folder / "containerd.toml").write_text(
            kube_configs.render_containerd_config(self.folder), "utf-8"
        )
        (self.folder / "network.d" / "10-ttft.conflist").write_text(
            json.dumps(kube_configs.build_network_config(self.folder)), "utf-8"
        )
        for name, config in (
            ("kubelet", kube_configs.build_kubelet_config(self.folder, self.group)),
            ("kube-proxy", kube_configs.build_proxy_config(self.cluster.kubeconfig)),
        ):
            (self.folder / f"{name}.yaml").write_text(yaml.safe_dump(config), "utf-8")

    def _list_commands(self) -> dict[str, tuple[str, ...]]:
        """Command lines of what needs the API server."""
        access = f"--kubeconfig={self.cluster.kubeconfig}"
        bind = f"--bind-address={HOST}"
        path = {name: str(self.node_programs / name) for name in NODE_PARTS}
        return {
            "kube-controller-manager": (
                path["kube-controller-manager"], access, bind, "--leader-elect=false",
                f"--service-account-private-key-file={self.folder / 'accounts.key'}",
                f"--root-ca-file={self.cluster.certificate}",
            ),
            "kube-scheduler": (path["kube-scheduler"], access, bind, "--leader-elect=false"),
            "kube-proxy": (path["kube-proxy"], f"--config={self.folder / 'kube-proxy.yaml'}"),
            "dnsmasq": (
                "dnsmasq", "--keep-in-foreground", "--no-resolv", "--no-hosts", "--user=root",
                f"--listen-address={NODE_ADDRESS}", "--bind-interfaces", "--pid-file=",
                f"--hostsdir={self.folder / 'names'}",
                f"--local=/{kube_configs.CLUSTER_DOMAIN}/",
            ),
            "kubelet": (
                path["kubelet"], access, f"--config={self.folder / 'kubelet.yaml'}",
                f"--root-dir={self.folder / 'kubelet'}", f"--cert-dir={self.folder}",
                f"--hostname-override={NODE_NAME}", f"--node-ip={NODE_ADDRESS}",
            ),
        }  # fmt: skip

    def _start_program(
        self, name: str, argv: Sequence[str], probe: Sequence[str] = ("true",)
    ) -> None:
        program = NodeProgram(name, argv, self.folder / f"{name}.log", probe)
        self._programs.append(program)
        program.start().wait_until_ready(60)

    def _run_checked(self, *words: str) -> None:
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            raise ClusterCommandError(f"{' '.join(words)}: {done.stdout}{done.stderr}")

    def _wait_until_ready(self) -> None:
        def is_ready() -> bool:
            found = self.get_objects("nodes")
            return any(
                each["type"] == "Ready" and each["status"] == "True"
                for node in found
                for each in node["status"].get("conditions", ())
            )

        def has_account() -> bool:
            return bool(self.get_objects("serviceaccounts", "-n", "default"))

        self.wait_for("the node", is_ready, READY_TIMEOUT_S)
        self.wait_for("the controllers' first accounts", has_account, READY_TIMEOUT_S)


NODE_PARTS: Final = ("kube-controller-manager", "kube-scheduler", "kube-proxy", "kubelet")
