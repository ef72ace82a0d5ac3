# SPDX-License-Identifier: Apache-2.0
"""Find free TCP ports on the loopback for servers that start slowly; recipes.py asks."""

from __future__ import annotations

import random
import socket

# Below the range from which the kernel takes the ports of outgoing connections: a vLLM server
# binds its port half a minute after it was chosen.
LOWEST, HIGHEST = 18000, 30000

given: set[int] = set()


def free() -> int:
    """A port that nobody listens on and that this process has not given out before."""
    chooser = random.SystemRandom()
    for _ in range(200):
        port = chooser.randrange(LOWEST, HIGHEST)
        if port not in given and idle(port):
            given.add(port)
            return port
    raise OSError(f"no free port found between {LOWEST} and {HIGHEST}; stop other servers first")


def idle(port: int) -> bool:
    """Whether the port can be bound on the loopback right now."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
