# SPDX-License-Identifier: Apache-2.0
"""What runs on the trial's node: deploy/kubernetes/mono.yaml with a tiny model, and values for our chart.

vLLM comes from this checkout's environment, mounted read-only over a small Debian, without any ttft-otel:
what traces the servers is the init container of the manifest alone.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import yaml

from lab.fake_vllm import FAKE_VLLM_FOLDER
from lab.kube_configs import NODE_ADDRESS
from lab.kube_images import ROUTER_IMAGE
from lab.stack.program_pins import CHECKOUT
from lab.vllm_plugins import PLUGINS_FOLDER

MANIFEST: Final = CHECKOUT / "deploy" / "kubernetes" / "mono.yaml"
NAMESPACE, RELEASE = "observability", "ttft"  # as the manifest names the collector
VLLM_SELECTOR: Final = "app=vllm"
SPANS_PORT, METRICS_PORT = 4317, 9090  # of the trial's receivers, on the node
VLLM_FOLDER: Final = "/opt/vllm"  # where the image's command expects its environment
MODEL_FOLDER = "/models/tiny"
PLUGIN_FOLDER = "/opt/no-spin"
STAND_IN_FOLDER = "/opt/stand-in"
VLLM_ENV: Final = {
    # Two servers share two cores, so none is bound to one.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}
VLLM_ARGS: Final = (
    MODEL_FOLDER, "--served-model-name=tiny", "--port=8000", "--max-model-len=8192",
    "--max-num-batched-tokens=2048", "--max-num-seqs=64", "--enforce-eager",
)  # fmt: skip


def mount_vllm(environment: Path, folder: Path) -> Path:
    """Mount a Python environment without its ttft-otel below `folder`; gives the mount point.

    Nothing is copied, and the environment itself is not changed. The mount is gone with the namespace.
    """
    upper, work, merged = (folder / name for name in ("upper", "work", "merged"))
    for path in (upper, work, merged):
        path.mkdir(parents=True)
    options = f"lowerdir={environment},upperdir={upper},workdir={work}"
    subprocess.run(("mount", "-t", "overlay", "overlay", "-o", options, merged), check=True)
    for path in sorted(merged.glob("lib/python3*/site-packages/*ttft_otel*")):
        subprocess.run(("rm", "-r", path), check=True)
    return merged


def build_vllm_objects(vllm: Path, model: Path) -> list[dict[str, Any]]:
    """Service and Deployment of MANIFEST with a tiny model on a CPU.

    vllm: an environment on the node, model: a folder there.
    """
    service, deployment = yaml.safe_load_all(MANIFEST.read_text("utf-8"))
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    # A GPU and a model that are not here; the rest of the manifest is tried as it is.
    del container["resources"]
    container["args"] = list(VLLM_ARGS)
    for variable in container["env"]:
        if variable["name"] == "PYTHONPATH":
            variable["value"] += f":{PLUGIN_FOLDER}"
    container["env"] += [{"name": name, "value": value} for name, value in VLLM_ENV.items()]
    for name, source, target in (
        ("vllm", vllm, VLLM_FOLDER),
        ("python", Path(sys.base_prefix), sys.base_prefix),
        ("model", model, MODEL_FOLDER),
        ("no-spin", PLUGINS_FOLDER / "no_spin", PLUGIN_FOLDER),
    ):
        pod["volumes"].append({"name": name, "hostPath": {"path": str(source)}})
        container["volumeMounts"].append({"name": name, "mountPath": target, "readOnly": True})
    return [service, deployment]


def replace_vllm(deployment: dict[str, Any]) -> None:
    """Put a small server in the place of vLLM; probes, hooks and the init container stay."""
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    container["image"] = ROUTER_IMAGE  # for its Python
    container["command"] = ["python3", f"{STAND_IN_FOLDER}/word_server.py"]
    del container["args"]
    source = {"path": str(FAKE_VLLM_FOLDER)}
    pod["volumes"].append({"name": "stand-in", "hostPath": source})
    container["volumeMounts"].append(
        {"name": "stand-in", "mountPath": STAND_IN_FOLDER, "readOnly": True}
    )


def build_chart_values() -> dict[str, Any]:
    """Values for our chart: two routers that watch vLLM's Service, a collector that sends to the trial."""
    return {
        "router": {
            "discover": [f"k8s://default/{VLLM_SELECTOR}"],
            # The longest answer of the trial takes seconds, not minutes.
            "drain": {"delaySeconds": 10, "timeoutSeconds": 60},
        },
        "collector": {
            "tempoEndpoint": f"{NODE_ADDRESS}:{SPANS_PORT}",
            "prometheusUrl": f"http://{NODE_ADDRESS}:{METRICS_PORT}",
        },
    }


def build_echo_objects(busybox: str) -> list[dict[str, Any]]:
    """A pod that answers HTTP, and its Service: what has to work before anything else."""
    labels = {"app": "echo"}
    return [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "echo", "namespace": "default", "labels": labels},
            "spec": {
                "terminationGracePeriodSeconds": 0,
                "containers": [
                    {
                        "name": "echo",
                        "image": busybox,
                        "command": ["/bin/busybox", "httpd", "-f", "-p", "8080"],
                    }
                ],
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "echo", "namespace": "default"},
            "spec": {"selector": labels, "ports": [{"port": 80, "targetPort": 8080}]},
        },
    ]
