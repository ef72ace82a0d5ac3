# SPDX-License-Identifier: Apache-2.0
"""`ttft-otel top`: what waits for a first token now, read from running servers' /metrics and WAITING_PATH.

How many wait and since when is counted in the API server, so it grows also while the engine core hangs; of
the reasons the engine core's last word is shown then, with its age.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import urllib.request
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from http.client import HTTPException
from typing import Any, Final

import click
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ttft_otel.model import endpoints
from ttft_otel.model.names import metric_names

WINDOW_S: Final = 60.0
HANG_S: Final = 10.0  # so long without any first token while some wait: the engine may hang
VLLM_API_KEY: Final = (
    "VLLM_API_KEY"  # vLLM's own: which requests hold others up is told with it alone
)
TEXT_COLUMNS: Final = ("server", "in the queue", "held by")
MAX_ID_CHARS: Final = 24  # of a request ID that are shown: its end differs
MAX_PAGE_BYTES: Final = 8 << 20
SCRAPE_TIMEOUT_S: Final = 2.0
TTFT: Final = "vllm:time_to_first_token_seconds"
QUEUED: Final = "vllm:num_requests_waiting_by_reason"
AGE_SHOWN_S: Final = 2.0  # younger than that, counts are of now


@dataclass(frozen=True, slots=True)
class Scrape:
    """One page of /metrics, summed over its labels.

    time: CLOCK_MONOTONIC in seconds. waiting: the queue by our reasons, queued: by vLLM's. buckets: first
    tokens, by the upper bound of their bucket in seconds.
    """

    time: float
    values: dict[str, float]
    waiting: dict[str, float]
    queued: dict[str, float]
    buckets: dict[float, float]


@dataclass(slots=True)
class ServerView:
    """What is shown of one server; None is unknown.

    pending, oldest_s: traced requests without a first token, and the age of the oldest in seconds.
    waiting: of them in the scheduler's queue, by reason, as it was age_s seconds ago; holders: requests
    that hold up the first of each queue, None where the server does not tell. queued: vLLM's own count and
    reasons. ttft: first tokens within window_s seconds, mean and p99 in seconds (p99: the upper bound of its
    bucket). quiet_s: without any first token while some wait.
    """

    server: str
    error: str = ""
    pending: int | None = None
    oldest_s: float | None = None
    running: int | None = None
    waiting: dict[str, int] = field(default_factory=dict)
    age_s: float | None = None
    holders: list[dict[str, Any]] | None = None
    queued: dict[str, int] = field(default_factory=dict)
    ttft: dict[str, float] = field(default_factory=dict)
    window_s: float = 0.0
    quiet_s: float = 0.0


def parse_page(text: str, now: float) -> Scrape:
    """Sum the samples of a page. Raises ValueError for text that is no page of metrics."""
    values = dict[str, float]()
    by_reason = {metric_names.WAITING: dict[str, float](), QUEUED: dict[str, float]()}
    buckets = dict[float, float]()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
            if sample.name == f"{TTFT}_bucket":
                bound = float(sample.labels["le"])
                buckets[bound] = buckets.get(bound, 0.0) + sample.value
            elif (found := by_reason.get(sample.name)) is not None:
                reason = sample.labels["reason"]
                found[reason] = found.get(reason, 0.0) + sample.value
    return Scrape(now, values, by_reason[metric_names.WAITING], by_reason[QUEUED], buckets)


def summarize_ttft(first: Scrape | None, last: Scrape) -> dict[str, float]:
    """First tokens between two scrapes (of all time without `first`): count, mean, p99; {} without any."""

    def grew(name: str) -> float:
        before = first.values.get(name, 0.0) if first else 0.0
        return last.values.get(name, 0.0) - before

    count = grew(f"{TTFT}_count")
    if count <= 0:
        return {}
    earlier = first.buckets if first else {}
    found = {"count": count, "mean": grew(f"{TTFT}_sum") / count}
    for bound, number in sorted(last.buckets.items()):
        # The last bucket's bound is infinite, which says nothing.
        if number - earlier.get(bound, 0.0) >= 0.99 * count and bound < math.inf:
            return {**found, "p99": bound}
    return found


class ServerWatch:
    """The scrapes of one server within WINDOW_S, and when its last first token was seen."""

    def __init__(self, url: str, key: str = "") -> None:
        self.key = key
        self.url = url.rstrip("/").removesuffix("/metrics")
        self.scrapes = deque[Scrape]()
        self._last_token_s = time.monotonic()

    def read(self) -> ServerView:
        """Scrape it once more; an error becomes a view that says so."""
        try:
            view = self.add(parse_page(self._get(endpoints.METRICS_PATH), time.monotonic()))
        except (OSError, ValueError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            text = getattr(reason, "strerror", "") or reason or "no page of metrics"
            return ServerView(self.url, error=str(text))
        if any(view.waiting.values()):
            with suppress(OSError, ValueError, TypeError, KeyError, HTTPException):
                engines = json.loads(self._get(endpoints.WAITING_PATH, self.key))
                view.holders = [each for engine in engines for each in engine["holders"]]
        return view

    def _get(self, path: str, key: str = "") -> str:
        request = urllib.request.Request(self.url + path)
        if key:  # for this server alone, not for where it redirects
            request.add_unredirected_header("Authorization", f"Bearer {key}")
        with urllib.request.urlopen(request, timeout=SCRAPE_TIMEOUT_S) as answer:
            return str(answer.read(MAX_PAGE_BYTES).decode("utf-8", "replace"))

    def add(self, last: Scrape) -> ServerView:
        """Take one more scrape, and say what is so now."""
        before = self.scrapes[-1] if self.scrapes else None
        self.scrapes.append(last)
        while self.scrapes[0].time < last.time - WINDOW_S:
            self.scrapes.popleft()
        first = self.scrapes[0] if len(self.scrapes) > 1 else None
        counted = last.values.get(f"{TTFT}_count", 0.0)
        pending = last.values.get(metric_names.PENDING)
        if not pending or before is None or counted != before.values.get(f"{TTFT}_count", 0.0):
            self._last_token_s = last.time
        running = last.values.get("vllm:num_requests_running")
        return ServerView(
            self.url,
            pending=None if pending is None else int(pending),
            oldest_s=last.values.get(metric_names.OLDEST_PENDING),
            running=None if running is None else int(running),
            waiting={reason: int(number) for reason, number in last.waiting.items() if number},
            age_s=last.values.get(metric_names.WAITING_AGE),
            queued={reason: int(number) for reason, number in last.queued.items() if number},
            ttft=summarize_ttft(first, last),
            window_s=last.time - first.time if first else 0.0,
            quiet_s=last.time - self._last_token_s,
        )


def describe_queue(view: ServerView, hangs: bool) -> Text:
    """Reasons with their counts, one a line; first that nothing is answered any more, if it `hangs`."""
    text = Text(f"no first token for {view.quiet_s:.0f} s\n" if hangs else "", "bold red")
    counts = view.waiting or view.queued  # without our engine core's word: vLLM's
    text.append("\n".join(f"{number} {reason}" for reason, number in counts.items()), "default")
    if view.waiting and view.age_s is not None and view.age_s >= AGE_SHOWN_S:
        text.append(f"\nas of {view.age_s:.0f} s ago", "yellow")
    text.rstrip()
    return text


def describe_holder(holder: dict[str, Any]) -> str:
    """Write a request that holds others up on one line."""
    return f"{holder['request_id'][-MAX_ID_CHARS:]} {holder['kind']} {holder['held_s']:.1f} s"


def build_table(views: list[ServerView]) -> Table:
    """One row for each server; those that wait long without any first token are red."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in (
        "server",
        "waiting",
        "oldest",
        "in the queue",
        "held by",
        "running",
        "TTFT mean",
        "p99",
        "n",
    ):
        table.add_column(name, justify="left" if name in TEXT_COLUMNS else "right")
    for view in views:
        if view.error:
            table.add_row(view.server, Text(view.error, "bold red"))
            continue
        hangs = view.quiet_s >= HANG_S
        ttft = view.ttft
        table.add_row(
            view.server,
            "?" if view.pending is None else str(view.pending),
            "?" if view.oldest_s is None else f"{view.oldest_s:.1f} s",
            describe_queue(view, hangs),
            "\n".join(describe_holder(each) for each in view.holders or ()),
            "?" if view.running is None else str(view.running),
            f"{ttft['mean'] * 1000:.0f} ms" if ttft else "",
            f"≤ {ttft['p99'] * 1000:.0f} ms" if "p99" in ttft else "",
            f"{ttft['count']:.0f}" if ttft else "",
            style="red" if hangs else "",
        )
    return table


@click.command(
    epilog="""\b
Examples:
  ttft-otel top
  ttft-otel top --server http://10.0.0.1:8000 --server http://10.0.0.2:8000
  ttft-otel top --json | jq '.[] | select(.oldest_s > 5)'
"""
)
@click.option(
    "--server",
    "servers",
    multiple=True,
    metavar="URL",
    default=("http://127.0.0.1:8000",),
    show_default="http://127.0.0.1:8000",
    help="A running server, whose /metrics is read; repeatable. A key of its API: VLLM_API_KEY.",
)
@click.option(
    "--every",
    type=click.FloatRange(0.2, 3600),
    default=1.0,
    show_default=True,
    help="Seconds between two looks.",
)
@click.option("--once", is_flag=True, help="Look once; TTFTs are those since the server's start.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, once.")
def top(servers: tuple[str, ...], every: float, once: bool, as_json: bool) -> None:
    """Show what waits for a first token now, since when, why, held up by whom; TTFTs of the last minute."""
    watches = [ServerWatch(url, os.environ.get(VLLM_API_KEY, "")) for url in servers]
    console = Console(highlight=False)

    # At once: a server that hangs must not hold the others' rows back.
    with ThreadPoolExecutor(len(watches)) as pool:

        def look() -> list[ServerView]:
            return list(pool.map(ServerWatch.read, watches))

        views = look()
        if as_json:
            click.echo(json.dumps([asdict(view) for view in views], indent=2))
        elif once:
            console.print(build_table(views))
        else:
            # Draw until Ctrl-C.
            table = Live(build_table(views), console=console, auto_refresh=False, screen=False)
            with suppress(KeyboardInterrupt), table as live:
                while True:
                    time.sleep(every)
                    live.update(build_table(look()), refresh=True)
    sys.exit(1 if any(view.error for view in views) else 0)
