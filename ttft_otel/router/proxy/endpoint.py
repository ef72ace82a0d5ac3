# SPDX-License-Identifier: Apache-2.0
"""The data path: serves a client's request from one leg or several, relays their bytes, notes the times.

A raw ASGI endpoint: a framework's request and response objects would double its cost. Of prefill and decode
instances the prefill token may go to the client at once, and the decode instance fetches the KV blocks of the
prefill instance. Blocks that no decode instance fetches are always released.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from ttft_otel.model import endpoints
from ttft_otel.model.endpoints import COMPLETIONS_PATH, OPERATION_BY_PATH
from ttft_otel.model.names import header_names, keys
from ttft_otel.model.stages import DECODE, PREFILL
from ttft_otel.router import types
from ttft_otel.router.disagg import encoders, request_body, request_plan
from ttft_otel.router.disagg.encoders import splice_params
from ttft_otel.router.disagg.request_body import BodyParser
from ttft_otel.router.disagg.request_plan import LegPlan, PrefillAnswer, StreamSplicer
from ttft_otel.router.errors import (
    RequestRejected,
    RouterError,
    UpstreamRefused,
    UpstreamUnavailable,
)
from ttft_otel.router.proxy.admission import (
    AdmissionGate,
    BodyBudget,
    ClientBody,
    HoldQueue,
    read_body,
    read_ttft_limit,
)
from ttft_otel.router.proxy.client_stream import (
    OUTPUT_EXTENSION,
    AnswerReading,
    ClientOutput,
    ClientStream,
    finish_attempt,
    relay_response,
)
from ttft_otel.router.proxy.exchange_reporter import ExchangeReporter, RecentReports
from ttft_otel.router.routing.upstream_client import (
    FirstByteWait,
    UpstreamClient,
    read_first_chunk,
    record_server_timing,
)
from ttft_otel.router.timeline import Attempt, Exchange, RequestTimeline
from ttft_otel.router.types import MODE_OFF, AsgiReceive, AsgiScope, AsgiSend, HeaderList, Instance
from ttft_otel.router.upstream import failures, http_headers
from ttft_otel.router.upstream.connection_pool import QUERY_ERRORS
from ttft_otel.router.upstream.failures import UPSTREAM_ERRORS, build_unavailable_error
from ttft_otel.router.upstream.instance_connection import InstanceAnswer
from ttft_otel.tracing import clock, context
from ttft_otel.tracing.settings import Settings

PROMPT_PATHS: Final = (*OPERATION_BY_PATH, endpoints.MESSAGES_PATH)  # requests with a prompt
# The prefill answer was one JSON object, the client's is a stream.
_EVENT_STREAM_HEADER: Final = (b"content-type", b"text/event-stream; charset=utf-8")
UNKNOWN_MODEL: Final = "ttft-otel-nobody"  # no model has this name
RELEASE_TIMEOUT_S: Final = 10.0
SHUTDOWN_WAIT_S: Final = 2.0  # seconds to wait for running releases at shutdown
# In flight; further ones are left to the prefill instance's time-out.
MAX_PENDING_RELEASES: Final = 256


class DisaggregatedRequest(msgspec.Struct):
    """One request on its way through a prefill and a decode instance."""

    plan: LegPlan
    request: types.RoutingRequest  # as for a single server
    exchange: Exchange
    client_stream: ClientStream
    on_sent: Callable[[], None]  # called when no instance gets the client's body any more
    leg_headers: dict[str, str] = {}  # of both legs' requests
    unfetched_kv_params: Raw | None = None  # names KV blocks that the prefill instance still keeps

    def __post_init__(self) -> None:
        # Both legs get bodies of our own, and the prefill answer is parsed here: nothing is compressed.
        self.leg_headers = http_headers.build_buffered_headers(self.request.headers)

    def drop_bodies(self) -> None:
        """Drop what was kept for sending: the decode instance answers, which may take minutes."""
        self.request = replace(self.request, body=b"")
        self.plan.fields = {}
        self.plan.ec_params = b""
        self.on_sent()


class PrefillDecodeFlow(msgspec.Struct):
    """Serves requests by both legs, and releases KV blocks that no decode instance will fetch.

    The prefill instance keeps the blocks of a request until a time-out (NIXL: half a minute to eight minutes,
    by release). A decode instance that refuses a request with the prefill parameters tells it to free them,
    so a decode instance is sent a request that it must refuse, in the background.
    """

    upstream: UpstreamClient
    _releases: set[asyncio.Task[None]] = set()
    # Requests whose first token the decode instance generated differently.
    mismatch_count: int = 0

    async def serve_request(self, job: DisaggregatedRequest) -> None:
        plan, exchange, client_stream = job.plan, job.exchange, job.client_stream
        answer, data = await self._run_prefill(job)
        try:
            first_token = self._take_first_token(job, data)
            exchange.record_first_token_mode(plan.mode, plan.reason)
            if first_token is None:
                await self._serve_full_answer(job)
                return
            # From here on the client has a stream, whatever becomes of the decode instance.
            exchange.record_answer(is_streaming=True)
            events = request_plan.render_first_events(first_token, plan)
            await client_stream.send_first_chunk(200, _build_stream_headers(answer), events, True)
            # The prefill token was the last one: nothing is left for the decode instance.
            if first_token.is_last:
                await client_stream.send_end()
            else:
                splicer = StreamSplicer(first_token, plan, events)
                await self._continue_generation(job, splicer)
        finally:
            # Also when the client has left: the prefill instance would keep the blocks until its time-out.
            if job.unfetched_kv_params:
                self._start_release(job.unfetched_kv_params, job.leg_headers)

    def _start_release(self, kv_params: Raw, client_headers: Mapping[str, str]) -> None:
        """Release the blocks that `kv_params` name; `client_headers` give the authorization."""
        pool = self.upstream.pool
        # an instance whose breaker is open can still refuse, and there may be no other
        candidates = pool.get_candidates(DECODE) or pool.get(DECODE)
        if candidates and len(self._releases) < MAX_PENDING_RELEASES:
            task = asyncio.create_task(
                self._send_refused_request(candidates[0], kv_params, client_headers)
            )
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)

    async def wait_releases(self) -> None:
        if self._releases:
            await asyncio.wait(self._releases, timeout=SHUTDOWN_WAIT_S)

    async def _send_refused_request(
        self, instance: Instance, kv_params: Raw, client_headers: Mapping[str, str]
    ) -> None:
        fields = {
            "model": UNKNOWN_MODEL,
            "prompt": "-",
            "max_tokens": 1,
            "kv_transfer_params": kv_params,
        }
        # a trace of its own, not sampled: no client asked for this request
        key = client_headers.get("authorization", "")
        headers = {"Authorization": key} if key else {}
        traceparent = f"00-{context.new_span_id() * 2}-{context.new_span_id()}-00"
        # Else the prefill instance's time-out frees the blocks.
        with contextlib.suppress(*QUERY_ERRORS):
            await self.upstream.queries.ask(
                f"{instance.url}{COMPLETIONS_PATH}",
                body=msgspec.json.encode(fields),
                headers={**headers, header_names.TRACEPARENT: traceparent},
                timeout_s=RELEASE_TIMEOUT_S,
            )

    async def _run_prefill(self, job: DisaggregatedRequest) -> tuple[InstanceAnswer, bytes]:
        """The prefill answer and its body, one token. Raises UpstreamRefused, UpstreamUnavailable."""
        # Not kept: its body may be as large as the client's, and the decode answer long.
        request = replace(
            job.request, leg=PREFILL, headers=job.leg_headers, body=job.plan.build_prefill_body()
        )
        attempts = job.exchange.add_attempts()
        response = await self.upstream.send_request(request, job.exchange.trace_context, attempts)
        attempt = attempts[-1]
        try:
            with AnswerReading(response, attempt):
                # Mostly it came with its head, and what is here cannot be late.
                if response.is_complete:
                    data = response.read_nowait()
                else:
                    # All of it has to come within --first-byte-timeout: it is one token.
                    with FirstByteWait(attempt):
                        data = await response.read()
            attempt.record_whole_answer()
            record_server_timing(attempt, response)
        except UPSTREAM_ERRORS as error:
            raise build_unavailable_error(request.leg, error) from error
        finally:
            self.upstream.pool.record_ended(attempt)
        # Mostly an error in the request, which the decode instance would find, too.
        if response.status >= 400:
            headers = http_headers.filter_response_headers(response.raw_headers)
            raise UpstreamRefused(response.status, headers, data)
        return response, data

    def _take_first_token(self, job: DisaggregatedRequest, data: bytes) -> PrefillAnswer | None:
        """The token in the prefill answer; None if the decode instance is to answer everything.

        Also takes where the prefill instance keeps the KV blocks.
        """
        plan = job.plan
        if plan.mode == MODE_OFF:
            job.unfetched_kv_params = request_plan.parse_kv_params(data)
            return None
        first_token = request_plan.parse_prefill_answer(data, plan.is_chat)
        # Not vLLM's form: the decode instance answers all of it, with the blocks if the answer names them.
        if first_token is None:
            job.unfetched_kv_params = request_plan.parse_kv_params(data)
            plan.turn_off("answer")
            return None
        job.unfetched_kv_params = request_plan.take_kv_params(first_token)
        reason = first_token.explain_refusal(plan) or self._explain_too_long(plan, first_token)
        if reason:
            plan.turn_off(reason)
            return None
        return first_token

    def _explain_too_long(self, plan: LegPlan, first_token: PrefillAnswer) -> str:
        """Reason if prompt and requested tokens exceed the context of a decode instance; else ""."""
        # The prefill instance checks its own context only, and the decode instance's may be shorter.
        # The smallest of them, as any may be chosen.
        decoders = self.upstream.pool.get(DECODE)
        max_model_len = min(
            (each.max_model_len for each in decoders if each.max_model_len), default=0
        )
        wanted_tokens = (first_token.usage or {}).get("prompt_tokens", 0) + (plan.max_tokens or 0)
        return "max_model_len" if max_model_len and wanted_tokens > max_model_len else ""

    async def _serve_full_answer(self, job: DisaggregatedRequest) -> None:
        """Relay the whole decode response; the decode instance generates the first token again."""
        attempts = job.exchange.add_attempts()
        response = await self._send_decode(job, attempts)
        job.drop_bodies()
        # The decode instance fetches the blocks now; after a refusal they are still kept, and have to be
        # released.
        if response.status < 400:
            job.unfetched_kv_params = None
        await relay_response(response, attempts[-1], job.client_stream)

    async def _continue_generation(self, job: DisaggregatedRequest, splicer: StreamSplicer) -> None:
        """Relay the decode stream after the prefill token, which the client has, and end the client's."""
        exchange = job.exchange
        handover_timeline = exchange.begin_handover()
        attempts = exchange.add_attempts(handover_timeline)
        try:
            response = await self._send_decode(job, attempts)
        # Status 200 is out already: an error can only be an event of the stream.
        except UpstreamUnavailable as error:
            await self._send_failure(job, error)
            return
        job.drop_bodies()
        if response.status >= 400:
            exchange.record_failure(str(response.status))
            try:
                with FirstByteWait(attempts[-1]):
                    data = await response.read()
            finally:
                finish_attempt(response, attempts[-1])
            await job.client_stream.send_end(
                request_plan.render_stream_error(data, exchange.error, response.status)
            )
            return
        job.unfetched_kv_params = None
        try:
            last_part, ends_wait = await self._relay_spliced(response, attempts[-1], splicer, job)
        except UPSTREAM_ERRORS as error:
            # Some of the decode answer is out: it is cut, which no client takes for its end.
            if attempts[-1].first_byte_us:
                raise
            await self._send_failure(job, build_unavailable_error(DECODE, error))
            return
        await job.client_stream.send_end(last_part)
        if ends_wait:
            handover_timeline.record_ended()

    async def _send_failure(self, job: DisaggregatedRequest, error: UpstreamUnavailable) -> None:
        """End the client's stream with an error event: no decode answer followed the prefill token."""
        job.exchange.record_failure(str(error.status))
        await job.client_stream.send_end(
            request_plan.render_stream_error(b"", str(error), error.status)
        )

    async def _send_decode(
        self, job: DisaggregatedRequest, attempts: list[Attempt]
    ) -> InstanceAnswer:
        """Send to a decode instance; if it is unavailable, to another one that computes the prompt itself.

        An instance that refuses tells the prefill instance to free the blocks, so no other may be sent to
        fetch them. The other one needs the encodings of the media, as the prefill instance did.
        """
        request = replace(
            job.request,
            leg=DECODE,
            headers=job.leg_headers,
            body=job.plan.build_decode_body(job.unfetched_kv_params),
            # Blocks are fetched once: the prefill instance frees them afterwards.
            single_use=bool(job.unfetched_kv_params),
            media_encoded=False,
        )
        response = await self.upstream.send_request(request, job.exchange.trace_context, attempts)
        # Only 502 to 504 say that this decode instance is not there; any other status is for the client.
        if (
            not job.unfetched_kv_params
            or response.status not in failures.UNAVAILABLE_STATUSES
            or not self.upstream.take_refused_retry(request, attempts)
        ):
            return response
        response.close()
        # Before the next one is chosen, by the load that each decode instance has.
        self.upstream.pool.record_ended(attempts[-1])
        # At once: the prefill instance needs the memory for other requests.
        self._start_release(job.unfetched_kv_params, request.headers)
        job.unfetched_kv_params = None
        body = job.plan.build_decode_body(None)
        # It computes the whole prompt, media included.
        if job.plan.ec_params:
            body = splice_params(body, job.plan.ec_params)
        request = replace(
            request, body=body, single_use=False, media_encoded=job.request.media_encoded
        )
        return await self.upstream.send_request(request, job.exchange.trace_context, attempts)

    async def _relay_spliced(
        self,
        response: InstanceAnswer,
        attempt: Attempt,
        splicer: StreamSplicer,
        job: DisaggregatedRequest,
    ) -> tuple[bytes, bool]:
        """Relay all but what came with the end; returns that, and whether it has the first token."""
        timeline = job.exchange.handover_timeline
        rewritten = b""
        try:
            with AnswerReading(response, attempt):
                chunk = await read_first_chunk(response, attempt)
                record_server_timing(attempt, response)
                # What only repeats the prefill token has no bytes left, and does not end the wait.
                while chunk and not (rewritten := splicer.splice_chunk(chunk)):
                    chunk = await response.readany()
                # A stream that ended without another token has no wait to tell of.
                if not chunk or response.at_eof():
                    return rewritten + splicer.flush_rest(), bool(chunk)
                await job.client_stream.send_chunk(rewritten)
                if timeline is not None:
                    timeline.record_ended()
                last_part = await job.client_stream.send_rest(response, splicer.splice_chunk)
                return last_part + splicer.flush_rest(), False
        finally:
            # Also when the client left in between.
            if splicer.has_mismatch:
                job.exchange.record_token_mismatch()
                self.mismatch_count += 1


def _build_stream_headers(answer: InstanceAnswer) -> HeaderList:
    # Length and type were those of the prefill instance's JSON.
    headers = [
        header
        for header in http_headers.filter_response_headers(answer.raw_headers)
        if header[0] not in (b"content-type", b"content-length")
    ]
    return [*headers, _EVENT_STREAM_HEADER]


class ProxyEndpoint:
    """The ASGI endpoint of every POST below /v1; `send_record` takes a Record's bytes and never waits.

    Without `send_record` tracing is off: nothing is measured, and trace headers pass as they came.
    """

    def __init__(
        self,
        upstream: UpstreamClient,
        settings: Settings,
        send_record: Callable[[bytes], bool] | None,
        reports: RecentReports | None = None,
        first_token: str = types.MODE_STRIP,
        admission: AdmissionGate | None = None,
        trust_priority: bool = False,
    ) -> None:
        self.upstream = upstream
        self.routing = upstream.routing
        self.settings = settings
        self.limits = upstream.limits
        self.body_budget = BodyBudget(self.limits)
        self.body_parser = BodyParser()
        policy = self.routing.prefill_policy
        self.hold_queue = (
            HoldQueue(policy, upstream.pool.get_candidates, self.limits)
            if policy.state.options.max_queue_s
            else None
        )
        self.trust_priority = trust_priority
        self.admission = admission or AdmissionGate(upstream)
        self.response_counts: Counter[str] = Counter()  # by class of status
        self.send_record = send_record
        self.reports = reports if reports is not None else RecentReports()
        self.reporter = (
            ExchangeReporter(send_record, self.reports, settings.metrics) if send_record else None
        )
        self.recomputed_media = encoders.RecomputedMediaLog()
        self.first_token_mode = first_token
        self.prefill_decode = PrefillDecodeFlow(upstream)

    async def __call__(self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        """Serve one request; its result is recorded when it is over, however it ended."""
        arrived_us = clock.now_us()
        client_headers = http_headers.split_headers(scope["headers"], self.send_record is not None)
        exchange = self._begin_exchange(scope, client_headers, arrived_us)
        output: ClientOutput = scope["extensions"][OUTPUT_EXTENSION]
        wants_timing = client_headers.get(header_names.ASK_TIMING) == "1"
        client_stream = ClientStream(exchange, send, output, wants_timing, self.reporter)
        client_body = None
        try:
            # Before the body is read: who is refused costs no memory.
            exchange.record_owner(
                self.admission.admit_request(scope, client_headers, bool(exchange.operation))
            )
            task = asyncio.current_task()
            client_body = self.body_budget.begin_body(task, exchange.owner or "")
            if await read_body(receive, client_headers, self.body_budget, client_body, exchange):
                # The body is here: from now on the client can only leave, which ends the legs.
                output.begin_watch(partial(_cancel_request, exchange, task))
                await self._serve_request(scope, client_headers, client_body, client_stream)
        except asyncio.CancelledError:
            if not exchange.is_client_gone:
                exchange.record_failure(keys.ERROR_STOPPED)  # nobody but the server's stop does
                raise
            exchange.record_failure(keys.ERROR_DISCONNECTED)
        except RouterError as error:
            if isinstance(error, RequestRejected):
                self.admission.refusal_counts[error.reason] += 1
            await client_stream.send_error(error)
        except failures.UPSTREAM_ERRORS as error:
            # Mid-stream, no error can be sent: returning makes uvicorn close the connection.
            exchange.record_failure(type(error).__name__)
            if not exchange.status:
                await client_stream.send_error(failures.build_unavailable_error("", error))
        except Exception as error:
            # An error of the router: reported and counted too, and logged by uvicorn.
            exchange.record_failure(type(error).__name__)
            if not exchange.status:
                await client_stream.send_error(RouterError(500, "The router failed."))
            raise
        finally:
            output.end_watch()
            exchange.record_last_send()
            if exchange.owner:
                self.admission.end_request(exchange.owner)
            if client_body is not None:
                self.body_budget.release_body(client_body)
            self._end_exchange(exchange)

    def _begin_exchange(
        self, scope: AsgiScope, client_headers: http_headers.ClientHeaders, arrived_us: int
    ) -> Exchange:
        trace = context.NO_CONTEXT
        if self.send_record is not None:
            traceparent = client_headers.get(header_names.TRACEPARENT)
            tracestate = client_headers.get(header_names.TRACESTATE)
            trace = context.start_context(traceparent, tracestate, self.settings)
        path = scope["path"]
        return Exchange(
            trace,
            http_headers.choose_request_id(client_headers.get(header_names.REQUEST_ID), trace),
            path,
            endpoints.find_route(path),
            scope.get("scheme", "http"),
            OPERATION_BY_PATH.get(path, ""),
            # Behind another router that we trust, that one measures the client's TTFT.
            not (self.settings.trust_sampled and client_headers.get(header_names.LEG)),
            RequestTimeline(arrived_us),
        )

    async def _serve_request(
        self,
        scope: AsgiScope,
        client_headers: http_headers.ClientHeaders,
        client_body: ClientBody,
        client_stream: ClientStream,
    ) -> None:
        exchange = client_stream.exchange
        leg_plan, request = await self._prepare_request(
            scope, client_headers, client_body.take_data(), exchange
        )
        if leg_plan is not None:
            if len(leg_plan.legs) > 1:
                job = DisaggregatedRequest(
                    leg_plan,
                    request,
                    exchange,
                    client_stream,
                    partial(self.body_budget.release_body, client_body),
                )
                del leg_plan, request
                await self.prefill_decode.serve_request(job)
                return
            exchange.record_first_token_mode(leg_plan.mode, leg_plan.reason)
        attempts = exchange.add_attempts()
        response = await self.upstream.send_request(request, exchange.trace_context, attempts)
        # An answer may last for minutes, and no instance gets the body any more.
        del leg_plan, request
        self.body_budget.release_body(client_body)
        await relay_response(response, attempts[-1], client_stream)

    async def _prepare_request(
        self,
        scope: AsgiScope,
        client_headers: http_headers.ClientHeaders,
        body_bytes: bytes,
        exchange: Exchange,
    ) -> tuple[request_plan.LegPlan | None, types.RoutingRequest]:
        """The plan of its legs where there is one, and the request for the first of them.

        Its media are encoded by then. Raises RouterError for what no instance gets.
        """
        pool = self.upstream.pool
        encodes = pool.has_encoders and request_body.may_be_encoded_apart(
            exchange.path, pool.answering_leg
        )
        parsed_body = await self.body_parser.parse(body_bytes, exchange.path if encodes else "")
        exchange.record_parsed(parsed_body.model, parsed_body.stream, parsed_body.background)
        self.admission.check_body(parsed_body, client_headers, bool(exchange.operation))
        if exchange.operation:
            authorization = client_headers.forwarded.get("authorization", "")
            await self.admission.check_model(parsed_body, pool.answering_leg, authorization)
        if pool.lists_model(pool.answering_leg, parsed_body.model):
            exchange.record_model_listed()
        request = self._build_routing_request(scope, client_headers, parsed_body, exchange)
        leg_plan = None
        if request.leg == DECODE:
            leg_plan = await self.body_parser.run_on(
                parsed_body,
                request_plan.plan_legs,
                exchange.path,
                parsed_body.data,
                parsed_body.stream,
                self.first_token_mode,
            )
            request = replace(request, leg=leg_plan.legs[0])
        if exchange.path in PROMPT_PATHS:
            has_media = bool(parsed_body.media_items)
            request = await self.routing.read_prompt(
                request, exchange.path, exchange.timeline, has_media
            )
        if parsed_body.media_items:
            encoder_requests = encoders.build_encoder_requests(parsed_body, request)
            # Before the encoders, whose work would be lost with a request that is refused then.
            self.routing.check_slo(request, encoder_requests)
            params = await encoders.encode_items(self.upstream, encoder_requests, exchange)
            request = encoders.add_ec_params(request, leg_plan, params)
        # After the encoders, which need not wait for it; embeddings have no prompt that is known.
        if self.hold_queue is not None and request.prompt_tokens:
            # As with nice(1): anyone may let others pass, but not pass those who ask for nothing.
            priority = parsed_body.priority if self.trust_priority else max(parsed_body.priority, 0)
            await self.hold_queue.wait_turn(request, priority, exchange.timeline)
        return leg_plan, request

    def _build_routing_request(
        self,
        scope: AsgiScope,
        client_headers: http_headers.ClientHeaders,
        parsed_body: request_body.RequestBody,
        exchange: Exchange,
    ) -> types.RoutingRequest:
        query = scope.get("query_string", b"").decode("latin-1")
        path = scope.get("raw_path", exchange.path.encode()).decode("latin-1")
        return types.RoutingRequest(
            self.upstream.pool.answering_leg,
            f"{path}?{query}" if query else path,
            parsed_body.model,
            exchange.request_id,
            client_headers.forwarded,
            parsed_body.data,
            arrived_us=exchange.timeline.arrived_us,
            slo_s=read_ttft_limit(client_headers.forwarded.get(header_names.TTFT_LIMIT, "")),
        )

    def _end_exchange(self, exchange: Exchange) -> None:
        for attempt in (attempt for chain in exchange.attempt_chains for attempt in chain):
            self.upstream.pool.record_ended(attempt)
            self.recomputed_media.record_attempt(attempt)
        self.response_counts[
            f"{exchange.status // 100}xx" if exchange.status else exchange.error
        ] += 1
        if self.reporter is not None:
            self.reporter.report(exchange, is_over=True)


def _cancel_request(exchange: Exchange, task: asyncio.Task[Any] | None) -> None:
    if task is not None and exchange.record_client_left():
        task.cancel()
