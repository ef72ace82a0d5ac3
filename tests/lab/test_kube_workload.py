# SPDX-License-Identifier: Apache-2.0
"""What scripts/kube runs is what deploy/ holds: the manifest's own pods, values that our chart takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from lab import chart, kube_configs, kube_images, kube_workload
from lab.kube_command import STEPS
from lab.kube_tools import run_helm
from lab.kube_trial import KubeTrial

VLLM, MODEL = Path("/node/vllm"), Path("/node/model")


def test_the_manifest_is_tried_as_it_is() -> None:
    """Probes, hooks and init container are the manifest's; what a machine without a GPU lacks is left out."""
    before = list(yaml.safe_load_all(kube_workload.MANIFEST.read_text("utf-8")))
    service, deployment = kube_workload.build_vllm_objects(VLLM, MODEL)

    assert service == before[0]
    old, new = (each["spec"]["template"]["spec"] for each in (before[1], deployment))
    assert new["initContainers"] == old["initContainers"]
    assert new["terminationGracePeriodSeconds"] == old["terminationGracePeriodSeconds"]
    (old_server,), (new_server,) = old["containers"], new["containers"]
    for same in ("image", "lifecycle", "readinessProbe", "startupProbe", "ports"):
        assert new_server[same] == old_server[same]
    assert new_server["env"][1 : len(old_server["env"])] == old_server["env"][1:]
    assert "resources" in old_server and "resources" not in new_server


def test_the_environment_is_mounted_read_only() -> None:
    """The pod cannot write into what it gets of the checkout, and the injected folder comes first."""
    _, deployment = kube_workload.build_vllm_objects(VLLM, MODEL)
    (server,) = deployment["spec"]["template"]["spec"]["containers"]
    volumes = deployment["spec"]["template"]["spec"]["volumes"]
    mounted = {each["name"] for each in volumes if "hostPath" in each}

    writable = {each["name"] for each in server["volumeMounts"] if not each.get("readOnly")}
    paths = {each["name"]: each.get("value") for each in server["env"]}["PYTHONPATH"].split(":")

    assert {"vllm", "model"} <= mounted and not mounted & writable
    assert paths[0] == "/ttft-otel"


def test_images_have_the_names_of_the_manifests(tmp_path: Path) -> None:
    """Nothing is pulled: all images that the trial's pods name are made."""
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump(kube_workload.build_chart_values()), "utf-8")
    done = run_helm(
        "template", kube_workload.RELEASE, str(chart.CHART),
        "--namespace", kube_workload.NAMESPACE, "-f", str(values),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    objects = [each for each in yaml.safe_load_all(done.stdout) if each]
    objects += kube_workload.build_vllm_objects(VLLM, MODEL)
    pods = [
        each["spec"]["template"]["spec"] for each in objects if "template" in each.get("spec", {})
    ]
    named = {
        each["image"]
        for pod in pods
        for each in (*pod["containers"], *pod.get("initContainers", ()))
    }

    assert len(named) == 4
    assert named <= set(kube_images.list_image_names())


def test_archives_follow_the_sources(tmp_path: Path) -> None:
    """Another file in an image is another folder of archives; compiled Python is not."""

    class Programs:
        collector = Path("/collector")

    (package := tmp_path / "ttft_otel").mkdir()
    for name in kube_images.SOURCES[1:]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    first = kube_images.build_archive_folder(Programs, tmp_path)  # type: ignore[arg-type]
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "a.pyc").write_text("")
    assert kube_images.build_archive_folder(Programs, tmp_path) == first  # type: ignore[arg-type]

    (package / "a.py").write_text("")

    assert kube_images.build_archive_folder(Programs, tmp_path) != first  # type: ignore[arg-type]


def test_steps_have_one_list() -> None:
    """--until offers the steps that there are."""
    assert tuple(KubeTrial.list_steps(object.__new__(KubeTrial))) == STEPS


@pytest.mark.parametrize(
    ("address", "line"), [("10.96.0.7", "10.96.0.7 web.team.svc.cluster.local\n"), ("None", "")]
)
def test_names_of_services(address: str, line: str) -> None:
    """Services with an address have a name, headless ones none."""
    service = {"metadata": {"name": "web", "namespace": "team"}, "spec": {"clusterIP": address}}

    assert kube_configs.render_hosts({"items": [service]}) == line


def test_a_stand_in_keeps_the_pod() -> None:
    """With --stand-in only image, command and arguments of the server differ."""
    _, server = kube_workload.build_vllm_objects(VLLM, MODEL)
    _, small = kube_workload.build_vllm_objects(VLLM, MODEL)
    kube_workload.replace_vllm(small)

    (old,), (new,) = (each["spec"]["template"]["spec"]["containers"] for each in (server, small))
    assert {key for key in old | new if old.get(key) != new.get(key)} == {
        "image", "command", "args", "volumeMounts",
    }  # fmt: skip
    assert new["image"] in kube_images.list_image_names()
