# SPDX-License-Identifier: Apache-2.0
"""HOT: what is known about one HTTP request so far; recorder.py, asgi.py and hooks/frontend.py fill it."""

from __future__ import annotations

from ttft_otel import breakdown, carrier, context


class Engine:
    """One engine request of a trip."""

    __slots__ = ("assign", "marks", "output", "received")

    def __init__(self, assign: int) -> None:
        self.assign = assign
        self.marks = ""
        self.received = 0
        self.output = 0


class Trip:
    """What is known about one HTTP request so far; times in microseconds."""

    __slots__ = (
        "arrive", "asked", "assigned", "context", "cut", "died", "end",
        "engines", "error", "first", "journey", "leg", "method", "parts", "path", "render", "request_id",
        "route", "scheme", "status", "streamed", "told", "ttft_id",
    )  # fmt: skip

    def __init__(self, arrive: int, found: context.Context, asked: bool) -> None:
        self.arrive = arrive
        self.context = found
        self.asked = asked
        self.assigned: dict[str, int] = {}
        self.journey: carrier.Journey | None = None
        self.cut: breakdown.Breakdown | None = None
        self.died = ""
        self.end = 0
        self.engines: dict[str, Engine] = {}
        self.error = ""
        self.first: Engine | None = None
        self.leg = ""
        self.method = ""
        self.parts: list[tuple[str, int, int]] = []
        self.path = ""
        self.render = 0
        self.request_id = ""
        self.route = ""
        self.scheme = ""
        self.status = 0
        self.streamed = False
        self.told = False
        self.ttft_id = context.new_id()
