# SPDX-License-Identifier: Apache-2.0
"""Build the SDK's OTLP exporters; after a failed export ask the endpoint which protocol it speaks.

export_worker.py and request_metrics.py send with them, and doctor.py asks, too. The SDK is imported when an
exporter is built, and reads the OTEL_EXPORTER_OTLP_* variables itself.
"""

from __future__ import annotations

import importlib
import os
import socket
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import urlsplit

from ttft_otel.model.names import env_names

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricExporter
    from opentelemetry.sdk.trace.export import SpanExporter

# By the variable that names a file, what differs if it was replaced; None where there is none.
TlsFiles: TypeAlias = dict[str, "tuple[int, int] | None"]


def build_span_exporter(protocol: str) -> SpanExporter:
    """The SDK's exporter for `protocol`: "grpc", anything else is HTTP."""
    exporter: SpanExporter = _import_exporters(protocol, "trace_exporter").OTLPSpanExporter()
    return exporter


def build_metric_exporter(protocol: str) -> MetricExporter:
    exporter: MetricExporter = _import_exporters(protocol, "metric_exporter").OTLPMetricExporter()
    return exporter


def _import_exporters(protocol: str, signal: str) -> Any:
    """The SDK's module, only that one: grpc alone takes 0.1 s and 15 MB."""
    transport = "grpc" if protocol == "grpc" else "http"
    return importlib.import_module(f"opentelemetry.exporter.otlp.proto.{transport}.{signal}")


def renew_exporter(exporter: Any, known: TlsFiles) -> TlsFiles:
    """Let an exporter of the SDK, which has failed, begin anew if a file was replaced since `known`.

    Returns the files of now: over gRPC the SDK reads them only once.
    """
    found = describe_tls_files()
    if found != known:
        exporter.shutdown()
        # As it was built above: all that it knows is in the environment.
        exporter.__init__()
    return found


def describe_tls_files() -> TlsFiles:
    """The files of OTEL_EXPORTER_OTLP_CERTIFICATE and its like: what tells each from one before it."""
    found: TlsFiles = {}
    for name, path in os.environ.items():
        if name.startswith("OTEL_EXPORTER_OTLP_") and name.endswith(("CERTIFICATE", "CLIENT_KEY")):
            try:
                state = os.stat(path)
                found[name] = (state.st_ino, state.st_ctime_ns)
            except OSError:
                found[name] = None
    return found


PROBE_TIMEOUT_S: Final = 1.0  # seconds for connecting, and for each answer
MAX_ANSWER_BYTES: Final = 65536  # that are read of an answer
_HTTP1_ANSWER: Final = b"HTTP/1."
_FRAME_HEAD_BYTES: Final = 9
_SETTINGS_FRAME: Final = 4  # type of the first frame of any HTTP/2 server
# A client's preface and an empty SETTINGS frame; gRPC is HTTP/2.
_HTTP2_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_HTTP1_REQUEST: Final = b"OPTIONS / HTTP/1.1\r\nhost: %s\r\nconnection: close\r\n\r\n"


def find_protocol_remedy(protocol: str, endpoint: str, timeout: float | None = None) -> str:
    """What to set when `endpoint` speaks the other protocol than `protocol`; "" if it does not.

    protocol: one of settings.PROTOCOLS, the one that failed. timeout: seconds per answer, by default
    PROBE_TIMEOUT_S. Takes up to two of them; nothing of a span is sent.
    """
    spoken = find_spoken_protocol(endpoint, PROBE_TIMEOUT_S if timeout is None else timeout)
    if not spoken or spoken == protocol:
        return ""
    usual = "4317" if spoken == "http/protobuf" else "4318"
    return (
        f"{endpoint} does not speak {protocol} but {spoken}: "
        f"set {env_names.OTEL_EXPORTER_OTLP_PROTOCOL}={spoken}, "
        f"or the port that takes {protocol} (usually {usual})"
    )


def find_connection_error(endpoint: str) -> str:
    """Why no connection to `endpoint` is made, in the system's words; "" if one is."""
    try:
        parts = urlsplit(endpoint if "://" in endpoint else f"http://{endpoint}")
        address = parts.hostname or "", parts.port or {"https": 443}.get(parts.scheme, 80)
        socket.create_connection(address, PROBE_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def find_spoken_protocol(endpoint: str, timeout: float) -> str:
    """The protocol that `endpoint` speaks, one of settings.PROTOCOLS; "" if that cannot be told.

    Endpoints with TLS are not asked: most of them speak both versions of HTTP.
    """
    try:
        parts = urlsplit(endpoint if "://" in endpoint else f"http://{endpoint}")
        host, port = parts.hostname, parts.port or 80
    except ValueError:
        return ""
    if parts.scheme != "http" or not host:
        return ""
    # HTTP/1 first: a server that speaks both versions takes http/protobuf, so the guess was not wrong.
    request = _HTTP1_REQUEST % host.encode("ascii", "replace")
    if _ask(host, port, request, timeout).startswith(_HTTP1_ANSWER):
        return "http/protobuf"
    answer = _ask(host, port, _HTTP2_PREFACE, timeout)
    is_http2 = len(answer) >= _FRAME_HEAD_BYTES and answer[3] == _SETTINGS_FRAME
    return "grpc" if is_http2 else ""


def _ask(host: str, port: int, data: bytes, timeout: float) -> bytes:
    """The first bytes that the server answers to `data`, at least a frame's head; b"" without."""
    answer = b""
    try:
        with socket.create_connection((host, port), timeout) as connection:
            connection.settimeout(timeout)
            connection.sendall(data)
            while _is_wanted(answer) and (more := connection.recv(4096)):
                answer += more
    except OSError:  # what came before it broke still tells
        pass
    return answer


def _is_wanted(answer: bytes) -> bool:
    # HTTP/1 is read to its end: a server whose answer is cut off would log an error.
    wanted = MAX_ANSWER_BYTES if answer.startswith(_HTTP1_ANSWER) else _FRAME_HEAD_BYTES
    return len(answer) < wanted
