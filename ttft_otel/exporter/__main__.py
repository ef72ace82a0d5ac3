# SPDX-License-Identifier: Apache-2.0
"""Entry of the exporter process: handoff.py starts it; it detaches itself, then main.py runs."""

from __future__ import annotations

import os
import signal
import sys


def detach() -> None:
    """Leave the host's process tree, which vLLM kills as a whole; the host reaps the process left.

    The session is new already. Whoever stops the host may signal us too: the end of the socket
    says when to go, a signal does not.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if os.fork():
        os._exit(0)


if __name__ == "__main__":
    detach()
    from ttft_otel.exporter.main import run  # after the fork: it starts a thread

    run(*map(int, sys.argv[1:4]))
