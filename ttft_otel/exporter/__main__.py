# SPDX-License-Identifier: Apache-2.0
"""Entry point of the exporter process, started by handoff.py: detach from the host, then run."""

from __future__ import annotations

import json
import os
import signal
import sys


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


if __name__ == "__main__":
    detach_process()
    from ttft_otel.exporter.exporter_process import (
        run_exporter,  # after the fork: it starts a thread
    )

    fd, page, pid = map(int, sys.argv[1:4])
    run_exporter(fd, page, pid, json.loads(sys.argv[4]))
