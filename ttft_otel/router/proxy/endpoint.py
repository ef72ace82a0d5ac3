# SPDX-License-Identifier: Apache-2.0
"""The data path: serves a client's request from its legs, relays their bytes, notes the times.

A raw ASGI endpoint: a framework's request and response objects would double its cost.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from msgspec.structs import replace

from ttft_otel.model import endpoints, stages
from ttft_otel.model.endpoints import OPERATION_BY_PATH
from ttft_otel.model.names import header_names, keys
from ttft_otel.router import types
from ttft_otel.router.disagg import encoders, request_body, request_plan
from ttft_otel.router.disagg.request_body import BodyParser
from ttft_otel.router.errors import RequestRejected, RouterError
from ttft_otel.router.proxy.admission import (
    AdmissionGate,
    BodyBudget,
    ClientBody,
    read_body,
    read_ttft_limit,
)
from ttft_otel.router.proxy.client_stream import (
    OUTPUT_EXTENSION,
    ClientOutput,
    ClientStream,
    relay_response,
)
from ttft_otel.router.proxy.exchange_reporter import ExchangeReporter, RecentReports
from ttft_otel.router.proxy.hold_queue import HoldQueue
from ttft_otel.router.proxy.prefill_decode import DisaggregatedRequest, PrefillDecodeFlow
from ttft_otel.router.routing.upstream_client import UpstreamClient
from ttft_otel.router.timeline import Exchange, RequestTimeline
from ttft_otel.router.types import AsgiReceive, AsgiScope, AsgiSend
from ttft_otel.router.upstream import failures, http_headers
from ttft_otel.tracing import clock, context
from ttft_otel.tracing.settings import Settings

PROMPT_PATHS: Final = (*OPERATION_BY_PATH, endpoints.MESSAGES_PATH)  # requests with a prompt


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
        if request.leg == stages.DECODE:
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
            self.reporter.report_end(exchange)


def _cancel_request(exchange: Exchange, task: asyncio.Task[Any] | None) -> None:
    if task is not None and exchange.record_client_left():
        task.cancel()
