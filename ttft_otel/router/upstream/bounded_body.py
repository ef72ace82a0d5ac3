# SPDX-License-Identifier: Apache-2.0
"""Read the body of an answer to a question of the router's own, which may be of any length."""

from __future__ import annotations

import aiohttp


async def read_bounded_body(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """The whole body. Raises ValueError when it is longer than `max_bytes`."""
    # Not read(): it would hold all that comes, and a chunked answer announces no length.
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > max_bytes:
            raise ValueError(f"an answer of more than {max_bytes} bytes")
    return bytes(body)
