# SPDX-License-Identifier: Apache-2.0
"""The router in a process of its own whose event loop is watched, for test_stalls.py.

Its command line is JSON: arguments of fake_instances.run_router. It prints its URL, and then for each
line of standard input one number: "take" gives the longest stall since the last one, "stall" makes one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from router import fake_instances

INJECTED_STALL_S = 0.5
START_S = 60


class LoopStallWatch:
    """longest_s: what was computed between two turns of the loop, in CPU seconds at most.

    By this process: a thread that holds the interpreter keeps the loop from its turn as well; or, with
    time.thread_time as `clock`, by the loop's own thread. Not the wall's seconds, which also count what other
    processes of a busy machine take.
    """

    def __init__(self, clock: Callable[[], float] = time.process_time) -> None:
        self.clock = clock
        self.longest_s = 0.0

    async def watch_turns(self) -> None:
        """Measure until cancelled."""
        before_s = self.clock()
        while True:
            await asyncio.sleep(0.0005)
            now_s = self.clock()
            self.longest_s = max(self.longest_s, now_s - before_s)
            before_s = now_s

    def answer_order(self, order: str) -> float:
        """Carry out a line of standard input; what it prints."""
        if order == "stall":
            end_s = time.process_time() + INJECTED_STALL_S
            while time.process_time() < end_s:
                pass
            return INJECTED_STALL_S
        longest_s, self.longest_s = self.longest_s, 0.0
        return longest_s


def _write_line(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


async def serve_orders(options: dict[str, Any]) -> None:
    """Run the router until standard input ends."""
    async with fake_instances.run_router(**options) as router:
        watch = LoopStallWatch()
        task = asyncio.create_task(watch.watch_turns())
        _write_line(router.url)
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            await asyncio.sleep(0.002)  # the watch has had its turn since the last stall
            _write_line(str(watch.answer_order(line.decode().strip())))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class WatchedRouter:
    """The process, seen from the test."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.url = self._read_line()

    def take_longest_s(self) -> float:
        """The longest stall since the last call, in CPU seconds."""
        return self._give_order("take")

    def make_stall(self) -> float:
        """Hold its loop up on purpose; for how many seconds."""
        return self._give_order("stall")

    def _give_order(self, order: str) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{order}\n")
        self._process.stdin.flush()
        return float(self._read_line())

    def _read_line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the router's process has ended"
        return line.strip()


@contextlib.contextmanager
def run_watched_process(**options: Any) -> Iterator[WatchedRouter]:
    """Run it with these options of fake_instances.run_router; at the end it must exit with 0."""
    with subprocess.Popen(
        (sys.executable, "-m", "attack.watched_process", json.dumps(options)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "TTFT_OTEL": "0"},
    ) as process:
        try:
            yield WatchedRouter(process)
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(START_S) == 0
        finally:
            process.kill()


if __name__ == "__main__":
    asyncio.run(serve_orders(json.loads(sys.argv[1])))
