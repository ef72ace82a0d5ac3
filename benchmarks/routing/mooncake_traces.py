# SPDX-License-Identifier: Apache-2.0
"""Mooncake's traces as rows, as they are or resampled; simulate.py replays them."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from ttft_otel.router.routing.policies.prefill_model import PrefillLine, compute_work

# Mooncake published hashes of blocks of 512 tokens; there are no texts.
TRACE_BLOCK_TOKENS = 512
# Seconds: 5 ms a prefill, 40 us a token, 1.3 ns an attention pair (about an 8B model on an H100).
PREFILL_COST = PrefillLine(0.005, 40e-6, 1.3e-9)
# Seconds that a decode reads for each token of its context: 128 KiB of an 8B model's KV cache at 3.3 TB/s.
CONTEXT_READ_S = 40e-9
DECODES = 32  # of a step, where the work of a request is counted
MAX_SESSION_SHIFT_S = 30.0  # seconds that a session drawn anew may begin sooner or later
COPY_BLOCK_OFFSET = 10**9  # added to the block numbers of a session's further copies


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace; `arrival_s` counts from its beginning."""

    arrival_s: float
    tokens: int
    blocks: tuple[int, ...]
    session: str
    output_tokens: int = 1
    adapter: int = 0  # LoRA adapter, 0 without
    images: int = 0  # that an encoder has to encode before the prefill


# A process of the pool simulates many cases of the same trace.
@lru_cache(maxsize=4)
def read_trace(path: Path, seed: int) -> tuple[TraceRow, ...]:
    """Read a trace; seed 1: as it is, others: as many sessions, drawn with replacement."""
    rows = []
    for line in path.read_text("utf-8").splitlines():
        row = json.loads(line)
        ids = row["hash_ids"]
        # The last hash of a prompt may be of a part of a block, which is never cached.
        full = tuple(ids[: row["input_length"] // TRACE_BLOCK_TOKENS])
        # The second block stands for a session: the first is the same for nearly all.
        session, output = str(ids[:2][-1]), max(row["output_length"], 1)
        rows.append(TraceRow(row["timestamp"] / 1e3, row["input_length"], full, session, output))
    return tuple(rows if seed == 1 else _resample_sessions(rows, random.Random(f"rows {seed}")))


def _resample_sessions(rows: list[TraceRow], chance: random.Random) -> list[TraceRow]:
    """A session's requests keep their distances; a second copy shares only what sessions share."""
    sessions: dict[str, list[TraceRow]] = {}
    for row in rows:
        sessions.setdefault(row.session, []).append(row)
    # Blocks of several sessions are system prompts and the like: copies share those, too.
    owners = Counter(
        block for each in sessions.values() for block in {b for row in each for b in row.blocks}
    )
    begin, span = rows[0].arrival_s, rows[-1].arrival_s - rows[0].arrival_s
    copies: Counter[str] = Counter()
    resampled = []
    # Whole sessions are drawn: single requests would lose the prefixes that they come back for.
    for name in chance.choices(list(sessions), k=len(sessions)):
        copy, shift = copies[name], chance.uniform(-MAX_SESSION_SHIFT_S, MAX_SESSION_SHIFT_S)
        copies[name] += 1
        for row in sessions[name]:
            blocks = tuple(b if owners[b] > 1 else b + copy * COPY_BLOCK_OFFSET for b in row.blocks)
            # Modulo the span: what would fall off the end arrives at the beginning, so the load stays.
            start_s = begin + (row.arrival_s - begin + shift) % (span or 1)
            resampled.append(
                replace(row, arrival_s=start_s, blocks=blocks, session=f"{name} {copy}")
            )
    # The simulation takes arrivals in order.
    return sorted(resampled, key=lambda row: row.arrival_s)


def compute_speedup(rows: tuple[TraceRow, ...], load: float, capacity: float) -> float:
    """The factor by which arrival times are divided for this load."""
    span = rows[-1].arrival_s - rows[0].arrival_s
    return load * capacity * span / sum(map(compute_work_s, rows))


def compute_work_s(row: TraceRow) -> float:
    """Seconds that a request takes of an instance which has nothing of it cached and DECODES at once."""
    step_share_s = PREFILL_COST.a / DECODES + PREFILL_COST.b
    context = row.tokens + row.output_tokens / 2
    return PREFILL_COST.predict_seconds(compute_work(row.tokens, 0)) + (row.output_tokens - 1) * (
        step_share_s + CONTEXT_READ_S * context
    )
