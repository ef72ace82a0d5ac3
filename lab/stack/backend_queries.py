# SPDX-License-Identifier: Apache-2.0
"""Query Tempo, Prometheus and Grafana over HTTP as a dashboard would, for smoke_check.py and tests."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

REQUEST_TIMEOUT_S = 10.0


class BackendQueryError(RuntimeError):
    """No answer, or an error; the message has the address and the reason."""


def fetch_json(url: str, **parameters: object) -> Any:
    """GET `url`; returns the JSON, or the text if it is not JSON. Raises BackendQueryError."""
    # None is a parameter left out, so that callers can pass on what they were not given.
    asked = {name: str(value) for name, value in parameters.items() if value is not None}
    full = f"{url}?{urllib.parse.urlencode(asked)}" if asked else url
    body = _read_response(urllib.request.Request(full, headers={"accept": "application/json"}))
    try:
        # Health checks answer with text ("ready"), all else with JSON.
        return json.loads(body)
    except ValueError:
        return body.decode()


def send_body(
    url: str, body: bytes, kind: str = "application/x-protobuf", method: str = "POST"
) -> None:
    """Send bytes to `url`. Raises BackendQueryError for a status other than 2xx."""
    _read_response(urllib.request.Request(url, body, {"content-type": kind}, method=method))


def _read_response(request: urllib.request.Request) -> bytes:
    _add_basic_auth(request)
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
        raise BackendQueryError(
            f"{url} does not answer: {getattr(error, 'reason', error)}"
        ) from error
    return body


def _add_basic_auth(request: urllib.request.Request) -> None:
    """Turn NAME:PASSWORD in a URL into an Authorization header, as browsers do."""
    # urllib itself would take NAME:PASSWORD for a part of the host.
    parts = urllib.parse.urlsplit(request.full_url)
    credentials, _, host = parts.netloc.rpartition("@")
    if credentials:
        request.full_url = parts._replace(netloc=host).geturl()
        # Quoted in the URL, so that a password may hold @ or a colon.
        token = base64.b64encode(urllib.parse.unquote(credentials).encode()).decode()
        request.add_header("authorization", f"Basic {token}")


def is_reachable(url: str) -> bool:
    """Whether a health check answers 200."""
    try:
        fetch_json(url)
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


def fetch_trace_spans(tempo: str, trace_id: str) -> list[dict[str, Any]]:
    """All spans of one trace as OTLP JSON; empty while Tempo does not know it."""
    try:
        document = fetch_json(f"{tempo}/api/traces/{trace_id}")
    except BackendQueryError as error:
        # Not yet is no error: a trace is found only after Tempo has flushed or indexed it.
        if "answered 404" in str(error):
            return []
        raise
    return [
        span
        for batch in document["batches"]
        for scope in batch["scopeSpans"]
        for span in scope["spans"]
    ]


def query_instant(prometheus: str, query: str, time: float | None = None) -> list[dict[str, Any]]:
    """The result of a PromQL `query`: [{"metric": {...}, "value": [time, "1.5"]}]."""
    found = fetch_json(f"{prometheus}/api/v1/query", query=query, time=time)
    vector: list[dict[str, Any]] = found["data"]["result"]
    return vector


def sum_instant_query(prometheus: str, query: str, time: float | None = None) -> float | None:
    """The sum of the values of a PromQL `query`; None when there are none."""
    # No series is not 0: a counter that nobody has counted is missing.
    samples = query_instant(prometheus, query, time)
    return sum(float(each["value"][1]) for each in samples) if samples else None


def query_exemplars(prometheus: str, query: str, start: float, end: float) -> list[dict[str, Any]]:
    """Exemplars of a metric's series: [{"labels": {"trace_id": ...}, "value": ..., "timestamp": ...}]."""
    found = fetch_json(f"{prometheus}/api/v1/query_exemplars", query=query, start=start, end=end)
    return [each for series in found["data"] for each in series["exemplars"]]
