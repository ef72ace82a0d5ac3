# SPDX-License-Identifier: Apache-2.0
"""Counts media items that were encoded twice: by an encoder, and again by the prefilling instance.

endpoint.py passes each finished attempt; the instance reports such items in Server-Timing (`ec`). They
are counted per instance for router_metrics.py, and logged with the remedy.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Final

from ttft_otel.model import timing
from ttft_otel.router.timeline import Attempt
from ttft_otel.tracing import clock

LOG_INTERVAL_US: Final = 60_000_000  # microseconds: at most one line in that time
MAX_LOGGED_INSTANCES: Final = 4  # instances in one line, those with the most items

log: Final = logging.getLogger("ttft_otel")


class RecomputedMediaLog:
    """The items counted since the last log line."""

    def __init__(self) -> None:
        self._items_by_url: Counter[str] = Counter()  # by the instance's URL
        self._request_count = 0
        self._logged_us: int | None = None

    def record_attempt(self, attempt: Attempt) -> None:
        """Count items that the instance of `attempt` encoded again; usually none."""
        # Instances that are not traced, or have no encoder cache, report nothing.
        if not timing.may_count_media(attempt.timing_header):
            return
        server_timing = attempt.read_server_timing()
        if server_timing is None or server_timing.ec is None or not server_timing.ec.recomputed:
            return
        ec = server_timing.ec
        instance = attempt.instance
        instance.recomputed_items += ec.recomputed
        self._items_by_url[instance.url] += ec.recomputed
        self._request_count += 1
        now_us = clock.now_us()
        if self._logged_us is None or now_us - self._logged_us >= LOG_INTERVAL_US:
            self._logged_us = now_us
            self._log_recomputed()

    def _log_recomputed(self) -> None:
        most_common = self._items_by_url.most_common(MAX_LOGGED_INSTANCES)
        instances = ", ".join(f"{url} ({number})" for url, number in most_common)
        other_count = len(self._items_by_url) - len(most_common)
        log.warning(
            "ttft-otel: media items encoded again although an encoder had encoded them: %d, in %d"
            " requests since the last such line, by %s%s. Possible causes: encoder responses without"
            " ec_transfer_params, different EC connectors on encoder and consumer, an EC port of the"
            " encoder that the consumer cannot reach, or a cache (ec_cpu_bytes) too small for the"
            " requests in flight. What to check: docs/router.md, 'Encoder-cache parameters'.",
            self._items_by_url.total(),
            self._request_count,
            instances,
            f" and {other_count} more" if other_count else "",
        )
        self._items_by_url.clear()
        self._request_count = 0
