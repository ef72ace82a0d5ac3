# SPDX-License-Identifier: Apache-2.0
"""A wrong protocol is named from the first failed export on, at a real gRPC and a real HTTP receiver."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ttft_otel.exporter import batch_exporter, protocol_probe
from ttft_otel.exporter.export_worker import run_worker
from ttft_otel.exporter.exporter_counters import ExporterCounters
from ttft_otel.exporter.record_queue import RecordQueue
from ttft_otel.model.names import env_names
from ttft_otel.model.record import Record, encode_record

PATIENCE_S = 20.0  # of a probe on a busy machine; answers come in milliseconds


@pytest.fixture(autouse=True)
def patient_probe(monkeypatch: pytest.MonkeyPatch, restored_loggers: None) -> None:
    """Time for answers, none between attempts."""
    monkeypatch.setattr(protocol_probe, "PROBE_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr(batch_exporter, "RETRY_PAUSES_S", ())
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")


@pytest.fixture
def grpc_port(grpc_collector: Any) -> int:
    """The port of a gRPC receiver."""
    return int(grpc_collector.port)


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def _export_record(endpoint: str, protocol: str, record: Record) -> None:
    """Export one record; the host is there until its first attempt has failed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(env_names.OTEL_EXPORTER_OTLP_ENDPOINT, endpoint)
        patch.setenv(env_names.OTEL_EXPORTER_OTLP_PROTOCOL, protocol)
        record_queue = RecordQueue(ExporterCounters())
        record_queue.put(encode_record(record))
        worker = threading.Thread(target=run_worker, args=(record_queue, 1))
        worker.start()
        while worker.is_alive() and not record_queue.counters.get_counts()["failed"]:
            worker.join(0.05)
        record_queue.mark_ended()
        worker.join(PATIENCE_S)


def test_http_at_grpc_port(
    grpc_port: int, make_record: Callable[..., Record], caplog: pytest.LogCaptureFixture
) -> None:
    """http/protobuf to a gRPC receiver: the one line says what the endpoint speaks and what to set."""
    endpoint = f"http://127.0.0.1:{grpc_port}"
    _export_record(endpoint, "http/protobuf", make_record())

    (line,) = [line for line in caplog.messages if "failed:" in line]
    assert f"{endpoint} does not speak http/protobuf but grpc" in line
    assert f"set {env_names.OTEL_EXPORTER_OTLP_PROTOCOL}=grpc" in line


def test_grpc_at_http_port(
    collector: Any, make_record: Callable[..., Record], caplog: pytest.LogCaptureFixture
) -> None:
    """gRPC to an HTTP receiver, the same."""
    _export_record(collector.url, "grpc", make_record())

    (line,) = [line for line in caplog.messages if "failed:" in line]
    assert f"{collector.url} does not speak grpc but http/protobuf" in line
    assert f"set {env_names.OTEL_EXPORTER_OTLP_PROTOCOL}=http/protobuf" in line


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_other_failures(
    protocol: str,
    collector: Any,
    unused_port: int,
    make_record: Callable[..., Record],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An endpoint that is away, or refuses what it understands, is not called the wrong protocol."""
    collector.status = 503
    endpoint = collector.url if protocol == "http/protobuf" else f"http://127.0.0.1:{unused_port}"
    _export_record(endpoint, protocol, make_record())

    (line,) = [line for line in caplog.messages if "failed:" in line]
    assert "does not speak" not in line


def test_spoken_protocol(
    grpc_port: int, collector: Any, silent_port: int, unused_port: int
) -> None:
    """What an endpoint speaks, also by an address without a scheme; "" where nobody knows."""
    found = [
        protocol_probe.find_spoken_protocol(endpoint, timeout)
        for endpoint, timeout in (
            (f"http://127.0.0.1:{grpc_port}", PATIENCE_S),
            (f"127.0.0.1:{grpc_port}", PATIENCE_S),
            (f"http://localhost:{collector.port}/v1/traces", PATIENCE_S),
            (f"http://127.0.0.1:{silent_port}", 0.1),
            (f"http://127.0.0.1:{unused_port}", 0.1),
            (f"https://127.0.0.1:{grpc_port}", PATIENCE_S),
            ("http://[broken", PATIENCE_S),
        )
    ]

    assert found == ["grpc", "grpc", "http/protobuf", "", "", "", ""]
