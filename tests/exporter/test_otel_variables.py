# SPDX-License-Identifier: Apache-2.0
"""Each variable of OpenTelemetry: one that is followed changes what a receiver gets, another one nothing."""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any, Final

import pytest
from msgspec.structs import replace
from opentelemetry import environment_variables as api_variables
from opentelemetry.instrumentation import environment_variables as python_variables
from opentelemetry.sdk import environment_variables as sdk_variables
from tracing_fakes import FULL_RECORD

from lab.certificates import make_certificate
from lab.otlp_sinks import SpanSink
from ttft_otel.commands import doctor
from ttft_otel.exporter.export_worker import run_worker
from ttft_otel.exporter.record_queue import ExporterCounters, RecordQueue
from ttft_otel.model.names import env_names, span_names
from ttft_otel.model.record import Record, encode_record
from ttft_otel.tracing import context
from ttft_otel.tracing.settings import read_settings

FOLLOWED: Final = [
    name for pattern in env_names.FOLLOWED for name in env_names.expand_names(pattern)
]
NOT_FOLLOWED: Final = [
    name
    for patterns in env_names.NOT_FOLLOWED.values()
    for pattern in patterns
    for name in env_names.expand_names(pattern)
]
# tests/test_plugin.py sets these, in processes that opentelemetry-instrument starts; and
# tests/tracing/test_settings.py.
IN_OTHER_TESTS: Final = {name for name in FOLLOWED if name.startswith("OTEL_PYTHON_")} | {
    env_names.OTEL_CONFIG_FILE
}

pytestmark = pytest.mark.usefixtures("restored_loggers")


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


def name_both(sink: Any) -> dict[str, str]:
    """Variables that send both signals to the sink."""
    return {"OTEL_EXPORTER_OTLP_ENDPOINT": sink.url, env_names.TTFT_OTEL_METRICS: "1"}


@pytest.fixture(scope="module")
def plain(make_collector: Callable[[], Any]) -> Any:
    """What arrives of the crowded record without any variable."""
    made = make_collector()
    with pytest.MonkeyPatch.context() as patch:
        forget_variables(patch)
        run_export(patch, make_crowded_record(), **name_both(made))
    assert made.traces and made.metrics
    return made


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
    tried = {*HTTP_EFFECTS, *LIMITS, *TLS, *GRPC, *DECISIONS, *TIMEOUTS, *TIMES, *ENDPOINTS}

    assert tried | IN_OTHER_TESTS == set(FOLLOWED)


def test_schema_url(plain: Any) -> None:
    """Scope and resource of both signals name the version of the conventions that they follow."""
    (spans,) = plain.traces[0].resource_spans
    (metrics,) = plain.metrics[0].resource_metrics

    urls = {
        each.schema_url for each in (spans, metrics, *spans.scope_spans, *metrics.scope_metrics)
    }
    assert urls == {span_names.SCHEMA_URL}


# The variable, its value, and what has to be true of the receiver only then.
Effect = tuple[str, Callable[[Any], object]]


def name_header(signal: str) -> Callable[[Any], object]:
    """Whether a header came with the signal."""
    return lambda sink: sink.headers[signal][0].get("x-key") == "a b"


def name_encoding(signal: str, word: str) -> Callable[[Any], object]:
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
}


def measure_longest(sink: Any) -> int:
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
def test_http(name: str, plain: Any, collector: Any, export: Any) -> None:
    """What the receiver gets is different with the variable, and as ever without it."""
    value, is_different = HTTP_EFFECTS[name]
    assert not is_different(plain)
    export(make_crowded_record(), **name_both(collector), **{name: value})

    assert collector.traces
    assert is_different(collector)


def test_limits(plain: Any, collector: Any, export: Any) -> None:
    """What is beyond a limit is cut off and counted, and nothing else changes."""
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
    limits = dict.fromkeys(("LINK_ATTRIBUTE", "EVENT_ATTRIBUTE", "SPAN_LINK", "SPAN_EVENT"), "1")
    limits |= {"SPAN_ATTRIBUTE": "2"}
    export(
        make_crowded_record(),
        **endpoint,
        **{f"OTEL_{what}_COUNT_LIMIT": number for what, number in limits.items()},
        OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT="5",
    )
    assert len(collector.spans) == len(plain.spans) and measure_longest(collector) == 5
    for span, whole in zip(collector.spans, plain.spans, strict=True):
        lost = len(whole.attributes) - len(span.attributes)
        assert len(span.attributes) == 2 and span.dropped_attributes_count == lost
        for field in ("links", "events"):
            all_of_them, kept = getattr(whole, field), getattr(span, field)
            assert len(kept) == min(1, len(all_of_them))
            assert getattr(span, f"dropped_{field}_count") == len(all_of_them) - len(kept)
            for each in kept:
                assert len(each.attributes) == 1 and each.dropped_attributes_count == 3


def count_kept(sink: Any) -> tuple[int, ...]:
    """How many attributes of spans, events, links, how many events, links and characters came."""
    events = [each for span in sink.spans for each in span.events]
    links = [each for span in sink.spans for each in span.links]
    kinds = [sum(len(each.attributes) for each in kind) for kind in (sink.spans, events, links)]
    return (*kinds, len(events), len(links), measure_longest(sink) if kinds[0] else 0)


# What each limits, by its place in count_kept().
LIMITS: Final = {
    "OTEL_ATTRIBUTE_COUNT_LIMIT": {0, 1, 2, 5},
    "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": {0, 5},
    "OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT": {1},
    "OTEL_LINK_ATTRIBUTE_COUNT_LIMIT": {2},
    "OTEL_SPAN_EVENT_COUNT_LIMIT": {1, 3},
    "OTEL_SPAN_LINK_COUNT_LIMIT": {2, 4},
    "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT": {5},
    "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT": {5},
}


@pytest.mark.parametrize("name", LIMITS)
def test_limit_of_0(name: str, plain: Any, collector: Any, export: Any) -> None:
    """A limit of 0 keeps none, as the specification has it: all spans come, without what it limits."""
    before = count_kept(plain)
    assert all(before)
    export(make_crowded_record(), OTEL_EXPORTER_OTLP_ENDPOINT=collector.url, **{name: "0"})

    assert len(collector.spans) == len(plain.spans)
    kept = [0 if place in LIMITS[name] else count for place, count in enumerate(before)]
    assert list(count_kept(collector)) == kept


def name_signal(variable: str) -> str:
    """The signal that a variable is for."""
    return "metrics" if "METRICS_" in variable else "traces"


def choose_signal(variable: str) -> dict[str, str]:
    """Variables that leave only this signal: the other one would wait for its retries."""
    if name_signal(variable) == "metrics":
        return {env_names.TTFT_OTEL_METRICS: "1", "OTEL_TRACES_EXPORTER": "none"}
    return {env_names.TTFT_OTEL_METRICS: "0"}


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
    "signal",
    ["", *(pytest.param(each, marks=pytest.mark.full) for each in ("TRACES_", "METRICS_"))],
)
@pytest.mark.parametrize("left_out", ["", "CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY"])
def test_tls(
    signal: str,
    left_out: str,
    export: Any,
    key_pairs: Any,
    make_collector: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that shows a certificate and asks for one gets its signal with all three, else nothing."""
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):  # requests lets them win over a session's
        monkeypatch.delenv(name, raising=False)
    (certificate, key), (ours, our_key) = key_pairs
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    tls.load_verify_locations(ours)
    tls.verify_mode = ssl.CERT_REQUIRED
    collector = make_collector(tls=tls)
    files = {"CERTIFICATE": certificate, "CLIENT_CERTIFICATE": ours, "CLIENT_KEY": our_key}
    env = {
        f"OTEL_EXPORTER_OTLP_{signal}{what}": str(path)
        for what, path in files.items()
        if what != left_out
    }
    export(OTEL_EXPORTER_OTLP_ENDPOINT=collector.url, **choose_signal(signal), **env)

    assert bool(collector.headers[name_signal(signal)]) is (not left_out)


GRPC: Final = {
    f"OTEL_EXPORTER_OTLP_{signal}{what}"
    for signal in ("", "TRACES_", "METRICS_")
    for what in ("PROTOCOL", "INSECURE")
}


@pytest.mark.parametrize(
    ("signal", "insecure"),
    [("", "true"), ("TRACES_", "true"), ("METRICS_", "true"), ("", "false")],
)
def test_grpc(signal: str, insecure: str, grpc_collector: SpanSink, export: Any) -> None:
    """With both variables a signal arrives by gRPC without TLS at an address that has no scheme."""
    name, wanted = f"OTEL_EXPORTER_OTLP_{signal}", name_signal(signal)
    export(
        **choose_signal(signal),
        **{
            f"OTEL_EXPORTER_OTLP_{wanted.upper()}_ENDPOINT": f"127.0.0.1:{grpc_collector.port}",
            f"{name}PROTOCOL": "grpc",
            f"{name}INSECURE": insecure,
            f"{name}TIMEOUT": "1",
        },
    )
    found = {"metrics" if "metrics" in method else "traces" for method in grpc_collector.called}
    assert found == ({wanted} if insecure == "true" else set())


ENDPOINTS: Final = {
    "OTEL_EXPORTER_OTLP_ENDPOINT": ("", "/v1/traces", "/v1/metrics"),
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": ("/mine", "/mine", "/v1/metrics"),
    "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": ("/my-metrics", "/v1/traces", "/my-metrics"),
}


@pytest.mark.parametrize("name", ENDPOINTS)
def test_endpoint(name: str, collector: Any, export: Any) -> None:
    """The general one is a base, a signal's own one the whole URL."""
    path, traces, metrics = ENDPOINTS[name]
    export(**name_both(collector) | {name: collector.url + path})

    assert [each["path"] for each in collector.headers["traces"]] == [traces]
    assert {each["path"] for each in collector.headers["metrics"]} == {metrics}


TIMEOUTS: Final = {f"OTEL_EXPORTER_OTLP_{signal}TIMEOUT" for signal in ("", "TRACES_", "METRICS_")}


@pytest.mark.parametrize(
    ("name", "seconds", "is_late"),
    [(name, "0.3", True) for name in sorted(TIMEOUTS)]
    + [("OTEL_EXPORTER_OTLP_TIMEOUT", "30", False)],
)
def test_timeout(
    name: str,
    seconds: str,
    is_late: bool,
    collector: Any,
    export: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An answer after a second is too late for the short one, and the log says so."""
    collector.delay_s = 1.0
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
    export(**endpoint, **choose_signal(name), **{name: seconds})

    told = [each.getMessage() for each in caplog.records if each.name == "ttft_otel"]
    assert any("fail" in line for line in told) is is_late


TIMES: Final = {"OTEL_BSP_SCHEDULE_DELAY", "OTEL_METRIC_EXPORT_INTERVAL"}


@pytest.mark.parametrize("name", sorted(TIMES))
def test_time(
    name: str, collector: Any, clean: None, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a short time what is there is sent while the host lives, without one only later."""
    arrived = collector.metrics if "METRIC" in name else collector.traces
    for value in ("", "50"):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
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


def test_wrong_values(collector: Any, export: Any) -> None:
    """Values that the SDK would raise for cost no span: the defaults are used."""
    export(
        OTEL_EXPORTER_OTLP_ENDPOINT=collector.url,
        OTEL_EXPORTER_OTLP_TIMEOUT="10s",
        OTEL_EXPORTER_OTLP_TRACES_COMPRESSION="zstd",
        OTEL_BSP_MAX_EXPORT_BATCH_SIZE="many",
        OTEL_ATTRIBUTE_COUNT_LIMIT="-1",
    )
    assert collector.spans


# Values that have an effect on an SDK.
VALUES: Final = {
    "OTEL_BSP_MAX_QUEUE_SIZE": "1",
    "OTEL_BSP_EXPORT_TIMEOUT": "1",
    "OTEL_METRIC_EXPORT_TIMEOUT": "1",
    "OTEL_PYTHON_SDK_INTERNAL_METRICS_ENABLED": "true",
    # With the metrics above it is asked for; another name than that of a provider is an error there.
    "OTEL_PYTHON_METER_PROVIDER": "default_meter_provider",
}


def test_not_followed(plain: Any, collector: Any, export: Any) -> None:
    """With all of them spans are as without, and doctor tells of each that it has no effect, and why."""
    given = {name: VALUES.get(name, "none") for name in NOT_FOLLOWED}
    export(make_crowded_record(), **name_both(collector), **given)

    assert [span.name for span in collector.spans] == [span.name for span in plain.spans]
    assert collector.resource == plain.resource and collector.metrics
    for name in NOT_FOLLOWED:
        told = [
            each for each in doctor.check_settings(read_settings()) if name in each.says.split()
        ]
        assert [each.state for each in told] == ["note"], name
