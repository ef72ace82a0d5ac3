# SPDX-License-Identifier: Apache-2.0
"""Take the pictures of docs/img: `scripts/pictures`, a quarter of an hour; README and docs show them.

known_requests.py's go through a stack of their own at the pace of people's traffic, the slow ones of each
kind within two minutes of each other, and to our own receiver too; then the browser looks.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser

from lab import local_deployment
from lab.local_servers import LocalServer, exit_on_sigterm
from lab.stack import binaries, grafana_server
from lab.stack.program_pins import CHECKOUT
from tests.stack.filled_stack import run_router_meanwhile
from tests.stack.grafana_browser import WIDTH, GrafanaWindow, launch_browser
from tests.stack.known_requests import (
    SLO_MS,
    KnownRequest,
    KnownTruth,
    build_known_requests,
    send_rows,
)
from tests.stack.running_stack import StackStarter, wait_until

IMAGES_FOLDER = CHECKOUT / "docs" / "img"
MINUTES = 12
TROUBLE_MINUTE_BY_KIND = {
    "text": 3.0,
    "epd": 6.0,
    "pd": 9.0,
}  # when each kind's slow ones begin, in minutes
TROUBLE_LASTS_MINUTES = 1.5
TOP = 1390  # pixels of the dashboard that README shows: down to the stages


def send_on_schedule(rows: list[KnownRequest], *urls: str) -> float:
    """Send every request to all receivers when it ends; returns the Unix time of the start."""
    draw, left = random.Random(3), list[tuple[float, KnownRequest]]()
    for row in rows:
        late = row.ttft // 1000 >= SLO_MS or row.error
        begin = TROUBLE_MINUTE_BY_KIND.get(row.kind, 0.0) if late else 0.0
        lasts = TROUBLE_LASTS_MINUTES if late else MINUTES
        left.append((60 * (begin + lasts * draw.random()), row))
    left.sort(key=lambda each: each[0])
    start = time.time()
    while left:
        time.sleep(max(0.0, start + left[0][0] + 1 - time.time()))
        due = [row for at, row in left if start + at <= time.time()]
        left = left[len(due) :]
        for url in urls:
            send_rows(url, due)
        sys.stderr.write(f"\r{len(rows) - len(left)} of {len(rows)} requests")
    return start


def save_whole_page(window: GrafanaWindow, path: Path) -> None:
    """Save a picture of the whole page, not only of the visible part."""
    window.page.set_viewport_size({"width": WIDTH, "height": window.measure_height() + 120})
    window.wait_until_quiet()
    window.page.screenshot(path=path)


def take_pictures(
    browser: Browser, grafana: str, receiver: str, start: float, slow: KnownRequest
) -> None:
    """Take pictures of both dashboards, of the report page's list, and of one slow request in each."""
    query = {"from": f"{start * 1000:.0f}", "to": f"{time.time() * 1000:.0f}"}
    window = GrafanaWindow(browser, grafana)
    window.open_dashboard("ttft", {**query, "var-trace": slow.trace_id}, tall=True)
    save_whole_page(window, IMAGES_FOLDER / "ttft.png")
    top = {"x": 0, "y": 0, "width": WIDTH, "height": TOP}
    window.page.screenshot(path=IMAGES_FOLDER / "overview.png", clip=top)
    window.find_panel("Trace").screenshot(path=IMAGES_FOLDER / "trace.png")
    window.open_dashboard("ttft-health", query, tall=True)
    save_whole_page(window, IMAGES_FOLDER / "health.png")
    window.close()
    window = GrafanaWindow(browser, receiver)
    for name, path in (("page", "?last=2000"), ("page-trace", f"trace/{slow.trace_id}")):
        window.open_path(f"{receiver}/{path}")
        window.page.screenshot(path=IMAGES_FOLDER / f"{name}.png")
    window.close()
    # 256 colours of each: a third of the bytes, and no difference that a reader sees.
    for path in IMAGES_FOLDER.glob("*.png"):
        with Image.open(path) as picture:
            picture.convert("RGB").quantize(256).save(path, optimize=True)


def main() -> None:
    """Start the stack, send the requests, take the pictures."""
    home = grafana_server.find_grafana_home()
    if home is None:
        sys.exit(f"no Grafana here; {grafana_server.GRAFANA_REMEDY}")
    IMAGES_FOLDER.mkdir(exist_ok=True)
    rows = build_known_requests()
    slow = next(
        row for row in KnownTruth(rows).list_slow_rows() if row.kind == "epd" and not row.error
    )
    with exit_on_sigterm(), tempfile.TemporaryDirectory() as scratch:
        bench = StackStarter(binaries.gather_binaries(sys.stderr.write), Path(scratch))
        try:
            stack = bench.start_stack()
            with (
                run_router_meanwhile(stack),
                LocalServer(
                    local_deployment.build_receiver_command(Path(scratch) / "spans.db")
                ) as receiver,
            ):
                start = send_on_schedule(rows, stack.collector.http, receiver.url)
                wait_until(lambda: stack.tempo.fetch_trace(slow.trace_id), 60)
                time.sleep(30)  # Prometheus is a push behind
                server = bench.start_grafana(home, stack.addresses)
                with launch_browser() as browser:
                    take_pictures(browser, server.url, receiver.url, start, slow)
        finally:
            bench.close()


if __name__ == "__main__":
    main()
