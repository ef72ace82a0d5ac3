# SPDX-License-Identifier: Apache-2.0
"""The embedded OTLP receiver, gRPC and HTTP: exporters send, store.py keeps, the answer says so.

Success is said when the batch is on disk. Whatever is temporary (disk full, database locked, too
much waiting) is answered so that the sender keeps the batch and tries again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from typing import Any, Final

import grpc
from fastapi import APIRouter, Request, Response
from google.protobuf import json_format
from google.protobuf.message import Message
from google.rpc import code_pb2, status_pb2  # type: ignore[import-untyped]
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from ttft_otel.report import body, otlp
from ttft_otel.report.store import Store, Unwritable

PROTOBUF: Final = "application/x-protobuf"
JSON: Final = "application/json"
SERVICE: Final = "opentelemetry.proto.collector.trace.v1.TraceService"
ANSWER_S: Final = 8.0  # below the SDK exporters' own 10 s
READ_S: Final = 20.0  # for a body to arrive
DRAIN: Final = 4 * body.LIMIT
AT_ONCE: Final = 8  # bodies in memory at a time: 8 x body.LIMIT
RETRY_S: Final = "2"


class Receiver:
    """Both doors of one store; `counts` says what they refused."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.counts: Counter[str] = Counter()

    def take(self, batch: otlp.Batch) -> Future[int]:
        """Hand a batch to the store. Raises Unwritable."""
        self.counts["received"] += len(batch.spans) + batch.refused
        self.counts["refused"] += batch.refused
        return self.store.add(batch.spans)

    def export(self, data: bytes, context: grpc.ServicerContext) -> bytes:
        """gRPC Export, raw bytes in and out."""
        try:
            batch = otlp.read(data)
        except otlp.Bad as error:
            self.counts["bad"] += 1
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        try:
            full = self.take(batch).result(ANSWER_S)
        except (Unwritable, Late) as error:
            self.counts["retry"] += 1
            context.abort(grpc.StatusCode.UNAVAILABLE, f"not stored, try again: {error}")
        return _answer(batch, full).SerializeToString()

    async def post(self, request: Request) -> Response:
        """HTTP POST /v1/traces."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in (PROTOBUF, JSON):
            self.counts["bad"] += 1
            text = f"Content-Type {kind!r} is not OTLP; send {PROTOBUF} or {JSON}"
            return _error(415, code_pb2.INVALID_ARGUMENT, text, PROTOBUF)
        try:
            data = await asyncio.wait_for(_read(request), READ_S)
            encoding = request.headers.get("content-encoding", "")
            batch = await run_in_threadpool(_decode, data, encoding, kind == JSON)
        except body.Large as error:
            self.counts["large"] += 1
            return _error(413, code_pb2.RESOURCE_EXHAUSTED, str(error), kind)
        except (body.Broken, otlp.Bad, ClientDisconnect) as error:
            self.counts["bad"] += 1
            return _error(400, code_pb2.INVALID_ARGUMENT, str(error), kind)
        except asyncio.TimeoutError:
            self.counts["bad"] += 1
            return _error(408, code_pb2.DEADLINE_EXCEEDED, "the body came too slowly", kind)
        return await self._keep(batch, kind)

    async def _keep(self, batch: otlp.Batch, kind: str) -> Response:
        try:
            full = await asyncio.wait_for(asyncio.wrap_future(self.take(batch)), ANSWER_S)
        except (Unwritable, asyncio.TimeoutError) as error:
            self.counts["retry"] += 1
            return _error(503, code_pb2.UNAVAILABLE, f"not stored, try again: {error}", kind)
        return Response(_write(_answer(batch, full), kind), media_type=kind)


def routes(receiver: Receiver) -> APIRouter:
    """The HTTP door, to be included in an app."""
    router = APIRouter()
    gate = asyncio.Semaphore(AT_ONCE)

    async def traces(request: Request) -> Response:
        async with gate:
            return await receiver.post(request)

    router.add_api_route("/v1/traces", traces, methods=["POST"], include_in_schema=False)
    return router


def grpc_server(receiver: Receiver) -> grpc.Server:
    """The gRPC door, without an address yet."""
    server = grpc.server(
        ThreadPoolExecutor(AT_ONCE, thread_name_prefix="ttft-otel-grpc"),
        options=[("grpc.max_receive_message_length", body.LIMIT), ("grpc.so_reuseport", 0)],
        maximum_concurrent_rpcs=4 * AT_ONCE,
    )
    handler = grpc.unary_unary_rpc_method_handler(receiver.export)
    generic = grpc.method_handlers_generic_handler(SERVICE, {"Export": handler})
    server.add_generic_rpc_handlers((generic,))
    return server


async def _read(request: Request) -> bytes:
    """The body as it came, within the bound.

    What is too large is read on a while and thrown away: most clients hear an answer only after
    they have sent everything, and would take a closed connection for a failure worth repeating.
    """
    data = bytearray()
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > DRAIN:
            break
        if size <= body.LIMIT:
            data += chunk
    if size > body.LIMIT:
        raise body.Large(f"more than {body.LIMIT} bytes")
    return bytes(data)


def _decode(data: bytes, encoding: str, as_json: bool) -> otlp.Batch:
    return otlp.read(body.unpack(data, encoding), as_json)


def _answer(batch: otlp.Batch, full: int) -> Message:
    why = batch.why or ("a trace with too many spans" if full else "")
    return otlp.answer(batch.refused + full, why)


def _write(message: Message, kind: str) -> bytes:
    if kind == JSON:
        return json_format.MessageToJson(message, indent=None).encode()
    return message.SerializeToString()


def _error(status: int, code: Any, text: str, kind: str) -> Response:
    """A google.rpc.Status in the sender's own encoding."""
    headers = {"Retry-After": RETRY_S} if status == 503 else {}
    content = _write(status_pb2.Status(code=code, message=text), kind)
    return Response(content, status, headers, kind)
