# SPDX-License-Identifier: Apache-2.0
"""Cached prefixes from the index that one process keeps for all workers: kv-events with --workers.

Where that process is away or late, and for instances that report nothing, prefixes are estimated from the
prompts sent, by this worker and by the others.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import msgspec

from ttft_otel.router.routing.policies.block_index import SentHistory
from ttft_otel.router.routing.prefixes.prefix_source import PrefixSource

if TYPE_CHECKING:
    from ttft_otel.router.routing.prompts.prompt_reader import Prompt

LENGTH_BYTES: Final = 4  # bytes of a frame's length
MAX_FRAME_BYTES: Final = 1 << 24  # the state of 1 024 instances with 128 ranks each
MAX_ASKED_BLOCKS: Final = 65_536  # leading blocks of a prompt that are asked for: a million tokens


# array_like: fields by position, since both ends are of the same version.
class Follow(msgspec.Struct, array_like=True, tag="f", frozen=True):
    """A worker has these instances that prefill, by URL."""

    urls: list[str]


class Lookup(msgspec.Struct, array_like=True, tag="l", frozen=True):
    """How many leading blocks of this prompt does each instance have? keys: from pack_keys()."""

    number: int
    keys: bytes


class Depths(msgspec.Struct, array_like=True, tag="d", frozen=True):
    """The answer to the lookup of that number: by URL of each instance that reports its blocks."""

    number: int
    depths: dict[str, int]


class Status(msgspec.Struct, array_like=True, tag="s", frozen=True):
    """Once a second: tokens per block of the index, and the feeds of instances that report, by URL."""

    block_size: int
    instances: dict[str, dict[str, Any]]


WorkerMessage: TypeAlias = Follow | Lookup
OwnerMessage: TypeAlias = Depths | Status

_ENCODER: Final = msgspec.msgpack.Encoder()
# The decoders check tag and types, so that no handler has to.
worker_decoder: Final = msgspec.msgpack.Decoder(WorkerMessage)
owner_decoder: Final = msgspec.msgpack.Decoder(OwnerMessage)


def frame_message(message: WorkerMessage | OwnerMessage) -> bytes:
    """Encode `message` as a frame."""
    data = _ENCODER.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def pack_keys(keys: Sequence[int]) -> bytes:
    """The keys of a prompt's blocks, 8 bytes each; of more than MAX_ASKED_BLOCKS the first ones."""
    return array("Q", keys[:MAX_ASKED_BLOCKS]).tobytes()


def unpack_keys(data: bytes) -> Sequence[int]:
    """The keys again. Raises ValueError for a length that is no multiple of 8."""
    keys = array("Q")
    keys.frombytes(data)
    return keys


class FrameSplitter:
    """Cuts what arrives on one connection into messages."""

    def __init__(self) -> None:
        self._left = b""

    def split_frames(self, data: bytes) -> Iterator[bytes]:
        """The messages that are complete now that `data` has come. Raises ValueError for one too long."""
        data = self._left + data
        begin = 0
        while len(data) - begin >= LENGTH_BYTES:
            length = int.from_bytes(data[begin : begin + LENGTH_BYTES], "big")
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a message of {length} bytes")
            end = begin + LENGTH_BYTES + length
            if end > len(data):
                break
            yield data[begin + LENGTH_BYTES : end]
            begin = end
        self._left = data[begin:]


# Of all instances, in each worker: 50 MB. It decides only while the index, with up to 1 GB, cannot.
MAX_FALLBACK_BLOCKS: Final = 250_000
# Seconds that a request waits for an answer, which takes a tenth of a millisecond where nothing else runs.
DEADLINE_S: Final = 0.008
GRACE_S: Final = 0.001  # more, to read what arrived while this worker itself was busy
MAX_LOOKUPS: Final = 64  # lookups that wait; further requests are decided without
MAX_UNSENT_BYTES: Final = 1 << 20  # that an index owner has not read yet; then the same
MAX_LATE: Final = 3  # answers in a row that are late, before lookups pause
LATE_PAUSE_S: Final = 1.0  # seconds without lookups after that
RECONNECT_S: Final = 0.1  # seconds between two attempts to connect
WARNING_INTERVAL_S: Final = 60.0
log: Final = logging.getLogger("ttft_otel")


class IndexChannel(asyncio.Protocol):
    """Connects to the index owner at `path`, for ever.

    A lookup never waits for longer than DEADLINE_S: without an answer the worker decides by what it knows.

    Args:
        path: socket of the index owner.
        list_urls: returns the instances that prefill.
        take_status: gets what the index owner reports each second, None when the connection is lost.
    """

    def __init__(
        self,
        path: Path,
        list_urls: Callable[[], Sequence[str]],
        take_status: Callable[[Status | None], None],
    ) -> None:
        self.path = path
        self.list_urls = list_urls
        self.take_status = take_status
        #: Lookups by result; skipped: too many wait or were late; away: there is no index owner.
        self.counts = Counter(answered=0, late=0, skipped=0, away=0)
        self._waiting: dict[int, asyncio.Future[dict[str, int] | None]] = {}
        self._numbers = itertools.count(1)
        self._transport: asyncio.Transport | None = None
        self._lost = asyncio.Event()
        self._splitter = FrameSplitter()
        self._late_in_row = 0
        self._paused_until_s = 0.0
        self._warned_s = -WARNING_INTERVAL_S
        self._task = asyncio.create_task(self._connect_forever())

    @property
    def is_connected(self) -> bool:
        """Whether there is an index owner that could be asked."""
        return self._transport is not None

    async def close(self) -> None:
        """End the connection."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._transport is not None:
            self._transport.abort()

    async def look_up(self, keys: Sequence[int]) -> dict[str, int] | None:
        """Leading blocks of `keys` that each reporting instance has, by URL; None without a timely answer."""
        transport = self._transport
        if transport is None:
            self.counts["away"] += 1
            return None
        is_busy = transport.get_write_buffer_size() > MAX_UNSENT_BYTES
        if is_busy or len(self._waiting) >= MAX_LOOKUPS or monotonic() < self._paused_until_s:
            self.counts["skipped"] += 1
            return None
        number, loop = next(self._numbers), asyncio.get_running_loop()
        answer: asyncio.Future[dict[str, int] | None] = loop.create_future()
        self._waiting[number] = answer
        timer = loop.call_later(DEADLINE_S, self._begin_grace, number)
        transport.write(frame_message(Lookup(number, pack_keys(keys))))
        try:
            depths = await answer
        finally:
            timer.cancel()
            self._waiting.pop(number, None)
        self._note_answer(depths)
        return depths

    def send_urls(self) -> None:
        """Send the index owner which instances there are now."""
        self._send(Follow(list(self.list_urls())))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Introduce this worker."""
        self._transport = cast(asyncio.Transport, transport)
        self._splitter = FrameSplitter()
        self._late_in_row = 0
        self._paused_until_s = 0.0
        self.send_urls()

    def data_received(self, data: bytes) -> None:
        """Take in what the index owner says."""
        try:
            for frame in self._splitter.split_frames(data):
                message = owner_decoder.decode(frame)
                if isinstance(message, Depths):
                    self._end_lookup(message.number, message.depths)
                else:
                    self.take_status(message)
        except (ValueError, msgspec.MsgspecError) as error:
            log.warning("ttft-otel: the owner of the KV-event index is not understood: %s", error)
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Decide without it, from the requests on that wait."""
        self._transport = None
        for number in list(self._waiting):
            self._end_lookup(number, None)
        self.take_status(None)
        self._lost.set()

    async def _connect_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._lost.clear()
            try:
                await loop.create_unix_connection(lambda: self, str(self.path))
            # It is being started, or replaced.
            except OSError:
                await asyncio.sleep(RECONNECT_S)
            else:
                await self._lost.wait()

    def _send(self, message: WorkerMessage) -> None:
        if self._transport is not None:
            self._transport.write(frame_message(message))

    def _begin_grace(self, number: int) -> None:
        # uvloop runs timers before it reads sockets: after a long turn the answer may be there already.
        asyncio.get_running_loop().call_later(GRACE_S, self._end_lookup, number, None)

    def _end_lookup(self, number: int, depths: dict[str, int] | None) -> None:
        answer = self._waiting.pop(number, None)
        if answer is not None and not answer.done():
            answer.set_result(depths)

    def _note_answer(self, depths: dict[str, int] | None) -> None:
        if depths is not None:
            self.counts["answered"] += 1
            self._late_in_row = 0
        elif self._transport is None:
            self.counts["away"] += 1
        else:
            self.counts["late"] += 1
            self._late_in_row += 1
            if self._late_in_row >= MAX_LATE:
                self._pause()

    def _pause(self) -> None:
        """Do not let every request wait for an index owner that is stuck."""
        moment = monotonic()
        self._late_in_row = 0
        self._paused_until_s = moment + LATE_PAUSE_S
        if moment - self._warned_s >= WARNING_INTERVAL_S:
            self._warned_s = moment
            log.warning(
                "ttft-otel: the process that keeps the index of KV events does not answer within %g ms: "
                "meanwhile cached prefixes are estimated from the prompts sent; give it a core",
                DEADLINE_S * 1000,
            )


class SharedIndexSource(PrefixSource):
    """Asks the index owner for each prompt; its own estimate of what was sent is the fallback."""

    max_total_blocks = MAX_FALLBACK_BLOCKS

    def __init__(self, block_size: int, max_blocks: int) -> None:
        super().__init__(SentHistory(block_size, max_blocks))
        self.channel: IndexChannel | None = None
        self._described: dict[str, dict[str, Any]] = {}

    def join_owner(self, path: Path) -> None:
        """Connect to the index owner that listens at `path`, now and whenever it is a new one."""
        self.channel = IndexChannel(path, lambda: sorted(self._urls), self._take_status)

    async def close(self) -> None:
        """Leave the index owner, and end the background tasks."""
        if self.channel is not None:
            await self.channel.close()
        await super().close()

    def sync_instances(self) -> None:
        """Send the index owner of instances added and removed."""
        super().sync_instances()
        if self.channel is not None:
            self.channel.send_urls()

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
        """By URL: what the index owner said of it, else the number of blocks remembered."""
        described = super().describe_instances()
        return described | {url: each for url, each in self._described.items() if url in described}

    def describe_problem(self) -> str:
        """For /readyz: why prefixes are estimated, "" if the index owner is there."""
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
