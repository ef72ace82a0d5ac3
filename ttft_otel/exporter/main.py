# SPDX-License-Identifier: Apache-2.0
"""The exporter's life: read until the host is gone, export meanwhile, drain within a bound, end.

handoff.py gives the socket, the shared page and the host's pid.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from typing import Final

from opentelemetry.sdk.trace import ReadableSpan

from ttft_otel import record
from ttft_otel.exporter import spans
from ttft_otel.exporter.health import Health
from ttft_otel.exporter.identity import Resources
from ttft_otel.exporter.inbox import Inbox
from ttft_otel.exporter.ship import Ship, exporter
from ttft_otel.guard import Guard
from ttft_otel.settings import read

log = logging.getLogger("ttft_otel")

GATHER: Final = 1.0  # seconds until a batch that is not full goes
RECORDS: Final = 64  # taken at once; about 16 spans each
DRAIN: Final = 4.5  # seconds from end of file to exit, at most


def run(fd: int, page: int, pid: int) -> None:
    """Everything, from the first record to the process's end."""
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    logging.raiseExceptions = False  # whoever read our stderr may be gone
    health = Health(page)
    inbox = Inbox(health)
    settings = read()
    ship = Ship(exporter(settings), health, settings.endpoint)
    worker = threading.Thread(target=work, args=(inbox, ship, Resources(pid)), daemon=True)
    worker.start()
    with socket.socket(fileno=fd) as source:  # open until we are done: the host waits for that
        inbox.read(source)
        ship.hurry.set()
        end = time.monotonic() + DRAIN
        worker.join(DRAIN)
        if worker.is_alive():
            log.warning(
                "ttft-otel exporter: gave up on %d records and the batch under way after %.1f s",
                len(inbox),
                time.monotonic() - end + DRAIN,
            )
        health.tell(last=True)
    os._exit(0)  # no exit handler of any library holds us up


def work(inbox: Inbox, ship: Ship, resources: Resources) -> None:
    """Records to spans to OTLP, until the inbox has ended and is empty."""
    while batch := inbox.take(RECORDS, GATHER):
        made: list[ReadableSpan] = []
        for data in batch:
            with Guard("exporter.spans"):
                try:
                    found = record.decode(data)
                    made += spans.build(found, resources.get(found.service))
                except ValueError:  # not a record of this version, or with broken ids
                    ship.health.add("foreign")
        if made:
            ship.send(made)
        ship.health.tell()
