# SPDX-License-Identifier: Apache-2.0
"""`ttft-otel top`: what waits for a first token now, read from /metrics of running servers.

How many wait and since when is counted in the API server, so it grows also while the engine core hangs; what
vLLM's scheduler says of its queue is then its last word.
"""

from __future__ import annotations

import json
import math
import sys
import time
import urllib.request
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from http.client import HTTPException
from typing import Any, Final

import click
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ttft_otel.model.names import metric_names

WINDOW_S: Final = 60.0
HANG_S: Final = 10.0  # so long without any first token while some wait: the engine may hang
MAX_PAGE_BYTES: Final = 8 << 20
SCRAPE_TIMEOUT_S: Final = 2.0
TTFT: Final = "vllm:time_to_first_token_seconds"


@dataclass(frozen=True, slots=True)
class Scrape:
    """One page of /metrics, summed over its labels.

    time: CLOCK_MONOTONIC in seconds. waiting: vLLM's queue by its reason. buckets: first tokens, by the upper
    bound of their bucket in seconds.
    """

    time: float
    values: dict[str, float]
    waiting: dict[str, float]
    buckets: dict[float, float]


@dataclass(slots=True)
class ServerView:
    """What is shown of one server; None is unknown.

    pending, oldest_s: traced requests without a first token, and the age of the oldest in seconds.
    waiting: of them in vLLM's queue, by vLLM's reason. ttft: first tokens within window_s seconds, mean and
    p99 in seconds (p99: the upper bound of its bucket). quiet_s: without any first token while some wait.
    """

    server: str
    error: str = ""
    pending: int | None = None
    oldest_s: float | None = None
    running: int | None = None
    waiting: dict[str, int] = field(default_factory=dict)
    ttft: dict[str, float] = field(default_factory=dict)
    window_s: float = 0.0
    quiet_s: float = 0.0


def parse_page(text: str, now: float) -> Scrape:
    """Sum the samples of a page. Raises ValueError for text that is no page of metrics."""
    values = dict[str, float]()
    waiting = dict[str, float]()
    buckets = dict[float, float]()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
            if sample.name == f"{TTFT}_bucket":
                bound = float(sample.labels["le"])
                buckets[bound] = buckets.get(bound, 0.0) + sample.value
            elif sample.name == "vllm:num_requests_waiting_by_reason":
                reason = sample.labels["reason"]
                waiting[reason] = waiting.get(reason, 0.0) + sample.value
    return Scrape(now, values, waiting, buckets)


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

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/metrics")
        self.scrapes = deque[Scrape]()
        self._last_token_s = time.monotonic()

    def read(self) -> ServerView:
        """Scrape it once more; an error becomes a view that says so."""
        try:
            with urllib.request.urlopen(f"{self.url}/metrics", timeout=SCRAPE_TIMEOUT_S) as answer:
                page = answer.read(MAX_PAGE_BYTES).decode("utf-8", "replace")
            return self.add(parse_page(page, time.monotonic()))
        except (OSError, ValueError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            text = getattr(reason, "strerror", "") or reason or "no page of metrics"
            return ServerView(self.url, error=str(text))

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
            ttft=summarize_ttft(first, last),
            window_s=last.time - first.time if first else 0.0,
            quiet_s=last.time - self._last_token_s,
        )


def build_table(views: list[ServerView]) -> Table:
    """One row for each server; those that wait long without any first token are red."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in (
        "server",
        "waiting",
        "oldest",
        "in vLLM's queue",
        "running",
        "TTFT mean",
        "p99",
        "n",
    ):
        table.add_column(name, justify="left" if name in ("server", "in vLLM's queue") else "right")
    for view in views:
        if view.error:
            table.add_row(view.server, Text(view.error, "bold red"))
            continue
        hangs = view.quiet_s >= HANG_S
        queue = ", ".join(f"{number} {reason}" for reason, number in view.waiting.items())
        ttft = view.ttft
        table.add_row(
            view.server,
            "?" if view.pending is None else str(view.pending),
            "?" if view.oldest_s is None else f"{view.oldest_s:.1f} s",
            Text(f"no first token for {view.quiet_s:.0f} s", "bold red") if hangs else queue,
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
    help="A running server, whose /metrics is read; repeatable.",
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
    """Show how many requests wait for their first token now, and since when; TTFTs of the last minute."""
    watches = [ServerWatch(url) for url in servers]
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
            _redraw(console, views, look, every)
    sys.exit(1 if any(view.error for view in views) else 0)


def _redraw(console: Console, views: list[ServerView], look: Any, every: float) -> None:
    """Draw until Ctrl-C."""
    try:
        with Live(build_table(views), console=console, auto_refresh=False, screen=False) as live:
            while True:
                time.sleep(every)
                live.update(build_table(look()), refresh=True)
    except KeyboardInterrupt:
        return
