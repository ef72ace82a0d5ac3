# SPDX-License-Identifier: Apache-2.0
"""What it costs to ask another process for cached prefixes, beside a look into one's own index.

With --workers and KV events one process has the index (router/workers/index_service.py). A real one is
asked over its socket, one prompt after the other; the same prompts are then looked up in an index of this
process.

    python -m benchmarks.index_service [--rounds 9] [--json FILE]
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import uvloop

from benchmarks.figures import (
    Figure,
    build_figure,
    build_figure_parser,
    divide_rounds,
    report_figures,
)
from benchmarks.process_cpu import read_process_cpu_s
from ttft_otel.router.routing.prefixes.block_ledger import ReportedIndex
from ttft_otel.router.routing.prefixes.kv_events_source import KvEventsSource
from ttft_otel.router.routing.prefixes.shared_index_source import IndexChannel
from ttft_otel.router.workers.index_service import IndexService

INSTANCE_URLS: Final = tuple(f"http://127.0.0.1:{port}" for port in range(1, 9))
BLOCK_COUNTS: Final = (16, 100, 512)  # of a prompt
PROMPTS_PER_COUNT: Final = 50
LOOKUPS_PER_ROUND: Final = 1000
BLOCK_TOKENS: Final = 16
MAX_BLOCKS: Final = 1000  # of what is estimated, which is nothing here


def build_prompts() -> dict[int, list[tuple[int, ...]]]:
    """Keys of the blocks of prompts, by how many there are; the same in each process."""
    chance = random.Random(1)
    return {
        count: [
            tuple(chance.getrandbits(63) for _ in range(count)) for _ in range(PROMPTS_PER_COUNT)
        ]
        for count in BLOCK_COUNTS
    }


def fill_index(index: ReportedIndex) -> None:
    """Have all of each prompt at one instance, and its beginning at the others."""
    chance = random.Random(2)
    for prompts in build_prompts().values():
        for number, keys in enumerate(prompts):
            for url in INSTANCE_URLS:
                index.add_blocks(url, keys[: chance.randrange(1, len(keys))])
            index.add_blocks(INSTANCE_URLS[number % len(INSTANCE_URLS)], keys)
    index.reporting.update(INSTANCE_URLS)


def serve_index(path: Path, lifeline: tuple[int, int]) -> None:
    """The other process, until the first one closes its end of the lifeline."""
    os.close(lifeline[1])
    source = KvEventsSource(BLOCK_TOKENS, MAX_BLOCKS, ())
    fill_index(source.reported)
    uvloop.run(IndexService(source, path).run(lifeline[0]))


async def measure_rounds(path: Path, service_pid: int, rounds: int) -> dict[str, Figure]:
    """Microseconds of CPU time of both processes, and how long an answer takes."""
    index = ReportedIndex(BLOCK_TOKENS, MAX_BLOCKS)
    fill_index(index)
    # It names no instances: there are none to subscribe to.
    channel = IndexChannel(path, tuple, lambda _: None)
    while not channel.is_connected:
        await asyncio.sleep(0.05)
    figures: dict[str, Figure] = {}
    for count, prompts in build_prompts().items():
        asking_us, service_us, own_us, wait_us = [], [], [], []
        for _ in range(rounds):
            before_s, service_before_s = time.process_time(), read_process_cpu_s(service_pid)
            waits_s = await ask_all(channel, prompts)
            after_s, service_after_s = time.process_time(), read_process_cpu_s(service_pid)
            for number in range(LOOKUPS_PER_ROUND):
                index.match_blocks(prompts[number % PROMPTS_PER_COUNT], INSTANCE_URLS)
            own_us.append((time.process_time() - after_s) / LOOKUPS_PER_ROUND * 1e6)
            asking_us.append((after_s - before_s) / LOOKUPS_PER_ROUND * 1e6)
            service_us.append((service_after_s - service_before_s) / LOOKUPS_PER_ROUND * 1e6)
            wait_us.append(sorted(waits_s)[len(waits_s) // 2] * 1e6)
        name = f"{count} blocks"
        figures |= {
            f"{name}: worker that asks / own index": build_figure(divide_rounds(asking_us, own_us)),
            f"{name}: own index, us": build_figure(own_us, digits=1),
            f"{name}: worker that asks, us": build_figure(asking_us, digits=1),
            f"{name}: service, us": build_figure(service_us, digits=1),
            f"{name}: median wait, us": build_figure(wait_us, digits=1),
        }
    figures["lookups without an answer"] = build_figure(
        [sum(channel.counts.values()) - channel.counts["answered"]]
    )
    await channel.close()
    return figures


async def ask_all(channel: IndexChannel, prompts: Sequence[tuple[int, ...]]) -> list[float]:
    """Ask for the prompts in turns; returns the seconds of each answer."""
    waits_s = []
    for number in range(LOOKUPS_PER_ROUND):
        began_s = time.perf_counter()
        await channel.look_up(prompts[number % len(prompts)])
        waits_s.append(time.perf_counter() - began_s)
    return waits_s


def main() -> int:
    """Measure, print, write."""
    parser = build_figure_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    lifeline = os.pipe()
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        path = Path(folder) / "index.sock"
        context = multiprocessing.get_context("fork")
        service = context.Process(target=serve_index, args=(path, lifeline))
        service.start()
        assert service.pid is not None
        figures = uvloop.run(measure_rounds(path, service.pid, options.rounds))
        os.close(lifeline[1])
        service.join()
    return report_figures(figures, options.json)


if __name__ == "__main__":
    sys.exit(main())
