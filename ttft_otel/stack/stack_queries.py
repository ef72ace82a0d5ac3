# SPDX-License-Identifier: Apache-2.0
"""Ask a running stack over HTTP, add dashboards to a Grafana, send one trace to look for at every hop.

That trace is one `encode` span of a service of its own: panels and alerts of TTFT leave encoders out, so
that it does not count as a slow request. It is slow enough to pass any sampling. For commands/stack.py.
"""

from __future__ import annotations

import base64
import json
import secrets
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

import click
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
from rich.console import Console
from rich.text import Text

from ttft_otel.exporter import span_batch
from ttft_otel.model import record
from ttft_otel.model.names import keys, span_names
from ttft_otel.stack import stack_folder

REQUEST_TIMEOUT_S: Final = 10.0
JSON_CONTENT_TYPE: Final = "application/json"
SOURCE_TYPES: Final = ("prometheus", "tempo")  # of data sources that our dashboards ask


SMOKE_SERVICE: Final = "ttft-smoke"
# Almost three seconds, above sampling's limit of one; a sum that no other span has by chance.
SMOKE_STAGES_US: Final = {"receive": 500, "preprocess": 1_999_067, "encoder.compute": 1_000_000}
SMOKE_TTFT_MS: Final = sum(SMOKE_STAGES_US.values()) // 1000
# Seconds: a tail sampler waits for late spans, Tempo's search for its first block.
ARRIVAL_TIMEOUT_S: Final = 60.0

COLLECTOR_HOP_REMEDY: Final = "is the stack up? ttft-otel stack status"
TEMPO_HOP_REMEDY: Final = (
    "look for `exporter` errors in the collector's log, then for refusals in Tempo's;"
    " without the attribute ttft_ms the collector runs another configuration"
)
PROMETHEUS_HOP_REMEDY: Final = (
    "look for `exporter` errors in the collector's log; Prometheus needs --web.enable-otlp-receiver"
)
GRAFANA_HOP_REMEDY: Final = "read Grafana's log"


class BackendQueryError(RuntimeError):
    """No answer, or an error; the message has the address and the reason."""


def fetch_json(url: str, **parameters: object) -> Any:
    """GET `url`; returns the JSON, or the text if it is not JSON. Raises BackendQueryError."""
    # None is a parameter left out, so that callers can pass on what they were not given.
    asked = {name: str(value) for name, value in parameters.items() if value is not None}
    full = f"{url}?{urllib.parse.urlencode(asked)}" if asked else url
    body = _read_response(urllib.request.Request(full, headers={"accept": JSON_CONTENT_TYPE}))
    try:
        # Health checks answer with text ("ready"), all else with JSON.
        return json.loads(body)
    except ValueError:
        return body.decode()


def send_body(
    url: str,
    body: bytes | None,
    kind: str = "application/x-protobuf",
    method: str = "POST",
    token: str = "",
) -> bytes:
    """Send bytes to `url`; gives the answer. Raises BackendQueryError for a status other than 2xx.

    token: a bearer token, or the password of the user that `url` names.
    """
    request = urllib.request.Request(url, body, {"content-type": kind}, method=method)
    if token:
        _add_authorization(request, f"Bearer {token}")
    return _read_response(request, token)


def _read_response(request: urllib.request.Request, password: str = "") -> bytes:
    _add_basic_auth(request, password)
    # For messages: without the query, and after _add_basic_auth() without the password.
    url = request.full_url.partition("?")[0]
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as answer:
            body: bytes = answer.read()
    except urllib.error.HTTPError as error:
        with error:
            # The body has the reason, and may be a whole page of HTML.
            detail = error.read(300).decode(errors="replace")
        # URLError wraps the socket's error, which says more.
        raise BackendQueryError(f"{url} answered {error.code}: {detail}") from error
    except OSError as error:
        reason = getattr(error, "reason", error)
        text = getattr(reason, "strerror", "") or reason
        raise BackendQueryError(f"{url} does not answer: {text}") from error
    return body


def _add_basic_auth(request: urllib.request.Request, password: str) -> None:
    """Turn NAME:PASSWORD in a URL into an Authorization header, as browsers do; NAME alone has `password`."""
    # urllib itself would take NAME:PASSWORD for a part of the host.
    parts = urllib.parse.urlsplit(request.full_url)
    credentials, _, host = parts.netloc.rpartition("@")
    if credentials:
        request.full_url = parts._replace(netloc=host).geturl()
        # Quoted in the URL, so that a password may hold @ or a colon.
        name = urllib.parse.unquote(credentials)
        token = base64.b64encode((name if ":" in name else f"{name}:{password}").encode()).decode()
        _add_authorization(request, f"Basic {token}")


def _add_authorization(request: urllib.request.Request, value: str) -> None:
    """Add the header for the server that `request` names alone: where a redirect leads, it is not shown."""
    request.add_unredirected_header("authorization", value)


def takes_traces(otlp: str) -> bool:
    """Whether a receiver of OTLP over HTTP takes a message without spans."""
    try:
        send_body(f"{otlp}/v1/traces", b"")
    except BackendQueryError:
        return False
    return True


def search_traces(
    tempo: str,
    query: str,
    limit: int = 100,
    start: float | None = None,
    end: float | None = None,
    spans: int = 100,
) -> list[dict[str, Any]]:
    """Traces that a TraceQL query finds, `spans` matching spans of each; times in Unix seconds."""
    # Tempo takes whole seconds only.
    start_s, end_s = (None if each is None else int(each) for each in (start, end))
    document = fetch_json(
        f"{tempo}/api/search", q=query, limit=limit, spss=spans, start=start_s, end=end_s
    )
    traces: list[dict[str, Any]] = document.get("traces") or []
    return traces


def query_exemplars(prometheus: str, query: str, start: float, end: float) -> list[dict[str, Any]]:
    """Exemplars of a metric's series: [{"labels": {"trace_id": ...}, "value": ..., "timestamp": ...}]."""
    found = fetch_json(f"{prometheus}/api/v1/query_exemplars", query=query, start=start, end=end)
    return [each for series in found["data"] for each in series["exemplars"]]


def import_dashboards(base: str, token: str = "") -> list[str]:
    """Create or replace them; gives their URLs. Raises BackendQueryError, StackError.

    base: Grafana's URL, with NAME:PASSWORD@ where there is no token of a service account.
    """
    urls = []
    for path in sorted((stack_folder.find_root() / "grafana" / "dashboards").glob("*.json")):
        board = json.loads(path.read_text("utf-8"))
        # overwrite: by uid, also over a version that somebody has edited there.
        body = json.dumps({"dashboard": board, "overwrite": True}).encode()
        send_body(f"{base}/api/dashboards/db", body, JSON_CONTENT_TYPE, "POST", token)
        urls.append(f"{strip_credentials(base)}/d/{board['uid']}")
    return urls


def list_missing_sources(base: str, token: str = "") -> list[str]:
    """The types of data sources that the dashboards need and that Grafana lacks. Raises BackendQueryError."""
    found = json.loads(send_body(f"{base}/api/datasources", None, JSON_CONTENT_TYPE, "GET", token))
    return [name for name in SOURCE_TYPES if name not in {each["type"] for each in found}]


def strip_credentials(base: str) -> str:
    """The URL without user name and password, for output and files."""
    parts = urllib.parse.urlsplit(base)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")


@dataclass(frozen=True, slots=True)
class StackEndpoints:
    """Where a running stack is reached, as base URLs.

    otlp: of the collector, OTLP over HTTP. tempo, prometheus: for queries.
    grafana: "" where the stack has none.
    """

    otlp: str
    tempo: str
    prometheus: str
    grafana: str = ""


@dataclass(frozen=True, slots=True)
class HopVerdict:
    """Result of one hop.

    hop: what was checked, as printed. seconds: until the check passed or was given up.
    why: what is wrong and what to do, when it did not pass.
    """

    hop: str
    passed: bool
    seconds: float
    why: str = ""


def get_container_endpoints(
    otlp: str = "http://127.0.0.1:4318", grafana: str = "http://127.0.0.1:3000"
) -> StackEndpoints:
    """Containers publish only collector and Grafana; queries go through Grafana's proxy."""
    proxy = f"{grafana}/api/datasources/proxy/uid"
    return StackEndpoints(otlp, f"{proxy}/tempo", f"{proxy}/prometheus", grafana)


def check_hops(
    endpoints: StackEndpoints, timeout_s: float = ARRIVAL_TIMEOUT_S
) -> Iterator[HopVerdict]:
    """Check all hops in order; the first failure is where to look, later hops are checked all the same."""
    # A new id each time: an earlier smoke test's trace must not pass for this one.
    trace_id = secrets.token_hex(16)
    started = time.time()
    yield check_hop(
        "collector takes OTLP",
        lambda: send_smoke_trace(endpoints, trace_id),
        0.0,
        COLLECTOR_HOP_REMEDY,
    )
    query = f'{{ span:name = "{span_names.ENCODE}" && span.ttft_ms = {SMOKE_TTFT_MS} }}'

    def is_trace_found() -> bool:
        traces = search_traces(endpoints.tempo, query, start=started - 60, end=time.time() + 60)
        # Tempo leaves out leading zeros. A minute on both sides allows for clocks that differ.
        return trace_id in {trace["traceID"].zfill(32) for trace in traces}

    def is_ttft_counted() -> bool:
        # By exemplar: the count alone would also be an earlier test's.
        series = f'ttft_duration_seconds{{job="{SMOKE_SERVICE}"}}'
        seen = query_exemplars(endpoints.prometheus, series, started - 60, time.time() + 60)
        return trace_id in {each["labels"].get("trace_id") for each in seen}

    yield check_hop("Tempo finds it by TraceQL", is_trace_found, timeout_s, TEMPO_HOP_REMEDY)
    # The same trace by the other way, which does not lead through Tempo.
    yield check_hop("Prometheus has its TTFT", is_ttft_counted, timeout_s, PROMETHEUS_HOP_REMEDY)
    if endpoints.grafana:
        health = f"{endpoints.grafana}/api/health"
        yield check_hop(
            # 0 seconds: it answers now or not, as nothing has to arrive there.
            "Grafana answers",
            lambda: bool(fetch_json(health)),
            0.0,
            GRAFANA_HOP_REMEDY,
        )


def print_hops(endpoints: StackEndpoints, timeout_s: float, as_json: bool) -> bool:
    """Check all hops and print a line for each, or a JSON document; gives whether all passed."""
    console = Console(highlight=False)
    verdicts = []
    for verdict in check_hops(endpoints, timeout_s):
        verdicts.append(verdict)
        mark = Text("ok  ", "green") if verdict.passed else Text("FAIL", "bold red")
        why = "" if verdict.passed else f": {verdict.why}"
        # Line by line: a hop may take a minute, and a reader should see which one.
        if not as_json:
            said = Text.assemble(mark, f"  {verdict.hop}, {verdict.seconds:.1f} s{why}")
            # Soft: remedies are copied from the terminal, and line breaks would be copied, too.
            console.print(said, soft_wrap=True)
    if as_json:
        click.echo(json.dumps([asdict(verdict) for verdict in verdicts], indent=2))
    return all(verdict.passed for verdict in verdicts)


def check_hop(hop: str, check: Callable[[], bool], seconds: float, remedy: str) -> HopVerdict:
    """Try until the check passes or the time is over, at least once."""
    started = time.monotonic()
    while True:
        why = "it did not arrive"
        try:
            if check():
                return HopVerdict(hop, True, time.monotonic() - started)
        # The last reason is reported: an early one may have passed while parts were starting.
        except BackendQueryError as error:
            why = str(error)
        spent = time.monotonic() - started
        if spent >= seconds:
            return HopVerdict(hop, False, spent, f"{why}; {remedy}")
        time.sleep(0.5)


def send_smoke_trace(endpoints: StackEndpoints, trace_id: str) -> bool:
    """The trace, as the exporter would send it."""
    resource = Resource({SERVICE_NAME: SMOKE_SERVICE, SERVICE_INSTANCE_ID: SMOKE_SERVICE})
    # With the exporter's own code: what passes here is what servers send.
    body = encode_spans(
        span_batch.build_spans(build_smoke_record(trace_id), resource)
    ).SerializeToString()
    send_body(f"{endpoints.otlp}/v1/traces", body)
    return True


def build_smoke_record(trace_id: str) -> record.Record:
    """One request whose stages add up."""
    total = sum(SMOKE_STAGES_US.values())
    pieces = []
    offset_us = 0
    for stage, length in SMOKE_STAGES_US.items():
        pieces.append(record.Piece("stage", stage, offset_us, offset_us + length))
        offset_us += length
    ttft = record.Ttft(
        secrets.token_hex(8), span_names.ENCODE, 0, total, SMOKE_STAGES_US, 0, 0, tuple(pieces)
    )
    return record.Record(
        version=record.RECORD_VERSION,
        trace_id=trace_id,
        span_id=secrets.token_hex(8),
        parent_id="",
        flags=1,
        state="",
        # In the past by its own length, so that it ends now.
        start_ns=time.time_ns() - total * 1000,
        role="encode",
        outermost=True,
        service=SMOKE_SERVICE,
        request_id=f"smoke-{trace_id[:8]}",
        attributes={keys.MODEL: "smoke"},
        ttft=ttft,
        server=record.Server("POST /smoke", total, 200),
    )
