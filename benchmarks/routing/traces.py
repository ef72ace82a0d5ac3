# SPDX-License-Identifier: Apache-2.0
"""Mooncake's traces as rows, as they are or resampled; simulate.py replays them."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from ttft_otel.router.policies.model import Line
from ttft_otel.router.policies.work import work

BLOCK = 512
COST = Line(0.005, 40e-6, 1.3e-9)
SHIFT = 30.0  # seconds that a session drawn anew may begin sooner or later
COPY = 10**9  # added to the block numbers of a session's further copies


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a trace; `at` in seconds."""

    at: float
    tokens: int
    blocks: tuple[int, ...]
    session: str


@lru_cache(maxsize=4)
def read(path: Path, seed: int) -> tuple[Row, ...]:
    """Seed 1: the trace as it is. Any other: as many of its sessions, drawn with replacement."""
    rows = []
    for line in path.read_text("utf-8").splitlines():
        row = json.loads(line)
        ids = row["hash_ids"]
        full = tuple(ids[: row["input_length"] // BLOCK])
        # The second block stands for a session: the first is the same for nearly all.
        rows.append(Row(row["timestamp"] / 1e3, row["input_length"], full, str(ids[:2][-1])))
    return tuple(rows if seed == 1 else _drawn(rows, random.Random(f"rows {seed}")))


def _drawn(rows: list[Row], chance: random.Random) -> list[Row]:
    """A session's requests keep their distances; a second copy shares only what sessions share."""
    sessions: dict[str, list[Row]] = {}
    for row in rows:
        sessions.setdefault(row.session, []).append(row)
    owners = Counter(
        block for each in sessions.values() for block in {b for row in each for b in row.blocks}
    )
    begin, span = rows[0].at, rows[-1].at - rows[0].at
    copies: Counter[str] = Counter()
    drawn = []
    for name in chance.choices(list(sessions), k=len(sessions)):
        copy, shift = copies[name], chance.uniform(-SHIFT, SHIFT)
        copies[name] += 1
        for row in sessions[name]:
            blocks = tuple(b if owners[b] > 1 else b + copy * COPY for b in row.blocks)
            at = begin + (row.at - begin + shift) % (span or 1)
            drawn.append(replace(row, at=at, blocks=blocks, session=f"{name} {copy}"))
    return sorted(drawn, key=lambda row: row.at)


def faster(rows: tuple[Row, ...], load: float, capacity: float) -> float:
    """By how much to speed a trace up for this load."""
    span = rows[-1].at - rows[0].at
    return load * capacity * span / sum(COST.seconds(work(row.tokens, 0)) for row in rows)


def alone(rows: tuple[Row, ...]) -> float:
    """Mean seconds of a prefill that never waits and finds all that any request before it had."""
    seen: set[int] = set()
    total = 0.0
    for row in rows:
        depth = next((at for at, block in enumerate(row.blocks) if block not in seen), None)
        found = len(row.blocks) if depth is None else depth
        total += COST.seconds(work(row.tokens, min(found, (row.tokens - 1) // BLOCK) * BLOCK))
        seen.update(row.blocks)
    return total / len(rows)
