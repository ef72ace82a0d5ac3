# SPDX-License-Identifier: Apache-2.0
"""Ask Tempo, Prometheus and Grafana over HTTP, and add our dashboards to a Grafana of any version."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any, Final

from ttft_otel.stack import stack_files

REQUEST_TIMEOUT_S: Final = 10.0
JSON_CONTENT_TYPE: Final = "application/json"
SOURCE_TYPES: Final = ("prometheus", "tempo")  # of data sources that our dashboards ask


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
    """Create or replace them; gives their URLs. Raises BackendQueryError, StackFilesError.

    base: Grafana's URL, with NAME:PASSWORD@ where there is no token of a service account.
    """
    urls = []
    for path in sorted((stack_files.find_root() / "grafana" / "dashboards").glob("*.json")):
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
