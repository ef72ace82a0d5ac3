# SPDX-License-Identifier: Apache-2.0
"""doctor's check for media items that were encoded twice, from the /metrics of a running router.

doctor's own request is text and cannot show that, so this reads what the router has counted for its
clients since it started.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.error import URLError
from urllib.request import urlopen

from ttft_otel.model.names import metric_names

MAX_PAGE_BYTES: Final = 8 << 20  # of a /metrics page; the rest is not read
RECOMPUTED_REMEDY: Final = (
    "check, in this order: the encoders' answers have ec_transfer_params; encoder and consumer have the "
    "same EC connector; the consumer reaches the encoder's EC port; ec_cpu_bytes is large enough "
    "(docs/router.md#encoder-cache-parameters)"
)
_SAMPLE: Final = re.compile(
    rf'^{metric_names.ROUTER_RECOMPUTED_ITEMS}_total\{{(?:.*,)?instance="([^"]*)".*\}} '
    r"(\d+(?:\.\d+)?(?:e\+?\d+)?)$",
    re.M,
)


def read_recomputed_items(base: str, timeout: float) -> dict[str, int] | None:
    """Media items that each instance behind a router has encoded again since the router started.

    base: URL of a router or server, without path. timeout: seconds.
    None when this is not a router with encoders, or /metrics cannot be read (another check reports
    servers that do not answer).
    """
    try:
        with urlopen(f"{base}/metrics", timeout=timeout) as answer:
            page = answer.read(MAX_PAGE_BYTES).decode("utf-8", "replace")
    except (URLError, OSError, ValueError):
        return None
    # float() first: the page's numbers are floats, and large ones have an exponent.
    items = {instance: int(float(count)) for instance, count in _SAMPLE.findall(page)}
    # No sample: not a router with encoders. Zeros are an answer, and are told.
    return items or None


def describe_recomputed_items(items: dict[str, int]) -> str:
    """The check's message: `3 media items were encoded twice ..., by http://...:8002 (3)`.

    items: instance -> number of media items, as of read_recomputed_items().
    """
    total = sum(items.values())
    if not total:
        return "no media item was encoded twice since this router started"
    by = ", ".join(f"{instance} ({count})" for instance, count in items.items() if count)
    said = "media item was" if total == 1 else "media items were"
    return f"{total} {said} encoded twice since this router started, by {by}"
