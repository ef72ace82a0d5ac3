# SPDX-License-Identifier: Apache-2.0
"""What all questions of the router's own to instances share; probes, capabilities and prompts ask them."""

from __future__ import annotations

import asyncio
from typing import Final

import aiohttp

QUERY_TIMEOUT: Final = aiohttp.ClientTimeout(total=5.0)
# An instance that cannot be asked now. TimeoutError is no OSError before Python 3.11.
QUERY_ERRORS: Final = (aiohttp.ClientError, OSError, asyncio.TimeoutError)


def build_authorization(api_key: str) -> str:
    """The Authorization header for a key; "" without one."""
    return f"Bearer {api_key}" if api_key else ""
