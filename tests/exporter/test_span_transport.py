# SPDX-License-Identifier: Apache-2.0
"""The SDK's own exporters send a batch's message as it is, and its spans where they cannot."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from ttft_otel.exporter.batch_exporter import create_span_exporter
from ttft_otel.exporter.spans.resource_cache import ResourceCache
from ttft_otel.exporter.spans.span_batch import SpanBatch, take_messages
from ttft_otel.model.names import env_names
from ttft_otel.model.record import Record
from ttft_otel.tracing.settings import read_settings

RESOURCES = ResourceCache(1)


@pytest.fixture
def make_batch(make_record: Callable[..., Record]) -> Callable[[], SpanBatch]:
    """A batch of two records, eight spans."""

    def build_batch() -> SpanBatch:
        batch = SpanBatch()
        batch.add_record(make_record(1), RESOURCES)
        batch.add_record(make_record(2), RESOURCES)
        return batch

    return build_batch


@pytest.fixture(params=["http/protobuf", "grpc"])
def connected(
    request: pytest.FixtureRequest,
    collector: Any,
    grpc_collector: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[SpanExporter, Callable[[], list[Any]]]]:
    """The SDK's exporter for each protocol, and what its receiver got."""
    receiver = grpc_collector if request.param == "grpc" else collector
    monkeypatch.setenv(env_names.OTEL_EXPORTER_OTLP_ENDPOINT, receiver.url)
    monkeypatch.setenv(env_names.OTEL_EXPORTER_OTLP_PROTOCOL, request.param)
    exporter = create_span_exporter(read_settings())

    yield exporter, lambda: receiver.received
    exporter.shutdown()


def test_message_is_sent(
    connected: Any, make_batch: Callable[[], SpanBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This version of the SDK takes the message: nobody builds spans of it."""
    exporter, list_received = connected
    batch = make_batch()

    def refuse_reading(_: SpanBatch) -> Iterator[Any]:
        raise AssertionError("the SDK reads the batch as spans")

    monkeypatch.setattr(SpanBatch, "__iter__", refuse_reading)
    assert exporter.export(batch) is SpanExportResult.SUCCESS
    assert list_received() == list(batch.request.resource_spans)


def test_other_sdk(
    connected: Any, make_batch: Callable[[], SpanBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An SDK that encodes elsewhere reads the batch as spans, and exports the same ones."""
    exporter, list_received = connected
    module = sys.modules[type(exporter).__module__]
    monkeypatch.setattr(module, "encode_spans", module.encode_spans.args[0])
    batch = make_batch()
    assert exporter.export(batch) is SpanExportResult.SUCCESS
    (received,) = list_received()
    names_sent = [span.name for span in batch]
    assert [span.name for span in received.scope_spans[0].spans] == names_sent
    assert received.resource == batch.request.resource_spans[0].resource


def test_other_spans(connected: Any, make_batch: Callable[[], SpanBatch]) -> None:
    """Spans that somebody else exports in this process are encoded by the SDK, as before."""
    exporter, list_received = connected
    take_messages(exporter)  # a second time changes nothing
    assert exporter.export(list(make_batch())) is SpanExportResult.SUCCESS
    assert sum(len(group.scope_spans[0].spans) for group in list_received()) == 8


def test_unknown_exporter() -> None:
    """An exporter whose module encodes nothing is left alone."""

    class OtherExporter(SpanExporter):
        pass

    before = dict(vars(sys.modules[__name__]))
    take_messages(OtherExporter())
    assert vars(sys.modules[__name__]) == before
