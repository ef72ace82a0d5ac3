# SPDX-License-Identifier: Apache-2.0
"""Read OpenTelemetry's declarative configuration as the variables that mean the same.

settings.py asks for it where OTEL_CONFIG_FILE is set, and only then is OpenTelemetry's own reader imported.
The exporter process is started with these variables, which the SDK's exporter reads.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import quote

from ttft_otel.model.names import env_names

# Of no matter for spans and metrics of ours; another SDK may read the same file.
IGNORED: Final = frozenset(
    {"file_format", "log_level", "logger_provider", "instrumentation_development", "distribution"}
)
_LIMITS: Final = "tracer_provider.limits."
_BATCH: Final = "tracer_provider.processors[0].batch."
_READER: Final = "meter_provider.readers[0].periodic."
_PARENT: Final = "tracer_provider.sampler.parent_based."
# Paths of single values, and the variables that mean the same.
VALUES: Final = {
    "disabled": env_names.OTEL_SDK_DISABLED,
    "attribute_limits.attribute_value_length_limit": "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT",
    "attribute_limits.attribute_count_limit": "OTEL_ATTRIBUTE_COUNT_LIMIT",
    f"{_LIMITS}attribute_value_length_limit": "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT",
    f"{_LIMITS}attribute_count_limit": "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT",
    f"{_LIMITS}event_count_limit": "OTEL_SPAN_EVENT_COUNT_LIMIT",
    f"{_LIMITS}link_count_limit": "OTEL_SPAN_LINK_COUNT_LIMIT",
    f"{_LIMITS}event_attribute_count_limit": "OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT",
    f"{_LIMITS}link_attribute_count_limit": "OTEL_LINK_ATTRIBUTE_COUNT_LIMIT",
    f"{_BATCH}schedule_delay": "OTEL_BSP_SCHEDULE_DELAY",
    f"{_BATCH}max_export_batch_size": "OTEL_BSP_MAX_EXPORT_BATCH_SIZE",
    f"{_READER}interval": env_names.OTEL_METRIC_EXPORT_INTERVAL,
}
# What we do not follow, but for the specification's own default: files often spell these out.
DEFAULTS: Final = {
    f"{_BATCH}export_timeout": "30000",
    f"{_BATCH}max_queue_size": "2048",
    f"{_BATCH}exporter.otlp_http.tls": "None",
    f"{_BATCH}exporter.otlp_grpc.tls": "None",
    f"{_READER}timeout": "30000",
    f"{_READER}exporter.otlp_http.tls": "None",
    f"{_READER}exporter.otlp_grpc.tls": "None",
    f"{_READER}exporter.otlp_http.default_histogram_aggregation": "explicit_bucket_histogram",
    f"{_READER}exporter.otlp_grpc.default_histogram_aggregation": "explicit_bucket_histogram",
    "meter_provider.exemplar_filter": "trace_based",
    "tracer_provider.id_generator.random": "None",
    f"{_PARENT}remote_parent_sampled.always_on": "None",
    f"{_PARENT}remote_parent_not_sampled.always_off": "None",
    f"{_PARENT}local_parent_sampled.always_on": "None",
    f"{_PARENT}local_parent_not_sampled.always_off": "None",
}
# Where a signal's exporter stands, and its variables' prefix.
EXPORTERS: Final = {
    f"{_BATCH}exporter.": "OTEL_EXPORTER_OTLP_TRACES_",
    f"{_READER}exporter.": "OTEL_EXPORTER_OTLP_METRICS_",
}
PROTOCOLS: Final = {"otlp_http": "http/protobuf", "otlp_grpc": "grpc"}
EXPORTER_VALUES: Final = {
    "endpoint": "ENDPOINT",
    "headers_list": "HEADERS",
    "compression": "COMPRESSION",
    "timeout": "TIMEOUT",
    "tls.ca_file": "CERTIFICATE",
    "tls.key_file": "CLIENT_KEY",
    "tls.cert_file": "CLIENT_CERTIFICATE",
    "tls.insecure": "INSECURE",
    "temporality_preference": "TEMPORALITY_PREFERENCE",
}
SAMPLERS: Final = {"always_on": "", "always_off": "", "trace_id_ratio_based": "ratio"}
DISABLED: Final = {env_names.OTEL_SDK_DISABLED: "true"}


def read_config_file(path: str) -> tuple[dict[str, str], list[str]]:
    """Variables that mean what the file says, and what of it has no variable, by its path in the file.

    A file that cannot be read turns spans and metrics off: nothing goes where nobody meant it to go.
    """
    try:
        from opentelemetry.configuration import ConfigurationError, load_config_file
    except ImportError:
        return DISABLED, [
            f"{env_names.OTEL_CONFIG_FILE} needs another package; "
            "pip install opentelemetry-configuration"
        ]
    try:
        config = load_config_file(path)
    except (ConfigurationError, TypeError) as error:
        return DISABLED, [f"{env_names.OTEL_CONFIG_FILE}={path!r}: {error}; correct the file"]
    leaves = dict(_list_leaves("", config))
    env = {
        env_names.OTEL_TRACES_EXPORTER: _name_exporter(config.tracer_provider),
        env_names.OTEL_METRICS_EXPORTER: _name_exporter(config.meter_provider),
    }
    _take_resource(leaves, env)
    _take_sampler(leaves, env)
    _take_propagators(leaves, env)
    for prefix, variables in EXPORTERS.items():
        _take_exporter(leaves, env, prefix, variables)
    for name, variable in VALUES.items():
        if name in leaves:
            env[variable] = _write_value(leaves.pop(name))
    return env, [
        f"{env_names.OTEL_CONFIG_FILE}={path!r}: ttft-otel does not follow {name}; take it out, or read "
        "docs/reference/settings.md"
        for name, value in leaves.items()
        if DEFAULTS.get(name) != _write_value(value)
    ]


def _list_leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The path and value of each leaf below `value`; of an object without fields, itself with None."""
    if dataclasses.is_dataclass(value):
        found = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        given = {key: each for key, each in found.items() if each is not None}
        # Components of others, which may have no settings.
        given |= getattr(value, "additional_properties", {})
        if not given:
            yield name, None
        for key, each in given.items():
            if name or key not in IGNORED:
                yield from _list_leaves(f"{name}.{key}" if name else key, each)
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _list_leaves(f"{name}[{number}]", each)
    else:
        yield name, None if value == {} else value


def _write_value(value: Any) -> str:
    if isinstance(value, enum.Enum):
        value = value.value
    return str(value).lower() if isinstance(value, bool) else str(value)


def _name_exporter(provider: object) -> str:
    """By the specification a provider that the file leaves out makes nothing."""
    return "otlp" if provider is not None else "none"


def _take_pairs(leaves: dict[str, Any], name: str) -> list[str]:
    """The names and values of a list of pairs, as a variable has them; types are lost."""
    pairs: list[str] = []
    while (key := leaves.pop(f"{name}[{len(pairs)}].name", None)) is not None:
        at = f"{name}[{len(pairs)}]"
        leaves.pop(f"{at}.type", None)
        value = _write_value(leaves.pop(f"{at}.value", ""))
        pairs.append(f"{quote(str(key), safe='')}={quote(value, safe='')}")
    return pairs


def _take_resource(leaves: dict[str, Any], env: dict[str, str]) -> None:
    listed = leaves.pop("resource.attributes_list", None)
    # Pairs come last: where both have a name, the pair wins.
    pairs = [*filter(None, [listed]), *_take_pairs(leaves, "resource.attributes")]
    for name in ("resource.schema_url", "resource"):
        leaves.pop(name, None)
    at = "resource.detection_development.detectors["
    detectors = [name.partition("].")[2] for name in leaves if name.startswith(at)]
    for name in [name for name in leaves if name.startswith(at)]:
        del leaves[name]
    if detectors:
        # What `service` detects is in the resource in any case; the SDK has no detector of this name.
        chosen = ["otel", *(name for name in detectors if name != "service")]
        env["OTEL_EXPERIMENTAL_RESOURCE_DETECTORS"] = ",".join(chosen)
    if pairs:
        env["OTEL_RESOURCE_ATTRIBUTES"] = ",".join(pairs)


def _take_sampler(leaves: dict[str, Any], env: dict[str, str]) -> None:
    for prefix, word in (
        ("tracer_provider.sampler.", ""),
        (f"{_PARENT}root.", "parentbased_"),
    ):
        for name, argument in SAMPLERS.items():
            at = prefix + name
            if at in leaves or f"{at}.{argument}" in leaves:
                leaves.pop(at, None)
                env[env_names.OTEL_TRACES_SAMPLER] = word + name.replace(
                    "trace_id_ratio_based", "traceidratio"
                )
                ratio = leaves.pop(f"{at}.{argument}", None)
                if ratio is not None:
                    env[env_names.OTEL_TRACES_SAMPLER_ARG] = str(ratio)


def _take_propagators(leaves: dict[str, Any], env: dict[str, str]) -> None:
    words = [*filter(None, [leaves.pop("propagator.composite_list", "")])]
    for name in [name for name in leaves if name.startswith("propagator.composite[")]:
        leaves.pop(name)
        words.append(name.partition("].")[2])
    if words:
        env[env_names.OTEL_PROPAGATORS] = ",".join(words)


def _take_exporter(
    leaves: dict[str, Any], env: dict[str, str], prefix: str, variables: str
) -> None:
    for exporter, protocol in PROTOCOLS.items():
        at = f"{prefix}{exporter}"
        if not any(name == at or name.startswith(f"{at}.") for name in leaves):
            continue
        leaves.pop(at, None)
        env[f"{variables}PROTOCOL"] = protocol
        # Of the encodings there are two; JSON stays, and is told.
        if _write_value(leaves.get(f"{at}.encoding", "")) == "protobuf":
            leaves.pop(f"{at}.encoding")
        headers = _take_pairs(leaves, f"{at}.headers")
        for name, variable in EXPORTER_VALUES.items():
            value = leaves.pop(f"{at}.{name}", None)
            if value is None:
                continue
            # The file has milliseconds, Python's variable seconds; and a word is spelled otherwise.
            text = str(value / 1000) if name == "timeout" else _write_value(value)
            env[variables + variable] = "lowmemory" if text == "low_memory" else text
        if headers:
            before = filter(None, [env.get(f"{variables}HEADERS")])
            env[f"{variables}HEADERS"] = ",".join([*before, *headers])
