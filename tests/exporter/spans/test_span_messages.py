# SPDX-License-Identifier: Apache-2.0
"""The exporter's OTLP messages are those that the SDK encodes for the same Records, field by field."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import msgspec
import pytest
import sdk_span_builder
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from benchmarks.otlp_bodies import build_request_records
from ttft_otel.exporter.spans.resource_cache import ResourceCache
from ttft_otel.exporter.spans.span_batch import MAX_BATCH_SPANS, BatchBuilder, SpanBatch
from ttft_otel.exporter.spans.span_builder import build_spans
from ttft_otel.exporter.spans.span_writer import count_spans
from ttft_otel.model import stages
from ttft_otel.model.names import keys, span_names
from ttft_otel.model.record import (
    RECORD_VERSION,
    Call,
    Handover,
    HandoverCall,
    HeldBy,
    Piece,
    Record,
    Server,
    Ttft,
)
from ttft_otel.tracing.settings import DETAILS

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
    spans = [
        span
        for each in made
        for span in sdk_span_builder.build_spans(each, RESOURCES.get(each.service))
    ]
    return order_attributes(encode_spans(spans))


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
    read_back = order_attributes(encode_spans(list(batch)))
    compare_requests(order_attributes(batch.request), expected)
    compare_requests(read_back, expected)


def test_same_as_sdk_in_benchmark() -> None:
    """Records as servers, encoders and routers make them, many in one batch."""
    draw = random.Random(3)
    made = [each for number in range(1, 21) for each in build_request_records(number, draw)]
    assert order_attributes(batch_records(made).request) == encode_by_sdk(made)


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


def test_sequence(make_record: Callable[..., Record]) -> None:
    """A batch is a sequence of the SDK's spans for whoever reads it as one."""
    batch = batch_records([make_record(1), make_record(2)])
    expected = [span.name for span in build_spans(make_record(1), RESOURCES.get("vllm"))] * 2
    assert [span.name for span in batch] == [span.name for span in batch[:]] == expected
    assert batch[-1].name == expected[-1]
    assert len(batch) == 8


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
