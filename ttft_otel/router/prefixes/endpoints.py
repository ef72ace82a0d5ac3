# SPDX-License-Identifier: Apache-2.0
"""Where an instance publishes its KV events: as itself or the operator says; kvevents.py asks.

An instance says it on `GET /kv_event_sources`, by data-parallel rank; addresses that it binds with a
wildcard are on its own host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

REMEDY: Final = (
    "write --kv-events-endpoint INSTANCE_URL=ENDPOINT[,REPLAY_ENDPOINT] with endpoints like "
    "tcp://host:5557 or ipc:///path, once for each data-parallel rank of the instance"
)
ANYWHERE: Final = ("*", "0.0.0.0", "::", "[::]")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One publisher: where events come from, where missed ones are asked for ("" nowhere)."""

    events: str
    replay: str = ""
    topic: str = ""


def given(values: Sequence[str]) -> dict[str, list[Endpoint]]:
    """Read the operator's endpoints, by instance. Raises ValueError with the remedy."""
    found: dict[str, list[Endpoint]] = {}
    for value in values:
        url, sign, rest = value.partition("=")
        events, _, replay = rest.partition(",")
        host = urlsplit(url).hostname if url.startswith(("http://", "https://")) else None
        if not sign or not host:
            raise ValueError(f"{value!r} names no instance and endpoint; {REMEDY}.")
        try:
            endpoint = Endpoint(reach(events, host), reach(replay, host) if replay else "")
        except ValueError as error:
            raise ValueError(f"{error}; {REMEDY}.") from error
        found.setdefault(url.rstrip("/"), []).append(endpoint)
    return found


def told(answer: Any, url: str) -> dict[int, Endpoint]:
    """Read an answer of /kv_event_sources, by rank; empty where nothing is published.

    Raises ValueError for an answer that is none.
    """
    if not isinstance(answer, Mapping):
        raise ValueError("its answer is no map of ranks")
    host = urlsplit(url).hostname or ""
    found: dict[int, Endpoint] = {}
    for rank, config in answer.items():
        if not isinstance(config, Mapping) or not str(rank).isdigit():
            raise ValueError(f"its answer has no configuration for rank {rank!r:.20}")
        if config.get("publisher") == "zmq" and config.get("enable_kv_cache_events", True):
            replay = config.get("replay_endpoint") or ""
            found[int(rank)] = Endpoint(
                reach(str(config.get("endpoint")), host),
                reach(str(replay), host) if replay else "",
                str(config.get("topic") or ""),
            )
    return found


def reach(address: str, host: str) -> str:
    """A ZMQ address as somebody else connects to it. Raises ValueError for what is none."""
    scheme, _, rest = address.partition("://")
    if scheme == "ipc" and rest:
        return address
    name, _, port = rest.rpartition(":")
    if scheme != "tcp" or not name or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r:.200} is no address of a publisher")
    if name in ANYWHERE:
        name = f"[{host}]" if ":" in host else host
    return f"tcp://{name}:{port}"
