# SPDX-License-Identifier: Apache-2.0
"""Environment variables that we read; OpenTelemetry's that are followed, or not, with the reason.

doctor.py tells which of the others are set; docs/generate_reference.py makes the tables of settings.md, and
tests/exporter/test_otel_variables.py sets each of them.
"""

from __future__ import annotations

import re
from typing import Final

# Environment.
TTFT_OTEL: Final = "TTFT_OTEL"
TTFT_OTEL_QUEUE_BYTES: Final = "TTFT_OTEL_QUEUE_BYTES"
TTFT_OTEL_TRUST_SAMPLED: Final = "TTFT_OTEL_TRUST_SAMPLED"
TTFT_OTEL_SAMPLING_KEY: Final = "TTFT_OTEL_SAMPLING_KEY"
TTFT_OTEL_ROLE: Final = "TTFT_OTEL_ROLE"
TTFT_OTEL_DETAIL: Final = "TTFT_OTEL_DETAIL"
TTFT_OTEL_METRICS: Final = "TTFT_OTEL_METRICS"
TTFT_OTEL_TEMPO_HEADERS: Final = "TTFT_OTEL_TEMPO_HEADERS"
OTEL_EXPORTER_OTLP_ENDPOINT: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
OTEL_EXPORTER_OTLP_TRACES_ENDPOINT: Final = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
OTEL_EXPORTER_OTLP_PROTOCOL: Final = "OTEL_EXPORTER_OTLP_PROTOCOL"
OTEL_EXPORTER_OTLP_TRACES_PROTOCOL: Final = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
OTEL_SERVICE_NAME: Final = "OTEL_SERVICE_NAME"
OTEL_SDK_DISABLED: Final = "OTEL_SDK_DISABLED"
OTEL_TRACES_EXPORTER: Final = "OTEL_TRACES_EXPORTER"
OTEL_METRICS_EXPORTER: Final = "OTEL_METRICS_EXPORTER"
OTEL_EXPORTER_OTLP_METRICS_ENDPOINT: Final = "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"
OTEL_EXPORTER_OTLP_METRICS_PROTOCOL: Final = "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL"
OTEL_METRIC_EXPORT_INTERVAL: Final = "OTEL_METRIC_EXPORT_INTERVAL"
OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE: Final = (
    "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE"
)
OTEL_CONFIG_FILE: Final = "OTEL_CONFIG_FILE"
OTEL_PROPAGATORS: Final = "OTEL_PROPAGATORS"
OTEL_TRACES_SAMPLER: Final = "OTEL_TRACES_SAMPLER"
OTEL_TRACES_SAMPLER_ARG: Final = "OTEL_TRACES_SAMPLER_ARG"


# Names may have alternatives in brackets, none among them: A_[B_|C_]D is A_D, A_B_D and A_C_D.
# Default and meaning; "-" where nothing is the default.
FOLLOWED: Final[dict[str, tuple[str, str]]] = {
    "OTEL_CONFIG_FILE": ("-", "[declarative configuration](#declarative-configuration)"),
    "OTEL_SDK_DISABLED": (
        "-",
        "`true`: no spans and no metrics; a caller that asks still gets its timings",
    ),
    "OTEL_TRACES_EXPORTER": ("`otlp`", "or `none`: no spans, only metrics; any other: `otlp`"),
    "OTEL_METRICS_EXPORTER": ("`otlp`", "or `none`: despite `TTFT_OTEL_METRICS`; other: `otlp`"),
    "OTEL_PROPAGATORS": ("`tracecontext`", "has to name it; no other is read or written"),
    "OTEL_TRACES_SAMPLER": (
        "`parentbased_always_on`",
        "or `always_on`, `always_off`, `traceidratio`, and these with `parentbased_`",
    ),
    "OTEL_TRACES_SAMPLER_ARG": ("`1.0`", "ratio for `traceidratio`"),
    "OTEL_SERVICE_NAME": (
        "by role",
        "one name for all roles; [the roles' own](attributes.md#resource)",
    ),
    "OTEL_RESOURCE_ATTRIBUTES": ("-", "[the resource](attributes.md#resource)"),
    "OTEL_EXPERIMENTAL_RESOURCE_DETECTORS": ("`otel`", "run in the exporter process"),
    "OTEL_EXPORTER_OTLP_ENDPOINT": (
        "`http://127.0.0.1:4318`",
        "where spans go; the port is 4317 if the protocol is grpc",
    ),
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": (
        "-",
        "the same for traces only, the whole URL. vLLM reads it too: prefer the one above",
    ),
    "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": ("-", "the same for metrics only, the whole URL"),
    "OTEL_EXPORTER_OTLP_[TRACES_|METRICS_]PROTOCOL": (
        "`http/protobuf`",
        "or `grpc`; where it is not set, port 4317 means `grpc`, any other `http/protobuf`",
    ),
    "OTEL_EXPORTER_OTLP_[TRACES_|METRICS_]HEADERS": ("-", "sent with each request"),
    "OTEL_EXPORTER_OTLP_[TRACES_|METRICS_]COMPRESSION": ("`none`", "`gzip`; HTTP also `deflate`"),
    "OTEL_EXPORTER_OTLP_[TRACES_|METRICS_]TIMEOUT": ("`4`", "seconds, as Python's SDK has it"),
    "OTEL_EXPORTER_OTLP_[TRACES_|METRICS_][CERTIFICATE|CLIENT_CERTIFICATE|CLIENT_KEY]": (
        "-",
        "files for TLS",
    ),
    "OTEL_EXPORTER_OTLP_[TRACES_|METRICS_]INSECURE": ("-", "gRPC, if the endpoint has no scheme"),
    "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": (
        "`cumulative`",
        "or `delta`, `lowmemory` (here the same as `delta`)",
    ),
    "OTEL_METRIC_EXPORT_INTERVAL": ("`15000`", "milliseconds between two pushes of metrics"),
    "OTEL_BSP_SCHEDULE_DELAY": ("`1000`", "milliseconds until a batch is sent that is not full"),
    "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": ("`1024`", "spans of one OTLP message"),
    "OTEL_[SPAN_]ATTRIBUTE_VALUE_LENGTH_LIMIT": (
        "`256`",
        "characters; more than 256 are never kept",
    ),
    "OTEL_[SPAN_|EVENT_|LINK_]ATTRIBUTE_COUNT_LIMIT": ("`128`", "below 100 stages may be cut off"),
    "OTEL_SPAN_[EVENT|LINK]_COUNT_LIMIT": ("`128`", "of a span; 0, as for all limits: none"),
    "OTEL_PYTHON_[DISTRO|CONFIGURATOR|DISABLED_INSTRUMENTATIONS]": (
        "-",
        "[below](#with-opentelemetry-instrument)",
    ),
}
# By the reason.
NOT_FOLLOWED: Final[dict[str, tuple[str, ...]]] = {
    "what ttft-otel logs goes where vLLM's log goes": ("OTEL_LOG_LEVEL",),
    "`TTFT_OTEL_QUEUE_BYTES` bounds what waits": ("OTEL_BSP_MAX_QUEUE_SIZE",),
    "a batch has four attempts, a push one, each with the exporter's timeout": (
        "OTEL_BSP_EXPORT_TIMEOUT",
        "OTEL_METRIC_EXPORT_TIMEOUT",
    ),
    "exemplars are sampled requests": ("OTEL_METRICS_EXEMPLAR_FILTER",),
    "histograms are exponential": ("OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION",),
    "no logs are made": (
        "OTEL_LOGS_EXPORTER",
        "OTEL_BLRP_[SCHEDULE_DELAY|EXPORT_TIMEOUT|MAX_QUEUE_SIZE|MAX_EXPORT_BATCH_SIZE]",
        "OTEL_LOGRECORD_ATTRIBUTE_[COUNT_LIMIT|VALUE_LENGTH_LIMIT]",
        "OTEL_EXPORTER_OTLP_LOGS_[ENDPOINT|PROTOCOL|HEADERS|COMPRESSION|TIMEOUT|INSECURE]",
        "OTEL_EXPORTER_OTLP_LOGS_[CERTIFICATE|CLIENT_CERTIFICATE|CLIENT_KEY]",
    ),
    "everything goes by OTLP": (
        "OTEL_EXPORTER_ZIPKIN_[ENDPOINT|TIMEOUT]",
        "OTEL_EXPORTER_PROMETHEUS_[HOST|PORT]",
    ),
    "IDs are random": ("OTEL_PYTHON_ID_GENERATOR",),
    "no SDK is set up": (
        "OTEL_PYTHON_[TRACER|METER|LOGGER]_[PROVIDER|CONFIGURATOR]",
        "OTEL_PYTHON_CONTEXT",
        "OTEL_PYTHON_SDK_INTERNAL_METRICS_ENABLED",
        "OTEL_PYTHON_LOGGING_AUTO_INSTRUMENTATION_ENABLED",
        "OTEL_PYTHON_AUTO_INSTRUMENTATION_EXPERIMENTAL_GEVENT_PATCH",
    ),
    "requests that generate are traced, no others": ("OTEL_PYTHON_[FASTAPI_]EXCLUDED_URLS",),
    "names are the new ones": ("OTEL_SEMCONV_STABILITY_OPT_IN",),
    "headers never enter a span": (
        "OTEL_INSTRUMENTATION_HTTP_CAPTURE_HEADERS_SERVER_[REQUEST|RESPONSE]",
    ),
}
# Of those that are followed, whole numbers.
_NUMBER: Final = re.compile(r"OTEL_BSP_.*|.*_LIMIT|OTEL_METRIC_EXPORT_INTERVAL")
_BRACKETS: Final = re.compile(r"\[(.*?)]")


def expand_names(pattern: str) -> list[str]:
    """The names that `pattern` stands for; alternatives are words of their own where `_` ends none."""
    found = _BRACKETS.search(pattern)
    if found is None:
        return [pattern]
    words = found[1].split("|")
    if words[0].endswith("_"):
        words.insert(0, "")
    tails = expand_names(pattern[found.end() :])
    return [pattern[: found.start()] + word + tail for word in words for tail in tails]


_FOLLOWED_NAMES: Final = [name for pattern in FOLLOWED for name in expand_names(pattern)]
# A configuration file is followed in place of all but these.
_BESIDE_FILES: Final = ("OTEL_PYTHON_", "OTEL_EXPERIMENTAL_", "OTEL_CONFIG_FILE")
REPLACED: Final = frozenset(name for name in _FOLLOWED_NAMES if not name.startswith(_BESIDE_FILES))
# The least that each may be, by the specification: of a limit, none at all.
NUMBERS: Final = {
    name: 0 if name.endswith("_LIMIT") else 1 for name in _FOLLOWED_NAMES if _NUMBER.fullmatch(name)
}
# Of the SDK's exporters, which raise for values that they cannot read.
TIMEOUTS: Final = tuple(name for name in _FOLLOWED_NAMES if name.endswith("_TIMEOUT"))
COMPRESSIONS: Final = tuple(name for name in _FOLLOWED_NAMES if name.endswith("_COMPRESSION"))
