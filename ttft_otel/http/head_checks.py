# SPDX-License-Identifier: Apache-2.0
"""What a request's head may be: its length, its version, and which web pages may have sent it.

bounded_connection.py asks for each request of the router and of `ttft-otel serve`, control/admin.py for the
admin port's.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

HeaderList = list[tuple[bytes, bytes]]

_SPARE_HEAD_BYTES: Final = 1024  # method, version and blanks, which no limit counts
_VERSIONS: Final = ("1.1", "1.0")
# No page can read their answers without --cors-origin, and they change nothing.
_SAFE_METHODS: Final = (b"GET", b"HEAD", b"OPTIONS")
# A page of this very server, or no page: an address that was typed in. Only browsers set this header.
_OWN_SITES: Final = (b"same-origin", b"none")
# Of a head, what CallerRules reads.
HOST: Final = b"host"
ORIGIN: Final = b"origin"
FETCH_SITE: Final = b"sec-fetch-site"


class HeadRefused(Exception):
    """A head, or what follows it, that is not taken; `status` and text are for the client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class HeadLimits:
    """How much a request's head may be. The defaults are those of the router's flags."""

    max_target: int = 8_000  # bytes of the path with its query
    max_headers: int = 256  # headers, and trailers
    max_header_bytes: int = 65_536  # bytes of all headers together

    def check_head(self, target: bytes, header_count: int, head_bytes: int) -> None:
        """Raise HeadRefused for a head that is too long, or a part of one.

        head_bytes: of a part, as it came: a header counts before it is complete.
        """
        if len(target) > self.max_target:
            raise HeadRefused(414, f"The target is longer than {self.max_target} bytes.")
        # The parts of a head are counted as they come, target and blanks included.
        max_bytes = self.max_target + self.max_header_bytes + _SPARE_HEAD_BYTES
        if header_count > self.max_headers or head_bytes > max_bytes:
            raise self._build_header_error()

    def check_headers(self, headers: HeaderList) -> None:
        """Raise HeadRefused for headers, or trailers, that are too many or too long together."""
        header_bytes = sum(len(name) + len(value) for name, value in headers)
        if len(headers) > self.max_headers or header_bytes > self.max_header_bytes:
            raise self._build_header_error()

    def _build_header_error(self) -> HeadRefused:
        return HeadRefused(
            431,
            f"The request has more than {self.max_headers} headers or "
            f"{self.max_header_bytes} bytes of them.",
        )


class CallerRules:
    """Which Host a request may name, and from which web pages it may come.

    A browser on the operator's machine reaches loopback for any page that it shows. A page of a name that was
    made to resolve to 127.0.0.1 (DNS rebinding) shows by its Host, any other page by its Origin. Other
    clients send no Origin.

    Args:
        host: The address on which the port listens. On loopback only its own names are answered to.
        allowed_hosts: Further names; elsewhere than on loopback, without any, all names.
        origins: Web pages that may call; "*" for all.
    """

    def __init__(
        self, host: str, allowed_hosts: Collection[str] = (), origins: Collection[str] = ()
    ) -> None:
        names = {"localhost", "127.0.0.1", host, *allowed_hosts}
        self._hosts = frozenset(name.lower().encode() for name in names)
        self._takes_any_host = not (allowed_hosts or is_loopback(host))
        self._origins = frozenset(each.encode() for each in origins)

    def check_request(self, method: bytes, version: str, noted: Mapping[bytes, bytes]) -> None:
        """Raise HeadRefused unless the request may be served.

        version: of HTTP, like "1.1". noted: its HOST, ORIGIN and FETCH_SITE, each as it came; the values of
            one that came twice are joined by a comma.
        """
        if version not in _VERSIONS:
            raise HeadRefused(400, "Send HTTP/1.1.")
        host = noted.get(HOST)
        if host is None:
            if version != "1.0":
                raise HeadRefused(400, "The request has no Host header.")
        elif b"," in host:
            raise HeadRefused(400, "The request has several Host headers.")
        elif not self.allows_host(host):
            raise HeadRefused(
                421,
                "This server does not go by that name in Host: use its address, or allow the name.",
            )
        if len(noted) > 1 and method not in _SAFE_METHODS and not self._allows_page(noted):
            raise HeadRefused(403, "Web pages of this origin may not send requests here.")

    def allows_host(self, host: bytes) -> bool:
        """Whether a request may name this `host`, with its port or without."""
        if self._takes_any_host:
            return True
        name, _, port = host.lower().rpartition(b":")
        if not port.isdigit():
            name = host.lower()
        # An address: whoever gave a page this one serves it from here.
        return name in self._hosts or _is_address(name)

    def _allows_page(self, noted: Mapping[bytes, bytes]) -> bool:
        site = noted.get(FETCH_SITE)
        if site in _OWN_SITES:
            return True
        origin = noted.get(ORIGIN)
        if origin is None:
            return site is None
        is_own = origin.partition(b"://")[2] == noted.get(HOST)
        return is_own or origin in self._origins or b"*" in self._origins


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach `host`; names other than localhost are not resolved."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _is_address(name: bytes) -> bool:
    try:
        ipaddress.ip_address(name.decode("ascii").strip("[]"))
    except ValueError:  # UnicodeDecodeError is one, too
        return False
    return True
