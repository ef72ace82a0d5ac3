# SPDX-License-Identifier: Apache-2.0
"""Sources of cached prefixes: `build_source` creates the one that --prefix-index names.

prefix_source.py is their base, and estimates from the prompts sent. kv_events_source.py follows the KV events
that vLLM publishes, by kv_events.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from ttft_otel.router.routing.policies.block_index import SentHistory
from ttft_otel.router.routing.prefixes.prefix_source import PrefixSource as PrefixSource

PrefixIndexName = Literal["kv-events", "history"]
DEFAULT_BLOCK_SIZE: Final = 16  # tokens per block until an engine reports its own; vLLM's default
MAX_HISTORY_BLOCKS: Final = 65_536  # blocks per instance: a million tokens at 16 each


def build_source(
    kind: PrefixIndexName,
    *,
    block_size: int = DEFAULT_BLOCK_SIZE,
    history_blocks: int = MAX_HISTORY_BLOCKS,
    kv_endpoints: Sequence[str] = (),
) -> PrefixSource:
    """Create the source that --prefix-index names. Raises ValueError, with the remedy.

    Args:
        kind: value of --prefix-index.
        block_size: tokens per block until an engine reports its own.
        history_blocks: blocks remembered for each instance that reports nothing.
        kv_endpoints: values of --kv-events-endpoint, for kv-events only.
    """
    if kind == "history":
        return PrefixSource(SentHistory(block_size, history_blocks))
    # Imported here, because a router without KV events needs no ZMQ.
    from ttft_otel.router.routing.prefixes.kv_events_source import KvEventsSource

    return KvEventsSource(block_size, history_blocks, kv_endpoints)
