# SPDX-License-Identifier: Apache-2.0
"""EngineReport: what an engine core sends of a request whose front-end has no hooks, instead of a Record.

hooks/engine_core/tracer.py fills it. The exporter makes the Record, because that takes twenty times as
long as the bytes of a report, and an engine core has a step to begin meanwhile.
"""

from __future__ import annotations

from typing import Final

import msgspec

from ttft_otel.model.names import keys
from ttft_otel.model.record import RECORD_VERSION, Record, RecordDecodeError, decode_record
from ttft_otel.tracing.context import TraceContext

REPORT_VERSION: Final = 1
# As measurement.PREFIX: no byte with which a Record begins.
PREFIX: Final = b"e"


class EngineReport(msgspec.Struct, array_like=True, gc=False):
    """One request of an engine core; times are microseconds of CLOCK_MONOTONIC.

    context: span_id is that of its `ttft` span, parent_id of the caller's span. is_routed: a router of ours
    has sent it. model, kv_connector, ec_connector, takes_encodings: of this instance, as in ServerIdentity.
    """

    version: int
    context: TraceContext
    request_id: str
    role: str
    is_routed: bool
    model: str
    kv_connector: str
    ec_connector: str
    takes_encodings: bool
    #: Its front-end had it, where that is known; else the engine core.
    arrived: int
    #: The engine core had it.
    added: int
    #: Its first token left the engine core, or it ended.
    left: int = 0
    #: Of carrier.encode_timeline().
    timeline: str = ""
    #: `error.type` where it ended without a first token.
    error: str = ""


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(EngineReport)


def encode_report(report: EngineReport) -> bytes:
    """The bytes that the exporter gets."""
    return PREFIX + _encoder.encode(report)


def decode_message(data: bytes) -> Record:
    """Bytes of a Record, or of a report -> Record. Raises RecordDecodeError for anything else."""
    if data[:1] != PREFIX:
        return decode_record(data)
    try:
        report = _decoder.decode(data[1:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecordDecodeError(str(error)) from error
    if report.version != REPORT_VERSION:
        raise RecordDecodeError(f"report version {report.version}, not {REPORT_VERSION}")
    return _build_record(report)


def _build_record(report: EngineReport) -> Record:
    """The Record of a `ttft` span right below the caller's span: the end of the answer is not seen."""
    # Here, because only the exporter of an engine core needs it: prometheus_client takes 50 ms.
    from ttft_otel.tracing import recorder, request_trace
    from ttft_otel.tracing.request_trace import EngineRequest, RequestTrace, identity

    identity.model, identity.takes_encodings = report.model, report.takes_encodings
    identity.kv_connector, identity.ec_connector = report.kv_connector, report.ec_connector
    context = report.context
    trace = RequestTrace(report.arrived, context, False)
    trace.role, trace.request_id = report.role, report.request_id
    trace.leg = report.role if report.is_routed else ""
    engine = EngineRequest(0, report.timeline)
    trace.engine_requests = {"": engine}
    if report.error:
        trace.error = report.error
        cut = recorder.fail_trace(trace, report.left)
    else:
        engine.output, trace.first_output = report.left, engine
        cut = recorder.close_ttft(trace, 0)
    ttft = request_trace.make_ttft(trace, cut)
    attributes = {key: value for key, value in ttft.attributes.items() if key != keys.STREAMING}
    ttft = msgspec.structs.replace(ttft, span_id=context.span_id, attributes=attributes)
    record = recorder.make_record(trace, ttft)
    shared = {key: value for key, value in record.attributes.items() if key != keys.STREAM}
    return msgspec.structs.replace(
        record,
        version=RECORD_VERSION,
        span_id=context.parent_id,
        parent_id="",
        attributes={**shared, keys.ENGINE_ONLY: True},
    )
