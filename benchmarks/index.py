# SPDX-License-Identifier: Apache-2.0
"""What the index of cached prefixes costs: memory of a million blocks, lookups, events, pauses of the loop.

    python benchmarks/index.py [--json FILE]

Blocks of 16 tokens, reported in messages as vLLM encodes them, through the router's own feed and ledger.
A process for each size of fleet. Times are CPU time: lookups the least of 25 rounds, the pause the
longest between two turns of the event loop.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
import timeit
from collections import deque
from pathlib import Path
from typing import Any, Final

import msgspec

from ttft_otel.router.policies.blocks import numbers
from ttft_otel.router.prefixes.feed import Feed
from ttft_otel.router.prefixes.ledger import Ledger
from ttft_otel.router.prefixes.reported import Reported

BLOCKS: Final = 1_000_000
SIZE: Final = 16
PROMPT: Final = 100  # blocks
REMOVED: Final = 100  # prompts, once all are stored
FLEETS: Final = (1, 2, 16, 128)
GOALS: Final = {"MB": 300.0, "lookup": 50.0, "filling": 5.0, "clearing": 5.0}


def resident() -> float:
    """This process's memory in MB."""
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def message(prompt: int, hashes: list[int], ids: list[int]) -> bytes:
    """A prompt's blocks as an engine reports them."""
    stored = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None}
    more = {"token_ids": ids, "block_size": SIZE, "lora_id": None, "medium": "GPU", "group_idx": 0}
    return msgspec.msgpack.encode([float(prompt), [{**stored, **more}], 0])


class Ticker:
    """How long the event loop was away, at the longest."""

    def __init__(self) -> None:
        self.longest, self.last = 0.0, 0.0

    def begin(self) -> None:
        """What was done until now does not count."""
        self.last = time.thread_time()

    async def run(self) -> None:
        """Look at the clock on every turn of the loop."""
        self.begin()
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            self.longest, self.last = max(self.longest, now - self.last), now


async def fill(instances: int, copies: int) -> dict[str, float]:
    """Report a million blocks, each by so many instances; then look some up, then remove some."""
    chance = random.Random(instances)
    index = Reported(SIZE, 0)
    urls = [f"http://10.0.{at // 250}.{at % 250}" for at in range(instances)]
    feeds = [Feed(Ledger(index, url, 0)) for url in urls]
    before, spent, prompts = resident(), 0.0, BLOCKS // PROMPT // copies
    ticker = Ticker()
    ticking = asyncio.ensure_future(ticker.run())
    said = [0] * instances
    last: deque[tuple[int, bytes]] = deque(maxlen=REMOVED)
    for prompt in range(prompts):
        ids = [chance.randrange(150_000) for _ in range(PROMPT * SIZE)]
        payload = message(prompt, [chance.getrandbits(64) for _ in range(PROMPT)], ids)
        for copy in range(copies):
            at = (prompt + copy) % instances
            ticker.begin()
            start = time.thread_time()
            await feeds[at].hear(said[at], payload)
            spent += time.thread_time() - start
            await asyncio.sleep(0)  # as between two messages that arrive
            said[at] += 1
        last.append((prompt, payload))
    memory, filling = resident() - before, ticker.longest
    known = numbers(ids, SIZE)
    assert max(index.match(known, urls)) == PROMPT
    lookup = min(timeit.repeat(lambda: index.match(known, urls), number=50, repeat=25)) / 50
    removed = 0.0
    for prompt, payload in last:
        start = time.thread_time()
        await feeds[prompt % instances].hear(said[prompt % instances], gone(payload))
        removed += time.thread_time() - start
        said[prompt % instances] += 1
    ticker.longest = 0.0
    ticker.begin()
    feeds[0].ledger.clear()
    await feeds[0].hear(said[0], message(0, [], []))
    ticking.cancel()
    return {
        "MB": memory,
        "lookup": lookup * 1e6,
        "stored": spent / (prompts * copies * PROMPT) * 1e6,
        "removed": removed / (REMOVED * PROMPT) * 1e6,
        "filling": filling * 1e3,
        "clearing": ticker.longest * 1e3,
    }


def gone(payload: bytes) -> bytes:
    """A message that a prompt's blocks have left, an event for each of them."""
    hashes = msgspec.msgpack.decode(payload)[1][0]["block_hashes"]
    events = [{"type": "BlockRemoved", "block_hashes": [each], "medium": "GPU"} for each in hashes]
    return msgspec.msgpack.encode([0.0, [{**each, "group_idx": 0} for each in events], 0])


def measure(instances: int, copies: int) -> dict[str, float]:
    """The same in a process of its own, whose memory is nothing else's."""
    argv = (sys.executable, __file__, "--fill", str(instances), str(copies))
    found: dict[str, float] = json.loads(subprocess.check_output(argv))
    return found


def figures() -> dict[str, dict[str, Any]]:
    """Every figure with its goal, if it has one."""
    found: dict[str, dict[str, Any]] = {}
    for instances, copies in [(each, 1) for each in FLEETS] + [(16, 16)]:
        where = f"{instances} instances" + (", each block on all of them" if copies > 1 else "")
        for name, value in measure(instances, copies).items():
            goal = GOALS.get(name)
            met = None if goal is None else value <= goal
            found[f"{NAMES[name]}, {where}"] = {"value": round(value, 2), "goal": goal, "met": met}
    return found


NAMES: Final = {
    "MB": "MB of a million blocks reported",
    "lookup": "us of the lookup of a prompt of 100 blocks",
    "stored": "us for a block stored",
    "removed": "us for a block removed",
    "filling": "ms that storing keeps the loop busy at a time",
    "clearing": "ms that clearing an instance keeps the loop busy at a time",
}


def main() -> None:
    """A line for each figure; --json writes them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--fill", type=int, nargs=2)
    options = parser.parse_args()
    if options.fill:
        sys.stdout.write(json.dumps(asyncio.run(fill(*options.fill))))
        return
    found = figures()
    for name, figure in found.items():
        goal = "" if figure["goal"] is None else f" (goal {figure['goal']:g})"
        sys.stdout.write(f"{figure['value']:10.2f} {name}{goal}\n")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
