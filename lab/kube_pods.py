# SPDX-License-Identifier: Apache-2.0
"""Questions about pods and Services on a node, and waiting for them; kube_trial.py asks."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from lab.kube_node import KubeNode
from lab.kube_workload import VLLM_SELECTOR


class PodQueries:
    """What `node` says of its pods, by kubectl and by containerd."""

    def __init__(self, node: KubeNode) -> None:
        self.node = node

    def is_rolled_out(self, namespace: str, target: str) -> bool:
        """Whether only new pods are there, all of them ready, and the old ones have ended."""
        deployment = json.loads(self.run_kubectl(namespace, "get", target, "-o", "json"))
        wanted, status = deployment["spec"]["replicas"], deployment["status"]
        labels = deployment["spec"]["selector"]["matchLabels"]
        selector = ",".join(f"{key}={value}" for key, value in labels.items())
        return bool(
            status.get("observedGeneration") == deployment["metadata"]["generation"]
            and status.get("updatedReplicas") == wanted == status.get("readyReplicas")
            and len(self.list_pod_names(namespace, selector)) == wanted
        )

    def find_server_pid(self) -> int:
        """The first process of a vLLM container."""
        pod = self.get_pods("default", VLLM_SELECTOR)[0]
        container = pod["status"]["containerStatuses"][0]["containerID"].rpartition("/")[2]
        told = subprocess.run(
            (*self.node.ctr, "tasks", "list"), capture_output=True, text=True, check=True
        )
        return next(
            int(line.split()[1]) for line in told.stdout.splitlines() if line.startswith(container)
        )

    def wait_for_pods(self, namespace: str, selector: str, count: int, timeout_s: float) -> None:
        """Wait until `count` pods are there and ready."""

        def are_ready() -> bool:
            pods = self.get_pods(namespace, selector)
            return len(pods) == count and all(map(is_pod_ready, pods))

        self.node.wait_for(f"{count} ready pods of {selector}", are_ready, timeout_s)

    def get_pods(self, namespace: str, selector: str) -> list[dict[str, Any]]:
        """Pods that are not about to end."""
        found = self.node.get_objects("pods", "-n", namespace, "-l", selector)
        return [each for each in found if "deletionTimestamp" not in each["metadata"]]

    def list_pod_names(self, namespace: str, selector: str) -> set[str]:
        """Pods, those that are about to end, too."""
        found = self.node.get_objects("pods", "-n", namespace, "-l", selector)
        return {each["metadata"]["name"] for each in found}

    def get_address(self, namespace: str, service: str) -> str:
        """The address of a Service."""
        return self.run_kubectl(
            namespace, "get", f"service/{service}", "-o", "jsonpath={.spec.clusterIP}"
        )

    def run_kubectl(self, namespace: str, *words: str) -> str:
        """What kubectl prints of a namespace."""
        return self.node.cluster.run_kubectl("-n", namespace, *words)


def is_pod_ready(pod: dict[str, Any]) -> bool:
    """Whether a pod says so."""
    return any(
        each["type"] == "Ready" and each["status"] == "True"
        for each in pod["status"].get("conditions", ())
    )
