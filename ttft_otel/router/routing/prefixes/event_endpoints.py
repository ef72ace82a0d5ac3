# SPDX-License-Identifier: Apache-2.0
"""ZMQ endpoints of an instance's KV events, reported or configured; kv_events_source.py asks.

An instance reports them on `GET /kv_event_sources`, by data-parallel rank. A wildcard in an address that
it binds is replaced by the host of the instance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

ENDPOINT_REMEDY: Final = (
    "write --kv-events-endpoint INSTANCE_URL=ENDPOINT[,REPLAY_ENDPOINT] with endpoints like "
    "tcp://host:5557 or ipc:///path, once for each data-parallel rank of the instance"
)
MAX_RANKS: Final = 128  # data-parallel ranks of an instance; each takes sockets and a task
MAX_ADDRESS_CHARS: Final = 255  # paths of sockets have fewer, host names no more
WILDCARD_HOSTS: Final = ("*", "0.0.0.0", "::", "[::]")


@dataclass(frozen=True, slots=True)
class EventEndpoint:
    """ZMQ addresses of one publisher: its PUB socket, and its replay (ROUTER) socket, "" if it has none."""

    events: str
    replay: str = ""
    topic: str = ""


def parse_configured(values: Sequence[str]) -> dict[str, list[EventEndpoint]]:
    """Parse --kv-events-endpoint into endpoints by instance URL. Raises ValueError with the remedy.

    values: each INSTANCE_URL=ENDPOINT[,REPLAY_ENDPOINT], in the order of data-parallel ranks.
    """
    endpoints: dict[str, list[EventEndpoint]] = {}
    for value in values:
        url, separator, rest = value.partition("=")
        events, _, replay = rest.partition(",")
        # Checked before: urlsplit() takes almost any text for a path.
        host = urlsplit(url).hostname if url.startswith(("http://", "https://")) else None
        if not separator or not host:
            raise ValueError(
                f"{value!r} is not an instance URL and an endpoint; {ENDPOINT_REMEDY}."
            )
        try:
            endpoint = EventEndpoint(
                resolve_address(events, host), resolve_address(replay, host) if replay else ""
            )
        except ValueError as error:
            raise ValueError(f"{error}; {ENDPOINT_REMEDY}.") from error
        endpoints.setdefault(url.rstrip("/"), []).append(endpoint)
    return endpoints


def parse_announced(answer: Any, url: str) -> dict[int, EventEndpoint]:
    """Parse a decoded response of /kv_event_sources into endpoints by data-parallel rank.

    answer: empty if the instance publishes nothing. url: of the instance, to resolve wildcard addresses.
    Raises ValueError for a response of another form, or with more than MAX_RANKS.
    """
    if not isinstance(answer, Mapping):
        raise ValueError("/kv_event_sources did not return an object by rank")
    # The answer comes from an instance: it must not make the router open thousands of sockets.
    if len(answer) > MAX_RANKS:
        raise ValueError(f"/kv_event_sources returned more than {MAX_RANKS} ranks")
    host = urlsplit(url).hostname or ""
    endpoints: dict[int, EventEndpoint] = {}
    for rank, config in answer.items():
        if not isinstance(config, Mapping) or not str(rank).isdigit():
            raise ValueError(f"/kv_event_sources has no valid configuration for rank {rank!r:.20}")
        # The other publisher, "null", sends nothing.
        if config.get("publisher") == "zmq" and config.get("enable_kv_cache_events", True):
            replay = config.get("replay_endpoint") or ""
            endpoints[int(rank)] = EventEndpoint(
                resolve_address(str(config.get("endpoint")), host),
                resolve_address(str(replay), host) if replay else "",
                str(config.get("topic") or ""),
            )
    return endpoints


def resolve_address(address: str, host: str) -> str:
    """Turn the `address` that a publisher binds into one to connect to, on `host` if it is a wildcard.

    Raises ValueError for anything but tcp://HOST:PORT and ipc://PATH.
    """
    scheme, _, rest = address.partition("://")
    if len(address) > MAX_ADDRESS_CHARS or not address.isprintable():
        raise ValueError(f"{address[:50]!r}... is not a ZMQ address of a publisher")
    # Only on this host, in a file system that both see.
    if scheme == "ipc" and rest:
        return address
    host_part, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host_part or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r:.200} is not a ZMQ address of a publisher")
    if host_part in WILDCARD_HOSTS:
        # An IPv6 address needs its brackets before a port.
        host_part = f"[{host}]" if ":" in host else host
    return f"tcp://{host_part}:{port}"
