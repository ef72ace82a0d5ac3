# SPDX-License-Identifier: Apache-2.0
"""A wall clock that is set by years while everything runs: nothing is lost, and no length is wrong."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from commands.router.test_router_process import run_command
from router import fake_instances
from router.fake_instances import InstancePlan

from attack.test_store_files import count_traces, store_span
from ttft_otel.model.names import env_names
from ttft_otel.report.store import database_schema
from ttft_otel.report.store.span_store import SpanStore

YEARS_NS = 10 * 365 * 86_400 * 10**9
REQUESTS = 20
SHIFTED = Path(__file__).with_name("shifted_clock.c")
DAY_S = 86_400
STEPS_S = (0, 3650 * DAY_S, -3650 * DAY_S, 7200, -7200, 0)
EACH = 4  # requests between two steps


def set_clock(monkeypatch: pytest.MonkeyPatch, shift_ns: int) -> None:
    """From now on the wall clock is so much ahead."""
    true_ns, true_s = time.clock_gettime_ns, time.clock_gettime
    monkeypatch.setattr(time, "time_ns", lambda: true_ns(time.CLOCK_REALTIME) + shift_ns)
    monkeypatch.setattr(time, "time", lambda: true_s(time.CLOCK_REALTIME) + shift_ns / 1e9)


def test_what_is_stored_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards and back: traces are as old as they are."""
    path = tmp_path / "spans.db"
    store = SpanStore(path)
    try:
        for number, shift_ns in enumerate((0, YEARS_NS, -YEARS_NS, 0), 1):
            set_clock(monkeypatch, shift_ns)
            store_span(store, number)
            assert not store._remove_old()
            assert count_traces(path) == number
    finally:
        store.close()


async def test_lengths_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that jumps at each look: every TTFT adds up, and is as long as it was."""
    looks = itertools.count()
    true_ns = time.clock_gettime_ns
    async with fake_instances.run_routed_instances([InstancePlan(gap_s=0.01)]) as (router, _):
        with monkeypatch.context() as patched:
            patched.setattr(
                time,
                "time_ns",
                lambda: true_ns(time.CLOCK_REALTIME) + (next(looks) % 3 - 1) * YEARS_NS,
            )
            for _ in range(REQUESTS):
                began_ns = time.monotonic_ns()
                assert (await router.post_chat())[0] == 200
                took_us = (time.monotonic_ns() - began_ns) // 1000
        records = [each.ttft for each in await router.wait_for_records(2 * REQUESTS) if each.ttft]
    assert next(looks) > REQUESTS and len(records) == REQUESTS
    for ttft in records:
        assert 0 < ttft.end - ttft.start < 10**7
        assert sum(ttft.stages.values()) + ttft.unattributed == ttft.end - ttft.start
    assert records[-1].end <= took_us


class ShiftedClock:
    """The wall clock of processes that have `env`."""

    def __init__(self, folder: Path) -> None:
        library, self._page = folder / "clock.so", folder / "clock"
        compiler = shutil.which("cc") or pytest.skip("needs a C compiler: apt-get install gcc")
        words = ("-shared", "-fPIC", "-O2", "-o", library, SHIFTED)
        subprocess.run((compiler, *words), check=True)
        self.env = {"LD_PRELOAD": str(library), "SHIFTED_CLOCK": str(self._page)}
        self._page.write_bytes(bytes(8))

    def set(self, shift_s: int) -> None:
        """From now on it is so much ahead, in all of them."""
        with self._page.open("r+b") as page:
            page.write(shift_s.to_bytes(8, sys.byteorder, signed=True))


async def ask_json(client: aiohttp.ClientSession, url: str) -> tuple[int, dict[str, Any]]:
    """Status and answer, 0 for none."""
    try:
        async with client.get(url) as response:
            return response.status, await response.json()
    except aiohttp.ClientError:
        return 0, {}


@pytest.mark.full
@pytest.mark.slow
async def test_processes(tmp_path: Path) -> None:
    """Router, exporter and receiver while it jumps by years and hours: all is stored, with right lengths."""
    clock, path = ShiftedClock(tmp_path), tmp_path / "spans.db"
    receiver = fake_instances.find_unused_url()
    port = receiver.rpartition(":")[2]
    words = ("serve", "--http-port", port, "--grpc-port", "-1", "--db", str(path))
    code = "from ttft_otel.commands.main import main; main()"
    serving = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, *words), env={**os.environ, **clock.env}
    )
    env = {
        **clock.env,
        env_names.TTFT_OTEL: "1",
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver,
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
    }
    number, took_ms = 0, list[float]()
    try:
        async with (
            aiohttp.ClientSession() as client,
            fake_instances.run_instance(InstancePlan(gap_s=0.01)) as one,
        ):
            while (await ask_json(client, f"{receiver}/healthz"))[0] != 200:
                await asyncio.sleep(0.1)
            flags = ("--backend", one.url, "--health-interval", "0.2")
            async with run_command(tmp_path, *flags, **env) as it:
                for shift_s in STEPS_S:
                    clock.set(shift_s)
                    for _ in range(EACH):
                        began_s = time.monotonic()
                        assert (await it.router.post_chat(X_Request_Id=f"r{number}"))[0] == 200
                        took_ms.append((time.monotonic() - began_s) * 1000)
                        number += 1
                    # The exporter sends within a second: each step has exports of its own.
                    await asyncio.sleep(1.2)
                async with asyncio.timeout(60):
                    for each in range(number):
                        url = f"{receiver}/ttft_report/r{each}"
                        while not (found := await ask_json(client, url))[0] == 200:
                            await asyncio.sleep(0.1)
                        whole = found[1]["combined"]
                        total = sum(whole["stages"].values()) + whole["unattributed_ms"]
                        assert abs(total - whole["ttft_ms"]) < 1e-6
                        # It notes that it has sent when it is scheduled again; steps are of hours.
                        assert 0 < whole["ttft_ms"] <= took_ms[each] + 1000
    finally:
        serving.kill()
        await serving.wait()
    with closing(database_schema.open_for_reading(path)) as database:
        query = "SELECT count(*), max(start_ns) - min(start_ns) FROM requests"
        count, spread_ns = database.execute(query).fetchone()
    # The control: it has jumped.
    assert count == number and spread_ns > 7000 * DAY_S * 10**9
