# SPDX-License-Identifier: Apache-2.0
"""The chart's NetworkPolicies, enforced by kube-router in a kernel: who reaches which port of which pod.

Pods are network namespaces on a bridge, with the labels and ports that the chart gives to its pods. The test
serves the lists of an API server; kube-router is the real one, with iptables and ipset.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from lab import chart, kube_host
from lab.kube_workload import build_chart_values
from lab.stack import go_builds
from lab.stack.go_builds import GoMissingError
from lab.stack.program_pins import CHECKOUT, KUBE_ROUTER, KUBE_ROUTER_TOOL

pytestmark = pytest.mark.full

NODE, NETWORK, GATEWAY = "ttft-node", "10.244.0", "10.244.0.1"
PROGRAMS: Final = ("iptables", "ipset", "ip", "unshare", "setpriv")
SYNCED: Final = "sync iptables took"  # what kube-router logs when all rules are there
UNNAMED_PORT: Final = 9999  # open in each pod, of which no policy speaks
LISTS: Final = {
    "/api/v1/pods": "Pod",
    "/api/v1/nodes": "Node",
    "/api/v1/namespaces": "Namespace",
    "/api/v1/services": "Service",
    "/api/v1/endpoints": "Endpoints",
    "/apis/discovery.k8s.io/v1/endpointslices": "EndpointSlice",
    "/apis/networking.k8s.io/v1/networkpolicies": "NetworkPolicy",
}
# Beside router and collector of the chart: a server, a neighbour of the router's, and a stranger.
OTHERS: Final = {
    "server": ("default", {"app": "vllm"}, [8000]),
    "neighbour": (chart.NAMESPACE, {"app": "client"}, []),
    "stranger": ("elsewhere", {"app": "client"}, []),
}
LISTEN: Final = """
import socket, sys, time
kept = [socket.create_server(("0.0.0.0", int(port))) for port in sys.argv[1:]]
print("ready", flush=True)
time.sleep(3600)
"""
CONNECT: Final = """
import socket, sys
for target in sys.argv[1:]:
    address, _, port = target.partition(":")
    try:
        socket.create_connection((address, int(port)), 3).close()
    except OSError:
        continue
    print(target)
"""


def build_pods(documents: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Pods of the chart's router and collector, as a node reports them, and of OTHERS, by short names."""
    specs: dict[str, tuple[str, dict[str, str], list[dict[str, Any]]]] = {
        name: (namespace, labels, [{"containerPort": port} for port in ports])
        for name, (namespace, labels, ports) in OTHERS.items()
    }
    for document in documents:
        if document["kind"] in ("Deployment", "StatefulSet"):
            template = document["spec"]["template"]
            labels = template["metadata"]["labels"]
            (container,) = template["spec"]["containers"]
            name = labels["app.kubernetes.io/component"]
            specs[name] = (document["metadata"]["namespace"], labels, container["ports"])
    pods = {}
    for number, (name, (namespace, labels, ports)) in enumerate(sorted(specs.items()), 10):
        address = f"{NETWORK}.{number}"
        container = {"name": "it", "ports": [{"protocol": "TCP", **each} for each in ports]}
        addresses = {"hostIP": GATEWAY, "podIP": address, "podIPs": [{"ip": address}]}
        pods[name] = {
            "metadata": {"name": name, "namespace": namespace, "labels": labels, "uid": name},
            "spec": {"nodeName": NODE, "containers": [container]},
            "status": {"phase": "Running", **addresses},
        }
    return pods


def build_world(documents: Sequence[dict[str, Any]], with_policies: bool) -> dict[str, Any]:
    """All objects that an API server would list, by their kind."""
    pods = build_pods(documents)
    names = sorted({each["metadata"]["namespace"] for each in pods.values()})
    policies = [each for each in documents if each["kind"] == "NetworkPolicy"]
    return {
        "Pod": list(pods.values()),
        "Node": [
            {
                "metadata": {"name": NODE},
                "status": {"addresses": [{"type": "InternalIP", "address": GATEWAY}]},
            }
        ],
        "Namespace": [
            {"metadata": {"name": each, "labels": {"kubernetes.io/metadata.name": each}}}
            for each in names
        ],
        "NetworkPolicy": policies if with_policies else [],
    }


@contextmanager
def serve_lists(world: dict[str, Any]) -> Iterator[str]:
    """An API server's lists, and watches in which nothing happens; its URL."""
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            folder, _, name = path.rpartition("/")
            kind = LISTS.get(path)
            if kind is None:
                (found,) = [
                    each for each in world[LISTS[folder]] if each["metadata"]["name"] == name
                ]
                self.answer({"kind": LISTS[folder], "apiVersion": "v1", **found})
            elif "watch=" in query:
                self.answer(None)
                ended.wait()
            else:
                version = path.removeprefix("/apis/").removeprefix("/api/").rpartition("/")[0]
                about = {"kind": f"{kind}List", "apiVersion": version}
                self.answer(
                    {**about, "metadata": {"resourceVersion": "1"}, "items": world.get(kind, [])}
                )

        def answer(self, content: Any) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(content).encode() if content else b"")
            self.wfile.flush()

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    ended.set()
    server.shutdown()


def list_ports(pod: dict[str, Any]) -> list[int]:
    """What a pod listens on."""
    named = [each["containerPort"] for each in pod["spec"]["containers"][0]["ports"]]
    return [*named, UNNAMED_PORT]


def run(*words: str) -> str:
    """What a command prints. Raises CalledProcessError."""
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout


def make_network(pods: Sequence[dict[str, Any]], stack: ExitStack) -> None:
    """A bridge of the node, and behind it a namespace of each pod, whose ports listen."""
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", "cni0", "type", "bridge")
    run("ip", "address", "add", f"{GATEWAY}/24", "dev", "cni0")
    run("ip", "link", "set", "cni0", "up")
    for pod in pods:
        name = pod["metadata"]["name"]
        run("ip", "netns", "add", name)
        inside = ("ip", "-n", name)
        run("ip", "link", "add", f"v{name[:12]}", "type", "veth", "peer", "eth0", "netns", name)
        run("ip", "link", "set", f"v{name[:12]}", "master", "cni0", "up")
        run(*inside, "address", "add", f"{pod['status']['podIP']}/24", "dev", "eth0")
        run(*inside, "link", "set", "eth0", "up")
        run(*inside, "link", "set", "lo", "up")
        words = ("ip", "netns", "exec", name, sys.executable, "-c", LISTEN)
        words = (*words, *map(str, list_ports(pod)))
        listening = stack.enter_context(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
        stack.callback(listening.kill)
        assert listening.stdout is not None and listening.stdout.readline() == "ready\n"


def measure(pods: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """Of each port of each pod, as POD:PORT, who reaches it; the node is "node"."""
    targets = {
        f"{pod['status']['podIP']}:{port}": f"{pod['metadata']['name']}:{port}"
        for pod in pods
        for port in list_ports(pod)
    }
    reached: dict[str, list[str]] = {each: [] for each in targets.values()}
    for name in sorted([*(pod["metadata"]["name"] for pod in pods), "node"]):
        place = () if name == "node" else ("ip", "netns", "exec", name)
        others = [each for each in targets if targets[each].partition(":")[0] != name]
        for each in run(*place, sys.executable, "-c", CONNECT, *others).split():
            reached[targets[each]].append(name)
    return reached


def run_inside(plan: dict[str, Any]) -> dict[str, Any]:
    """The trial, in the node's namespaces: who reaches what, before and while kube-router runs."""
    world = plan["world"]
    with ExitStack() as stack:
        make_network(world["Pod"], stack)
        before = measure(world["Pod"])
        url = stack.enter_context(serve_lists(world))
        log = stack.enter_context(Path(plan["log"]).open("w"))
        words = (
            plan["kube_router"], f"--master={url}", f"--hostname-override={NODE}", "--v=1",
            "--run-firewall=true", "--run-router=false", "--run-service-proxy=false",
            "--service-cluster-ip-range=10.96.0.0/16", "--health-port=0", "--enable-cni=false",
        )  # fmt: skip
        enforcer = stack.enter_context(subprocess.Popen(words, stdout=log, stderr=log))
        stack.callback(enforcer.kill)
        deadline = time.monotonic() + 120
        while SYNCED not in (text := Path(plan["log"]).read_text()) and time.monotonic() < deadline:
            time.sleep(0.5)
        after = measure(world["Pod"])
        is_enforced = SYNCED in text and enforcer.poll() is None
        return {"before": before, "after": after, "is_enforced": is_enforced}


def try_policies(folder: Path, values: dict[str, Any], with_policies: bool = True) -> Any:
    """What run_inside() found for these values of the chart."""
    folder.mkdir()
    (folder / "values.yaml").write_text(yaml.safe_dump(values), "utf-8")
    documents = [
        each for each in yaml.safe_load_all(chart.render_chart(folder / "values.yaml")) if each
    ]
    plan = {
        "world": build_world(documents, with_policies),
        "kube_router": str(go_builds.build_tool(KUBE_ROUTER_TOOL, print) / KUBE_ROUTER.name),
        "log": str(folder / "kube-router.log"),
        "result": str(folder / "result.json"),
    }
    (folder / "plan.json").write_text(json.dumps(plan), "utf-8")
    words = ("env", f"PYTHONPATH={CHECKOUT}", sys.executable, __file__, str(folder / "plan.json"))
    with kube_host.run_inside(NODE, words) as process:
        process.wait(300)
    log = Path(plan["log"])
    assert process.returncode == 0, log.read_text()[-3000:] if log.is_file() else "no log"
    return json.loads(Path(plan["result"]).read_text("utf-8"))


@pytest.fixture(scope="module")
def programs() -> None:
    """What is needed here. Skips without it."""
    if os.geteuid():
        pytest.skip("needs root, for namespaces")
    if lacking := [each for each in PROGRAMS if not shutil.which(each)]:
        pytest.skip(f"no {', '.join(lacking)}: apt-get install iptables ipset iproute2 util-linux")
    try:
        go_builds.check_go_version()
    except GoMissingError as error:
        pytest.skip(f"{error}; it builds kube-router, once, in five minutes of CPU")


def check_who_reaches(found: dict[str, Any], **expected: set[str]) -> None:
    """Router and collector by these alone; all others, and all of them without an enforcer, by everybody."""
    everybody = {"collector", "neighbour", "node", "router", "server", "stranger"}
    assert found["is_enforced"]
    for target, names in found["before"].items():
        assert {*names, target.partition(":")[0]} == everybody, target
    for target, names in found["after"].items():
        pod, _, port = target.partition(":")
        wanted = (
            everybody
            if pod not in ("router", "collector")
            else expected.get(f"{pod}_{port}", set())
        )
        # The node is let in by each enforcer: kubelet's probes come from it.
        assert {*names, pod} == {*wanted, pod, "node"}, target


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("with_policies", [True, False])
def test_by_default(programs: None, tmp_path: Path, with_policies: bool) -> None:
    """The router by its namespace, the collector's OTLP ports by all pods; the control has no policies."""
    found = try_policies(tmp_path / "trial", build_chart_values(), with_policies)
    if not with_policies:
        assert found["is_enforced"] and found["after"] == found["before"]
        return
    pods = {"collector", "neighbour", "router", "server", "stranger"}
    router = {"neighbour", "collector"}
    check_who_reaches(found, router_8000=router, collector_4317=pods, collector_4318=pods)


@pytest.mark.timeout(3600)
def test_peers_that_are_named(programs: None, tmp_path: Path) -> None:
    """networkPolicy.from: the router by these alone, the collector by these and by its namespace."""
    servers = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "default"}}}
    values = build_chart_values()
    for part in values.values():
        part["networkPolicy"] = {"from": [servers]}
    found = try_policies(tmp_path / "trial", values)
    collector = {"server", "neighbour", "router"}
    check_who_reaches(
        found, router_8000={"server"}, collector_4317=collector, collector_4318=collector
    )


def main() -> None:
    """The side of run_inside()."""
    plan = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    Path(plan["result"]).write_text(json.dumps(run_inside(plan)), "utf-8")


if __name__ == "__main__":
    main()
