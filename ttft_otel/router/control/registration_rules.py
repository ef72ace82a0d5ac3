# SPDX-License-Identifier: Apache-2.0
"""Which instances may register: roles that can be mixed, and valid URLs.

The rules are those of vLLM's EPD proxy. registrations.py applies them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Final
from urllib.parse import urlsplit

from ttft_otel.model.stages import DECODE, ENCODE, PREFILL, PREFILL_DECODE
from ttft_otel.router import types
from ttft_otel.router.errors import RequestRejected

REGISTRABLE_ROLES: Final = (
    ENCODE,
    PREFILL,
    DECODE,
    PREFILL_DECODE,
)  # a role is also the name of its leg
PAIR_ROLES: Final = (PREFILL, DECODE)
MAX_URL_CHARS: Final = 2048  # characters
_VISIBLE_PATTERN: Final = re.compile(
    r"[!-~]+"
)  # visible ASCII; line breaks, for instance, could forge log lines


def check_url(url: str) -> str:
    """Return `url` without a trailing slash. Raises RequestRejected unless http(s)://HOST:PORT[/PREFIX]."""
    try:
        if len(url) > MAX_URL_CHARS or not _VISIBLE_PATTERN.fullmatch(url):
            raise ValueError
        parts = urlsplit(url)
        # A user's name would be shown to all who list instances; a fragment is never sent.
        if not parts.port or "@" in parts.netloc or parts.fragment:
            raise ValueError
        return types.parse_instance_url(url, "").url
    except ValueError as error:
        message = f"{url[:200]!r} is not an instance's URL; write it like http://10.0.0.7:8001"
        raise RequestRejected(400, message) from error


def check_topology(
    role: str, other_roles: Collection[str], configured_urls: Mapping[str, Collection[str]]
) -> None:
    """Raise RequestRejected for a `role` that cannot be mixed with registered or configured ones.

    other_roles: of the other registered instances. configured_urls: by leg.
    """
    backends = PREFILL_DECODE in other_roles or bool(
        configured_urls.get(PREFILL_DECODE) and role == PREFILL
    )
    pairs = any(each in other_roles or configured_urls.get(each) for each in PAIR_ROLES)
    if (role in PAIR_ROLES and backends) or (role == PREFILL_DECODE and pairs):
        conflicting_roles = PREFILL_DECODE if role in PAIR_ROLES else " and ".join(PAIR_ROLES)
        raise RequestRejected(
            409,
            f"This router has {conflicting_roles} instances, with which a {role} instance "
            "cannot be mixed; deregister them first.",
        )
