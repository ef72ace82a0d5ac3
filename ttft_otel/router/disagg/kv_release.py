# SPDX-License-Identifier: Apache-2.0
"""Release KV blocks on the prefill instance that no decode instance will fetch.

The prefill instance keeps the blocks of a request for the decode instance until a time-out (NIXL: half a
minute to eight minutes, by release). A decode instance that refuses a request with the prefill parameters
tells the prefill instance to free them, so in the background a decode instance is sent a request that it
must refuse. prefill_decode.py and decode_leg.py start it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import Raw

from ttft_otel.model.endpoints import COMPLETIONS_PATH
from ttft_otel.model.names import header_names
from ttft_otel.model.stages import DECODE
from ttft_otel.router.types import Instance
from ttft_otel.router.upstream.query_client import QUERY_ERRORS
from ttft_otel.router.upstream.upstream_client import UpstreamClient
from ttft_otel.tracing import context

UNKNOWN_MODEL: Final = "ttft-otel-nobody"  # no model has this name
RELEASE_TIMEOUT_S: Final = 10.0
SHUTDOWN_WAIT_S: Final = 2.0  # seconds to wait for running releases at shutdown
_AUTH_HEADERS: Final = ("authorization",)
# In flight; further ones are left to the prefill instance's time-out.
MAX_PENDING_RELEASES: Final = 256


class KvReleases:
    """Runs the releases of one router in the background."""

    def __init__(self, upstream: UpstreamClient) -> None:
        self._upstream = upstream
        self._tasks: set[asyncio.Task[None]] = set()

    def start_release(self, kv_params: Raw, client_headers: Mapping[str, str]) -> None:
        """Release the blocks that `kv_params` name; `client_headers` give the authorization."""
        pool = self._upstream.pool
        # an instance whose breaker is open can still refuse, and there may be no other
        candidates = pool.get_candidates(DECODE) or pool.get(DECODE)
        if candidates and len(self._tasks) < MAX_PENDING_RELEASES:
            task = asyncio.create_task(
                self._send_refused_request(candidates[0], kv_params, client_headers)
            )
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def wait_pending(self) -> None:
        """Wait at shutdown for running releases, at most SHUTDOWN_WAIT_S."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=SHUTDOWN_WAIT_S)

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
        headers = {name: client_headers[name] for name in _AUTH_HEADERS if name in client_headers}
        traceparent = f"00-{context.new_span_id() * 2}-{context.new_span_id()}-00"
        try:
            await self._upstream.queries.ask(
                f"{instance.url}{COMPLETIONS_PATH}",
                body=msgspec.json.encode(fields),
                headers={**headers, header_names.TRACEPARENT: traceparent},
                timeout_s=RELEASE_TIMEOUT_S,
            )
        except QUERY_ERRORS:
            return  # the prefill instance's time-out frees the blocks
