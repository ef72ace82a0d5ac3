# SPDX-License-Identifier: Apache-2.0
"""The exporter process, started by handoff.py: detach from the host, read records until it is gone, drain.

Its arguments are the socket, the shared page, the host's process ID, and what the host tells of its engine.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ttft_otel.exporter.record_queue import RecordQueue

log = logging.getLogger("ttft_otel")

# Seconds to wait for the worker's imports, where the host ended before they were done (busy machine).
MAX_START_S: Final = 4.0
MAX_DRAIN_S: Final = 4.5  # seconds from then, or from the end of file, to exit, at most


def detach_process() -> None:
    """Leave the host's process tree, which vLLM kills as a whole: fork, and end the parent.

    handoff.py has started a new session and reaps the parent. Signals for the host's process group may
    still arrive; they are ignored, because the end of the socket's stream says when to end.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if os.fork():  # the parent is the process that handoff.py reaps
        os._exit(0)


def run_exporter(fd: int, page: int, pid: int, engine_settings: Mapping[str, int]) -> None:
    """Run the exporter, and exit the process.

    fd: file descriptor of the socket. page: of the shared memory page. pid: the host's process.
    engine_settings: resource attributes that the host knows.
    """
    # After the fork: until then the host has a process to reap.
    from ttft_otel.exporter.record_queue import ExporterCounters, RecordQueue

    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    logging.raiseExceptions = False  # the process that reads our stderr may be gone
    set_batch_policy()
    record_queue = RecordQueue(ExporterCounters(page))
    ready = threading.Event()
    passed = (record_queue, pid, ready, engine_settings)
    worker = threading.Thread(target=_run_worker, args=passed, daemon=True)
    worker.start()
    # The socket stays open until all is exported: RecordSender.close() waits for its end.
    with socket.socket(fileno=fd) as source:
        record_queue.read_socket(source)
        ready.wait(MAX_START_S)
        worker.join(MAX_DRAIN_S)
        if worker.is_alive():
            record_queue.counters.add("overflowed", len(record_queue))
            log.warning(
                "ttft-otel exporter: %d records and the current batch are lost: not exported within "
                "%.1f s after the host's end",
                len(record_queue),
                MAX_DRAIN_S,
            )
        record_queue.counters.log_losses(final=True)
    os._exit(0)  # without exit handlers, of which a library's could block


def set_batch_policy() -> None:
    """Run under SCHED_BATCH, so that a wake-up of this process does not preempt the host.

    Threads that start later inherit it. The share of CPU time stays the same, and a policy that somebody has
    chosen stays, too.
    """
    try:
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError:  # forbidden here
        log.debug("ttft-otel exporter: no batch policy", exc_info=True)


def _run_worker(
    inbox: RecordQueue, pid: int, ready: threading.Event, engine_settings: Mapping[str, int]
) -> None:
    try:
        # Imported in this thread: the SDK takes 0.4 s, in which the main thread reads records.
        from ttft_otel.exporter.export_worker import run_worker
    finally:
        ready.set()
    run_worker(inbox, pid, engine_settings)


if __name__ == "__main__":
    detach_process()
    fd, page, pid = map(int, sys.argv[1:4])
    run_exporter(fd, page, pid, json.loads(sys.argv[4]))
