# SPDX-License-Identifier: Apache-2.0
"""TraceQL for requests, the windows in which Tempo is searched, and what a search cannot decide. Pure.

tempo_source.py asks with them.
"""

from __future__ import annotations

import json
import time
from typing import Final

from ttft_otel.model.names import keys
from ttft_otel.report.report_types import TTFT_SPAN_NAMES, Request
from ttft_otel.report.store.database_reader import RequestFilter

FIRST_WINDOW_S: Final = (
    900  # of the search backwards from now; each further window is twice as long
)
MAX_WINDOW_S: Final = 86_400  # of one search


def build_query(wanted: RequestFilter) -> str:
    """TraceQL for the traces that can hold a request of `wanted`; matches_filter() decides."""
    # Not only outermost ones: behind some routers a request has none, and is pending.
    named = " || ".join(f'name = "{name}"' for name in TTFT_SPAN_NAMES)
    conditions = [f"({named})", f"span.{keys.TOTAL_US} >= 0"]
    if wanted.model:
        conditions.append(f"span.{keys.MODEL} = {quote_traceql(wanted.model)}")
    return f"{{ {' && '.join(conditions)} }}"


def matches_filter(request: Request, wanted: RequestFilter) -> bool:
    """Whether `request` meets all conditions of `wanted`, as the embedded store decides it."""
    return (
        (not wanted.model or request.model == wanted.model)
        and (not wanted.role or wanted.role in request.roles)
        and {
            "": True,
            "any": bool(request.error),
            "none": not request.error,
        }.get(wanted.error, request.error == wanted.error)
        and request.ttft_us >= wanted.min_us
        and request.start_ns >= wanted.since_ns
        and (not wanted.until_ns or request.start_ns < wanted.until_ns)
    )


def list_windows(since_s: int, until_s: int) -> list[tuple[int, int]]:
    """Windows from the newest to the oldest that fill [since_s, until_s]; each is at most a day."""
    windows = []
    length_s = FIRST_WINDOW_S
    while until_s > since_s:
        begin_s = max(since_s, until_s - length_s)
        windows.append((begin_s, until_s))
        until_s, length_s = begin_s, min(2 * length_s, MAX_WINDOW_S)
    return windows


def is_trace_id(text: str) -> bool:
    """Whether `text` is 32 hex digits."""
    return len(text) == 32 and all(each in "0123456789abcdefABCDEF" for each in text)


def quote_traceql(text: str) -> str:
    """`text` as a string of TraceQL."""
    # Go's quoted strings know JSON's escapes; \u keeps what is not ASCII.
    return json.dumps(text)


def format_window(begin_s: int, end_s: int) -> str:
    """A window in words, in UTC."""
    ends = (time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(end)) for end in (begin_s, end_s))
    return "..".join(ends)
