# SPDX-License-Identifier: Apache-2.0
"""Each variable of OpenTelemetry: one that is followed changes what a receiver gets, another one nothing."""

from __future__ import annotations

import gzip
import os
import ssl
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any, Final

import grpc
import pytest
from full_record import FULL_RECORD
from msgspec.structs import replace
from opentelemetry import environment_variables as api_variables
from opentelemetry.instrumentation import environment_variables as python_variables
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk import environment_variables as sdk_variables

from lab.certificates import make_certificate
from lab.http_servers import HttpServerThread, SilentHandler
from lab.otlp_sinks import to_attributes
from ttft_otel.commands import doctor
from ttft_otel.exporter.export_worker import run_worker
from ttft_otel.exporter.exporter_counters import ExporterCounters
from ttft_otel.exporter.record_queue import RecordQueue
from ttft_otel.model.names import env_names, otel_variables, span_names
from ttft_otel.model.record import Record, encode_record
from ttft_otel.tracing import context
from ttft_otel.tracing.settings import read_settings

FOLLOWED: Final = [
    name for pattern in otel_variables.FOLLOWED for name in otel_variables.expand_names(pattern)
]
NOT_FOLLOWED: Final = [
    name
    for patterns in otel_variables.NOT_FOLLOWED.values()
    for pattern in patterns
    for name in otel_variables.expand_names(pattern)
]
UNPACK: Final[dict[str, Callable[[bytes], bytes]]] = {
    "gzip": gzip.decompress,
    "deflate": zlib.decompress,
    "": bytes,
}
# tests/test_distro.py sets these, in processes that opentelemetry-instrument starts; and
# tests/tracing/test_config_file.py.
IN_OTHER_TESTS: Final = {name for name in FOLLOWED if name.startswith("OTEL_PYTHON_")} | {
    env_names.OTEL_CONFIG_FILE
}

pytestmark = pytest.mark.usefixtures("restored_loggers")


class Sink:
    """An OTLP/HTTP receiver, with TLS if there are certificates; keeps requests by their signal."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.delay_s = 0.0
        self.headers: dict[str, list[dict[str, str]]] = {"traces": [], "metrics": []}
        self.traces: list[ExportTraceServiceRequest] = []
        self.metrics: list[ExportMetricsServiceRequest] = []
        outer = self

        class Handler(SilentHandler):
            def do_POST(self) -> None:
                body = UNPACK[self.headers.get("content-encoding", "")](self.read_body())
                time.sleep(outer.delay_s)
                signal = "metrics" if "metrics" in self.path else "traces"
                outer.headers[signal].append(self.list_headers() | {"path": self.path})
                if signal == "traces":
                    outer.traces.append(ExportTraceServiceRequest.FromString(body))
                else:
                    outer.metrics.append(ExportMetricsServiceRequest.FromString(body))
                self.send_answer(200)

        self.server = HttpServerThread(Handler)
        self.url = self.server.url
        if tls is not None:
            self.server.socket = tls.wrap_socket(self.server.socket, server_side=True)
            self.url = self.url.replace("http:", "https:")

    @property
    def resource(self) -> dict[str, Any]:
        """Attributes of the first resource that came."""
        return to_attributes(self.traces[0].resource_spans[0].resource.attributes)

    @property
    def spans(self) -> list[Any]:
        """All spans, without what is drawn anew for each of them."""
        return [
            span
            for request in self.traces
            for each in request.resource_spans
            for span in each.scope_spans[0].spans
        ]


def forget_variables(patch: pytest.MonkeyPatch) -> None:
    """Take all variables of OpenTelemetry away; what the exporter sets is taken back, too."""
    for name in [*os.environ]:
        if name.startswith(("OTEL_", "TTFT_OTEL")):
            patch.delenv(name)
    patch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "4")
    patch.delenv("OTEL_EXPORTER_OTLP_TIMEOUT")


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of OpenTelemetry but those of the test."""
    forget_variables(monkeypatch)


@pytest.fixture
def sink(clean: None) -> Iterator[Sink]:
    """A receiver without TLS."""
    made = Sink()
    yield made
    made.server.close()


def run_export(patch: pytest.MonkeyPatch, record: Record, **env: str) -> None:
    """Run the exporter's worker on a record, with these variables, until it has sent it or given up."""
    for name, value in env.items():
        patch.setenv(name, value)
    record_queue = RecordQueue(ExporterCounters())
    record_queue.put(encode_record(record))
    record_queue.ended.set()
    run_worker(record_queue, 1)


@pytest.fixture
def export(clean: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """run_export(), of FULL_RECORD where no other is given."""
    return lambda record=FULL_RECORD, **env: run_export(monkeypatch, record, **env)


def name_both(sink: Sink) -> dict[str, str]:
    """Variables that send both signals to the sink."""
    return {"OTEL_EXPORTER_OTLP_ENDPOINT": sink.url, env_names.TTFT_OTEL_METRICS: "1"}


@pytest.fixture(scope="module")
def plain() -> Iterator[Sink]:
    """What arrives of the crowded record without any variable."""
    made = Sink()
    with pytest.MonkeyPatch.context() as patch:
        forget_variables(patch)
        run_export(patch, make_crowded_record(), **name_both(made))
    made.server.close()
    assert made.traces and made.metrics
    yield made


def list_known(module: ModuleType) -> set[str]:
    """The names of variables that a module of OpenTelemetry documents."""
    return {name for name in vars(module) if name.startswith("OTEL_")}


def test_complete() -> None:
    """Every variable of the installed API, SDK and instrumentation is in one list."""
    known = set.union(*map(list_known, (api_variables, sdk_variables, python_variables)))
    listed = [*FOLLOWED, *NOT_FOLLOWED]

    assert len(known) > 60
    assert known <= set(listed)
    assert len(listed) == len(set(listed))


def test_all_are_tried() -> None:
    """Each variable that is followed has a test below."""
    tried = {*HTTP_EFFECTS, *TLS, *GRPC, *DECISIONS, *TIMEOUTS, *TIMES, *ENDPOINTS}

    assert tried | IN_OTHER_TESTS == set(FOLLOWED)


def test_schema_url(plain: Sink) -> None:
    """Scope and resource of both signals name the version of the conventions that they follow."""
    (spans,) = plain.traces[0].resource_spans
    (metrics,) = plain.metrics[0].resource_metrics

    urls = {
        each.schema_url for each in (spans, metrics, *spans.scope_spans, *metrics.scope_metrics)
    }
    assert urls == {span_names.SCHEMA_URL}


# The variable, its value, and what has to be true of the receiver only then.
Effect = tuple[str, Callable[[Sink], object]]


def name_header(signal: str) -> Callable[[Sink], object]:
    """Whether a header came with the signal."""
    return lambda sink: sink.headers[signal][0].get("x-key") == "a b"


def name_encoding(signal: str, word: str) -> Callable[[Sink], object]:
    """Whether the signal came compressed in this way."""
    return lambda sink: sink.headers[signal][0].get("content-encoding") == word


HTTP_EFFECTS: Final[dict[str, Effect]] = {
    "OTEL_EXPORTER_OTLP_HEADERS": ("x-key=a%20b", name_header("traces")),
    "OTEL_EXPORTER_OTLP_TRACES_HEADERS": ("x-key=a%20b", name_header("traces")),
    "OTEL_EXPORTER_OTLP_METRICS_HEADERS": ("x-key=a%20b", name_header("metrics")),
    "OTEL_EXPORTER_OTLP_COMPRESSION": ("gzip", name_encoding("traces", "gzip")),
    "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION": ("deflate", name_encoding("traces", "deflate")),
    "OTEL_EXPORTER_OTLP_METRICS_COMPRESSION": ("gzip", name_encoding("metrics", "gzip")),
    "OTEL_SERVICE_NAME": ("mine", lambda sink: sink.resource["service.name"] == "mine"),
    "OTEL_RESOURCE_ATTRIBUTES": ("a.b=c%20d", lambda sink: sink.resource.get("a.b") == "c d"),
    "OTEL_EXPERIMENTAL_RESOURCE_DETECTORS": (
        "process",
        lambda sink: "process.runtime.name" in sink.resource,
    ),
    "OTEL_METRICS_EXPORTER": ("none", lambda sink: not sink.metrics),
    "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": (
        "delta",
        lambda sink: (
            {
                each.exponential_histogram.aggregation_temporality
                for each in sink.metrics[0].resource_metrics[0].scope_metrics[0].metrics
                if each.HasField("exponential_histogram")
            }
            == {1}
        ),
    ),
    "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": ("3", lambda sink: len(sink.traces) > 1),
    "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT": ("5", lambda sink: measure_longest(sink) == 5),
    "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT": ("5", lambda sink: measure_longest(sink) == 5),
    "OTEL_ATTRIBUTE_COUNT_LIMIT": (
        "2",
        lambda sink: all(len(each.attributes) == 2 for span in sink.spans for each in span.links),
    ),
    "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": (
        "2",
        lambda sink: (
            {len(span.attributes) for span in sink.spans} == {2}
            and any(span.dropped_attributes_count for span in sink.spans)
        ),
    ),
    "OTEL_LINK_ATTRIBUTE_COUNT_LIMIT": (
        "1",
        lambda sink: (
            {
                len(each.attributes) + each.dropped_attributes_count * 10
                for span in sink.spans
                for each in span.links
            }
            == {31}
        ),
    ),
    "OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT": (
        "1",
        lambda sink: {len(each.attributes) for span in sink.spans for each in span.events} == {1},
    ),
    "OTEL_SPAN_LINK_COUNT_LIMIT": (
        "1",
        lambda sink: [span.dropped_links_count for span in sink.spans if span.links] == [1],
    ),
    "OTEL_SPAN_EVENT_COUNT_LIMIT": (
        "1",
        lambda sink: [span.dropped_events_count for span in sink.spans if span.events] == [1],
    ),
}


def measure_longest(sink: Sink) -> int:
    """Characters of the longest text that came."""
    texts = (each.value.string_value for span in sink.spans for each in span.attributes)
    return max(map(len, texts))


def make_crowded_record() -> Record:
    """The full record with two holders that have a trace, and two that have none, on its queue's span."""
    ttft = FULL_RECORD.ttft
    assert ttft is not None
    (queue,) = (piece for piece in ttft.pieces if piece.held_by)
    (linked,) = queue.held_by
    hidden = replace(linked, trace_id="", span_id="")
    crowded = replace(queue, held_by=(linked, linked, hidden, hidden))
    pieces = tuple(crowded if piece is queue else piece for piece in ttft.pieces)
    return replace(FULL_RECORD, ttft=replace(ttft, pieces=pieces))


@pytest.mark.parametrize("name", HTTP_EFFECTS)
def test_http(name: str, plain: Sink, sink: Sink, export: Any) -> None:
    """What the receiver gets is different with the variable, and as ever without it."""
    value, is_different = HTTP_EFFECTS[name]
    assert not is_different(plain)
    export(make_crowded_record(), **name_both(sink), **{name: value})

    assert sink.traces
    assert is_different(sink)


def count_kept(sink: Sink) -> tuple[int, ...]:
    """How many attributes of spans, events, links, how many events, links and characters came."""
    events = [each for span in sink.spans for each in span.events]
    links = [each for span in sink.spans for each in span.links]
    kinds = [sum(len(each.attributes) for each in kind) for kind in (sink.spans, events, links)]
    return (*kinds, len(events), len(links), measure_longest(sink) if kinds[0] else 0)


@pytest.mark.parametrize(
    ("name", "gone"),
    [
        ("OTEL_ATTRIBUTE_COUNT_LIMIT", {0, 1, 2, 5}),
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", {0, 5}),
        ("OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT", {1}),
        ("OTEL_LINK_ATTRIBUTE_COUNT_LIMIT", {2}),
        ("OTEL_SPAN_EVENT_COUNT_LIMIT", {1, 3}),
        ("OTEL_SPAN_LINK_COUNT_LIMIT", {2, 4}),
        ("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", {5}),
        ("OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT", {5}),
    ],
)
def test_limit_of_0(name: str, gone: set[int], plain: Sink, sink: Sink, export: Any) -> None:
    """A limit of 0 keeps none, as the specification has it: all spans come, without what it limits."""
    before = count_kept(plain)
    assert all(before)
    export(make_crowded_record(), OTEL_EXPORTER_OTLP_ENDPOINT=sink.url, **{name: "0"})

    assert len(sink.spans) == len(plain.spans)
    kept = [0 if place in gone else count for place, count in enumerate(before)]
    assert list(count_kept(sink)) == kept


TLS: Final = {
    f"OTEL_EXPORTER_OTLP_{signal}{what}"
    for signal in ("", "TRACES_", "METRICS_")
    for what in ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY")
}


@pytest.fixture(scope="module")
def key_pairs(tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[Path, Path], ...]:
    """Certificate and key of a server, and of a client."""
    folder = tmp_path_factory.mktemp("tls")
    return make_certificate(folder), make_certificate(folder, stem="client")


@pytest.mark.parametrize(
    "signal", ["", "TRACES_", pytest.param("METRICS_", marks=pytest.mark.full)]
)
@pytest.mark.parametrize("left_out", ["", "CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY"])
def test_tls(
    signal: str, left_out: str, export: Any, key_pairs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that shows a certificate and asks for one gets its signal with all three, else nothing."""
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):  # requests lets them win over a session's
        monkeypatch.delenv(name, raising=False)
    (certificate, key), (ours, our_key) = key_pairs
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    tls.load_verify_locations(ours)
    tls.verify_mode = ssl.CERT_REQUIRED
    sink = Sink(tls)
    files = {"CERTIFICATE": certificate, "CLIENT_CERTIFICATE": ours, "CLIENT_KEY": our_key}
    env = {
        f"OTEL_EXPORTER_OTLP_{signal}{what}": str(path)
        for what, path in files.items()
        if what != left_out
    }
    wanted = "metrics" if signal == "METRICS_" else "traces"
    # The other signal goes nowhere: it would wait for its retries.
    other = {"OTEL_TRACES_EXPORTER": "none"} if wanted == "metrics" else {}
    try:
        export(
            OTEL_EXPORTER_OTLP_ENDPOINT=sink.url,
            TTFT_OTEL_METRICS="1" if wanted == "metrics" else "0",
            **other,
            **env,
        )
        assert bool(sink.headers[wanted]) is (not left_out)
    finally:
        sink.server.close()


GRPC: Final = {
    f"OTEL_EXPORTER_OTLP_{signal}{what}"
    for signal in ("", "TRACES_", "METRICS_")
    for what in ("PROTOCOL", "INSECURE")
}


class GrpcSink(grpc.GenericRpcHandler):  # type: ignore[misc]
    """An OTLP/gRPC receiver without TLS that keeps the names of the methods that were called."""

    def __init__(self) -> None:
        self.called: set[str] = set()
        self.server = grpc.server(ThreadPoolExecutor(1))
        self.server.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        """Accept everything: an answer without fields is an empty message."""
        self.called.add("metrics" if "metrics" in details.method else "traces")
        return grpc.unary_unary_rpc_method_handler(lambda body, _: b"")


@pytest.mark.parametrize(
    ("signal", "insecure"),
    [("", "true"), ("TRACES_", "true"), ("METRICS_", "true"), ("", "false")],
)
def test_grpc(signal: str, insecure: str, clean: None, export: Any) -> None:
    """With both variables a signal arrives by gRPC without TLS at an address that has no scheme."""
    sink = GrpcSink()
    name = "OTEL_EXPORTER_OTLP_" + signal
    wanted = "metrics" if signal == "METRICS_" else "traces"
    try:
        export(
            TTFT_OTEL_METRICS="1" if wanted == "metrics" else "0",
            **{
                f"OTEL_EXPORTER_OTLP_{wanted.upper()}_ENDPOINT": sink.address,
                f"{name}PROTOCOL": "grpc",
                f"{name}INSECURE": insecure,
                f"{name}TIMEOUT": "1",
            },
            **({"OTEL_TRACES_EXPORTER": "none"} if wanted == "metrics" else {}),
        )
        assert (wanted in sink.called) is (insecure == "true")
    finally:
        sink.server.stop(None).wait()


ENDPOINTS: Final = {
    "OTEL_EXPORTER_OTLP_ENDPOINT": ("", "/v1/traces", "/v1/metrics"),
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": ("/mine", "/mine", "/v1/metrics"),
    "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": ("/my-metrics", "/v1/traces", "/my-metrics"),
}


@pytest.mark.parametrize("name", ENDPOINTS)
def test_endpoint(name: str, sink: Sink, export: Any) -> None:
    """The general one is a base, a signal's own one the whole URL."""
    path, traces, metrics = ENDPOINTS[name]
    export(**name_both(sink) | {name: sink.url + path})

    assert [each["path"] for each in sink.headers["traces"]] == [traces]
    assert {each["path"] for each in sink.headers["metrics"]} == {metrics}


TIMEOUTS: Final = {f"OTEL_EXPORTER_OTLP_{signal}TIMEOUT" for signal in ("", "TRACES_", "METRICS_")}


@pytest.mark.parametrize(
    ("name", "seconds", "is_late"),
    [
        *((name, "0.3", True) for name in sorted(TIMEOUTS)),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "30", False),
    ],
)
def test_timeout(
    name: str,
    seconds: str,
    is_late: bool,
    sink: Sink,
    export: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An answer after a second is too late for the short one, and the log says so."""
    is_metrics = "METRICS" in name
    sink.delay_s = 1.0
    export(
        OTEL_EXPORTER_OTLP_ENDPOINT=sink.url,
        TTFT_OTEL_METRICS=str(int(is_metrics)),
        OTEL_TRACES_EXPORTER="none" if is_metrics else "otlp",
        **{name: seconds},
    )

    told = [each.getMessage() for each in caplog.records if each.name == "ttft_otel"]
    assert any("fail" in line for line in told) is is_late


TIMES: Final = {"OTEL_BSP_SCHEDULE_DELAY", "OTEL_METRIC_EXPORT_INTERVAL"}


@pytest.mark.parametrize("name", sorted(TIMES))
def test_time(
    name: str, sink: Sink, clean: None, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a short time what is there is sent while the host lives, without one only later."""
    arrived = sink.metrics if "METRIC" in name else sink.traces
    for value in ("", "50"):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", sink.url)
        monkeypatch.setenv(env_names.TTFT_OTEL_METRICS, "1")
        monkeypatch.setenv(name, value)
        monkeypatch.setenv({*TIMES}.difference([name]).pop(), "50" if "METRIC" in name else "60000")
        record_queue = RecordQueue(ExporterCounters())
        thread = Thread(target=run_worker, args=(record_queue, 1))
        thread.start()
        try:
            # After the worker's imports.
            eventually(lambda queue=record_queue: queue._wanted_records, 30)
            record_queue.put(encode_record(FULL_RECORD))
            if value:
                eventually(lambda: arrived, 30)
            else:
                time.sleep(0.5)
                assert not arrived
        finally:
            record_queue.mark_ended()
            thread.join()
        arrived.clear()


DECISIONS: Final = {
    "OTEL_SDK_DISABLED": {"OTEL_SDK_DISABLED": "true"},
    "OTEL_TRACES_EXPORTER": {"OTEL_TRACES_EXPORTER": "none"},
    "OTEL_TRACES_SAMPLER": {"OTEL_TRACES_SAMPLER": "always_off"},
    "OTEL_TRACES_SAMPLER_ARG": {
        "OTEL_TRACES_SAMPLER": "traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": "0.0",
    },
    "OTEL_PROPAGATORS": {},
}


@pytest.mark.parametrize("name", DECISIONS)
def test_decision(name: str) -> None:
    """Whether a request is recorded at all is decided where it arrives."""
    env = DECISIONS[name]
    without = {key: value for key, value in env.items() if key != name}

    def is_sampled(env: dict[str, str]) -> bool:
        return bool(context.start_context("", "", read_settings(env)).flags)

    assert is_sampled(without)
    assert is_sampled(env) is (env == {})


@pytest.mark.parametrize(
    ("env", "problem"),
    [
        ({"OTEL_PROPAGATORS": "tracecontext,baggage"}, None),
        ({"OTEL_PROPAGATORS": "b3, tracecontext"}, None),
        ({"OTEL_PROPAGATORS": "b3"}, "leaves out tracecontext"),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, None),
        ({"OTEL_TRACES_EXPORTER": "console,otlp"}, "names console"),
        ({"OTEL_METRICS_EXPORTER": "prometheus"}, None),
        ({"OTEL_METRICS_EXPORTER": "prometheus", "TTFT_OTEL_METRICS": "1"}, "names prometheus"),
        ({"OTEL_BSP_SCHEDULE_DELAY": "soon"}, "is not a whole number"),
        ({"OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "0"}, "is not a whole number from 1"),
        ({"OTEL_SPAN_LINK_COUNT_LIMIT": "0"}, None),
        ({"OTEL_SPAN_LINK_COUNT_LIMIT": "-1"}, "is not a whole number from 0"),
        ({"OTEL_EXPORTER_OTLP_TIMEOUT": "10s"}, "is no time"),
        ({"OTEL_EXPORTER_OTLP_COMPRESSION": "zstd"}, "is unknown to http/protobuf"),
        (
            {
                "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION": "deflate",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
            },
            "is unknown to grpc",
        ),
    ],
)
def test_problems(env: dict[str, str], problem: str | None) -> None:
    """What cannot be followed is told with its remedy; what is no matter for tracing is not."""
    problems = read_settings(env).problems

    assert [problem in line and "; " in line for line in problems] == [True] * (problem is not None)


def test_wrong_values(sink: Sink, export: Any) -> None:
    """Values that the SDK would raise for cost no span: the defaults are used."""
    export(
        OTEL_EXPORTER_OTLP_ENDPOINT=sink.url,
        OTEL_EXPORTER_OTLP_TIMEOUT="10s",
        OTEL_EXPORTER_OTLP_TRACES_COMPRESSION="zstd",
        OTEL_BSP_MAX_EXPORT_BATCH_SIZE="many",
        OTEL_ATTRIBUTE_COUNT_LIMIT="-1",
    )
    assert sink.spans


# Values that have an effect on an SDK.
VALUES: Final = {
    "OTEL_BSP_MAX_QUEUE_SIZE": "1",
    "OTEL_BSP_EXPORT_TIMEOUT": "1",
    "OTEL_METRIC_EXPORT_TIMEOUT": "1",
    "OTEL_PYTHON_SDK_INTERNAL_METRICS_ENABLED": "true",
    # With the metrics above it is asked for; another name than that of a provider is an error there.
    "OTEL_PYTHON_METER_PROVIDER": "default_meter_provider",
}


def test_not_followed(plain: Sink, sink: Sink, export: Any) -> None:
    """With all of them spans are as without, and doctor tells of each that it has no effect, and why."""
    given = {name: VALUES.get(name, "none") for name in NOT_FOLLOWED}
    export(make_crowded_record(), **name_both(sink), **given)

    assert [span.name for span in sink.spans] == [span.name for span in plain.spans]
    assert sink.resource == plain.resource and sink.metrics
    for name in NOT_FOLLOWED:
        told = [
            each for each in doctor.check_settings(read_settings()) if name in each.says.split()
        ]
        assert [each.state for each in told] == ["note"], name
