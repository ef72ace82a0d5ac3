# SPDX-License-Identifier: Apache-2.0
"""Take the pictures of docs/img: `scripts/pictures`, a quarter of an hour; README and docs show them.

known.py's requests go through a stack of their own at the pace of people's traffic, the slow ones of each
kind within two minutes of each other, and to our own receiver too; then the browser looks.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Browser

from tests.stack.bench import Bench, until
from tests.stack.browser import WIDTH, Window, launched
from tests.stack.filled import beside
from tests.stack.known import SLO_MS, Known, Truth, send, table
from ttft_otel.lab import fleet
from ttft_otel.lab.servers import Server, terminable
from ttft_otel.lab.stack import binaries, grafana
from ttft_otel.lab.stack.pins import CHECKOUT

IMAGES = CHECKOUT / "docs" / "img"
MINUTES = 12
TROUBLE = {"text": 3.0, "epd": 6.0, "pd": 9.0}  # when each kind's slow ones begin, in minutes
LASTS = 1.5
TOP = 1390  # pixels of the dashboard that README shows: down to the stages


def plan(rows: list[Known]) -> list[tuple[float, Known]]:
    """Seconds after the beginning at which each request ends."""
    draw = random.Random(3)
    found = []
    for row in rows:
        late = row.ttft // 1000 >= SLO_MS or row.error
        begin = TROUBLE.get(row.kind, 0.0) if late else 0.0
        lasts = LASTS if late else MINUTES
        found.append((60 * (begin + lasts * draw.random()), row))
    return sorted(found, key=lambda each: each[0])


def play(planned: list[tuple[float, Known]], *urls: str) -> float:
    """Send every request in its second, to all receivers; gives the Unix time of the beginning."""
    start = time.time()
    left = list(planned)
    while left:
        time.sleep(max(0.0, start + left[0][0] + 1 - time.time()))
        due = [row for at, row in left if start + at <= time.time()]
        left = left[len(due) :]
        for url in urls:
            send(url, due)
        sys.stderr.write(f"\r{len(planned) - len(left)} of {len(planned)} requests")
    return start


def whole(window: Window, path: Path) -> None:
    """A picture of everything that is drawn."""
    window.page.set_viewport_size({"width": WIDTH, "height": window.height() + 120})
    window.settle()
    window.page.screenshot(path=path)


def dashboards(browser: Browser, url: str, start: float, slow: Known) -> None:
    """Both dashboards, and the trace panel of one slow request."""
    end = time.time()
    query = {"from": f"{start * 1000:.0f}", "to": f"{end * 1000:.0f}"}
    window = Window(browser, url)
    window.dashboard("ttft", {**query, "var-trace": slow.trace_id}, tall=True)
    whole(window, IMAGES / "ttft.png")
    top = {"x": 0, "y": 0, "width": WIDTH, "height": TOP}
    window.page.screenshot(path=IMAGES / "overview.png", clip=top)
    window.panel("Trace").screenshot(path=IMAGES / "trace.png")
    window.dashboard("ttft-health", query, tall=True)
    whole(window, IMAGES / "health.png")
    window.close()


def page(browser: Browser, url: str, slow: Known) -> None:
    """Our own page: its list, and the same request."""
    window = Window(browser, url)
    window.go(f"{url}/?last=2000")
    window.page.screenshot(path=IMAGES / "page.png")
    window.go(f"{url}/trace/{slow.trace_id}")
    window.page.screenshot(path=IMAGES / "page-trace.png")
    window.close()


def main() -> None:
    """Start, play, look."""
    home = grafana.home()
    if home is None:
        sys.exit(f"no Grafana here; {grafana.REMEDY}")
    IMAGES.mkdir(exist_ok=True)
    rows = table()
    slow = next(row for row in Truth(rows).slow() if row.kind == "epd" and not row.error)
    with terminable(), tempfile.TemporaryDirectory() as scratch:
        bench = Bench(binaries.gather(sys.stderr.write), Path(scratch))
        try:
            stack = bench.stack()
            with beside(stack), Server(fleet.receiver(Path(scratch) / "spans.db")) as receiver:
                start = play(plan(rows), stack.collector.http, receiver.url)
                until(lambda: stack.tempo.trace(slow.trace_id), 60)
                time.sleep(30)  # Prometheus is a push behind
                server = bench.grafana(home, stack.at)
                with launched() as browser:
                    dashboards(browser, server.url, start, slow)
                    page(browser, receiver.url, slow)
        finally:
            bench.close()


if __name__ == "__main__":
    main()
