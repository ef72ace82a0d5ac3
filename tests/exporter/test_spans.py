# SPDX-License-Identifier: Apache-2.0
"""Spans of a Record: whole traces, their size, and messages as the SDK encodes them, field by field."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common import trace_encoder
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags, TraceState
from opentelemetry.trace.status import Status, StatusCode
from tracing_fakes import change_full_record, make_short_record

from benchmarks import otlp_bodies
from lab.otlp_sinks import SpanSink
from ttft_otel.exporter import span_writer
from ttft_otel.exporter.export_worker import create_span_exporter
from ttft_otel.exporter.span_batch import (
    MAX_BATCH_SPANS,
    MAX_SERVICES,
    SCOPE,
    BatchBuilder,
    ResourceCache,
    SpanBatch,
    build_spans,
    take_messages,
)
from ttft_otel.exporter.span_writer import (
    count_late_pieces,
    count_spans,
    cut_handover,
    list_late_pieces,
)
from ttft_otel.model import stages
from ttft_otel.model.names import env_names, keys, span_names
from ttft_otel.model.record import (
    RECORD_VERSION,
    Attributes,
    Call,
    Handover,
    HandoverCall,
    HeldBy,
    Piece,
    Record,
    Server,
    Ttft,
)
from ttft_otel.model.timing import format_server_timing
from ttft_otel.tracing.settings import DETAILS, read_settings

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


@pytest.mark.parametrize("field", ["trace_id", "span_id"])
@pytest.mark.parametrize("value", ["", "xyz", "0" * 16])
def test_broken_ids(field: str, value: str, make_record: Callable[[], Record]) -> None:
    """Ids that are not hexadecimal numbers, or zero, raise an error and are not exported in another form."""
    with pytest.raises(ValueError):
        build_spans(msgspec.structs.replace(make_record(), **{field: value}), RESOURCE)


SAID = format_server_timing({"receive": 100, "kv.transfer": 500}, 80, 680)
times = st.integers(1, 2000)
maybe_times = st.just(0) | times
waited_calls = st.builds(
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


@given(times, times, st.booleans(), st.lists(waited_calls, max_size=3))
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
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "kubernetes.md").read_text("utf-8")
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


MAX_VALUE_CHARS = 256  # characters of one attribute's value
MAX_ATTRIBUTES = 128  # attributes of one span
BELOW = ("part", "reason")  # kinds of pieces whose parent is a stage's span
RESOURCES = ResourceCache(4711)
MAX_US = 10**12
MAX_INT = 2**63 - 1

texts = st.text(max_size=300) | st.sampled_from(["", "x" * 300, "chat", "1", "True"])
numbers = st.integers(-MAX_INT - 1, MAX_INT)
values = (
    texts
    | numbers
    | st.booleans()
    # One value in three types, which are equal as key_words of a dictionary.
    | st.sampled_from([0, 1, 0.0, 1.0, False, True])
    | st.floats(allow_nan=False)
    | st.lists(texts | numbers, max_size=4).map(tuple)
)
key_words = st.sampled_from(
    [keys.ROLE, keys.MODEL, keys.REQUEST_ID, keys.ERROR_TYPE, keys.LEG, keys.INSTANCE, "a"]
) | st.text(max_size=12)
attributes = st.dictionaries(key_words, values, max_size=8) | st.integers(0, 150).map(
    lambda count: {f"key.{number}": number for number in range(count)}
)
stage_names = st.sampled_from(
    ["receive", "prefill.queue", "unattributed", "router.receive", "encode.receive", "decode.ipc"]
)
offsets = st.integers(0, MAX_US)
texts_of_errors = st.sampled_from(["", "ConnectionError", "error"])


def hex_ids(digits: int) -> st.SearchStrategy[str]:
    """IDs of a record, never zero."""
    return st.integers(1, 16**digits - 1).map(lambda number: f"{number:0{digits}x}")


holders = st.builds(
    HeldBy,
    st.integers(0, MAX_US),
    st.integers(0, MAX_US),
    st.sampled_from([*stages.HOLDING_KINDS]),
    texts,
) | st.builds(
    HeldBy, offsets, offsets, st.just("decode"), texts, hex_ids(32), hex_ids(16)
)  # fmt: skip


def pieces(*kinds: str) -> st.SearchStrategy[tuple[Piece, ...]]:
    """Pieces of these kinds, in no order of time."""
    piece = st.builds(
        Piece,
        st.sampled_from(kinds),
        stage_names | texts,
        offsets,
        offsets,
        attributes,
        st.lists(holders, max_size=3).map(tuple),
    )
    return st.lists(piece, max_size=8).map(tuple)


statuses = st.sampled_from([0, 200, 404, 500, 503])
ttfts = st.builds(
    Ttft,
    hex_ids(16),
    st.sampled_from([span_names.TTFT, span_names.ENCODE]),
    offsets,
    offsets,
    st.dictionaries(stage_names, st.integers(0, MAX_US), max_size=6),
    offsets,
    offsets,
    pieces("stage", "part", "sibling"),
    attributes,
    texts_of_errors,
    st.sampled_from(["", "receive"]),
)
servers = st.builds(Server, texts, offsets, statuses, attributes, texts_of_errors)
calls = st.builds(
    Call, hex_ids(16), texts, texts, offsets, offsets, statuses, attributes, texts_of_errors
)
handover_calls = st.builds(
    HandoverCall,
    st.sampled_from(["decode", "encode"]),
    offsets,
    st.just(0) | offsets,
    st.just(0) | offsets,
    st.booleans(),
    st.just(0) | offsets,
    texts | st.sampled_from(["receive;dur=0.100, prefill.queue;dur=0.2, ttft;dur=0.300"]),
)
handovers = st.builds(
    Handover, offsets, offsets, st.booleans(), st.lists(handover_calls, max_size=3).map(tuple)
)
records = st.builds(
    Record,
    version=st.just(RECORD_VERSION),
    trace_id=hex_ids(32),
    span_id=hex_ids(16),
    parent_id=st.just("") | hex_ids(16),
    flags=st.sampled_from([0, 1, 3]),
    state=st.sampled_from(
        ["", "vendor=one,other=two", "vendor=one,vendor=two", "not valid,=", "a=b"]
    ),
    start_ns=st.integers(0, 2**62),
    role=st.sampled_from(stages.ROLES),
    outermost=st.booleans(),
    service=st.sampled_from(["", *stages.SERVICE_NAMES.values()]),
    request_id=texts,
    rank=st.sampled_from([-1, 0, 7]),
    attributes=attributes,
    ttft=st.none() | ttfts,
    server=st.none() | servers,
    calls=st.lists(calls, max_size=4).map(tuple),
    late=pieces("late", "step"),
    handover=st.none() | handovers,
)


class SdkTrace:
    """A sampled record's spans by the SDK's own objects: what span_writer.py has to write."""

    def __init__(self, record: Record, resource: Resource) -> None:
        self.record, self.resource = record, resource
        self.state = TraceState.from_header([record.state]) if record.state else TraceState()
        self.shared = span_writer.list_shared_attributes(record)
        self.top = self.make_context(record.span_id)
        self.spans: list[ReadableSpan] = []
        self.add_top_spans()
        self.add_pieces()

    def make_context(self, span_id: str = "", remote: bool = False) -> SpanContext:
        """The context of a span in this trace, by default of a new one."""
        number = int(span_id, 16) if span_id else random.getrandbits(64) or 1
        ids = int(self.record.trace_id, 16), number
        return SpanContext(*ids, remote, TraceFlags(self.record.flags), self.state)

    def add_top_spans(self) -> None:
        """Server span, calls and `ttft` span."""
        record, server, ttft = self.record, self.record.server, self.record.ttft
        identity = span_writer.list_identity_attributes(record, self.shared)
        if server:
            above = self.make_context(record.parent_id, True) if record.parent_id else None
            own = identity | server.attributes | span_writer.list_outcome(server)
            times = (0, server.end)
            self.add(server.name, self.top, above, times, own, SpanKind.SERVER)
        for call in record.calls:
            own = self.shared | {keys.LEG: call.leg} | call.attributes
            own |= span_writer.list_outcome(call)
            context, times = self.make_context(call.span_id), (call.start, call.end)
            self.add(call.name, context, self.top, times, own, SpanKind.CLIENT)
        if ttft:
            own = identity | ttft.attributes | span_writer.list_totals(ttft)
            context, times = self.make_context(ttft.span_id), (ttft.start, ttft.end)
            self.add(ttft.name, context, self.top, times, own, failed=bool(ttft.error))

    def add_pieces(self) -> None:
        """Pieces of the `ttft` span, those below stages last; late ones and their steps."""
        ttft = self.record.ttft
        on_stages = span_writer.list_stage_attributes(self.record, self.shared)
        placed: list[tuple[Piece, SpanContext]] = []
        for piece in sorted(ttft.pieces, key=lambda each: each.kind in BELOW) if ttft else ():
            parent = self.make_context(ttft.span_id)
            for stage, context in placed if piece.kind in BELOW else ():
                if stage.start <= piece.start and piece.end <= stage.end:
                    parent = context
                    break
            shared = on_stages if piece.kind in ("stage", "reason") else self.shared
            context = self.add_piece(piece, parent, shared)
            if piece.kind == "stage":
                placed.append((piece, context))
        above = self.top
        for piece in span_writer.list_late_pieces(self.record):
            parent = above if piece.kind == "step" else self.top
            context = self.add_piece(piece, parent, self.shared)
            above = above if piece.kind == "step" else context

    def add_piece(self, piece: Piece, parent: SpanContext, shared: Attributes) -> SpanContext:
        """The span of a piece, which never failed by itself."""
        links, events = [], []
        for holder in piece.held_by:
            told: Attributes = {
                keys.HELD_BY_US: holder.us,
                keys.HELD_BY_TOKENS: holder.tokens,
                keys.HELD_BY_KIND: holder.kind,
                keys.HELD_BY_REQUEST_ID: holder.request_id[:MAX_VALUE_CHARS],
            }
            if holder.trace_id:
                ids = int(holder.trace_id, 16), int(holder.span_id, 16)
                links.append(Link(SpanContext(*ids, True, TraceFlags(1)), told))
            else:
                at_ns = self.record.start_ns + 1000 * piece.start
                events.append(Event(keys.HELD_BY, told, at_ns))
        context, times = self.make_context(), (piece.start, piece.end)
        own = shared | piece.attributes
        own |= span_writer.list_kind_attributes(piece.kind, piece.name)
        self.add(piece.name, context, parent, times, own, failed=False, links=links, events=events)
        return context

    def add(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        times: tuple[int, int],
        attributes: Attributes,
        kind: SpanKind = SpanKind.INTERNAL,
        failed: bool | None = None,
        **more: Any,
    ) -> None:
        """Add a span. times: in us after the record's start. failed: by default if it has an error."""
        failed = keys.ERROR_TYPE in attributes if failed is None else failed
        start_ns, end_ns = (self.record.start_ns + 1000 * each for each in times)
        made = ReadableSpan(
            name=name,
            context=context,
            parent=parent,
            resource=self.resource,
            attributes={
                key: value[:MAX_VALUE_CHARS] if isinstance(value, str) else value
                for key, value in [*attributes.items()][-MAX_ATTRIBUTES:]
            },
            kind=kind,
            status=Status(StatusCode.ERROR if failed else StatusCode.UNSET),
            start_time=start_ns,
            end_time=max(start_ns, end_ns),
            instrumentation_scope=SCOPE,
            **more,
        )
        self.spans.append(made)


def order_attributes(request: ExportTraceServiceRequest) -> ExportTraceServiceRequest:
    """The request with each span's attributes sorted by name: OTLP gives their order no meaning."""
    for group in request.resource_spans:
        for scope in group.scope_spans:
            for span in scope.spans:
                ordered = sorted(span.attributes, key=lambda attribute: attribute.key)
                del span.attributes[:]
                span.attributes.extend(ordered)
    return request


def encode_by_sdk(made: Iterable[Record]) -> ExportTraceServiceRequest:
    """The same records by the SDK's spans and its encoder, with the same random IDs."""
    random.seed(17)
    spans = [span for each in made for span in SdkTrace(each, RESOURCES.get(each.service)).spans]
    return order_attributes(trace_encoder.encode_spans(spans))


def batch_records(made: Iterable[Record]) -> SpanBatch:
    """The records in one batch of ours."""
    random.seed(17)
    batch = SpanBatch()
    for each in made:
        batch.add_record(each, RESOURCES)
    return batch


def compare_requests(found: ExportTraceServiceRequest, expected: ExportTraceServiceRequest) -> None:
    """Compare span by span first, so that a failure names the field, then as a whole."""
    for ours, theirs in zip(list_spans(found), list_spans(expected), strict=True):
        assert str(ours).splitlines() == str(theirs).splitlines()
    assert found == expected


def list_spans(request: ExportTraceServiceRequest) -> list[Span]:
    """All spans of a request with one scope per resource."""
    return [span for group in request.resource_spans for span in group.scope_spans[0].spans]


@given(st.lists(records, min_size=1, max_size=3))
@settings(deadline=None)
def test_same_as_sdk(made: list[Record]) -> None:
    """Any records: each field of each span is equal, and so are resources and scope."""
    sampled = [each for each in made if each.flags & 1]
    batch = batch_records(sampled)
    expected = encode_by_sdk(sampled)
    written = sum(len(group.scope_spans[0].spans) for group in batch.request.resource_spans)
    assert len(batch) == written <= sum(map(count_spans, made))
    # A handover is only cut into steps when they are written.
    assert written == sum(map(count_spans, made)) or any(each.handover for each in sampled)
    read_back = order_attributes(trace_encoder.encode_spans(list(batch)))
    compare_requests(order_attributes(batch.request), expected)
    compare_requests(read_back, expected)


def test_unsampled(make_record: Callable[[], Record]) -> None:
    """A record that is not sampled makes no batch at all."""
    builder = BatchBuilder(RESOURCES)
    builder.add_record(msgspec.structs.replace(make_record(), flags=0))
    assert list(builder.take_batches()) == []


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1])
def test_number_too_large(number: int, make_record: Callable[..., Record]) -> None:
    """A number that OTLP cannot hold refuses its record, and leaves the batch's other spans."""
    random.seed(17)
    builder = BatchBuilder(RESOURCES)
    builder.add_record(make_record(1))
    broken = msgspec.structs.replace(make_record(2), attributes={"a": number})
    for service in (broken.service, "another"):
        with pytest.raises(ValueError):
            builder.add_record(msgspec.structs.replace(broken, service=service))
    (batch,) = builder.take_batches()
    assert order_attributes(batch.request) == encode_by_sdk([make_record(1)])


def test_batches_are_bounded(make_record: Callable[..., Record]) -> None:
    """Small records fill a batch; one that is larger than any batch is split, and nothing is lost."""
    large = make_record(1)
    assert large.ttft is not None
    pieces = tuple(Piece("stage", "receive", at, at + 1) for at in range(2 * MAX_BATCH_SPANS))
    large = msgspec.structs.replace(large, ttft=msgspec.structs.replace(large.ttft, pieces=pieces))
    builder = BatchBuilder(RESOURCES)
    for number in range(2, 400):
        builder.add_record(make_record(number))
    builder.add_record(large)
    builder.add_record(make_record(1000))
    batches = list(builder.take_batches())
    assert max(map(len, batches)) <= MAX_BATCH_SPANS
    assert len(batches[0]) == MAX_BATCH_SPANS
    found = [span.context.span_id for batch in batches for span in batch]
    assert len(set(found)) == len(found) == count_spans(large) + 399 * 4
    assert list(builder.take_batches()) == []


KINDS_LEFT = {
    "full": {"server", "call", "ttft", "stage", "part", "sibling", "late", "step"},
    "stages": {"server", "call", "ttft", "stage", "late", "step"},
    "ttft": {"server", "call", "ttft", "late"},
}


@pytest.mark.parametrize("detail", DETAILS)
def test_detail(detail: str, make_record: Callable[..., Record]) -> None:
    """Less detail takes spans away; those that are left are the same, and none hangs in the air."""
    whole = make_record(1)
    assert whole.ttft is not None
    pieces = (
        *(Piece(kind, kind, 0, 10) for kind in ("stage", "part", "sibling")),
        Piece("part", "part", 2, 8, {"a": 1}),
    )
    record = msgspec.structs.replace(
        whole,
        ttft=msgspec.structs.replace(whole.ttft, pieces=pieces),
        server=msgspec.structs.replace(whole.server, name="server"),
        calls=(Call("d1", "call", "encode", 1, 2, 200),),
        late=(Piece("late", "late", 10, 30), Piece("step", "step", 10, 20, {"a": 1})),
    )
    batch, full = SpanBatch(detail), SpanBatch()
    for each in (batch, full):
        each.add_record(record, RESOURCES)
    spans = list_spans(batch.request)
    assert {span.name for span in spans} == KINDS_LEFT[detail]
    assert len(batch) == len(spans)
    ids = {span.span_id for span in spans}
    assert all(span.parent_span_id in ids for span in spans if span.name != "server")
    same = {span.name: span.attributes for span in list_spans(full.request)}
    assert all(span.attributes == same[span.name] for span in spans if span.name != "part")


@pytest.fixture(params=["http/protobuf", "grpc"])
def connected(
    request: pytest.FixtureRequest,
    collector: Any,
    grpc_collector: SpanSink,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[SpanExporter, Callable[[], list[ResourceSpans]]]]:
    """The SDK's exporter for each protocol, and what its receiver got."""
    is_grpc = request.param == "grpc"
    url = f"http://127.0.0.1:{grpc_collector.port}" if is_grpc else collector.url
    monkeypatch.setenv(env_names.OTEL_EXPORTER_OTLP_ENDPOINT, url)
    monkeypatch.setenv(env_names.OTEL_EXPORTER_OTLP_PROTOCOL, request.param)
    exporter = create_span_exporter(read_settings())

    def list_received() -> list[ResourceSpans]:
        received = [each for request in collector.traces for each in request.resource_spans]
        return grpc_collector.list_resources() or received

    yield exporter, list_received
    exporter.shutdown()


def test_message_is_sent(
    connected: Any, make_record: Callable[..., Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This version of the SDK takes the message: nobody builds spans of it."""
    exporter, list_received = connected
    batch = batch_records([make_record(1), make_record(2)])

    def refuse_reading(_: SpanBatch) -> Iterator[Any]:
        raise AssertionError("the SDK reads the batch as spans")

    monkeypatch.setattr(SpanBatch, "__iter__", refuse_reading)
    assert exporter.export(batch) is SpanExportResult.SUCCESS
    assert list_received() == list(batch.request.resource_spans)


@pytest.mark.parametrize("is_other_sdk", [True, False])
def test_spans_are_sent(
    is_other_sdk: bool,
    connected: Any,
    make_record: Callable[..., Record],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An SDK that encodes elsewhere reads the batch as spans; those of others are encoded as before."""
    exporter, list_received = connected
    take_messages(exporter)  # a second time changes nothing
    batch = batch_records([make_record(1), make_record(2)])
    if is_other_sdk:
        module = sys.modules[type(exporter).__module__]
        monkeypatch.setattr(module, "encode_spans", module.encode_spans.args[0])
    assert exporter.export(batch if is_other_sdk else batch[:]) is SpanExportResult.SUCCESS
    (received,) = list_received()
    names_sent = [span.name for span in batch]
    assert [span.name for span in received.scope_spans[0].spans] == names_sent
    assert received.resource == batch.request.resource_spans[0].resource and len(names_sent) == 8


def test_unknown_exporter() -> None:
    """An exporter whose module encodes nothing is left alone."""

    class OtherExporter(SpanExporter):
        pass

    before = dict(vars(sys.modules[__name__]))
    take_messages(OtherExporter())
    assert vars(sys.modules[__name__]) == before
