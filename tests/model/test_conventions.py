# SPDX-License-Identifier: Apache-2.0
"""Our gen_ai names and values against the published model of the GenAI conventions.

golden/genai_conventions.json has its facts, with the versions of the files that they are from.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
import tracing_fakes

from tests.model.test_names import list_constants
from ttft_otel.model.metric_table import METRICS
from ttft_otel.model.names import keys, span_names
from ttft_otel.tracing import carrier, recorder
from ttft_otel.tracing.context import start_context
from ttft_otel.tracing.engine_timeline import EngineTimeline
from ttft_otel.tracing.request_trace import RequestTrace
from ttft_otel.tracing.roles import identity
from ttft_otel.tracing.settings import Settings

MODEL: Final = json.loads(
    (Path(__file__).parents[1] / "golden" / "genai_conventions.json").read_text("utf-8")
)
TYPES: Final = {"string": str, "boolean": bool, "double": float, "int": int, "string[]": tuple}

pytestmark = pytest.mark.usefixtures("blank_identity", "no_state_left")


@pytest.fixture
def spans(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Attributes of a request's spans, by the spans' names; the parameter: role, and is it a stream."""
    role, streamed = request.param
    monkeypatch.setattr(identity, "model", "tiny")
    monkeypatch.setattr(identity, "role", role)
    trace = RequestTrace(1000, start_context("", "", Settings(on=True)), False)
    trace.path, trace.method, trace.route = "/v1/chat/completions", "POST", "/v1/chat/completions"
    trace.server, trace.streamed, trace.status = ("10.1.2.3", 8000), streamed, 200
    timeline = EngineTimeline()
    timeline.prompt, timeline.cached = 100, 64
    recorder.register_engine_request(trace, "e")
    marks = carrier.encode_timeline(timeline)
    recorder.record_first_output("e", marks, 1900, 2000)
    recorder.close_ttft(trace, 2100 if streamed else 0)
    recorder.record_end("e", "length", 8)
    trace.engine_requests["e"].ended = 2700
    trace.end = 3000
    sender = tracing_fakes.MemorySender()
    recorder.send_known_halves(trace, sender, server=True)
    return {span.name: dict(span.attributes or {}) for span in sender.build_spans()}


@pytest.mark.parametrize("metric", MODEL["metrics"])
def test_metrics(metric: str) -> None:
    """The model's server metrics are all made, with its unit, buckets and no attribute of another name."""
    expected = MODEL["metrics"][metric]
    ours = METRICS[metric]

    assert (ours.unit, list(ours.bounds_s)) == (expected["unit"], expected["buckets"])
    assert set(ours.labels) <= set(expected["attributes"])
    # Required by the model, or by a condition that can be met here.
    wanted = {keys.OPERATION, keys.PROVIDER, keys.MODEL}
    assert wanted | ({keys.ERROR_TYPE} & set(expected["attributes"])) == set(ours.labels)


def test_names() -> None:
    """Every gen_ai name of ours is one of the model's, as an attribute or as a metric."""
    ours = {value for value in list_constants().values() if value.startswith("gen_ai.")}

    assert ours <= set(MODEL["attributes"]) | set(MODEL["metrics"])


@pytest.mark.parametrize(
    "spans", [("mono", True), ("mono", False), ("encode", False)], indirect=True
)
def test_values(spans: dict[str, Any]) -> None:
    """Values have the model's types."""
    told = [(key, value) for each in spans.values() for key, value in each.items()]
    found = {key: value for key, value in told if key.startswith("gen_ai.")}

    assert {keys.OPERATION, keys.PROVIDER, keys.MODEL, keys.RESPONSE_MODEL} <= set(found)
    for key, value in found.items():
        assert type(value) is TYPES[MODEL["attributes"][key]], key


@pytest.mark.parametrize(
    ("spans", "expected"),
    [(("mono", True), True), (("mono", False), False), (("encode", False), False)],
    indirect=["spans"],
)
def test_streams_only(spans: dict[str, Any], expected: bool) -> None:
    """What the model defines for streams is on the `ttft` span of a stream; our own total is on all."""
    (ttft,) = [each for name, each in spans.items() if name in (span_names.TTFT, span_names.ENCODE)]

    for name in MODEL["streams only"]:
        assert (name in ttft) is expected
        assert not any(name in each for each in spans.values() if each is not ttft)
    assert keys.TOTAL_US in ttft


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        (("mono", True), {keys.OUTPUT_TOKENS: 8, keys.FINISH_REASONS: ("length",)}),
        (("encode", False), {}),
    ],
    indirect=["spans"],
)
def test_end(spans: dict[str, Any], expected: dict[str, Any]) -> None:
    """What is known only at the end is on the span that ends then, the request's own."""
    ends = {keys.OUTPUT_TOKENS, keys.FINISH_REASONS}
    found = {name: {key: each[key] for key in ends & set(each)} for name, each in spans.items()}

    assert found.pop("POST /v1/chat/completions") == expected
    assert not any(found.values())


@pytest.mark.parametrize("spans", [("mono", True)], indirect=True)
def test_facts(spans: dict[str, Any]) -> None:
    """Tokens, the answering model and the server's address are the request's."""
    ttft, server = spans[span_names.TTFT], spans["POST /v1/chat/completions"]

    assert (ttft[keys.INPUT_TOKENS], ttft[keys.CACHE_READ_TOKENS]) == (100, 64)
    for each in (ttft, server):
        assert each[keys.RESPONSE_MODEL] == "tiny"
        assert (each[keys.SERVER_ADDRESS], each[keys.SERVER_PORT]) == ("10.1.2.3", 8000)
