# SPDX-License-Identifier: Apache-2.0
"""The trial on a Kubernetes node: what is shown, step by step, with figures; kube_inside.py runs it.

A step that needs something that does not come about raises TimeoutError; what comes about and is wrong
becomes a fault in the result.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from lab import kube_workload
from lab.chart import CHART
from lab.container_images import list_named_images
from lab.kube_cluster import ClusterCommandError
from lab.kube_configs import NODE_ADDRESS
from lab.kube_load import RequestOutcome, RouterConnection, run_load, summarize_outcomes
from lab.kube_node import KubeNode
from lab.kube_workload import METRICS_PORT, NAMESPACE, RELEASE, SPANS_PORT, VLLM_SELECTOR
from lab.otlp_sinks import MetricSink, SpanSink


class PodQueries:
    """What `node` says of its pods, by kubectl and by containerd."""

    def __init__(self, node: KubeNode) -> None:
        self.node = node

    def is_rolled_out(self, namespace: str, target: str) -> bool:
        """Whether only new pods are there, all of them ready, and the old ones have ended."""
        deployment = json.loads(self.run_kubectl(namespace, "get", target, "-o", "json"))
        wanted = deployment["spec"]["replicas"]
        status = deployment["status"]
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
        tasks = subprocess.run(
            (*self.node.ctr, "tasks", "list"), capture_output=True, text=True, check=True
        )
        return next(
            int(line.split()[1]) for line in tasks.stdout.splitlines() if line.startswith(container)
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


VLLM_TIMEOUT_S: Final = 400.0  # seconds for all servers; two cores need one minute for two
PODS_TIMEOUT_S: Final = 120.0  # seconds for pods without vLLM
ROLLOUT_TIMEOUT_S: Final = 1500.0
ARRIVAL_TIMEOUT_S: Final = 60.0  # seconds for spans that were handed off
HANDED_OFF_S: Final = 2.0  # an exporter sends what is a second old; beside a busy machine's pauses
STEADY_S: Final = 8.0  # seconds of load before and after an event
ROUTER: Final = f"{RELEASE}-ttft-otel-router"
WEB_PORT: Final = 8000


class KubeTrial:
    """Steps on a started node. figures: what they measured. faults: what was not as it should be.

    stand_in: small servers in place of vLLM, of which no spans come.
    """

    def __init__(
        self,
        node: KubeNode,
        vllm: Path,
        model: Path,
        say: Callable[[str], None],
        stand_in: bool = False,
    ) -> None:
        self.node = node
        self.vllm = vllm
        self.model = model
        self.say = say
        self.stand_in = stand_in
        self.pods = PodQueries(node)
        self.figures: dict[str, Any] = {}
        self.faults: list[str] = []

    def run_steps(self, last: str) -> None:
        """All steps up to the one named `last`. Raises TimeoutError, ClusterCommandError."""
        metrics = MetricSink(NODE_ADDRESS, METRICS_PORT)
        self.traces = SpanSink(NODE_ADDRESS, SPANS_PORT)
        try:
            for name, run in self.list_steps().items():
                self.say(name)
                self.figures[name] = run()
                self.say(f"{name}: {describe_figures(self.figures[name])}")
                if name == last:
                    return
        finally:
            self.traces.stop()
            metrics.close()

    def list_steps(self) -> dict[str, Callable[[], dict[str, Any]]]:
        """Steps by name, in their order."""
        return {
            "service": self.show_service,
            "servers": self.start_servers,
            "router": self.start_router,
            "request": self.trace_request,
            "backend rollout": lambda: self.roll_out("default", "deployment/vllm"),
            "router rollout": lambda: self.roll_out(NAMESPACE, f"deployment/{ROUTER}"),
            "pod deleted": self.delete_server,
            "pod killed": self.kill_server,
        }

    def show_service(self) -> dict[str, Any]:
        """A pod answers behind the address of its Service."""
        (busybox,) = [each for each in list_named_images() if each.startswith("busybox:")]
        objects = kube_workload.build_echo_objects(busybox)
        self.node.cluster.apply_objects(*objects)
        address = self.pods.get_address("default", "echo")
        seconds = self.node.wait_for(
            "the Service", lambda: get_status(address, 80) is not None, PODS_TIMEOUT_S
        )
        self.node.cluster.run_kubectl("delete", "pod/echo", "service/echo", "--wait=false")
        return {"seconds": round(seconds, 1)}

    def start_servers(self) -> dict[str, Any]:
        """Both vLLM servers are ready."""
        started = time.monotonic()
        objects = kube_workload.build_vllm_objects(self.vllm, self.model)
        if self.stand_in:
            kube_workload.replace_vllm(objects[1])
        self.node.cluster.apply_objects(*objects)
        self.pods.wait_for_pods("default", VLLM_SELECTOR, 2, VLLM_TIMEOUT_S)
        return {"seconds": round(time.monotonic() - started, 1), "servers": 2}

    def start_router(self) -> dict[str, Any]:
        """Router and collector of our chart are ready, and the router has found both servers."""
        started = time.monotonic()
        values = self.node.folder / "values.yaml"
        values.write_text(yaml.safe_dump(kube_workload.build_chart_values()), "utf-8")
        done = self.node.cluster.run_helm(
            "install", RELEASE, str(CHART), "--namespace", NAMESPACE, "--create-namespace",
            "-f", str(values),
        )  # fmt: skip
        if done.returncode:
            raise ClusterCommandError(done.stderr)
        self.node.publish_names()
        self.pods.wait_for_pods(
            NAMESPACE, f"app.kubernetes.io/instance={RELEASE}", 3, PODS_TIMEOUT_S
        )
        address = self.pods.get_address(NAMESPACE, ROUTER)
        self.node.wait_for(
            "the router's instances", lambda: get_status(address, WEB_PORT) == 200, PODS_TIMEOUT_S
        )
        return {"seconds": round(time.monotonic() - started, 1), "routers": 2}

    def trace_request(self) -> dict[str, Any]:
        """One request through router and server: its trace has both, and is complete in the collector."""
        trace_id = os.urandom(16).hex()
        connection = RouterConnection(
            self.pods.get_address(NAMESPACE, ROUTER), WEB_PORT, kept_alive=False
        )
        if failure := connection.send_request(8, trace_id):
            self.faults.append(f"request: {failure}")
        connection.http.close()
        seconds = self.node.wait_for(
            "the request's trace", lambda: self.is_whole(trace_id), ARRIVAL_TIMEOUT_S
        )
        time.sleep(HANDED_OFF_S)
        spans = self.traces.list_pod_spans(trace_id)
        pods = sorted({pod for pod, _ in spans})
        if len(pods) < 2 and not self.stand_in:
            self.faults.append(f"request: spans of {pods} alone")
        return {
            "seconds_to_arrive": round(seconds, 1),
            "spans": len(spans),
            "pods": pods,
            "names": sorted({span.name for _, span in spans}),
        }

    def roll_out(self, namespace: str, target: str) -> dict[str, Any]:
        """All pods of a Deployment are replaced under load: no request fails, no trace is lost."""
        with run_load(self.pods.get_address(NAMESPACE, ROUTER), WEB_PORT) as load:
            time.sleep(STEADY_S)
            started = time.monotonic()
            self.pods.run_kubectl(namespace, "rollout", "restart", target)
            self.node.wait_for(
                f"rollout of {target}",
                lambda: self.pods.is_rolled_out(namespace, target),
                ROLLOUT_TIMEOUT_S,
            )
            seconds = time.monotonic() - started
            time.sleep(STEADY_S)
        figures = {"seconds": round(seconds, 1), **self.judge_load(target, load.outcomes)}
        self.expect_traces(target, [each for each in load.outcomes if not each.failure], figures)
        return figures

    def delete_server(self) -> dict[str, Any]:
        """`kubectl delete pod` under load, as a node's maintenance does it: nothing fails or is lost."""
        with run_load(self.pods.get_address(NAMESPACE, ROUTER), WEB_PORT) as load:
            time.sleep(STEADY_S)
            name = self.pods.get_pods("default", VLLM_SELECTOR)[0]["metadata"]["name"]
            started = time.monotonic()
            self.pods.run_kubectl("default", "delete", "pod", name, "--wait=false")
            self.node.wait_for(
                f"the end of {name}",
                lambda: name not in self.pods.list_pod_names("default", VLLM_SELECTOR),
                PODS_TIMEOUT_S,
            )
            seconds = time.monotonic() - started
            self.pods.wait_for_pods("default", VLLM_SELECTOR, 2, VLLM_TIMEOUT_S)
            time.sleep(STEADY_S)
        figures = {"seconds": round(seconds, 1), **self.judge_load("pod deleted", load.outcomes)}
        answered = [each for each in load.outcomes if not each.failure]
        self.expect_traces("pod deleted", answered, figures)
        return figures

    def kill_server(self) -> dict[str, Any]:
        """SIGKILL for a server's first process under load, as when memory runs out.

        Streams that it had begun break off; whatever was handed off before arrives.
        """
        with run_load(self.pods.get_address(NAMESPACE, ROUTER), WEB_PORT) as load:
            time.sleep(STEADY_S)
            pid = self.pods.find_server_pid()
            killed_at = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            time.sleep(STEADY_S)
            self.pods.wait_for_pods("default", VLLM_SELECTOR, 2, VLLM_TIMEOUT_S)
            seconds = time.monotonic() - killed_at
            time.sleep(STEADY_S)
        late = [each for each in load.outcomes if each.failure and each.started > killed_at]
        if late:
            self.faults.append(f"pod killed: {len(late)} later requests failed: {late[0].failure}")
        figures = {
            "seconds_until_back": round(seconds, 1),
            **summarize_outcomes(load.outcomes),
            "under_way_at_the_kill": sum(
                each.started <= killed_at < each.ended for each in load.outcomes
            ),
            "failed_that_began_later": len(late),
        }
        old = [each for each in load.outcomes if each.ended <= killed_at - HANDED_OFF_S]
        self.expect_traces("pod killed", old, figures)
        recent = [e for e in load.outcomes if killed_at - HANDED_OFF_S < e.ended <= killed_at]
        figures["answered_in_the_last_seconds"] = len(recent)
        figures["of_these_whole"] = sum(self.is_whole(each.trace_id) for each in recent)
        return figures

    def judge_load(self, what: str, outcomes: Sequence[RequestOutcome]) -> dict[str, Any]:
        """Figures of a load of which nothing may fail."""
        figures = summarize_outcomes(outcomes)
        if figures["failed"] or not figures["requests"]:
            self.faults.append(f"{what}: {figures['failed']} of {figures['requests']} failed")
        return figures

    def expect_traces(
        self, what: str, outcomes: Sequence[RequestOutcome], figures: dict[str, Any]
    ) -> None:
        """Wait for the traces of these requests; those that do not come are a fault."""
        deadline = time.monotonic() + ARRIVAL_TIMEOUT_S
        left = {each.trace_id for each in outcomes}
        while left and time.monotonic() < deadline:
            left = {each for each in left if not self.is_whole(each)}
            time.sleep(0.5)
        figures |= {"traces_expected": len(outcomes), "traces_missing": len(left)}
        if left:
            self.faults.append(f"{what}: {len(left)} of {len(outcomes)} traces are not whole")

    def is_whole(self, trace_id: str) -> bool:
        """Whether spans of a router and of a server have arrived."""
        pods = {pod for pod, _ in self.traces.list_pod_spans(trace_id)}
        routers = {pod for pod in pods if pod.startswith(ROUTER)}
        return bool(routers and (self.stand_in or pods - routers))


def describe_figures(figures: dict[str, Any]) -> str:
    """Figures of a step in one line."""
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in figures.items())


def get_status(address: str, port: int, path: str = "/readyz") -> int | None:
    """The status of an answer; None without one."""
    connection = http.client.HTTPConnection(address, port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
