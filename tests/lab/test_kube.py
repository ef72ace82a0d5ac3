# SPDX-License-Identifier: Apache-2.0
"""scripts/kube: it runs what deploy/ holds, counts every failure, and puts the machine back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import grpc
import pytest
import yaml
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from lab import chart, kube_host, kube_images, kube_workload
from lab.http_servers import HttpServerThread, SilentHandler
from lab.kube_host import MachineState
from lab.kube_load import LoadClient, RouterConnection, SteadyLoad, summarize_outcomes
from lab.kube_tools import run_helm
from lab.otlp_sinks import EXPORT_METHOD, SpanSink, to_attributes
from lab.server_commands import HOST

# A process that holds its namespace and tells what it sees.
TELL = "hostname; ls /proc | grep -c '^[0-9]'; sleep 1000 & echo $!; cat /proc/net/dev | wc -l"


def test_changed_settings_are_put_back(tmp_path: Path) -> None:
    """Only what differs is written; settings that a kernel lacks are left out."""
    first, second = kube_host.SETTINGS[:2]
    for name in (first, second):  # in the form of /proc/sys
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("0\n")
    before = kube_host.read_settings(tmp_path)
    assert before == {first: "0", second: "0"}

    (tmp_path / first).write_text("1\n")

    assert kube_host.restore_settings(before, tmp_path) == [first]
    assert kube_host.read_settings(tmp_path) == before
    assert kube_host.restore_settings(before, tmp_path) == []


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
def test_processes_end_with_the_block(tmp_path: Path, eventually: Callable[..., None]) -> None:
    """A node's host name, network and processes are its own, and none of them outlives it."""
    reported = tmp_path / "reported"
    mark = f"100{os.getpid()}"
    script = f"{{ {TELL.replace('1000', mark)}; }} > {reported}; echo end >> {reported}; wait"
    with kube_host.run_inside("ttft-test", ("bash", "-c", script)):
        eventually(lambda: reported.exists() and reported.read_text().endswith("end\n"), 60)
        assert list_sleepers(mark)

    name, count, _, interfaces, _ = reported.read_text().split()
    assert name == "ttft-test" != os.uname().nodename
    assert int(count) < 10
    # Two lines of headings and the loopback, with the machine's own interfaces outside.
    assert int(interfaces) == 3 or "eth" not in Path("/proc/net/dev").read_text()
    assert not list_sleepers(mark)


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


CHUNK, DONE = b"data: {}\n\n", b"data: [DONE]\n\n"


class ScriptedHandler(SilentHandler):
    """Answers as the server's `script` says, the last entry again and again."""

    def do_POST(self) -> None:
        """One answer."""
        self.read_body()
        server = self.server
        assert isinstance(server, ScriptedServer)
        server.traces.append(self.headers["traceparent"])
        server.peers.add(self.client_address)
        what = server.script.pop(0) if len(server.script) > 1 else server.script[0]
        if what == "reset":
            self.close_connection = True
            return
        # A stream that breaks off has no end.
        body = CHUNK if what == "broken" else CHUNK + DONE
        self.send_answer(503 if what == "busy" else 200, body)
        if what == "close":
            self.close_connection = True


class ScriptedServer(HttpServerThread):
    """What the handler reads and writes."""

    script: list[str]
    traces: list[str]
    peers: set[object]


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    """A server on loopback."""
    with ScriptedServer(ScriptedHandler) as started:
        started.script, started.traces, started.peers = ["good"], [], set()
        yield started


@pytest.mark.parametrize(
    ("script", "reported"),
    [
        ("good", ""),
        ("broken", "broken off"),
        ("busy", "status 503"),
        ("reset", "RemoteDisconnected"),
    ],
)
def test_answers_are_judged(server: ScriptedServer, script: str, reported: str) -> None:
    """A stream without its end, an error and a lost connection are failures, each with its words."""
    server.script = [script]
    connection = RouterConnection(HOST, server.server_address[1], kept_alive=True)

    failure = connection.send_request(8, "a" * 32)
    connection.http.close()

    assert failure.startswith(reported) and bool(failure) == bool(reported)
    assert "a" * 32 in server.traces[0]


@pytest.mark.parametrize(("kept_alive", "connections"), [(True, 2), (False, 3)])
def test_connections(server: ScriptedServer, kept_alive: bool, connections: int) -> None:
    """A kept connection is used again, and one that the server has closed is not a failure."""
    server.script = ["good", "close", "good"]
    connection = RouterConnection(HOST, server.server_address[1], kept_alive)

    failures = [connection.send_request(8, "b" * 32) for _ in range(3)]
    connection.http.close()

    assert failures == ["", "", ""]
    assert len(server.peers) == connections


def test_load_goes_on_after_failures(
    server: ScriptedServer, eventually: Callable[..., None]
) -> None:
    """Every request has an outcome, failed ones in between too."""
    server.script = ["good", "busy", "reset", "good"]
    load = SteadyLoad(HOST, server.server_address[1], [LoadClient(8, kept_alive=True)])
    load.start()
    eventually(lambda: len(load.outcomes) >= 5)

    reported = summarize_outcomes(load.stop())

    assert reported["requests"] == len(server.traces) >= 5
    assert reported["failed"] == 2
    assert len(reported["failures"]) == 2


def test_spans_are_kept_with_their_pods() -> None:
    """What a collector sends by gRPC is found by its trace id; another method is refused."""
    request = ExportTraceServiceRequest()
    resource = request.resource_spans.add()
    resource.resource.attributes.add(key="k8s.pod.name").value.string_value = "vllm-1"
    span = resource.scope_spans.add().spans.add(trace_id=b"\x01" * 16, name="ttft")
    span.attributes.add(key="ttft.attempt").value.int_value = 2
    sink = SpanSink()
    with grpc.insecure_channel(f"{HOST}:{sink.port}") as channel:
        channel.unary_unary(EXPORT_METHOD)(request.SerializeToString(), timeout=30)
        with pytest.raises(grpc.RpcError, match="UNIMPLEMENTED"):
            channel.unary_unary("/other/Export")(b"", timeout=30)
    sink.stop()

    ((pod, arrived),) = sink.list_pod_spans("01" * 16)
    assert (pod, arrived.name) == ("vllm-1", "ttft")
    assert to_attributes(arrived.attributes) == {"ttft.attempt": 2}
    assert sink.list_pod_spans("02" * 16) == []


VLLM, MODEL = Path("/node/vllm"), Path("/node/model")


def test_the_manifest_is_tried_as_it_is() -> None:
    """Probes, hooks and init container are the manifest's; what a machine without a GPU lacks is left out.

    The pod cannot write into what it gets of the checkout, and the injected folder comes first. With
    --stand-in only image, command and arguments of the server differ.
    """
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

    mounted = {each["name"] for each in new["volumes"] if "hostPath" in each}
    writable = {each["name"] for each in new_server["volumeMounts"] if not each.get("readOnly")}
    assert {"vllm", "model"} <= mounted and not mounted & writable
    paths = {each["name"]: each.get("value") for each in new_server["env"]}["PYTHONPATH"]
    assert paths.split(":")[0] == "/ttft-otel"

    _, small = kube_workload.build_vllm_objects(VLLM, MODEL)
    kube_workload.replace_vllm(small)
    (stand_in,) = small["spec"]["template"]["spec"]["containers"]
    names = new_server | stand_in
    assert {key for key in names if new_server.get(key) != stand_in.get(key)} == {
        "image", "command", "args", "volumeMounts",
    }  # fmt: skip
    assert stand_in["image"] in kube_images.list_image_names()


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
