# SPDX-License-Identifier: Apache-2.0
"""Cached prefixes as vLLM's engines publish them (ZMQ); the source behind --prefix-index kv-events."""

from __future__ import annotations

from collections.abc import Sequence

from ttft_otel.router.prefixes.endpoints import given
from ttft_otel.router.prefixes.history import Sent


class Events(Sent):
    """Instances that publish events are known by them, others by what they were sent."""

    def __init__(self, size: int, most: int, endpoints: Sequence[str]) -> None:
        super().__init__(size, most)
        self.given = given(endpoints)
