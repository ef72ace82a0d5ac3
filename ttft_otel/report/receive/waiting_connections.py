# SPDX-License-Identifier: Apache-2.0
"""Closes connections of uvicorn that wait for a request; report_server.py calls it at each tick.

uvicorn closes a kept-alive connection between two requests, but neither one that never sends a request nor
one that stops in the middle of a head.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import monotonic
from typing import Any, Final

# An exporter sends its head at once; only a stalled or idle client takes longer.
MAX_WAIT_S: Final = 10.0  # seconds for the head of a request
MAX_CONNECTIONS: Final = 256  # with more, those that have waited longest are closed


class WaitingConnections:
    """Since when each connection has been waiting for a request, or has been in one."""

    def __init__(self) -> None:
        # By connection: its last request (uvicorn's object), whether that has ended, and since when.
        self._states: dict[Any, tuple[Any, bool, float]] = {}

    def close_overdue(self, connections: Iterable[Any]) -> None:
        """Close what has waited for MAX_WAIT_S, and the oldest beyond MAX_CONNECTIONS.

        connections: uvicorn's protocol objects.
        """
        now_s = monotonic()
        states: dict[Any, tuple[Any, bool, float]] = {}
        for connection in connections:
            request = connection.cycle
            waits = request is None or request.response_complete
            before = self._states.get(connection)
            # Another request, or its end, starts the wait anew.
            is_same = before is not None and before[0] is request and before[1] == waits
            states[connection] = before if before and is_same else (request, waits, now_s)
        # Replaced as a whole, so that closed connections are forgotten.
        self._states = states
        # Waiting ones first, each group oldest first.
        ordered = sorted(states.items(), key=lambda item: (not item[1][1], item[1][2]))
        excess = len(ordered) - MAX_CONNECTIONS
        for position, (connection, (_, waits, since_s)) in enumerate(ordered):
            if position < excess or (waits and now_s - since_s > MAX_WAIT_S):
                connection.transport.close()
