# SPDX-License-Identifier: Apache-2.0
"""Tell on stderr what a long Go build is doing; fixtures that build programs pass it to the builder."""

from __future__ import annotations

import sys
import time

from lab.stack.go_builds import LineCallback

INTERVAL_S = 20


def make_announcer(label: str) -> LineCallback:
    """A callback that prints a line of a build every twenty seconds, with `label` before it."""
    last = time.monotonic()

    def report_line(line: str) -> None:
        nonlocal last
        if time.monotonic() - last > INTERVAL_S:
            last = time.monotonic()
            sys.stderr.write(f"[{label}] {line}\n")

    return report_line
