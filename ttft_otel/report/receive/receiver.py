# SPDX-License-Identifier: Apache-2.0
"""The embedded OTLP receiver, gRPC and HTTP, in front of span_store.py.

It answers with success once the batch is on disk. For temporary conditions (disk full, database
locked, queue or memory full) it answers UNAVAILABLE or 503, upon which OTLP exporters retry. Both
protocols run on one event loop, where a sender that waits costs no thread; threads decode batches.
The bytes of all bodies are bounded from
the first one until the batch is stored, and a body is decompressed within a limit.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Final

import anyio
import grpc
from anyio.to_thread import run_sync
from fastapi import Request, Response
from google.protobuf import json_format
from google.protobuf.message import Message
from google.rpc import code_pb2, status_pb2  # type: ignore[import-untyped]
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from starlette.requests import ClientDisconnect

from ttft_otel.http.bodies import BodyTooLargeError, ByteBudget, unpack_body
from ttft_otel.report.receive import otlp_decoder
from ttft_otel.report.store.span_store import SpanStore, StoreUnavailableError

# Of one export, compressed or not: gRPC's own default. The SDK's largest have 1 MB.
MAX_BODY_BYTES: Final = 4 << 20
MAX_BODIES_BYTES: Final = 64 << 20  # of all bodies together
PROTOBUF_TYPE: Final = "application/x-protobuf"
JSON_TYPE: Final = "application/json"
OTLP_TRACE_SERVICE: Final = "opentelemetry.proto.collector.trace.v1.TraceService"
MAX_STORE_S: Final = 8.0  # seconds until a batch is stored; the SDK's exporters wait for 10 s
MAX_READ_S: Final = 20.0  # seconds for a body to arrive
MAX_DRAINED_BYTES: Final = 64 << 20  # read of a body that is too large
MAX_DECODING: Final = 2  # bodies decoded at once; a decoded batch takes many times its bytes
MAX_ARRIVING_RPCS: Final = 32  # gRPC messages awaited at once: the oldest one gives way to the next
MAX_GRPC_CONNECTIONS: Final = 256
MAX_METADATA_BYTES: Final = 16_384  # of a gRPC call: its headers together
RETRY_AFTER_S: Final = "2"  # header value
TOKEN_HINT: Final = "Send the token: Authorization: Bearer TOKEN, or as the password."


class ArrivingBody:
    """One body, of which `data` has arrived; ByteBudget's `counted_bytes` until they are released."""

    __slots__ = ("data", "has_given_way", "counted_bytes")

    def __init__(self) -> None:
        self.data = bytearray()
        self.has_given_way = False
        self.counted_bytes = 0


class BodyBudget:
    """The bodies in memory; used on one event loop."""

    def __init__(self, max_bytes: int = MAX_BODIES_BYTES) -> None:
        self.max_bytes = max_bytes
        self._arriving: dict[ArrivingBody, None] = {}  # oldest first
        self._bytes: ByteBudget[ArrivingBody] = ByteBudget(max_bytes, self._arriving)

    @property
    def counted_bytes(self) -> int:
        """Bytes of all bodies together."""
        return self._bytes.counted_bytes

    @contextmanager
    def open_body(self) -> Iterator[ArrivingBody]:
        """A new body, whose bytes are given back at the end."""
        body = ArrivingBody()
        self._arriving[body] = None
        try:
            yield body
        finally:
            self.complete_body(body)
            self._bytes.release(body)
            body.data = bytearray()

    def extend_body(self, body: ArrivingBody, chunk: bytes) -> None:
        """Append `chunk`. Raises StoreUnavailableError when this body gave way, now or earlier."""
        if not body.has_given_way:
            for each in self._bytes.add_bytes(body, len(chunk)):
                each.has_given_way = True
                each.data = bytearray()
                self.complete_body(each)
        if body.has_given_way:
            raise StoreUnavailableError("too many bytes of other exports are arriving")
        body.data += chunk

    def complete_body(self, body: ArrivingBody) -> None:
        """Nothing more of `body` will arrive: it is being decoded and cannot give way. Idempotent."""
        self._arriving.pop(body, None)


# Temporary conditions, upon which the sender should retry.
UNAVAILABLE: Final = (StoreUnavailableError, asyncio.TimeoutError)


def is_admitted(authorization: bytes, token: str) -> bool:
    """Whether a caller with this `Authorization` has the token; "" asks nobody. Compares in constant time."""
    scheme, _, data = authorization.partition(b" ")
    if scheme.lower() == b"basic":
        try:
            data = base64.b64decode(data).partition(b":")[2]
        except ValueError:
            data = b""
    return not token or hmac.compare_digest(data, token.encode())


class Receiver:
    """Receives exports by gRPC and HTTP for one store.

    budget: for all bodies of the server.
    token: of those who may send and read, as bearer token or as browsers send a password; "": everybody.
    counts: spans "received" and "refused"; requests answered "bad" (400, 408, 415), "large" (413) and
    "retry" (503).
    """

    def __init__(self, store: SpanStore, token: str = "") -> None:
        self.store = store
        self._token = token
        self.counts: Counter[str] = Counter()
        self.budget = BodyBudget()
        self._decoding = anyio.CapacityLimiter(MAX_DECODING)
        self._arriving: dict[asyncio.Future[bytes], None] = {}  # gRPC messages, oldest first

    async def export(
        self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]
    ) -> bytes:
        """gRPC TraceService.Export on serialized messages.

        messages: the one message of a unary call, which as a stream can be awaited for a limited time.
        """
        authorization = dict(context.invocation_metadata() or ()).get("authorization", "")
        if not is_admitted(str(authorization).encode(), self._token):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, TOKEN_HINT)
        with self.budget.open_body() as body:
            try:
                self.budget.extend_body(body, await self._read_message(messages))
                return (await self._store_body(body, "", False)).SerializeToString()
            except (BodyTooLargeError, otlp_decoder.OtlpDecodeError, *UNAVAILABLE) as error:
                code, _, text = self._count_refusal(error)
                await context.abort(code, text)
        raise AssertionError  # abort() has raised

    async def handle_post(self, request: Request) -> Response:
        """Answer an HTTP `request` POST /v1/traces, in its own encoding (protobuf or JSON)."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        # Judged before the body is read: nothing else could be made of it.
        if kind not in (PROTOBUF_TYPE, JSON_TYPE):
            self.counts["bad"] += 1
            text = f"Content-Type {kind!r} is not OTLP; send {PROTOBUF_TYPE} or {JSON_TYPE}"
            return _build_error(415, code_pb2.INVALID_ARGUMENT, text, PROTOBUF_TYPE)
        with self.budget.open_body() as body:
            try:
                # Not part of MAX_STORE_S: a slow upload is the sender's time.
                await asyncio.wait_for(self._read_body(request, body), MAX_READ_S)
            except asyncio.TimeoutError:
                self.counts["bad"] += 1
                text = "the body did not arrive in time"
                return _build_error(408, code_pb2.DEADLINE_EXCEEDED, text, kind)
            except (BodyTooLargeError, StoreUnavailableError, ClientDisconnect) as error:
                return self._refuse(error, kind)
            try:
                encoding = request.headers.get("content-encoding", "")
                answer = await self._store_body(body, encoding, kind == JSON_TYPE)
            except (BodyTooLargeError, otlp_decoder.OtlpDecodeError, *UNAVAILABLE) as error:
                return self._refuse(error, kind)
            return Response(_serialize_message(answer, kind), media_type=kind)

    def _refuse(self, error: Exception, kind: str) -> Response:
        code, status, text = self._count_refusal(error)
        return _build_error(status, code.value[0], text, kind)

    def _count_refusal(self, error: Exception) -> tuple[grpc.StatusCode, int, str]:
        """The statuses of gRPC, which are those of google.rpc, and of HTTP, and the text for the sender."""
        if isinstance(error, BodyTooLargeError):
            self.counts["large"] += 1
            return grpc.StatusCode.RESOURCE_EXHAUSTED, 413, str(error)
        if isinstance(error, UNAVAILABLE):
            self.counts["retry"] += 1
            return grpc.StatusCode.UNAVAILABLE, 503, f"not stored, try again: {error}"
        self.counts["bad"] += 1
        return grpc.StatusCode.INVALID_ARGUMENT, 400, str(error)

    async def _read_message(self, messages: AsyncIterator[bytes]) -> bytes:
        """The message of a gRPC call. Raises TimeoutError, StoreUnavailableError and OtlpDecodeError."""
        if len(self._arriving) >= MAX_ARRIVING_RPCS:
            # A call that only occupies its slot would keep all others out.
            next(iter(self._arriving)).cancel()
        reading = asyncio.ensure_future(_take_first(messages))
        self._arriving[reading] = None
        try:
            await asyncio.wait({reading}, timeout=MAX_READ_S)
        finally:
            # Before cancel(), which would make it look ended.
            has_ended = reading.done()
            reading.cancel()
            del self._arriving[reading]
        if not has_ended:
            raise asyncio.TimeoutError("the message did not arrive in time")
        # By the line above in another call: this one was the oldest.
        if reading.cancelled():
            raise StoreUnavailableError("too many other exports are arriving")
        return reading.result()

    async def _read_body(self, request: Request, body: ArrivingBody) -> None:
        """Read the body as it comes. Raises BodyTooLargeError, StoreUnavailableError and ClientDisconnect.

        A body that is too large is read to its end (up to MAX_DRAINED_BYTES) and discarded: most clients
        read the answer only after they have sent everything, and retry when the connection is closed.
        """
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
            # Who sends on after this is no OTLP exporter.
            if size > MAX_DRAINED_BYTES:
                break
            if size <= MAX_BODY_BYTES:
                self.budget.extend_body(body, chunk)
        if size > MAX_BODY_BYTES:
            raise BodyTooLargeError(f"more than {MAX_BODY_BYTES} bytes")

    async def _store_body(self, body: ArrivingBody, encoding: str, as_json: bool) -> Message:
        """Decode and store one body; the answer. Raises BodyTooLargeError, OtlpDecodeError or UNAVAILABLE."""
        # From here on it must not give way: the thread below has its bytes.
        self.budget.complete_body(body)

        async def store_body() -> Message:
            data = bytes(body.data)
            batch, stored = await run_sync(
                self._decode_body, data, encoding, as_json, limiter=self._decoding
            )
            # On disk when this returns: only then may the sender forget the batch.
            full = await asyncio.wrap_future(stored)
            answer = ExportTraceServiceResponse()
            if batch.refused + full:  # a partial success
                answer.partial_success.rejected_spans = batch.refused + full
                reason = batch.refusal_reason or "a trace with too many spans"
                answer.partial_success.error_message = reason
            return answer

        # Given up, but not undone: the sender's retry finds the spans as duplicates.
        return await asyncio.wait_for(store_body(), MAX_STORE_S)

    def _decode_body(
        self, data: bytes, encoding: str, as_json: bool
    ) -> tuple[otlp_decoder.ExportBatch, Future[int]]:
        """Decode a body and queue its spans in the store, which gives the number that it refused.

        Runs in a thread.
        """
        try:
            plain = unpack_body(data, encoding, MAX_BODY_BYTES)
        except ValueError as error:
            raise otlp_decoder.OtlpDecodeError(str(error)) from error
        batch = otlp_decoder.chunk_export(plain, as_json)
        self.counts["received"] += batch.accepted + batch.refused
        self.counts["refused"] += batch.refused
        return batch, self.store.add_chunks(batch.chunks)


def create_grpc_server(receiver: Receiver) -> grpc.aio.Server:
    """The gRPC server, to be called on its event loop; the caller adds its port and starts it."""
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", MAX_BODY_BYTES),
            ("grpc.so_reuseport", 0),  # a port that is in use is an error
            # Connections without calls must not use up the descriptors of the HTTP side.
            ("grpc.max_allowed_incoming_connections", MAX_GRPC_CONNECTIONS),
            ("grpc.server_handshake_timeout_ms", 10_000),
            ("grpc.max_connection_idle_ms", 60_000),
            ("grpc.max_concurrent_streams", MAX_ARRIVING_RPCS),  # of one connection
            # From the first one on a call may be refused, beyond the other it is.
            ("grpc.max_metadata_size", MAX_METADATA_BYTES),
            ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ]
    )
    # A unary call is a stream of one message on the wire.
    handler = grpc.stream_unary_rpc_method_handler(receiver.export)
    generic = grpc.method_handlers_generic_handler(OTLP_TRACE_SERVICE, {"Export": handler})
    server.add_generic_rpc_handlers((generic,))
    return server


async def _take_first(messages: AsyncIterator[bytes]) -> bytes:
    async for message in messages:
        return message
    raise otlp_decoder.OtlpDecodeError("a call without a message")


def _serialize_message(message: Message, kind: str) -> bytes:
    if kind == JSON_TYPE:
        return json_format.MessageToJson(message, indent=None).encode()
    return message.SerializeToString()


def _build_error(status: int, code: Any, text: str, kind: str) -> Response:
    """A google.rpc.Status in the sender's own encoding."""
    # Only where a retry can help.
    headers = {"Retry-After": RETRY_AFTER_S} if status == 503 else {}
    content = _serialize_message(status_pb2.Status(code=code, message=text), kind)
    return Response(content, status, headers, kind)
