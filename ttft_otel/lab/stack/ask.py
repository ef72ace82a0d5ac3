# SPDX-License-Identifier: Apache-2.0
"""Ask Tempo, Prometheus and Grafana over HTTP as a dashboard would; smoke.py, command.py and tests ask."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

TIMEOUT = 10.0


class AskError(RuntimeError):
    """No answer, or one that says no; the message names the address and the reason."""


def get(url: str, **parameters: object) -> Any:
    """The JSON answer of a GET (text that is no JSON as it is). Raises AskError."""
    asked = {name: str(value) for name, value in parameters.items() if value is not None}
    full = f"{url}?{urllib.parse.urlencode(asked)}" if asked else url
    body = _answer(urllib.request.Request(full, headers={"accept": "application/json"}))
    try:
        return json.loads(body)
    except ValueError:
        return body.decode()


def post(url: str, body: bytes, kind: str = "application/x-protobuf", method: str = "POST") -> None:
    """Send bytes; whatever is answered with 2xx is fine. Raises AskError."""
    _answer(urllib.request.Request(url, body, {"content-type": kind}, method=method))


def _answer(request: urllib.request.Request) -> bytes:
    _sign(request)
    url = request.full_url.partition("?")[0]
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            body: bytes = answer.read()
    except urllib.error.HTTPError as error:
        with error:
            said = error.read(300).decode(errors="replace")
        raise AskError(f"{url} answered {error.code}: {said}") from error
    except OSError as error:
        raise AskError(f"{url} does not answer: {getattr(error, 'reason', error)}") from error
    return body


def _sign(request: urllib.request.Request) -> None:
    """http://NAME:PASSWORD@HOST means the same as in a browser."""
    parts = urllib.parse.urlsplit(request.full_url)
    who, _, host = parts.netloc.rpartition("@")
    if who:
        request.full_url = parts._replace(netloc=host).geturl()
        token = base64.b64encode(urllib.parse.unquote(who).encode()).decode()
        request.add_header("authorization", f"Basic {token}")


def alive(url: str) -> bool:
    """Whether a health check answers 200."""
    try:
        get(url)
    except AskError:
        return False
    return True


def search(
    tempo: str,
    query: str,
    limit: int = 100,
    start: float | None = None,
    end: float | None = None,
    spans: int = 100,
) -> list[dict[str, Any]]:
    """Traces that a TraceQL query finds, `spans` matching spans of each; times in Unix seconds."""
    began, ended = (None if each is None else int(each) for each in (start, end))
    found = get(f"{tempo}/api/search", q=query, limit=limit, spss=spans, start=began, end=ended)
    traces: list[dict[str, Any]] = found.get("traces") or []
    return traces


def trace(tempo: str, trace_id: str) -> list[dict[str, Any]]:
    """All spans of one trace as OTLP JSON; empty while Tempo does not know it."""
    try:
        found = get(f"{tempo}/api/traces/{trace_id}")
    except AskError as error:
        if "answered 404" in str(error):
            return []
        raise
    return [
        span
        for batch in found["batches"]
        for scope in batch["scopeSpans"]
        for span in scope["spans"]
    ]


def instant(prometheus: str, query: str, time: float | None = None) -> list[dict[str, Any]]:
    """The vector that a PromQL query gives: [{"metric": {...}, "value": [time, "1.5"]}]."""
    found = get(f"{prometheus}/api/v1/query", query=query, time=time)
    vector: list[dict[str, Any]] = found["data"]["result"]
    return vector


def number(prometheus: str, query: str, time: float | None = None) -> float | None:
    """The sum of an instant query's values; None when it found nothing."""
    found = instant(prometheus, query, time)
    return sum(float(each["value"][1]) for each in found) if found else None


def exemplars(prometheus: str, query: str, start: float, end: float) -> list[dict[str, Any]]:
    """Exemplars of a metric's series: [{"labels": {"trace_id": ...}, "value": ..., "timestamp": ...}]."""
    found = get(f"{prometheus}/api/v1/query_exemplars", query=query, start=start, end=end)
    return [each for series in found["data"] for each in series["exemplars"]]
