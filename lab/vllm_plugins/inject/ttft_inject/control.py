# SPDX-License-Identifier: Apache-2.0
"""Read the control file, which all processes of a server share, and log each delay."""

from __future__ import annotations

import asyncio
import json
import os
import time
from typing import Any

from . import device_sleep

PATH = os.environ.get("TTFT_LAB_CONTROL", "")

content: dict[str, Any] = {}
file_version: tuple[int, int] = (0, 0)


def read() -> dict[str, Any]:
    """The file's content, parsed again when it has changed; the last valid one when it is invalid."""
    global content, file_version
    try:
        status = os.stat(PATH)
        if (status.st_mtime_ns, status.st_ino) != file_version:
            with open(PATH, encoding="utf-8") as source:
                content = json.load(source)
            file_version = (status.st_mtime_ns, status.st_ino)
    except (OSError, ValueError):
        pass
    return content


def read_delay_s(place: str) -> float:
    """The current delay at `place`, in seconds."""
    return float(read().get("delay_ms", {}).get(place, 0.0)) / 1000.0


def read_min_tokens() -> int:
    """Tokens that a step must have to be delayed on its way through the model; 0: any step is."""
    return int(read().get("min_tokens", 0))


def delay(place: str) -> None:
    """Delay the calling thread as the file says for `place`: asleep, or in a busy loop.

    With `device` the device's stream is delayed instead, and nothing is logged: the caller goes on.
    """
    wanted = read_delay_s(place)
    if wanted <= 0:
        return
    if content.get("device"):
        device_sleep.queue(wanted)
        return
    began = time.monotonic_ns()
    if content.get("busy"):
        spin_until(began + int(wanted * 1e9))
    else:
        time.sleep(wanted)
    log_delay(place, began)


async def delay_async(place: str) -> None:
    """Delay only the calling task; with a busy loop the whole thread."""
    wanted = read_delay_s(place)
    if wanted <= 0:
        return
    if content.get("busy"):
        delay(place)
        return
    began = time.monotonic_ns()
    await asyncio.sleep(wanted)
    log_delay(place, began)


def spin_until(until_ns: int) -> None:
    """Loop until `until_ns` of CLOCK_MONOTONIC."""
    while time.monotonic_ns() < until_ns:
        pass


def note_applied(number: int) -> None:
    """Note that this process has applied the content with this number, for InjectionControl.wait_applied."""
    folder = PATH + ".applied"
    os.makedirs(folder, exist_ok=True)
    draft = f"{folder}/.{os.getpid()}"
    note = f"{folder}/{os.getpid()}"
    with open(draft, "w", encoding="utf-8") as target:
        target.write(str(number))
    os.replace(draft, note)  # a reader finds the old number or the new one, never half of one


def log_delay(place: str, began_ns: int) -> None:
    """Append one line to the log; short appends of several processes do not interleave."""
    line = {"place": place, "pid": os.getpid(), "start_ns": began_ns, "end_ns": time.monotonic_ns()}
    log = os.open(PATH + ".log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(log, json.dumps(line).encode() + b"\n")
    finally:
        os.close(log)
