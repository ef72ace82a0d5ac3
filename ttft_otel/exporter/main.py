# SPDX-License-Identifier: Apache-2.0
"""The exporter's life: read until the host is gone, let flow.py drain within a bound, end.

handoff.py gives the socket, the shared page and the host's pid.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from typing import Final

from ttft_otel.exporter.health import Health
from ttft_otel.exporter.inbox import Inbox

log = logging.getLogger("ttft_otel")

START: Final = 4.0  # seconds more where the host ended before we were ready, on a busy machine
DRAIN: Final = 4.5  # seconds from end of file to exit, at most


def run(fd: int, page: int, pid: int) -> None:
    """Everything, from the first record to the process's end."""
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    logging.raiseExceptions = False  # whoever read our stderr may be gone
    inbox = Inbox(Health(page))
    ready = threading.Event()
    worker = threading.Thread(target=_work, args=(inbox, pid, ready), daemon=True)
    worker.start()
    with socket.socket(fileno=fd) as source:  # open until we are done: the host waits for that
        inbox.read(source)
        ready.wait(START)
        worker.join(DRAIN)
        if worker.is_alive():
            inbox.health.add("overflowed", len(inbox))
            log.warning(
                "ttft-otel exporter: gave up on %d records and the batch under way after %.1f s",
                len(inbox),
                DRAIN,
            )
        inbox.health.tell(last=True)
    os._exit(0)  # no exit handler of any library holds us up


def _work(inbox: Inbox, pid: int, ready: threading.Event) -> None:
    try:
        # Imported here, in the thread: the SDK takes 0.4 s of CPU, and records are read meanwhile.
        from ttft_otel.exporter.flow import work
    finally:
        ready.set()
    work(inbox, pid)
