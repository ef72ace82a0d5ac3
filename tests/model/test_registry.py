# SPDX-License-Identifier: Apache-2.0
"""Names, spans and metrics that are made, against semconv/ and the published GenAI conventions.

semconv/ itself is valid under weaver's schema. golden/genai_conventions.json has the conventions' facts, with
the versions of the files that they are from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import jsonschema
import pytest
import tracing_fakes
import yaml
from opentelemetry.semconv import attributes as stable
from opentelemetry.semconv.schemas import Schemas

from tests.model.test_names import list_constants
from ttft_otel.model import stages
from ttft_otel.model.metric_table import FOREIGN_METRICS, METRICS, STATUS_LABEL
from ttft_otel.model.names import keys, span_names
from ttft_otel.tracing import carrier, recorder
from ttft_otel.tracing.carrier import EngineTimeline
from ttft_otel.tracing.context import start_context
from ttft_otel.tracing.request_trace import RequestTrace, identity
from ttft_otel.tracing.settings import Settings

ROOT: Final = Path(__file__).parents[2]
GOLDEN: Final = ROOT / "tests" / "golden"
FILES: Final = ("attributes", "spans", "metrics")
CONVENTIONS: Final = json.loads((GOLDEN / "genai_conventions.json").read_text("utf-8"))
HTTP: Final = {"error.type", "http.request.method", "http.route", "url.path", "url.scheme"} | {
    "server.address",
    "http.response.status_code",
    "server.port",
}
TYPES: Final = {"string": str, "boolean": bool, "double": float, "int": int}


def load_file(name: str) -> dict[str, Any]:
    """A file of semconv/."""
    found: dict[str, Any] = yaml.safe_load((ROOT / "semconv" / f"{name}.yaml").read_text("utf-8"))
    return found


GROUPS: Final[dict[str, dict[str, Any]]] = {
    group["id"]: group for name in FILES for group in load_file(name)["groups"]
}
ATTRIBUTES: Final[dict[str, dict[str, Any]]] = {
    each["id"]: each
    for group in GROUPS.values()
    for each in group.get("attributes", ())
    if "id" in each
}
TEMPLATES: Final = {name for name, each in ATTRIBUTES.items() if "template" in each["type"]}


def read_type(type_: str) -> tuple[type, bool]:
    """The type of a value, or of its items where it is an array; of a template, that of its attributes."""
    word = re.sub(r"template\[(.*)]", r"\1", type_)
    return TYPES[word.removesuffix("[]")], word.endswith("[]")


def find_template(name: str) -> str:
    """The template that an attribute's name is made by, the narrowest; "" without one."""
    found = [each for each in TEMPLATES if name.startswith(f"{each}.") and name.endswith("_us")]
    return max(found, key=len, default="")


def list_references(group: Mapping[str, Any]) -> Iterator[str]:
    """The attributes that a group names."""
    return (each["ref"] for each in group.get("attributes", ()) if "ref" in each)


@pytest.mark.parametrize("name", FILES)
def test_schema(name: str) -> None:
    """The file is valid under the schema of weaver, which a change for the worse is not."""
    schema = json.loads((GOLDEN / "semconv.schema.json").read_text("utf-8"))
    content = load_file(name)
    jsonschema.validate(content, schema, cls=jsonschema.Draft202012Validator)
    first = content["groups"][0]
    del first["brief"]
    with pytest.raises(jsonschema.ValidationError):
        broken = content | {"groups": [first]}
        jsonschema.validate(broken, schema, cls=jsonschema.Draft202012Validator)


def test_attributes() -> None:
    """Each key of ours is one of the registry or made by a template of it, and it has no other."""
    ours = {
        value
        for key, value in list_constants().items()
        if key.startswith("keys.") and re.match(r"ttft[._]", value)
    }

    assert ours == set(ATTRIBUTES) - (TEMPLATES - ours)
    for name in (*stages.STAGE_NAMES, *stages.ROUTER_STAGES):
        assert find_template(keys.name_stage_attribute(name)) == "ttft"
        assert find_template(keys.name_handover_attribute(name)) == span_names.HANDOVER
    for stage in (stages.QUEUE_STAGES[0], stages.STALL_STAGE):
        for reason in stages.WAIT_REASON_NAMES:
            attribute = keys.name_reason_attribute(stage, reason)
            assert find_template(attribute) in ("ttft.queue", "ttft.stall")
    for kind in stages.HOLDING_KINDS:
        assert find_template(keys.name_held_attribute(kind)) == "ttft.held"


def test_references() -> None:
    """What is referred to is here, or one of OpenTelemetry's own attributes."""
    published = {
        value
        for module in vars(stable).values()
        for key, value in getattr(module, "__dict__", {}).items()
        if key.isupper() and isinstance(value, str)
    } | set(CONVENTIONS["attributes"])
    named = {name for group in GROUPS.values() for name in list_references(group)}

    assert named <= set(ATTRIBUTES) | published | HTTP
    manifest = load_file("manifest")
    (dependency,) = manifest["dependencies"]
    assert dependency["schema_url"] == span_names.SCHEMA_URL
    assert span_names.SCHEMA_URL in {each.value for each in Schemas}


def test_examples() -> None:
    """Each text has an example, and each example its attribute's type."""
    for name, each in ATTRIBUTES.items():
        wanted, is_array = read_type(each["type"])
        for example in each.get("examples", ()):
            values = example if is_array else [example]
            assert all(type(value) is wanted for value in values), name
        # A link or an event has no value.
        assert each.get("examples") or wanted is bool or name == keys.HELD_BY, name


def test_metrics() -> None:
    """Name, unit, instrument and labels are those that are made; no metric is missing."""
    registry = {
        group["metric_name"]: group for group in GROUPS.values() if group["type"] == "metric"
    }
    for name, metric in (METRICS | FOREIGN_METRICS).items():
        group = registry[name]
        assert group["unit"] == metric.unit
        assert group["instrument"] == ("counter" if metric.is_sum else "histogram")
        assert {*list_references(group)} == {*metric.all_labels} - {STATUS_LABEL}
    names = {value for key, value in list_constants().items() if key.startswith("metric_names.")}
    assert names == set(registry)


def name_span_group(kind: str, name: str, attributes: Mapping[str, Any]) -> str:
    """The group of a span that was exported."""
    if kind in ("SERVER", "CLIENT"):
        return kind.lower()
    marks = {keys.STAGE: "stage", keys.PART: "part", keys.HANDOVER_STAGE: "step"}
    found = next((group for mark, group in marks.items() if mark in attributes), "")
    return found or name.removeprefix("ttft.").replace(".", "_")


def check_span(kind: str, name: str, attributes: Mapping[str, Any]) -> list[str]:
    """What is wrong with a span by the registry; nothing for one that it describes."""
    group = GROUPS[f"span.ttft.{name_span_group(kind, name, attributes)}"]
    allowed = {*list_references(group)}
    required = {
        each["ref"] for each in group["attributes"] if each.get("requirement_level") == "required"
    }
    wrong = [f"{name} has no {each}" for each in required - set(attributes)]
    for key, value in attributes.items():
        template = find_template(key)
        if key not in allowed and template not in allowed:
            wrong.append(f"{name} has {key}")
        kind = ATTRIBUTES.get(key, ATTRIBUTES.get(template, {})).get("type") or CONVENTIONS[
            "attributes"
        ].get(key, "int" if key in (keys.HTTP_STATUS, keys.SERVER_PORT) else "string")
        wanted, is_array = read_type(kind)
        values = value if is_array and isinstance(value, list | tuple) else [value]
        if any(type(each) is not wanted for each in values):
            wrong.append(f"{key} of {name} is no {kind}: {value!r}")
    return wrong


def test_spans() -> None:
    """Every span of the sample traces has what its group requires, nothing else, and of the right types."""
    trees = json.loads((GOLDEN / "trees.json").read_text("utf-8"))
    waiting = [root for roots in trees.values() for root in roots]
    checked = set()
    while waiting:
        span = waiting.pop()
        waiting += span.get("children", ())
        # The file has words in place of what differs in each run.
        numbers = {"port": 8000, "length": 1, "score": 1}
        attributes = {
            key: numbers.get(value, value) if isinstance(value, str) else value
            for key, value in span["attributes"].items()
        }
        if keys.TIME_TO_FIRST_CHUNK in attributes:
            attributes[keys.TIME_TO_FIRST_CHUNK] = 0.5
        assert not check_span(span["kind"], span["name"], attributes)
        checked.add(name_span_group(span["kind"], span["name"], attributes))

    assert {"server", "client", "ttft", "stage", "handover", "step"} <= checked
    assert check_span(
        "SERVER", "POST", {keys.ROLE: "mono", keys.OUTERMOST: 1, keys.STAGE: "sample"}
    )


@pytest.mark.parametrize("metric", CONVENTIONS["metrics"])
def test_metrics_of_conventions(metric: str) -> None:
    """Those of a server are all made, with their unit, buckets and no attribute of another name."""
    expected, ours = CONVENTIONS["metrics"][metric], METRICS[metric]

    assert (ours.unit, list(ours.bounds_s)) == (expected["unit"], expected["buckets"])
    assert set(ours.labels) <= set(expected["attributes"])
    # Required by the model, or by a condition that can be met here.
    wanted = {keys.OPERATION, keys.PROVIDER, keys.MODEL}
    assert wanted | ({keys.ERROR_TYPE} & set(expected["attributes"])) == set(ours.labels)


def test_names_of_conventions() -> None:
    """Every gen_ai name of ours is one of the model's, as an attribute or as a metric."""
    ours = {value for value in list_constants().values() if value.startswith("gen_ai.")}

    assert ours <= set(CONVENTIONS["attributes"]) | set(CONVENTIONS["metrics"])


@pytest.mark.usefixtures("blank_identity", "no_state_left")
@pytest.mark.parametrize(("role", "streamed"), [("mono", True), ("mono", False), ("encode", False)])
def test_values_of_conventions(role: str, streamed: bool) -> None:
    """Values are the request's, of the types that they have to have, and on the span that knows them."""
    identity.model, identity.role = "tiny", role
    trace = RequestTrace(1000, start_context("", "", Settings(on=True)), False)
    trace.path = trace.route = "/v1/chat/completions"
    trace.method, trace.server = "POST", ("10.1.2.3", 8000)
    trace.streamed, trace.status = streamed, 200
    recorder.register_engine_request(trace, "e")
    marks = carrier.encode_timeline(EngineTimeline(prompt=100, cached=64))
    recorder.record_first_output("e", marks, 1900, 2000)
    recorder.close_ttft(trace, 2100 if streamed else 0)
    recorder.record_end("e", "length", 8)
    trace.engine_requests["e"].ended, trace.end = 2700, 3000
    sender = tracing_fakes.MemorySender()
    recorder.send_known_halves(trace, sender, server=True)
    spans = {span.name: (span.kind.name, dict(span.attributes)) for span in sender.build_spans()}

    for name, (kind, attributes) in spans.items():
        assert not check_span(kind, name, attributes)
    _, server = spans["POST /v1/chat/completions"]
    _, ttft = spans[span_names.ENCODE if role == "encode" else span_names.TTFT]
    for each in (ttft, server):
        assert each[keys.RESPONSE_MODEL] == "tiny"
        assert (each[keys.SERVER_ADDRESS], each[keys.SERVER_PORT]) == ("10.1.2.3", 8000)
    assert (ttft[keys.INPUT_TOKENS], ttft[keys.CACHE_READ_TOKENS]) == (100, 64)
    ends, of_streams = {keys.OUTPUT_TOKENS, keys.FINISH_REASONS}, {*CONVENTIONS["streams only"]}
    for _, attributes in spans.values():
        is_told = streamed and attributes is ttft
        assert of_streams & {*attributes} == (of_streams if is_told else set())
        is_told = role != "encode" and attributes is server
        assert ends & {*attributes} == (ends if is_told else set())
    assert role == "encode" or [server[key] for key in sorted(ends)] == [("length",), 8]
