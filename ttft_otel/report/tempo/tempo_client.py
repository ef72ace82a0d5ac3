# SPDX-License-Identifier: Apache-2.0
"""Tempo's HTTP API for tempo_source.py: search by TraceQL, whole traces, version and retention.

Every answer is bounded in bytes and time, no redirect is followed (it would carry the credentials to another
host), and every failure is a TempoError whose text has the remedy and no credentials.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import msgspec
from yarl import URL

from ttft_otel.model.names import env_names, span_names
from ttft_otel.report.report_types import STATUS_ERROR, SourceChoice, StoredSpan
from ttft_otel.report.store.database_schema import StoreError

LOOPBACK_HOSTS: Final = frozenset({"localhost", "127.0.0.1", "::1"})
MAX_SEARCH_BYTES: Final = 16 << 20  # of one answer to a search; 1000 traces have about 300 kB
# Of one trace; Tempo's own limit at ingestion (max_bytes_per_trace) is 5 MB by default.
MAX_TRACE_BYTES: Final = 32 << 20
MAX_ERROR_CHARS: Final = 200  # of an error's body, which may be a page of HTML
# What reading an answer raises that is not of Tempo's form.
BAD_ANSWERS: Final = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
CONNECT_TIMEOUT_S: Final = 10.0
OLDEST_MAJOR: Final = 2  # Tempo 1 has no TraceQL, and ignores the parameter
HEADERS_REMEDY: Final = (
    'give credentials by --tempo-header "Authorization=Bearer TOKEN" '
    f"or in ${env_names.TTFT_OTEL_TEMPO_HEADERS}"
)
ADDRESS_REMEDY: Final = (
    "--tempo is the address of Tempo's own HTTP API, for example http://127.0.0.1:3200, "
    "and not Grafana's or the collector's"
)


class TempoError(StoreError):
    """Tempo did not answer, or not completely; the text says why and what to do."""


class SearchTooLargeError(TempoError):
    """This Tempo refuses the search: its window is too long, or its limit above `allowed` (0: the window)."""

    def __init__(self, message: str, allowed: int = 0) -> None:
        super().__init__(message)
        self.allowed = allowed


@dataclass(frozen=True, slots=True)
class FoundTrace:
    trace_id: str
    #: Unix nanoseconds between which all of its spans lie that Tempo had when it answered.
    start_ns: int
    end_ns: int
    #: Its spans that match, with the attributes that the query selects; not all where `matched` is more.
    spans: tuple[StoredSpan, ...] = ()
    matched: int = 0


class TempoClient:
    """Tempo's HTTP API, between open() and close(). `shown_url` has no credentials."""

    def __init__(self, choice: SourceChoice) -> None:
        self._choice = choice
        try:
            self._url = URL(choice.tempo.rstrip("/"))
        except ValueError as error:
            # Without the text, which may have credentials in a place where nobody looks for them.
            raise TempoError(f"--tempo is no address ({error}): {ADDRESS_REMEDY}") from error
        self.shown_url = str(self._url.with_user(None)) if self._url.absolute else choice.tempo
        if self._url.scheme not in ("http", "https") or not self._url.host:
            raise TempoError(f"{self.shown_url!r} is not an HTTP address: {ADDRESS_REMEDY}")
        self._session: aiohttp.ClientSession | None = None

    @property
    def is_exposed(self) -> bool:
        """Whether credentials would cross a network unencrypted."""
        has_secret = bool(self._url.user) or any(
            name.lower() not in ("x-scope-orgid", "accept") for name in self._choice.headers
        )
        return self._url.scheme == "http" and self._url.host not in LOOPBACK_HOSTS and has_secret

    async def open(self) -> None:
        """Make the session. Raises TempoError for a file of CAs that cannot be read."""
        try:
            context = ssl.create_default_context(
                cafile=str(self._choice.ca_file) if self._choice.ca_file else None
            )
        except (OSError, ssl.SSLError) as error:
            raise TempoError(
                f"--tempo-ca {self._choice.ca_file} cannot be read: {error}; it is a file of PEM certificates"
            ) from error
        # Without a connector's limit of its own: the caller bounds how many traces it asks for.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=context),
            timeout=aiohttp.ClientTimeout(
                total=self._choice.timeout_s, sock_connect=CONNECT_TIMEOUT_S
            ),
            headers=dict(self._choice.headers),
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            # aiohttp closes its sockets in the loop's next round.
            await asyncio.sleep(0)

    async def read_version(self) -> str:
        """Tempo's version; "" for a build that has none. Raises TempoError if it is none, or too old."""
        body = await self._get("/api/status/buildinfo", {}, MAX_SEARCH_BYTES)
        try:
            if body is None:
                raise ValueError("no such page")
            version = str(msgspec.json.decode(body)["version"])
        except BAD_ANSWERS as error:
            raise TempoError(
                f"{self.shown_url} is not Tempo ({error}): {ADDRESS_REMEDY}"
            ) from error
        if (found := re.match(r"v?(\d+)\.\d+", version)) and int(found[1]) < OLDEST_MAJOR:
            raise TempoError(
                f"{self.shown_url} is Tempo {version}, which has no TraceQL; "
                f"{OLDEST_MAJOR}.0 or newer is needed"
            )
        return version

    async def read_retention_s(self) -> float:
        """For how long Tempo keeps traces, from its configuration; 0 where it does not say."""
        try:
            body = await self._get("/status/config", {}, MAX_SEARCH_BYTES)
        except TempoError:
            # A hosted Tempo shows its configuration to nobody; searches work all the same.
            return 0.0
        text = (body or b"").decode(errors="replace")
        # The smallest: Tempo 3 has one for who decides and one for who removes.
        kept = [
            parse_go_duration(each) for each in re.findall(r"(?m)^\s*block_retention: (\S+)", text)
        ]
        return min((each for each in kept if each), default=0.0)

    async def search(
        self, query: str, since_s: int, until_s: int, limit: int, spans: int = 1
    ) -> tuple[list[FoundTrace], bool]:
        """Up to `limit` traces with a span that matches, and whether Tempo looked everywhere.

        since_s, until_s: Unix seconds. spans: so many of each trace are given. Raises SearchTooLargeError,
        TempoError.
        """
        asked = {"q": query, "start": since_s, "end": until_s, "limit": limit, "spss": spans}
        body = await self._get("/api/search", asked, MAX_SEARCH_BYTES)
        try:
            if body is None:
                raise ValueError("no such page")
            document = msgspec.json.decode(body)
            found = [_read_found_trace(each) for each in document.get("traces") or []]
            metrics = document.get("metrics") or {}
            # Tempo ends a search at its limit; below that, a job that is missing has failed.
            completed = int(metrics.get("completedJobs") or 0)
            total = int(metrics.get("totalJobs") or 0)
        except BAD_ANSWERS as error:
            raise TempoError(
                f"{self.shown_url} gave no search result ({error}): {ADDRESS_REMEDY}"
            ) from error
        return found, completed >= total or len(found) >= limit

    async def fetch_trace(self, trace_id: str) -> bytes | None:
        """One trace in protobuf, whose form is that of an OTLP export; None where Tempo has none."""
        # Version 1 of this call, which all releases have; it answers 422 instead of cutting a trace.
        return await self._get(
            f"/api/traces/{trace_id}", {}, MAX_TRACE_BYTES, accept="application/protobuf"
        )

    async def _get(
        self,
        path: str,
        asked: Mapping[str, object],
        max_bytes: int,
        accept: str = "application/json",
    ) -> bytes | None:
        """The body of an answer with status 200; None for 404. Raises TempoError."""
        assert self._session is not None
        url = self._url.joinpath(path.lstrip("/")).with_query(
            {name: str(value) for name, value in asked.items()}
        )
        try:
            async with self._session.get(
                url, headers={"accept": accept}, allow_redirects=False
            ) as response:
                body = bytearray()
                async for chunk in response.content.iter_any():
                    body += chunk
                    if len(body) > max_bytes:
                        raise TempoError(
                            f"{self.shown_url} gave more than {max_bytes >> 20} MiB for {path}; "
                            "ask for a shorter window"
                        )
                if response.status == 404:
                    return None
                if response.status != 200:
                    raise self._explain_status(response, path, bytes(body))
                return bytes(body)
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise TempoError(self._explain_failure(error)) from error

    def _explain_status(
        self, response: aiohttp.ClientResponse, path: str, body: bytes
    ) -> TempoError:
        status = response.status
        text = self._clean_text(body.decode(errors="replace"))
        place = f"{self.shown_url} answered {status}"
        if status in (401, 403):
            return TempoError(f"{place}, it wants to know who asks: {HEADERS_REMEDY}")
        if 300 <= status < 400:
            host = _find_host(response.headers.get("location", "")) or "another page"
            return TempoError(
                f"{place}, a redirection to {host}, which is not followed, since it would get the "
                f"credentials. Is that a login page? {ADDRESS_REMEDY}; {HEADERS_REMEDY}"
            )
        if status == 400 and "range specified by start and end" in text:
            return SearchTooLargeError(f"{place}: {text}; ask for a shorter window")
        if status == 400 and (allowed := re.search(r"exceeds max limit (\d+)", text)):
            return SearchTooLargeError(f"{place}: {text}", int(allowed[1]))
        if status == 400 and "org id" in text:
            return TempoError(
                f'{place}, it serves several tenants: name yours by --tempo-header "X-Scope-OrgID=TENANT"'
            )
        if status == 206:
            return TempoError(
                f"{place} with a part of the answer, because some of its blocks cannot be read; "
                "its log says which. Ask for a window without them, or repair them"
            )
        remedy = (
            "it has too much to do: try again, or ask for a shorter window"
            if status in (408, 429, 500, 502, 503, 504)
            else ADDRESS_REMEDY
        )
        return TempoError(f"{place} to {path} ({text or 'no reason given'}): {remedy}")

    def _explain_failure(self, error: BaseException) -> str:
        said = self._clean_text(str(error))
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            said = self._clean_text(str(error.certificate_error))
            what = f"has a certificate that is not trusted ({said}): name its CA by --tempo-ca FILE"
        elif isinstance(error, aiohttp.ClientSSLError):
            what = f"does not speak TLS as it should ({said}): is it http://?"
        elif isinstance(error, asyncio.TimeoutError):
            what = (
                f"did not answer within {self._choice.timeout_s:g} s: ask for a shorter window, "
                "or wait longer with --tempo-timeout"
            )
        elif isinstance(error, aiohttp.ClientConnectorError):
            reason = error.os_error.strerror or error.os_error
            what = f"is not reachable ({reason}): {ADDRESS_REMEDY}"
        else:
            what = f"broke off ({said or type(error).__name__}): try again"
        return f"{self.shown_url} {what}"

    def _clean_text(self, text: str) -> str:
        """One short line that a terminal can show, without what only we and Tempo should know."""
        for secret in (*self._choice.headers.values(), self._url.password or ""):
            if secret:
                text = text.replace(secret, "***")
        printable = "".join(each if each.isprintable() else " " for each in text)
        return " ".join(printable.split())[:MAX_ERROR_CHARS]


def _read_found_trace(found: Mapping[str, Any]) -> FoundTrace:
    """A hit of a search. Raises KeyError, ValueError or TypeError for what is none."""
    start_ns = int(found.get("startTimeUnixNano") or 0)
    # Rounded up: Tempo cuts the duration to whole milliseconds.
    end_ns = start_ns + (int(found.get("durationMs") or 0) + 1) * 1_000_000
    # Tempo leaves leading zeros of an ID out.
    trace_id = str(found["traceID"]).lower().zfill(32)
    # It becomes a part of an address, to which our credentials go.
    if not is_trace_id(trace_id):
        raise ValueError("a trace ID that is none")
    span_set = (found.get("spanSets") or [found.get("spanSet") or {}])[0]
    spans = tuple(_read_found_span(trace_id, each) for each in span_set.get("spans") or ())
    return FoundTrace(trace_id, start_ns, end_ns, spans, int(span_set.get("matched") or 0))


def _read_found_span(trace_id: str, found: Mapping[str, Any]) -> StoredSpan:
    """A span of a hit, with its selected attributes; raises as _read_found_trace()."""
    start_ns = int(found["startTimeUnixNano"])
    attributes: dict[str, Any] = {}
    for each in found.get("attributes") or ():
        ((kind, value),) = each["value"].items()
        attributes[str(each["key"])] = int(value) if kind == "intValue" else value
    return StoredSpan(
        trace_id,
        str(found["spanID"]).zfill(16),
        "",
        str(found.get("name") or attributes.pop("name", "")),
        0,
        start_ns,
        start_ns + int(found.get("durationNanos") or 0),
        scope=span_names.SCOPE,
        status=STATUS_ERROR if attributes.pop("status", "") == "error" else 0,
        attributes=attributes,
    )


def is_trace_id(text: str) -> bool:
    """Whether `text` is 32 hex digits."""
    return re.fullmatch("[0-9a-fA-F]{32}", text) is not None


def _find_host(location: str) -> str:
    """The host of a redirection; "" for a path, and for what is no address."""
    try:
        return URL(location).host or ""
    except ValueError:
        return ""


def parse_go_duration(text: str) -> float:
    """Seconds of a duration as Go writes it, `336h0m0s`; 0.0 for what is none."""
    unit_seconds = {"h": 3600.0, "m": 60.0, "s": 1.0}
    parts = re.findall(r"(\d+(?:\.\d+)?)([hms])(?!s)", text)
    return sum(float(number) * unit_seconds[unit] for number, unit in parts)
