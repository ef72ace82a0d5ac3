# SPDX-License-Identifier: Apache-2.0
"""A Kubernetes API server with its etcd on loopback, without nodes; tests/cluster installs the chart there.

Objects are validated, admitted, stored and watched as anywhere; nothing runs them, because there are neither
controllers nor a kubelet. Programs come from the pins of tests/stack/tools/kubernetes, certificates, keys and
tokens are made at the start, in the cluster's folder.
"""

from __future__ import annotations

import csv
import http.client
import os
import secrets
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import yaml

from lab import free_ports, kube_tools
from lab.certificates import make_certificate
from lab.kube_configs import API_SERVICE_ADDRESS, SERVICE_NETWORK
from lab.local_servers import LocalServer, exit_on_sigterm
from lab.server_commands import HOST, ServerCommand
from lab.stack import go_builds
from lab.stack.go_builds import LineCallback
from lab.stack.program_pins import ETCD, KUBE_APISERVER, KUBERNETES_TOOL

START_TIMEOUT_S: Final = 120.0  # seconds; three on a machine that does nothing else
COMMAND_TIMEOUT_S: Final = 120.0  # seconds for one call of kubectl
ADMIN: Final = "admin"
EVERYTHING: Final = "system:masters"  # the group that RBAC asks nothing


class ClusterCommandError(RuntimeError):
    """kubectl refused; the message has its words."""


class ApiServer(LocalServer):
    """kube-apiserver, which speaks TLS alone; its certificate is its own authority."""

    def __init__(self, command: ServerCommand, log: Path, certificate: Path) -> None:
        super().__init__(command, log)
        self.certificate = certificate

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"https://{self.command.host}:{self.command.port}"

    def is_healthy(self) -> bool:
        """Whether it says that it is ready, its storage included."""
        connection = http.client.HTTPSConnection(
            self.command.host,
            self.command.port,
            timeout=5,
            context=ssl.create_default_context(cafile=str(self.certificate)),
        )
        try:
            connection.request("GET", self.command.health_path)
            response = connection.getresponse()
            # An unread body keeps the TLS socket open until it is collected.
            response.read()
            return response.status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


class KubeCluster:
    """etcd and an API server in `folder`; run_cluster() starts and stops it.

    programs: the folder with both. The ports stay the same when the API server is started again.
    address: where the API server listens; one that is not loopback is for pods, too.
    """

    def __init__(self, folder: Path, programs: Path, address: str = HOST) -> None:
        self.folder = folder
        self.programs = programs
        self.address = address
        self.certificate = folder / "tls.crt"
        self.kubeconfig = folder / "kubeconfig"
        self.port, client_port, peer_port = (free_ports.find_free_port() for _ in range(3))
        self.etcd = LocalServer(
            build_etcd_command(programs, folder, client_port, peer_port), folder / "etcd.log"
        )
        self._api_command = build_api_command(programs, folder, self.port, client_port, address)
        self.api = self._build_api()

    @property
    def url(self) -> str:
        """The API server's base URL."""
        return self.api.url

    def start(self) -> None:
        """Make what is secret, start both programs and wait for them. Raises LocalServerError."""
        token = write_secrets(self.folder, self.address)
        self.kubeconfig.touch(0o600)
        self.kubeconfig.write_text(
            yaml.safe_dump(build_kubeconfig(self.url, self.certificate, token)), "utf-8"
        )
        self.etcd.start().wait_until_ready(START_TIMEOUT_S)
        self.api.start().wait_until_ready(START_TIMEOUT_S)

    def kill_api(self) -> None:
        """End the API server as a crash does, without a word to those who watch."""
        assert self.api.process is not None
        self.api.process.kill()
        self.api.process.wait()

    def restart_api(self) -> None:
        """Start it again on the same port, with what etcd has."""
        self.api = self._build_api().start()
        self.api.wait_until_ready(START_TIMEOUT_S)

    def stop(self) -> None:
        """End both; idempotent."""
        self.api.stop()
        self.etcd.stop()

    def run_kubectl(self, *arguments: str, stdin: str = "") -> str:
        """What kubectl prints, as the admin. Raises ClusterCommandError."""
        done = subprocess.run(
            [kube_tools.find_tool("kubectl"), *arguments],
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(self.folder),
                "KUBECONFIG": str(self.kubeconfig),
            },
            input=stdin,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
        )
        if done.returncode:
            raise ClusterCommandError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def run_helm(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run helm as the admin, and return what it did."""
        return kube_tools.run_helm(*arguments, kubeconfig=self.kubeconfig)

    def apply_objects(self, *objects: dict[str, Any]) -> None:
        """Create objects or change them to these. Raises ClusterCommandError."""
        self.run_kubectl(
            "apply", "--server-side", "--force-conflicts", "-f", "-", stdin=join_objects(*objects)
        )

    def write_account_folder(self, namespace: str, account: str, folder: Path) -> Path:
        """Give `folder` the files that kubelet mounts into a pod of this service account."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "ca.crt").write_bytes(self.certificate.read_bytes())
        token = self.run_kubectl("-n", namespace, "create", "token", account)
        (folder / "token").touch(0o600)
        (folder / "token").write_text(token, "utf-8")
        return folder

    def _build_api(self) -> ApiServer:
        return ApiServer(self._api_command, self.folder / "kube-apiserver.log", self.certificate)


@contextmanager
def run_cluster(folder: Path, say: LineCallback) -> Iterator[KubeCluster]:
    """A cluster, ready when the block begins; its programs are built first if needed.

    Raises GoMissingError without Go, LocalServerError when a program does not come up.
    """
    cluster = KubeCluster(folder, go_builds.build_tool(KUBERNETES_TOOL, say))
    with exit_on_sigterm():
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


def build_etcd_command(
    programs: Path, folder: Path, client_port: int, peer_port: int
) -> ServerCommand:
    """One etcd that need not survive a power failure."""
    client, peer = (f"http://{HOST}:{port}" for port in (client_port, peer_port))
    argv = (
        str(programs / ETCD.name),
        f"--data-dir={folder / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",
        "--log-level=warn",
    )
    return ServerCommand("etcd", argv, {}, client_port)


def build_api_command(
    programs: Path, folder: Path, port: int, etcd_port: int, address: str = HOST
) -> ServerCommand:
    """An API server with RBAC; on loopback it serves no pods."""
    without_pods = (
        # The Service `kubernetes` would need an address that is not loopback.
        "--endpoint-reconciler-type=none",
        # Pods would wait for accounts that no controller makes.
        "--disable-admission-plugins=ServiceAccount",
    )
    argv = (
        str(programs / KUBE_APISERVER.name),
        f"--etcd-servers=http://{HOST}:{etcd_port}",
        f"--bind-address={address}",
        f"--advertise-address={address}",
        f"--secure-port={port}",
        f"--tls-cert-file={folder / 'tls.crt'}",
        f"--tls-private-key-file={folder / 'tls.key'}",
        f"--token-auth-file={folder / 'tokens.csv'}",
        "--authorization-mode=RBAC",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={folder / 'accounts.key'}",
        f"--service-account-signing-key-file={folder / 'accounts.key'}",
        f"--service-cluster-ip-range={SERVICE_NETWORK}",
        # The node's name is in no DNS.
        *(without_pods if address == HOST else ("--kubelet-preferred-address-types=InternalIP",)),
        "--v=1",
    )
    return ServerCommand("kube-apiserver", argv, {}, port, "/readyz", address)


def write_secrets(folder: Path, address: str = HOST) -> str:
    """Make the certificate, the accounts' key and the admin's token, which is returned."""
    named = ",".join(f"IP:{each}" for each in dict.fromkeys((HOST, address, API_SERVICE_ADDRESS)))
    make_certificate(folder, named)
    key = folder / "accounts.key"
    subprocess.run(("openssl", "genrsa", "-out", str(key), "2048"), check=True, capture_output=True)
    token = secrets.token_urlsafe(32)
    tokens = folder / "tokens.csv"
    tokens.touch(0o600)
    with tokens.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerow((token, ADMIN, "1", EVERYTHING))
    return token


def build_kubeconfig(url: str, certificate: Path, token: str) -> dict[str, Any]:
    """The admin's access, as kubectl and helm read it."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {
                "name": "test",
                "cluster": {"server": url, "certificate-authority": str(certificate)},
            }
        ],
        "users": [{"name": ADMIN, "user": {"token": token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": ADMIN}}],
        "current-context": "test",
    }


def join_objects(*objects: dict[str, Any]) -> str:
    """Objects as one YAML stream."""
    return yaml.safe_dump_all(objects, sort_keys=False)
