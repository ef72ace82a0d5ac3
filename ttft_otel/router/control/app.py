# SPDX-License-Identifier: Apache-2.0
"""The control plane (health, models, metrics, /ttft_report) around the data path of endpoint.py.

command.py builds the application and runs it under uvicorn. Metrics are computed from pool, endpoint and
exporter counts at each scrape.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any, Final, get_args

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException

from ttft_otel import __version__
from ttft_otel.model.endpoints import MODELS_PATH
from ttft_otel.model.names import env_names, metric_names
from ttft_otel.model.stages import ENCODE
from ttft_otel.router.discovery.discovery import Discovery
from ttft_otel.router.errors import RequestRejected
from ttft_otel.router.proxy.admission import HoldQueue
from ttft_otel.router.proxy.client_stream import render_error
from ttft_otel.router.proxy.endpoint import ProxyEndpoint
from ttft_otel.router.routing.policies.policy_state import PolicyState
from ttft_otel.router.routing.prefixes.prefix_source import PrefixSource
from ttft_otel.router.routing.routing_service import RoutingService
from ttft_otel.router.types import AsgiReceive, AsgiScope, AsgiSend, InstanceState
from ttft_otel.tracing import guard, meter
from ttft_otel.tracing.meter import build_counter, build_gauge

DATA_PATH_PREFIX: Final = "/v1/"
CLOSE_HEADER: Final = (b"connection", b"close")
INSTANCE_LABELS: Final = ("leg", "instance")
KV_EVENTS_SOURCE: Final = "kv-events"
# By how much each state keeps away, so that a graph of it can be read.
_BREAKER_VALUES: Final = {"closed": 0.0, "half-open": 0.5, "open": 1.0}
MetricsMerger = Callable[[Iterator[Metric]], Iterator[Metric]]


class RouterApp:
    """The ASGI application: POST below /v1 is data and goes straight to `endpoint`.

    In front of FastAPI, not a Route inside it: whatever middleware or telemetry of its own FastAPI
    has then costs the data path nothing.
    """

    def __init__(
        self, endpoint: ProxyEndpoint, control_plane: FastAPI, metrics: RouterMetrics
    ) -> None:
        self.endpoint = endpoint
        self.control_plane = control_plane
        self.metrics = metrics
        self.admission = endpoint.admission
        self.discovery = metrics.discovery  # where instances come and go
        self.allowed_hosts: tuple[str, ...] = ()  # further names that Host may have
        self.cors_origins: tuple[str, ...] = ()  # origins whose web pages may call the router

    async def __call__(self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        # All else, unknown paths and methods included, is for FastAPI to answer.
        is_data = scope["type"] == "http" and scope["method"] == "POST"
        if not (is_data and scope["path"].startswith(DATA_PATH_PREFIX)):
            await self.control_plane(
                scope,
                receive,
                _explain_startup_errors(send) if scope["type"] == "lifespan" else send,
            )
            return
        if self.admission.is_draining:
            send = _announce_close(send)
        # Only data is counted: a scrape or a probe under way must not delay a stop.
        self.admission.requests_under_way += 1
        try:
            await self.endpoint(scope, receive, send)
        finally:
            self.admission.requests_under_way -= 1


def build_app(
    endpoint: ProxyEndpoint,
    handoff_counts: Callable[[], Mapping[str, int]],
    background: Callable[[], AbstractAsyncContextManager[object]] = nullcontext,
    discovery: Discovery | None = None,
) -> RouterApp:
    """Build the application from data path and control plane.

    handoff_counts: returns counts of records by result. background: entered while the application runs.
    discovery: whose sources /readyz and /metrics describe, None without --discover.
    """

    @asynccontextmanager
    async def run_lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            # In this order: what runs in the background changes a pool that is probed by then.
            await endpoint.upstream.start()
            async with background():
                yield
        finally:
            # First: releases are sent by the session that is closed next.
            await endpoint.prefill_decode.wait_releases()
            await endpoint.upstream.close()

    app = FastAPI(
        title="ttft-otel router",
        version=__version__,
        lifespan=run_lifespan,
        openapi_url=None,  # it would describe the control plane, which is in the docs, without a key
    )
    metrics = RouterMetrics(endpoint, handoff_counts, discovery)
    _add_error_handlers(app, endpoint.admission.refusal_counts)
    _add_health_routes(app, endpoint, discovery)
    _add_model_routes(app, endpoint)

    @app.get("/metrics")
    async def read_metrics() -> Response:
        return Response(metrics.render_text(), media_type=CONTENT_TYPE_LATEST)

    # `:path`, as a client may choose an ID with slashes in it.
    @app.get("/ttft_report/{request_id:path}")
    async def get_ttft_report(request_id: str, request: Request) -> JSONResponse:
        # An ID may be guessed, so reports are only for whoever has the key of their request.
        owner = _check_api_key(endpoint, request)
        report = await endpoint.reports.find_report(owner, request_id)
        if report is not None:
            return JSONResponse(report)
        max_reports = endpoint.reports.max_reports
        message = f"No report for {request_id[:256]!r}: the newest {max_reports} are kept."
        if endpoint.send_record is None:
            message = (
                f"No reports: tracing is off. Start the router without {env_names.TTFT_OTEL}=0."
            )
        raise RequestRejected(404, message)

    return RouterApp(endpoint, app, metrics)


def _announce_close(send: AsgiSend) -> AsgiSend:
    """Say that the connection ends with this response: a client that kept it would meet a refusal later."""

    async def send_last(message: Any) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], CLOSE_HEADER]}
        await send(message)

    return send_last


def _explain_startup_errors(send: AsgiSend) -> AsgiSend:
    """Report configuration errors at startup by message and remedy, without a traceback."""

    async def send_explained(message: Any) -> None:
        # Starlette sends this message while it handles the error of the startup.
        error = sys.exc_info()[1]
        if message["type"] == "lifespan.startup.failed" and isinstance(error, ValueError):
            message = {**message, "message": f"ttft-otel cannot start: {error}"}
        await send(message)

    return send_explained


def _add_health_routes(app: FastAPI, endpoint: ProxyEndpoint, discovery: Discovery | None) -> None:
    @app.get("/healthz")
    async def get_healthz() -> dict[str, str]:
        # Alive while the event loop turns: a restart would not bring instances back.
        return {"status": "ok"}

    @app.get("/health")
    @app.get("/readyz")
    async def get_readiness() -> JSONResponse:
        """Ready when each leg has an instance that is not failed, until the router is to stop."""
        upstream = endpoint.upstream
        if not endpoint.admission.is_draining:
            await upstream.health_monitor.wait_probed()
        states: dict[str, dict[str, str]] = {}
        for instance in upstream.pool:
            states.setdefault(instance.leg, {})[instance.url] = instance.state
        missing_legs = upstream.pool.list_missing_legs()
        # One healthy instance per leg can serve; a draining one takes nothing new.
        is_ready = not missing_legs and all("healthy" in leg.values() for leg in states.values())
        body: dict[str, Any] = {"status": "ready" if is_ready else "not ready", "legs": states}
        if missing_legs:
            body["reason"] = f"there is no instance yet for {' and '.join(missing_legs)}"
        if discovery is not None:
            body["discovery"] = discovery.describe_sources()
        # Said while requests still pass: balancers have --drain-delay to notice.
        if endpoint.admission.is_draining:
            is_ready = False
            body["status"] = "draining"
        return JSONResponse(body, 200 if is_ready else 503)


def _add_model_routes(app: FastAPI, endpoint: ProxyEndpoint) -> None:
    @app.get(MODELS_PATH)
    async def list_models(request: Request) -> JSONResponse:
        _check_api_key(endpoint, request)
        upstream = endpoint.upstream
        # the client's key is the instances' one unless we have keys of our own
        authorization = (
            "" if endpoint.admission.client_keys else request.headers.get("authorization", "")
        )
        # Asked anew: an adapter may have been loaded a moment ago.
        statuses = await upstream.health_monitor.refresh_leg_models(
            upstream.pool.answering_leg, authorization
        )
        any_answered = 200 in statuses.values()
        if not any_answered and (
            refused_status := next((each for each in statuses.values() if each in (401, 403)), 0)
        ):
            raise RequestRejected(refused_status, "The instances do not take this key.")
        merged: dict[str, Any] = {}
        for instance, status in statuses.items():
            if status == 200 or not any_answered:  # with nobody there, what they said before
                for card in instance.model_cards:
                    merged.setdefault(card["id"], card)
        if not merged and not any_answered:
            raise RequestRejected(502, "No instance answered /v1/models; see /readyz.")
        return JSONResponse({"object": "list", "data": list(merged.values())})


def _check_api_key(endpoint: ProxyEndpoint, request: Request) -> str:
    """The owner, "" where keys are not checked. Raises RequestRejected."""
    if not endpoint.admission.client_keys:
        return ""
    # Starlette reads headers as Latin-1, and a key may be any text.
    text = request.headers.get("authorization", "").encode("latin-1")
    return endpoint.admission.check_api_key(text.decode("utf-8", "surrogateescape"))


def _add_error_handlers(app: FastAPI, refusal_counts: Counter[str]) -> None:
    """Render what the control plane refuses in OpenAI's form, and count it."""

    async def render_rejection(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestRejected)
        refusal_counts[error.reason] += 1
        headers, data = render_error(error)
        header_map = {name.decode(): value.decode() for name, value in headers}
        return Response(data, error.status, header_map)

    async def render_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        rejection = RequestRejected(error.status_code, str(error.detail))
        response = await render_rejection(request, rejection)
        # The Allow header of a 405, for example.
        response.headers.update(error.headers or {})
        return response

    app.add_exception_handler(RequestRejected, render_rejection)
    app.add_exception_handler(HTTPException, render_http_error)


def collect_routing_metrics(
    routing: RoutingService, hold_queue: HoldQueue | None = None
) -> Iterator[Metric]:
    """Metrics of the legs in `routing.reported_legs`; none if the policy compares no work."""
    # Without pending load nothing is predicted: all of the rest would be zeros for ever.
    if not routing.prefill_policy.reads_prompts:
        return
    if hold_queue is not None:
        help_text = "Requests that wait for an instance with a shorter queue."
        yield build_gauge(metric_names.ROUTER_HELD, help_text, len(hold_queue))
        help_text, holds = "Requests that waited, by what became of them.", hold_queue.counts
        yield build_counter(metric_names.ROUTER_HOLDS, help_text, holds, "result")
    if routing.prompt_reader is not None:
        help_text = "Prompts by how their tokens became known, or why not."
        counts = routing.prompt_reader.counts
        yield build_counter(metric_names.ROUTER_PROMPTS, help_text, counts, "result")
    yield from _collect_pending(routing)
    yield from _collect_prediction_quality(routing)
    yield from _collect_fits(routing)


def _map_states(routing: RoutingService) -> dict[tuple[str, ...], PolicyState]:
    """The state of the policy that chooses each instance, by leg and URL."""
    return {
        (leg, instance.url): routing.get_policy(leg).state
        for leg in routing.reported_legs
        for instance in routing.pool.get(leg)
    }


def _collect_pending(routing: RoutingService) -> Iterator[Metric]:
    loads = {key: state.pending.get_load(key[1]) for key, state in _map_states(routing).items()}
    help_text = "Requests sent that have no first token yet."
    requests = {key: len(load.entries) for key, load in loads.items()}
    yield build_gauge(metric_names.ROUTER_PENDING_PREFILLS, help_text, requests, *INSTANCE_LABELS)
    help_text = "Prompt tokens that these still need computed."
    tokens = {key: load.tokens_to_compute for key, load in loads.items()}
    yield build_gauge(metric_names.ROUTER_PENDING_TOKENS, help_text, tokens, *INSTANCE_LABELS)


def _collect_prediction_quality(routing: RoutingService) -> Iterator[Metric]:
    judged = {
        key: state.outcomes[key[1]]
        for key, state in _map_states(routing).items()
        # Before something was judged 0 would look like a perfect prediction.
        if key[1] in state.outcomes
    }
    help_text = "Mean error of predicted TTFTs, as a share."
    errors = {key: each.mape for key, each in judged.items() if each.mape is not None}
    yield build_gauge(metric_names.ROUTER_PREDICTION_MAPE, help_text, errors, *INSTANCE_LABELS)
    help_text = "Share of the TTFTs' variance that was predicted."
    explained = {key: each.r2 for key, each in judged.items() if each.r2 is not None}
    yield build_gauge(metric_names.ROUTER_PREDICTION_R2, help_text, explained, *INSTANCE_LABELS)


def _collect_fits(routing: RoutingService) -> Iterator[Metric]:
    fits = {
        (leg, url, model): fit
        for leg in routing.reported_legs
        for (model, url), fit in routing.get_policy(leg).state.models.list_fits().items()
        # Without a URL it is the line that the instances of a model share.
        if url
    }
    help_text = "Seconds of a prefill: once (a), per token (b), pair (d), answer beside it (e)."
    coefficients = {
        (*key, name): value
        for key, fit in fits.items()
        # There is no line before enough samples were taken.
        for name, value in (fit.line._asdict() if fit.line is not None else {}).items()
    }
    labels = (*INSTANCE_LABELS, "model")
    yield build_gauge(
        metric_names.ROUTER_PREFILL_FIT, help_text, coefficients, *labels, "coefficient"
    )
    help_text = "Prefills that these were learnt from."
    samples = {key: fit.samples for key, fit in fits.items()}
    yield build_gauge(metric_names.ROUTER_PREFILL_SAMPLES, help_text, samples, *labels)


def collect_cache_metrics(leg: str, prefix_source: PrefixSource) -> Iterator[Metric]:
    """Metrics of `prefix_source`, which knows the instances of `leg`."""
    # Sorted, so that the lines of two scrapes can be compared.
    described = sorted(prefix_source.describe_instances().items())
    blocks = {(leg, url, each["source"]): each["blocks"] for url, each in described}
    help_text = "Blocks that it is known to have cached."
    labels = INSTANCE_LABELS
    yield build_gauge(metric_names.ROUTER_CACHED_BLOCKS, help_text, blocks, *labels, "source")
    events = {
        (leg, url, event): number
        for url, each in described
        if each["source"] == KV_EVENTS_SOURCE
        for event, number in each["counts"].items()
    }
    help_text = "What became of its KV events."
    yield build_counter(metric_names.ROUTER_KV_EVENTS, help_text, events, *labels, "event")


class RouterMetrics(Collector):
    """A Prometheus collector of all metrics of the router.

    reloads: configuration reloads by result. handoff_counts: returns counts of records by result.
    discovery: None without --discover.
    """

    def __init__(
        self,
        endpoint: ProxyEndpoint,
        handoff_counts: Callable[[], Mapping[str, int]],
        discovery: Discovery | None = None,
    ) -> None:
        self.discovery = discovery
        self.endpoint = endpoint
        self.handoff_counts = handoff_counts
        self.reloads = {"ok": 0, "failed": 0}
        self.merge_workers: MetricsMerger | None = None  # with --workers
        # With --shared-state.
        self.collect_shared_state: Callable[[], Iterator[Metric]] | None = None
        # A registry of its own: the default one has what libraries register in it, too.
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render_text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        own = self.collect_own()
        return own if self.merge_workers is None else self.merge_workers(own)

    def collect_own(self) -> Iterator[Metric]:
        yield from self._collect_tracing()
        yield from self._collect_requests()
        yield from self._collect_instances()
        if self.discovery is not None:
            yield from self._collect_discovery(self.discovery)
        routing = self.endpoint.routing
        yield from collect_routing_metrics(routing, self.endpoint.hold_queue)
        if routing.prefix_source is not None:
            yield from collect_cache_metrics(routing.prefilling_leg, routing.prefix_source)
        if self.collect_shared_state is not None:
            yield from self.collect_shared_state()

    def _collect_tracing(self) -> Iterator[Metric]:
        counts = self.handoff_counts()
        # From 0 on: rate() sees the first rise only of a series that was there before.
        yield build_counter(
            metric_names.RECORDS, "Records given to the exporter.", counts.get("sent", 0)
        )
        dropped = {"handoff": counts.get("dropped", 0)}
        yield build_counter(metric_names.DROPPED, meter.LOST_HELP, dropped, "reason")
        errors = guard.error_counts
        yield build_counter(metric_names.HOOK_ERRORS, meter.ERRORS_HELP, errors, "place")
        losses = {reason: counts.get(reason, 0) for reason in meter.LOSS_REASONS}
        yield build_counter(metric_names.LOST, meter.LOST_HELP, losses, "reason")

    def _collect_requests(self) -> Iterator[Metric]:
        upstream, admission = self.endpoint.upstream, self.endpoint.admission
        responses, refusals = self.endpoint.response_counts, admission.refusal_counts
        yield build_counter(
            metric_names.ROUTER_REQUESTS, "Requests that ended.", responses, "result"
        )
        help_text = "Requests and connections that the router refused."
        yield build_counter(metric_names.ROUTER_REFUSALS, help_text, refusals, "reason")
        # Not the sum over instances: one request may have several attempts under way.
        yield build_gauge(
            metric_names.ROUTER_REQUESTS_IN_FLIGHT,
            "Requests under way.",
            admission.requests_under_way,
        )
        help_text, retries = "Attempts after a failed one.", upstream.retry_counts
        yield build_counter(metric_names.ROUTER_RETRIES, help_text, retries, "leg")
        help_text = "Requests whose first token from D was not P's."
        mismatches = self.endpoint.prefill_decode.mismatch_count
        yield build_counter(metric_names.ROUTER_FIRST_TOKEN_MISMATCHES, help_text, mismatches)
        help_text, available = "Retries allowed right now.", upstream.retry_budget.available_retries
        yield build_gauge(metric_names.ROUTER_RETRY_BUDGET, help_text, available)
        help_text = "Configurations read again."
        yield build_counter(metric_names.ROUTER_RELOADS, help_text, self.reloads, "result")

    def _collect_discovery(self, discovery: Discovery) -> Iterator[Metric]:
        help_text = "Instances that a source names."
        # What was refused is not in `roles_by_url`.
        found = {each.address.text: len(each.roles_by_url) for each in discovery.watched}
        yield build_gauge(metric_names.ROUTER_DISCOVERED_INSTANCES, help_text, found, "source")
        help_text = "Times that a source of instances could not be asked."
        failures = {each.address.text: each.failures for each in discovery.watched}
        yield build_counter(metric_names.ROUTER_DISCOVERY_FAILURES, help_text, failures, "source")

    def _collect_instances(self) -> Iterator[Metric]:
        # Instances that were removed are not in the pool, so their series end.
        instances = {(each.leg, each.url): each for each in self.endpoint.upstream.pool}
        # A series per state, of which one is 1: no query has to know numbers for states.
        states = {
            (*key, name): float(each.state == name)
            for key, each in instances.items()
            for name in get_args(InstanceState)
        }
        labels = INSTANCE_LABELS
        help_text = "1 for the state it is in."
        yield build_gauge(metric_names.ROUTER_INSTANCE, help_text, states, *labels, "state")
        # Of this worker; with several, workers/worker.py adds them up.
        in_flight = {key: each.in_flight for key, each in instances.items()}
        yield build_gauge(metric_names.ROUTER_IN_FLIGHT, "Attempts under way.", in_flight, *labels)
        help_text = "1 while it gets nothing, 0.5 while it is tried."
        breakers = {key: _BREAKER_VALUES[each.breaker.state] for key, each in instances.items()}
        yield build_gauge(metric_names.ROUTER_BREAKER_OPEN, help_text, breakers, *labels)
        results = {
            (*key, result): number
            for key, each in instances.items()
            for result, number in each.attempt_results.items()
        }
        help_text = "Attempts that ended."
        yield build_counter(metric_names.ROUTER_ATTEMPTS, help_text, results, *labels, "result")
        recomputed = {
            key: each.recomputed_items
            for key, each in instances.items()
            # An encoder encodes an item for the first time, so it is not asked.
            if self.endpoint.upstream.pool.has_encoders and each.leg != ENCODE
        }
        help_text = "Media items that it encoded although an encoder had encoded them."
        yield build_counter(metric_names.ROUTER_RECOMPUTED_ITEMS, help_text, recomputed, *labels)
