# SPDX-License-Identifier: Apache-2.0
"""Configuration of a node's programs, as data: kube_node.py writes it down and starts them.

All addresses are in the node's own network namespace, so they collide with nothing of the machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

NODE_NAME: Final = "ttft-node"
NODE_ADDRESS: Final = "10.250.0.1"
NODE_NETWORK: Final = f"{NODE_ADDRESS}/24"
POD_NETWORK: Final = "10.244.0.0/24"
SERVICE_NETWORK: Final = "10.96.0.0/16"
API_SERVICE_ADDRESS: Final = "10.96.0.1"  # the first one of the Services, always
CLUSTER_DOMAIN: Final = "cluster.local"
PAUSE_IMAGE: Final = "ttft-otel-pause:local"
PLUGIN_FOLDER: Final = Path("/usr/lib/cni")  # of Debian's containernetworking-plugins


def build_kubelet_config(folder: Path, group: str) -> dict[str, Any]:
    """Kubelet below `folder`, with its pods in the control group `group`."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": NODE_ADDRESS,
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        # Nobody reaches this address but who is in the namespace.
        "authorization": {"mode": "AlwaysAllow"},
        "containerRuntimeEndpoint": f"unix://{folder / 'containerd.sock'}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{group}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "oomScoreAdj": 0,
        "clusterDNS": [NODE_ADDRESS],
        "clusterDomain": CLUSTER_DOMAIN,
        "resolvConf": str(folder / "resolv.conf"),
        "podLogsDir": str(folder / "pod-logs"),
        "volumePluginDir": str(folder / "volume-plugins"),
        # The machine's disk is not this node's: pods are not evicted for what else lies on it.
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
    }


def build_proxy_config(kubeconfig: Path) -> dict[str, Any]:
    """kube-proxy with iptables, which leaves the kernel's tables of connections as they are."""
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "hostnameOverride": NODE_NAME,
        "clusterCIDR": POD_NETWORK,
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "oomScoreAdj": 0,
        # Limits of the whole machine, which a network namespace may not set.
        "conntrack": {
            **{"maxPerCore": 0, "min": 0},
            **{"tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        },
    }


def build_network_config(folder: Path) -> dict[str, Any]:
    """The pods' network: a bridge, addresses of POD_NETWORK, the node as its gateway."""
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isDefaultGateway": True,
        "ipMasq": True,
        # A pod reaches itself through its Service.
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "ranges": [[{"subnet": POD_NETWORK}]],
            "dataDir": str(folder / "addresses"),
        },
    }
    return {"cniVersion": "0.4.0", "name": "ttft", "plugins": [bridge]}


def render_containerd_config(folder: Path) -> str:
    """containerd with its interface for Kubernetes (CRI), in TOML."""
    return f"""version = 2
# In memory, so that a node begins and ends within seconds: 1.5 GB.
root = "/run/ttft-containerd/root"
state = "/run/ttft-containerd/state"
oom_score = 0
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.tracing.processor.v1.otlp"]
[grpc]
  address = "{folder / "containerd.sock"}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "docker.io/library/{PAUSE_IMAGE}"
  # Even root may lack CAP_SYS_RESOURCE.
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{PLUGIN_FOLDER}"
    conf_dir = "{folder / "network.d"}"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      SystemdCgroup = false
"""


def render_hosts(services: dict[str, Any]) -> str:
    """Names of Services with an address, as /etc/hosts has them, from `kubectl get services -A -o json`."""
    lines = [
        f"{each['spec']['clusterIP']} {each['metadata']['name']}.{each['metadata']['namespace']}"
        f".svc.{CLUSTER_DOMAIN}\n"
        for each in services["items"]
        if each["spec"].get("clusterIP", "None") != "None"
    ]
    return "".join(sorted(lines))
