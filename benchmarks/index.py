# SPDX-License-Identifier: Apache-2.0
"""Cost of the router's index of cached prefixes: memory of a million blocks, lookups, events, loop pauses.

    python -m benchmarks.index [--json FILE]

Blocks of 16 tokens, reported in messages as vLLM encodes them, through the router's own feed and ledger.
A process for each size of fleet. Times are CPU time: lookups the least of 25 rounds, the pause the
longest between two turns of the event loop. Goals are for ratios to one plain dictionary with a million
random keys in the same process: its memory, 100 lookups in it, and the longest that it takes to grow.
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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.figures import Figure, build_figure, build_figure_parser, report_figures
from ttft_otel.router.routing.policies.block_index import compute_block_keys
from ttft_otel.router.routing.prefixes.kv_events import BlockLedger, EventFeed, ReportedIndex

CHECKOUT: Final = Path(__file__).parents[1]
TOTAL_BLOCKS: Final = 1_000_000
# vLLM's default block on GPUs.
BLOCK_TOKENS: Final = 16
BLOCKS_PER_PROMPT: Final = 100  # blocks
REMOVED_PROMPTS: Final = 100  # prompts, once all are stored
# Masks of holders grow with the fleet: 128 instances no longer fit into one machine word.
FLEET_SIZES: Final = (1, 2, 16, 128)
# What the index may take at most, as a multiple of the plain dictionary.
RATIO_GOALS: Final = {"MB": 2.5, "lookup": 10.0, "filling": 0.2, "clearing": 0.2}


def read_resident_mb() -> float:
    """Resident memory of this process in MB."""
    # The second field is resident memory, in pages.
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def build_stored_message(prompt: int, hashes: list[int], ids: list[int]) -> bytes:
    """A prompt's blocks as an engine reports them."""
    # The fields and their order in a message are vLLM's: [time, events, data-parallel rank].
    stored = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None}
    more = {
        "token_ids": ids,
        "block_size": BLOCK_TOKENS,
        "lora_id": None,
        "medium": "GPU",
        "group_idx": 0,
    }
    return msgspec.msgpack.encode([float(prompt), [{**stored, **more}], 0])


class LoopPauseMeter:
    """Measures the longest pause of the event loop."""

    def __init__(self) -> None:
        self.longest_pause, self.last = 0.0, 0.0

    def reset(self) -> None:
        """Forget pauses until now."""
        self.last = time.thread_time()

    async def run(self) -> None:
        """Read the clock on every turn of the loop."""
        self.reset()
        while True:
            # Thread time: a pause is what our code takes, not what the machine does meanwhile.
            await asyncio.sleep(0)
            now = time.thread_time()
            self.longest_pause, self.last = max(self.longest_pause, now - self.last), now


async def measure_index(instances: int, copies: int) -> dict[str, float]:
    """Report a million blocks, each by so many instances; then look some up, then remove some."""
    chance = random.Random(instances)
    index = ReportedIndex(BLOCK_TOKENS, 0)
    urls = [
        f"http://10.0.{feed_number // 250}.{feed_number % 250}" for feed_number in range(instances)
    ]
    feeds = [EventFeed(BlockLedger(index, url, 0)) for url in urls]
    # Copies are counted among the million: the same number of entries, of fewer different blocks.
    before, stored_s, prompts = read_resident_mb(), 0.0, TOTAL_BLOCKS // BLOCKS_PER_PROMPT // copies
    ticker = LoopPauseMeter()
    ticking = asyncio.ensure_future(ticker.run())
    sequence_numbers = [0] * instances
    to_remove: deque[tuple[int, bytes]] = deque(maxlen=REMOVED_PROMPTS)
    for prompt in range(prompts):
        # Random tokens share no prefix: the worst case for memory.
        ids = [chance.randrange(150_000) for _ in range(BLOCKS_PER_PROMPT * BLOCK_TOKENS)]
        payload = build_stored_message(
            prompt, [chance.getrandbits(64) for _ in range(BLOCKS_PER_PROMPT)], ids
        )
        for copy in range(copies):
            # Neighbours hold a prompt's copies, and all instances get equally much.
            feed_number = (prompt + copy) % instances
            ticker.reset()
            start = time.thread_time()
            await feeds[feed_number].receive_message(sequence_numbers[feed_number], payload)
            stored_s += time.thread_time() - start
            await asyncio.sleep(0)  # as between two messages that arrive
            sequence_numbers[feed_number] += 1
        to_remove.append((prompt, payload))
    memory, filling = read_resident_mb() - before, ticker.longest_pause
    # The last prompt, which is cached in full: the longest walk that a lookup can take.
    prompt_blocks = compute_block_keys(ids, BLOCK_TOKENS)
    assert max(index.match_blocks(prompt_blocks, urls)) == BLOCKS_PER_PROMPT
    lookup_us = measure_least_us(lambda: index.match_blocks(prompt_blocks, urls))
    dictionary = measure_plain_dictionary(chance)
    removed_s = 0.0
    for prompt, payload in to_remove:
        start = time.thread_time()
        await feeds[prompt % instances].receive_message(
            sequence_numbers[prompt % instances], build_removed_message(payload)
        )
        removed_s += time.thread_time() - start
        sequence_numbers[prompt % instances] += 1
    ticker.longest_pause = 0.0
    ticker.reset()
    # Clearing goes on in slices; the next message has to wait until it is done.
    feeds[0].ledger.clear_blocks()
    await feeds[0].receive_message(sequence_numbers[0], build_stored_message(0, [], []))
    ticking.cancel()
    return {
        "MB": memory,
        "lookup": lookup_us,
        "stored": stored_s / (prompts * copies * BLOCKS_PER_PROMPT) * 1e6,
        "removed": removed_s / (REMOVED_PROMPTS * BLOCKS_PER_PROMPT) * 1e6,
        "filling": filling * 1e3,
        "clearing": ticker.longest_pause * 1e3,
        **{f"dictionary {name}": value for name, value in dictionary.items()},
    }


def measure_least_us(call: Callable[[], object]) -> float:
    """Microseconds of one call, the least of 25 rounds."""
    # The least: whatever disturbs a round only adds to it.
    return min(timeit.repeat(call, number=50, repeat=25)) / 50 * 1e6


def measure_plain_dictionary(chance: random.Random) -> dict[str, float]:
    """The reference: MB of TOTAL_BLOCKS keys, us of a prompt's lookups, ms of the longest insertion.

    Called while the index is filled, so that its memory is not what something else gave back.
    """
    before, longest_s, numbers = read_resident_mb(), 0.0, {}
    last = time.thread_time()
    # The clock is read at every insertion: the longest one is when the table grows.
    for number in range(TOTAL_BLOCKS):
        numbers[chance.getrandbits(64)] = number
        now = time.thread_time()
        longest_s, last = max(longest_s, now - last), now
    memory = read_resident_mb() - before
    # Keys spread over the table, as those of a prompt's blocks are.
    keys = chance.sample(list(numbers), BLOCKS_PER_PROMPT)
    lookup_us = measure_least_us(lambda: [numbers.get(key) for key in keys])
    return {"MB": memory, "lookup": lookup_us, "growth": longest_s * 1e3}


def build_removed_message(payload: bytes) -> bytes:
    """A message that a prompt's blocks have left, an event for each of them."""
    hashes = msgspec.msgpack.decode(payload)[1][0]["block_hashes"]
    # vLLM evicts blocks one by one, hence an event for each.
    events = [{"type": "BlockRemoved", "block_hashes": [each], "medium": "GPU"} for each in hashes]
    return msgspec.msgpack.encode([0.0, [{**each, "group_idx": 0} for each in events], 0])


def measure_in_child_process(instances: int, copies: int) -> dict[str, float]:
    """The same in a process of its own, whose memory is nothing else's."""
    # Memory that Python has freed stays with its process: a second fleet would find it there.
    argv = (sys.executable, "-m", "benchmarks.index", "--fill", str(instances), str(copies))
    found: dict[str, float] = json.loads(subprocess.check_output(argv, cwd=CHECKOUT))
    return found


def collect_index_figures() -> dict[str, Figure]:
    """The figures of every size of fleet."""
    figures: dict[str, Figure] = {}
    # The last case: 16 instances that all have cached the same prompts.
    for instances, copies in [(each, 1) for each in FLEET_SIZES] + [(16, 16)]:
        where = f"{instances} instances" + (", each block on all of them" if copies > 1 else "")
        figures.update(build_index_figures(measure_in_child_process(instances, copies), where))
    return figures


def build_index_figures(values: Mapping[str, float], where: str) -> dict[str, Figure]:
    """Ratios to the plain dictionary, with their goals; then what was measured."""
    figures = {
        f"{name}, times a dictionary's {DICTIONARY_VALUES[name]}, {where}": build_figure(
            [values[name] / values[f"dictionary {DICTIONARY_VALUES[name]}"]], goal
        )
        for name, goal in RATIO_GOALS.items()
    }
    for name, text in FIGURE_DESCRIPTIONS.items():
        figures[f"{text}, {where}"] = build_figure([values[name]])
    return figures


# Which of the dictionary's values is the reference.
DICTIONARY_VALUES: Final = {
    "MB": "MB",
    "lookup": "lookup",
    "filling": "growth",
    "clearing": "growth",
}
FIGURE_DESCRIPTIONS: Final = {
    "MB": "MB of a million blocks reported",
    "lookup": "us of the lookup of a prompt of 100 blocks",
    "stored": "us for a block stored",
    "removed": "us for a block removed",
    "filling": "ms that storing keeps the loop busy at a time",
    "clearing": "ms that clearing an instance keeps the loop busy at a time",
}


def main() -> int:
    """A line for each figure; --json writes them; 1 when a goal is missed."""
    parser = build_figure_parser(__doc__)
    parser.add_argument("--fill", type=int, nargs=2, help=argparse.SUPPRESS)  # the child's
    options = parser.parse_args()
    if options.fill:
        sys.stdout.write(json.dumps(asyncio.run(measure_index(*options.fill))))
        return 0
    return report_figures(collect_index_figures(), options.json)


if __name__ == "__main__":
    sys.exit(main())
