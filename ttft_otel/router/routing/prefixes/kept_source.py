# SPDX-License-Identifier: Apache-2.0
"""Cached prefixes from the index that one process keeps for all workers: kv-events with --workers.

Where that process is away or late, and for instances that report nothing, prefixes are estimated from the
prompts sent, by this worker and by the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ttft_otel.router.routing.policies.block_index import SentHistory
from ttft_otel.router.routing.prefixes.keeper_channel import KeeperChannel
from ttft_otel.router.routing.prefixes.keeper_frames import Status
from ttft_otel.router.routing.prefixes.sent_prefixes import SentPrefixSource

if TYPE_CHECKING:
    from ttft_otel.router.routing.prompts.prompt_reader import Prompt

# Of all instances, in each worker: 50 MB. It decides only while the index, with up to 1 GB, cannot.
MAX_FALLBACK_BLOCKS: Final = 250_000


class KeptPrefixSource(SentPrefixSource):
    """Asks the keeper for each prompt; its own estimate of what was sent is the fallback."""

    max_total_blocks = MAX_FALLBACK_BLOCKS

    def __init__(self, block_size: int, max_blocks: int) -> None:
        super().__init__(SentHistory(block_size, max_blocks))
        self.channel: KeeperChannel | None = None
        self._described: dict[str, dict[str, Any]] = {}

    def join_keeper(self, path: Path) -> None:
        """Connect to the keeper that listens at `path`, now and whenever it is a new one."""
        self.channel = KeeperChannel(path, lambda: sorted(self._urls), self._take_status)

    async def close(self) -> None:
        """Leave the keeper, and end the background tasks."""
        if self.channel is not None:
            await self.channel.close()
        await super().close()

    def sync_instances(self) -> None:
        """Tell the keeper of instances added and removed."""
        super().sync_instances()
        if self.channel is not None:
            self.channel.tell_urls()

    async def look_up(
        self, model: str, prompt: Prompt, urls: Sequence[str]
    ) -> dict[str, int] | None:
        """Cached tokens of `prompt` by URL, reported or estimated; None: use the estimate for all."""
        if self.channel is None or not prompt.block_keys:
            return None
        reported = await self.channel.look_up(prompt.block_keys)
        if reported is None:
            return None
        estimated = self.index.match_blocks(prompt.block_keys, urls)
        return {
            url: reported.get(url, depth) * self.index.block_size
            for url, depth in zip(urls, estimated, strict=True)
        }

    def describe_instances(self) -> dict[str, Any]:
        """By URL: what the keeper said of it, else the number of blocks remembered."""
        described = super().describe_instances()
        return described | {url: each for url, each in self._described.items() if url in described}

    def describe_problem(self) -> str:
        """For /readyz: why prefixes are estimated, "" if the keeper is there."""
        if self.channel is not None and self.channel.is_connected:
            return ""
        return (
            "the process that keeps the index of KV events is away: cached prefixes are estimated from "
            "the prompts sent until it is back"
        )

    def _take_status(self, status: Status | None) -> None:
        self._described = {} if status is None else status.instances
        # Keys of blocks of another size would match nothing there.
        if status is not None and status.block_size != self.index.block_size:
            self.index.set_block_size(status.block_size)
