# SPDX-License-Identifier: Apache-2.0
"""scripts/kube counts every request that does not end as it should, and every trace that is not whole."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from lab.http_servers import HttpServerThread, SilentHandler
from lab.kube_load import LoadClient, RouterConnection, SteadyLoad, summarize_outcomes
from lab.otlp_sinks import EXPORT_METHOD, SpanSink, to_attributes
from lab.server_commands import HOST

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


def test_load_goes_on_after_failures(server: ScriptedServer) -> None:
    """Every request has an outcome, failed ones in between too."""
    server.script = ["good", "busy", "reset", "good"]
    load = SteadyLoad(HOST, server.server_address[1], [LoadClient(8, kept_alive=True)])
    load.start()
    while len(load.outcomes) < 5:
        threading.Event().wait(0.05)

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
