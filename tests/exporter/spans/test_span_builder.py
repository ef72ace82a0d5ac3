# SPDX-License-Identifier: Apache-2.0
"""Whole traces: one record as spans, their resource, the wait for decode, and how large they are."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from full_record import change_full_record, make_short_record
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan

from benchmarks import otlp_bodies
from ttft_otel.exporter.spans.resource_cache import MAX_SERVICES, ResourceCache
from ttft_otel.exporter.spans.span_builder import build_spans
from ttft_otel.exporter.spans.span_content import count_late_pieces, cut_handover, list_late_pieces
from ttft_otel.model.names import keys, span_names
from ttft_otel.model.record import Call, Handover, HandoverCall, Piece, Record, Server, Ttft
from ttft_otel.model.timing import format_server_timing

START = 1_700_000_000_000_000_000
RESOURCE = Resource({"service.name": "test"})

SERVER = make_short_record(
    span_id="00000000000000b1",
    parent_id="00000000000000a1",
    state="vendor=one,other=two",
    start_ns=START,
    role="prefill_decode",
    outermost=False,
    service="vllm-prefill-decode",
    request_id="cmpl-1",
    rank=2,
    attributes={"gen_ai.request.model": "tiny"},
    ttft=Ttft(
        "00000000000000c1",
        "ttft",
        *(0, 1000),
        {"receive": 50, "preprocess": 450, "prefill.queue": 300},
        unattributed=200,
        clamped=3,
        pieces=tuple(
            Piece(*each)
            for each in (
                ("stage", "receive", 0, 50),
                ("part", "tokenize", 60, 90),
                ("stage", "preprocess", 50, 500),
                ("stage", "prefill.queue", 500, 600),
                ("stage", "unattributed", 600, 800),
                ("stage", "prefill.queue", 800, 1000, {"ttft.preemptions": 1}),
                ("part", "media", 400, 700),
                ("sibling", "ttft.sibling", 500, 900),
            )
        ),
        attributes={"ttft.prefill.own_tokens": 7, "ttft.streaming": True},
    ),
    server=Server("POST /v1/completions", 5000, 200, {"http.route": "/v1/completions"}),
)

SERVER_TREE = """
SERVER POST /v1/completions 0..5000 gen_ai.request.model=tiny http.response.status_code=200 \
http.route=/v1/completions ttft.outermost=False ttft.rank=2 ttft.request_id=cmpl-1 \
ttft.role=prefill_decode
  INTERNAL ttft 0..1000 gen_ai.request.model=tiny gen_ai.response.time_to_first_chunk=0.001 \
ttft.clamped_us=3 ttft.outermost=False ttft.prefill.own_tokens=7 ttft.prefill.queue_us=300 \
ttft.preprocess_us=450 ttft.rank=2 ttft.receive_us=50 ttft.request_id=cmpl-1 \
ttft.role=prefill_decode ttft.streaming=True ttft.total_us=1000 ttft.unattributed_us=200
    INTERNAL receive 0..50 gen_ai.request.model=tiny ttft.outermost=False \
ttft.role=prefill_decode ttft.stage=receive
    INTERNAL preprocess 50..500 gen_ai.request.model=tiny ttft.outermost=False \
ttft.role=prefill_decode ttft.stage=preprocess
      INTERNAL tokenize 60..90 ttft.outermost=False ttft.part=tokenize ttft.role=prefill_decode
    INTERNAL media 400..700 ttft.outermost=False ttft.part=media ttft.role=prefill_decode
    INTERNAL prefill.queue 500..600 gen_ai.request.model=tiny ttft.outermost=False \
ttft.role=prefill_decode ttft.stage=prefill.queue
    INTERNAL ttft.sibling 500..900 ttft.outermost=False ttft.role=prefill_decode
    INTERNAL unattributed 600..800 gen_ai.request.model=tiny ttft.outermost=False \
ttft.role=prefill_decode ttft.stage=unattributed
    INTERNAL prefill.queue 800..1000 gen_ai.request.model=tiny ttft.outermost=False \
ttft.preemptions=1 ttft.role=prefill_decode ttft.stage=prefill.queue
"""

ROUTER = make_short_record(
    span_id="00000000000000b2",
    start_ns=START,
    role="router",
    service="ttft-otel-router",
    request_id="r-1",
    ttft=Ttft(
        span_id="00000000000000c2",
        name="ttft",
        start=0,
        end=900,
        stages={"router.receive": 100, "router.hop.encode": 200, "encode.receive": 300},
        unattributed=300,
        clamped=0,
        pieces=(
            Piece("stage", "router.receive", 0, 100),
            Piece("stage", "router.hop.encode", 100, 300),
            Piece("stage", "encode.receive", 300, 600),
            Piece("stage", "encode.unattributed", 600, 900),
        ),
        error="ConnectionError",
        died="encode.receive",
    ),
    server=Server("POST /v1/chat/completions", 950, 502),
    calls=(
        Call("00000000000000d1", "POST", "encode", 100, 900, 200),
        Call("00000000000000d2", "POST", "prefill_decode", 900, 940, 0, error="ConnectionError"),
        Call("00000000000000d3", "POST", "prefill_decode", 940, 945, 404),
    ),
)

ROUTER_TREE = """
SERVER POST /v1/chat/completions 0..950 ERROR error.type=502 http.response.status_code=502 \
ttft.outermost=True ttft.request_id=r-1 ttft.role=router
  INTERNAL ttft 0..900 ERROR error.type=ConnectionError ttft.clamped_us=0 \
ttft.died_in=encode.receive ttft.encode.receive_us=300 ttft.outermost=True ttft.request_id=r-1 \
ttft.role=router ttft.router.hop.encode_us=200 ttft.router.receive_us=100 ttft.total_us=900 \
ttft.unattributed_us=300
    INTERNAL router.receive 0..100 error.type=ConnectionError ttft.outermost=True \
ttft.role=router ttft.stage=router.receive
    INTERNAL router.hop.encode 100..300 error.type=ConnectionError ttft.outermost=True \
ttft.role=router ttft.stage=router.hop.encode
    INTERNAL encode.receive 300..600 error.type=ConnectionError ttft.leg=encode \
ttft.outermost=True ttft.role=router ttft.stage=encode.receive
    INTERNAL encode.unattributed 600..900 error.type=ConnectionError ttft.leg=encode \
ttft.outermost=True ttft.role=router ttft.stage=encode.unattributed
  CLIENT POST 100..900 http.response.status_code=200 ttft.leg=encode ttft.outermost=True \
ttft.role=router
  CLIENT POST 900..940 ERROR error.type=ConnectionError ttft.leg=prefill_decode \
ttft.outermost=True ttft.role=router
  CLIENT POST 940..945 ERROR error.type=404 http.response.status_code=404 \
ttft.leg=prefill_decode ttft.outermost=True ttft.role=router
"""


def draw_tree(spans: Sequence[ReadableSpan]) -> str:
    """Draw spans as an indented tree in time order, times in microseconds after START."""
    known = {span.context.span_id for span in spans}

    def draw_span(parent: int | None, depth: int) -> list[str]:
        lines = []
        below = [span for span in spans if _get_parent(span, known) == parent]
        for span in sorted(below, key=lambda span: span.start_time):
            failed = "ERROR " if not span.status.is_unset else ""
            attributes = " ".join(
                f"{name}={span.attributes[name]}" for name in sorted(span.attributes)
            )
            times = [(time - START) // 1000 for time in (span.start_time, span.end_time)]
            lines.append(
                f"{'  ' * depth}{span.kind.name} {span.name} {times[0]}..{times[1]} "
                f"{failed}{attributes}"
            )
            lines += draw_span(span.context.span_id, depth + 1)
        return lines

    return "\n" + "\n".join(draw_span(None, 0)) + "\n"


def _get_parent(span: ReadableSpan, known: set[int]) -> int | None:
    return span.parent.span_id if span.parent and span.parent.span_id in known else None


@pytest.mark.parametrize(("record", "expected"), [(SERVER, SERVER_TREE), (ROUTER, ROUTER_TREE)])
def test_tree(record: Record, expected: str) -> None:
    """One record becomes exactly this tree: a server's, and a router's with its calls to legs."""
    assert draw_tree(build_spans(record, RESOURCE)) == expected


def test_halves() -> None:
    """A stream's two records together give the spans of the one that holds both halves."""
    first = build_spans(msgspec.structs.replace(SERVER, server=None), RESOURCE)
    second = build_spans(msgspec.structs.replace(SERVER, ttft=None), RESOURCE)
    assert draw_tree(second + first) == draw_tree(build_spans(SERVER, RESOURCE))


@pytest.mark.parametrize("field", ["trace_id", "span_id"])
@pytest.mark.parametrize("value", ["", "xyz", "0" * 16])
def test_broken_ids(field: str, value: str, make_record: Callable[[], Record]) -> None:
    """Ids that are not hexadecimal numbers, or zero, raise an error and are not exported in another form."""
    with pytest.raises(ValueError):
        build_spans(msgspec.structs.replace(make_record(), **{field: value}), RESOURCE)


SAID = format_server_timing({"receive": 100, "kv.transfer": 500}, 80, 680)
times = st.integers(1, 2000)
maybe_times = st.just(0) | times
calls = st.builds(
    HandoverCall,
    st.just("decode"),
    times,
    maybe_times,
    maybe_times,
    st.booleans(),
    maybe_times,
    st.sampled_from(
        ["", SAID, SAID.replace("ttft", "tttt"), "receive;dur=-1", ",,,;dur", SAID * 2]
    ),
)


def list_steps(handover: Handover) -> list[tuple[str, int, int]]:
    """Its steps without the whole: name, start and end."""
    return [(each.name, each.start, each.end) for each in cut_handover(handover)[1:]]


def test_each_step_has_its_place() -> None:
    """Routing, the lost call with its pause, the hop, D's own stages, and what was left after its answer."""
    lost = HandoverCall("decode", 120, 0, 200, True, 260)
    good = HandoverCall("decode", 270, 1000, 3000, server_timing=SAID)

    repeated = list_steps(Handover(100, 1200, True, (lost, good)))

    assert repeated == [
        ("router.route", 100, 120),
        ("router.retry", 120, 260),
        ("router.route", 260, 270),
        ("router.hop.decode", 270, 320),
        ("decode.receive", 320, 420),
        ("decode.kv.transfer", 420, 920),
        ("unattributed", 920, 1000),
        (span_names.FIRST_DECODE, 1000, 1200),
    ]
    assert list_steps(Handover(100, 1200, False, (lost, good)))[-1] == ("router.egress", 1000, 1200)
    # Without Server-Timing nobody knows what D did.
    silent = HandoverCall("decode", 120, 900, 3000)

    assert list_steps(Handover(100, 1000, False, (silent,))) == [
        ("router.route", 100, 120),
        ("unattributed", 120, 900),
        ("router.egress", 900, 1000),
    ]


@given(times, times, st.booleans(), st.lists(calls, max_size=3))
def test_steps_add_up(
    start: int, end: int, is_repeated: bool, some_calls: list[HandoverCall]
) -> None:
    """They touch, fill the wait, and their totals add up to its own; no more of them than was counted."""
    handover = Handover(start, end, is_repeated, tuple(some_calls))

    whole, *steps = cut_handover(handover)

    record = change_full_record(late=(), handover=handover)
    assert list_late_pieces(record) == [whole, *steps]
    assert len(steps) + 1 <= count_late_pieces(record)
    found = dict(whole.attributes)
    total = found.pop(keys.HANDOVER_TOTAL_US)
    assert total == whole.end - whole.start == sum(each.end - each.start for each in steps)
    assert sum(found.values()) == total  # type: ignore[arg-type]
    position = whole.start
    for step in steps:
        assert step.start == position < step.end
        position = step.end
    assert position == whole.end and whole.start == start


def test_spans_and_bytes() -> None:
    """docs/guides/kubernetes.md has the spans that the exporter makes of a request, and their mean size."""
    resource = Resource({"service.name": "vllm", "service.instance.id": "vllm:1"})
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "kubernetes.md").read_text("utf-8")
    row = re.search(r"\| spans \((\d+) bytes each, OTLP\) \| (.+) \|", guide)
    assert row is not None
    deployments = ((), ("mono",), ("encode", "prefill_decode"), ("prefill", "decode"))
    for legs, count in zip(
        (*deployments, ("encode", "prefill", "decode")), row[2].split(" | "), strict=True
    ):
        made = otlp_bodies.build_request_records(legs, 1, random.Random(5))  # type: ignore[arg-type]
        spans = [span for record in made for span in build_spans(record, resource)]
        assert len(spans) == int(count), legs
        # Messages of hundreds of spans, so that the resource is not sent with each.
        body = otlp_bodies.pack_spans(spans * 20)
        assert len(body.data) / len(spans * 20) == pytest.approx(int(row[1]), rel=0.15)


def test_operator_resource(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator's attributes and the detectors that are asked for are in the resource; the former win."""
    given = {"k8s.pod.name": "vllm-0", "service.version": "1.2", "host.name": "mine"}
    text = ",".join(f"{name}={value}" for name, value in given.items())
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", text)
    monkeypatch.setenv("OTEL_EXPERIMENTAL_RESOURCE_DETECTORS", "host")
    settings = {keys.ENGINE_MAX_SEQS: 64, keys.ENGINE_ASYNC: 0}  # told by the host, as integers

    found = ResourceCache(4711, engine_settings=settings).get("vllm").attributes
    assert {name: found[name] for name in given} == given and found["host.arch"]
    assert (found["service.name"], found["process.pid"]) == ("vllm", 4711)
    assert settings.items() <= found.items()


def test_resources_are_bounded() -> None:
    """More service names than roles share one resource, whatever the records claim."""
    resources = ResourceCache(1)
    found = [resources.get(f"service-{number}") for number in range(100)]
    assert len({id(each) for each in found}) <= MAX_SERVICES + 1


def test_instances_of_several_processes_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of one server share the operator's service.instance.id on spans, and never on sums."""
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.instance.id=pod-1")
    found = set()
    for pid in (1, 2):
        resources = ResourceCache(pid, True)
        spans = resources.get("vllm")
        assert spans.attributes["service.instance.id"] == "pod-1"
        found.add(resources.build_metrics_resource(spans).attributes["service.instance.id"])

    assert found == {"pod-1:1", "pod-1:2"}
