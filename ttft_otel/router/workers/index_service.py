# SPDX-License-Identifier: Apache-2.0
"""The process that has the index of KV events for all workers; supervisor.py runs and replaces it.

Workers send it their instances and ask it by a Unix stream socket (routing/prefixes/shared_index_source.py).
It follows the instances of all of them. A new one begins with an empty index, which vLLM's replay fills.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import msgspec
import uvloop

from ttft_otel.model.stages import MONO
from ttft_otel.router.control.uvicorn_server import raise_file_limit
from ttft_otel.router.routing.prefixes.shared_index_source import (
    Depths,
    FrameSplitter,
    Lookup,
    Status,
    frame_message,
    unpack_keys,
    worker_decoder,
)
from ttft_otel.router.types import parse_instance_url
from ttft_otel.router.upstream.instance_pool import InstancePool
from ttft_otel.router.upstream.query_client import QueryClient
from ttft_otel.tracing.guard import Guard

if TYPE_CHECKING:
    from ttft_otel.router.routing.prefixes.kv_events_source import KvEventsSource

STATUS_INTERVAL_S: Final = 1.0
# Of answers that a worker does not read; it gets no status meanwhile.
MAX_UNREAD_BYTES: Final = 1 << 20

log: Final = logging.getLogger("ttft_otel")


class IndexService:
    """Has the index of `source`, and answers workers at `path`."""

    def __init__(self, source: KvEventsSource, path: Path) -> None:
        self.source, self.path = source, path
        # Which leg prefills is the workers' knowledge; here there is one.
        self.pool = InstancePool({MONO: ()})
        self.urls_by_worker: dict[WorkerConnection, list[str]] = {}
        self._is_following = asyncio.Event()
        self._is_over = asyncio.Event()
        self._is_orphaned = self._is_started = False

    async def run(self, lifeline_fd: int) -> None:
        """Serve until the supervisor, at whose end `lifeline_fd` is readable, and all workers are gone.

        Raises what the source raises when it starts: a successor may have more luck.
        """
        loop = asyncio.get_running_loop()
        loop.add_reader(lifeline_fd, self._note_orphaned, lifeline_fd)
        # A predecessor that was killed has left its file, on which bind() would fail.
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        server = await loop.create_unix_server(lambda: WorkerConnection(self), str(self.path))
        reporting_task = asyncio.create_task(self._report_forever())
        ending = asyncio.create_task(self._is_over.wait())
        try:
            await asyncio.wait({reporting_task, ending}, return_when=asyncio.FIRST_COMPLETED)
            if reporting_task.done():
                reporting_task.result()
        finally:
            reporting_task.cancel()
            ending.cancel()
            await asyncio.gather(reporting_task, ending, return_exceptions=True)
            server.close()

    def follow_urls(self, worker: WorkerConnection, urls: list[str]) -> None:
        """The worker has these instances: follow what any of them has."""
        self.urls_by_worker[worker] = urls
        self._sync_pool()
        self._is_following.set()

    def forget_worker(self, worker: WorkerConnection) -> None:
        """The worker is gone, or is being replaced."""
        self.urls_by_worker.pop(worker, None)
        # With the last one its instances stay: its successor will name them, and the index is worth keeping.
        if self.urls_by_worker:
            self._sync_pool()
        elif self._is_orphaned:
            self._is_over.set()

    def find_depths(self, lookup: Lookup) -> Depths:
        """The answer to a worker."""
        index = self.source.reported
        # Not those that report nothing: each worker estimates these.
        urls = list(index.reporting)
        depths = index.match_blocks(unpack_keys(lookup.keys), urls)
        return Depths(lookup.number, dict(zip(urls, depths, strict=True)))

    def _sync_pool(self) -> None:
        wanted = {url for urls in self.urls_by_worker.values() for url in urls}
        for instance in list(self.pool):
            if instance.url not in wanted:
                self.pool.remove_instance(instance)
        for url in sorted(wanted - {each.url for each in self.pool}):
            self.pool.add_instance(parse_instance_url(url, MONO))
        if self._is_started:
            self.source.sync_instances()

    def _note_orphaned(self, lifeline_fd: int) -> None:
        # An end of file stays readable: this would be called in every turn of the loop.
        asyncio.get_running_loop().remove_reader(lifeline_fd)
        self._is_orphaned = True
        if not self.urls_by_worker:
            self._is_over.set()

    async def _report_forever(self) -> None:
        """Start the source once a worker has named its instances; then report its state to all workers."""
        await self._is_following.wait()
        async with QueryClient() as queries:
            await self.source.start(queries, self.pool)
            self._is_started = True
            try:
                while True:
                    with Guard("router.index"):
                        self._report_status()
                    await asyncio.sleep(STATUS_INTERVAL_S)
            finally:
                await self.source.close()

    def _report_status(self) -> None:
        reporting = self.source.reported.reporting
        instances = {
            url: described
            for url, described in self.source.describe_instances().items()
            if url in reporting
        }
        frame = frame_message(Status(self.source.index.block_size, instances))
        for worker in self.urls_by_worker:
            worker.send(frame)


class WorkerConnection(asyncio.Protocol):
    """The service's end of one worker's connection."""

    def __init__(self, service: IndexService) -> None:
        self.service = service
        self._splitter = FrameSplitter()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for its instances."""
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Answer at once: a lookup takes microseconds, and as many as workers let wait are bounded."""
        try:
            for frame in self._splitter.split_frames(data):
                message = worker_decoder.decode(frame)
                if isinstance(message, Lookup):
                    self.transport.write(frame_message(self.service.find_depths(message)))
                else:
                    self.service.follow_urls(self, message.urls)
        except (ValueError, msgspec.MsgspecError) as error:
            log.warning("ttft-otel: a worker's question to the index is not readable: %s", error)
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self.service.forget_worker(self)

    def send(self, frame: bytes) -> None:
        """Send `frame`, unless the worker does not read."""
        if self.transport.get_write_buffer_size() <= MAX_UNREAD_BYTES:
            self.transport.write(frame)


def run_index_service(
    build_source: Callable[[], KvEventsSource], folder: Path, lifeline_fd: int
) -> None:
    """Have the index of the source that `build_source` makes, for the workers of `folder`."""
    raise_file_limit()

    async def serve_index() -> None:
        await IndexService(build_source(), build_index_path(folder)).run(lifeline_fd)

    uvloop.run(serve_index())


def build_index_path(folder: Path) -> Path:
    """Where the index service of the workers of `folder` listens."""
    return folder / "index.sock"
