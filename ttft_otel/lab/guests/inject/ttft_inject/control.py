# SPDX-License-Identifier: Apache-2.0
"""Read the control file that every process of a server shares, and note each delay in its log."""

from __future__ import annotations

import asyncio
import json
import os
import time
from typing import Any

PATH = os.environ.get("TTFT_LAB_CONTROL", "")

content: dict[str, Any] = {}
seen: tuple[int, int] = (0, 0)


def read() -> dict[str, Any]:
    """The file's content; parsed again only when the file has changed, kept when it is broken."""
    global content, seen
    try:
        status = os.stat(PATH)
        if (status.st_mtime_ns, status.st_ino) != seen:
            with open(PATH, encoding="utf-8") as source:
                content = json.load(source)
            seen = (status.st_mtime_ns, status.st_ino)
    except (OSError, ValueError):
        pass
    return content


def seconds(place: str) -> float:
    """How long this place is to wait now."""
    return float(read().get("delay_ms", {}).get(place, 0.0)) / 1000.0


def delay(place: str) -> None:
    """Hold up the calling thread, asleep or, where the file says so, busy."""
    wanted = seconds(place)
    if wanted <= 0:
        return
    began = time.monotonic_ns()
    if content.get("busy"):
        spin(began + int(wanted * 1e9))
    else:
        time.sleep(wanted)
    note(place, began)


async def delay_async(place: str) -> None:
    """Hold up the calling task only, unless busy."""
    wanted = seconds(place)
    if wanted <= 0:
        return
    if content.get("busy"):
        delay(place)
        return
    began = time.monotonic_ns()
    await asyncio.sleep(wanted)
    note(place, began)


def spin(until: int) -> None:
    """Use up the core."""
    while time.monotonic_ns() < until:
        pass


def note(place: str, began: int) -> None:
    """Append one line to the log beside the control file; short appends do not mix."""
    line = {"place": place, "pid": os.getpid(), "start_ns": began, "end_ns": time.monotonic_ns()}
    log = os.open(PATH + ".log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(log, json.dumps(line).encode() + b"\n")
    finally:
        os.close(log)
