# SPDX-License-Identifier: Apache-2.0
"""The one client for all questions that the router itself asks, of instances and of others.

Health probes, lists of models, capabilities, prompts to render, cached prefixes and discovery ask by it.
Whoever answers may be hostile: no redirect is followed, and an answer is bounded in bytes, also when it is
compressed, and in time. tests/attack/test_outbound_calls.py fails on another HTTP client in the router.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Final, NamedTuple

import aiohttp
from yarl import URL

from ttft_otel.http.body_decoding import BodyTooLargeError, unpack_body
from ttft_otel.router.errors import InvalidAnswer
from ttft_otel.router.time_limits import wait_at_most
from ttft_otel.router.upstream.client_tls import ClientTls
from ttft_otel.router.upstream.connection_pool import ConnectionPool
from ttft_otel.router.upstream.instance_connection import InstanceAnswer

# Seconds for a question, from the connection to the answer's last byte.
QUERY_TIMEOUT_S: Final = 5.0
MAX_PAGE_BYTES: Final = 8 << 20  # bytes of an answer, unpacked: /metrics is the longest
MAX_HEADER_BYTES: Final = 65_536  # bytes of one header of an answer, unless a flag says otherwise
# Who cannot be asked now, or does not answer so that it can be read. TimeoutError is no OSError before
# Python 3.11.
QUERY_ERRORS: Final = (aiohttp.ClientError, InvalidAnswer, OSError, asyncio.TimeoutError)


class QueryAnswer(NamedTuple):
    """A whole answer; a redirect is one, too."""

    status: int
    body: bytes  # not compressed


class QueryClient:
    """Asks questions, on connections of its own; made and closed on the event loop.

    Args:
        max_header_bytes: Bytes of one header of an answer.
        tls: For https:// URLs; None for the system's authorities.
        api_key: What whoever is asked is shown, "" for none.

    authorization: the header with that key, which one of the question itself replaces.
    """

    def __init__(
        self,
        max_header_bytes: int = MAX_HEADER_BYTES,
        tls: ClientTls | None = None,
        api_key: str = "",
    ) -> None:
        self.authorization = build_authorization(api_key)
        self._pool = ConnectionPool(max_header_bytes, tls=tls)

    async def __aenter__(self) -> QueryClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._pool.close()

    async def ask(
        self,
        url: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = QUERY_TIMEOUT_S,
        max_bytes: int = MAX_PAGE_BYTES,
    ) -> QueryAnswer:
        """Ask `url`, by POST if there is a `body`, else by GET. Raises QUERY_ERRORS.

        Args:
            url: http:// or https://, with path and query.
            body: JSON.
            headers: More of them.
            timeout_s: Seconds for everything.
            max_bytes: Of the answer's body. 0: only its status is wanted, and its body is not read.
        """
        return await wait_at_most(self._ask(url, body, headers or {}, max_bytes), timeout_s)

    async def _ask(
        self, url: str, body: bytes | None, headers: Mapping[str, str], max_bytes: int
    ) -> QueryAnswer:
        async with self.open_answer(url, body, headers) as answer:
            if not max_bytes:
                return QueryAnswer(answer.status, b"")
            data = await read_at_most(answer, max_bytes)
        try:
            encoding = ",".join(answer.list_values(b"content-encoding"))
            return QueryAnswer(answer.status, unpack_body(data, encoding, max_bytes))
        except BodyTooLargeError as error:
            raise InvalidAnswer(str(error)) from error
        except ValueError as error:
            raise aiohttp.ClientPayloadError(f"the answer cannot be read: {error}") from error

    @asynccontextmanager
    async def open_answer(
        self, url: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[InstanceAnswer]:
        """Ask as `ask` does, and give the answer once its head is here; the caller bounds the rest."""
        own = {"Authorization": self.authorization} if self.authorization else {}
        sent = {"Accept-Encoding": "identity", **own, **(headers or {})}
        if body is not None:
            sent.setdefault("Content-Type", "application/json")
        method = "GET" if body is None else "POST"
        try:
            # encoded: an operator's path is sent as it was written.
            answer = await self._pool.send_query(method, URL(url, encoded=True), sent, body)
        except ValueError as error:
            raise aiohttp.InvalidURL(url, str(error)) from error
        try:
            yield answer
        finally:
            answer.close()


async def read_at_most(answer: InstanceAnswer, max_bytes: int) -> bytes:
    """The whole body of `answer`. Raises QUERY_ERRORS, also when it is longer than `max_bytes`."""
    # The announced length saves reading; a chunked answer announces none.
    body, is_longer = bytearray(), answer.content_length > max_bytes
    while not is_longer and (chunk := await answer.readany()):
        body += chunk
        is_longer = len(body) > max_bytes
    if is_longer:
        raise InvalidAnswer(f"its answer is longer than {max_bytes} bytes")
    return bytes(body)


def build_authorization(api_key: str) -> str:
    return f"Bearer {api_key}" if api_key else ""
