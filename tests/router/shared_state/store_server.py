# SPDX-License-Identifier: Apache-2.0
"""A Valkey or Redis of its own for a test: any of both that the machine has, on a port of loopback."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio
from redis.exceptions import RedisError

from router import fake_instances

SERVER = shutil.which("valkey-server") or shutil.which("redis-server")
START_TIMEOUT_S = 30


class StoreServer:
    """The server; `flags` are its own, beside those that keep it here and off the disk."""

    process: subprocess.Popen[bytes]

    def __init__(self, folder: Path, *flags: str) -> None:
        if SERVER is None:
            pytest.skip("needs valkey-server or redis-server (Debian has both packages)")
        self.port = fake_instances.find_unused_url().rpartition(":")[2]
        self.url = f"redis://127.0.0.1:{self.port}"
        self._words = [SERVER, "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
        if "--tls-port" not in flags:
            self._words += ["--port", self.port]
        self._words += [self.port if each == "PORT" else each for each in flags]
        self._log = folder / "store.log"

    def start(self) -> None:
        """Run it, also once more."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._words, stdout=log, stderr=log)

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal; whoever is killed is waited for."""
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait()

    def connect(self) -> redis.asyncio.Redis:
        """A client with every right."""
        return redis.asyncio.Redis.from_url(self.url)


@contextlib.asynccontextmanager
async def run_store(folder: Path, *flags: str) -> AsyncIterator[StoreServer]:
    """A server with these flags, or without any and once it answers; it is killed at the end."""
    server = StoreServer(folder, *flags)
    server.start()
    try:
        if not flags:
            async with server.connect() as client:
                for _ in range(START_TIMEOUT_S * 20):
                    with contextlib.suppress(RedisError, OSError):
                        await client.ping()
                        break
                    await asyncio.sleep(0.05)
        yield server
    finally:
        server.send_signal(signal.SIGKILL)
