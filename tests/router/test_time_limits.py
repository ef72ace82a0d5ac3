# SPDX-License-Identifier: Apache-2.0
"""Waiting for a limited time, when end, limit and cancellation fall together, and for hosts that are gone."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import aiohttp
import pytest

from lab.fake_vllm import instances
from router import fake_instances, raw_http
from router.fake_instances import InstancePlan, RunningRouter
from ttft_otel.router import time_limits
from ttft_otel.router.time_limits import wait_at_most

CHAT = "/v1/chat/completions"
NETWORK_FLAG = 0x40000000  # CLONE_NEWNET
HERE, THERE = "169.254.213.1", "169.254.213.2"
# Seconds: the kernel of a host that is there answers within microseconds, however busy its processes are.
GONE_AFTER_S = 3
SHORT_TIMES = {
    "TCP_KEEPIDLE": 1,
    "TCP_KEEPINTVL": 1,
    "TCP_KEEPCNT": 2,
    "TCP_USER_TIMEOUT": GONE_AFTER_S * 1000,
}
open_socket = fake_instances.open_listening_socket

needs_network = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip"),
    reason="a network of its own needs root and the program `ip` (iproute2)",
)


async def test_result() -> None:
    """What is awaited in time gives its result or its error."""
    assert await wait_at_most(asyncio.sleep(0, 7), 10) == 7
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    failed.set_exception(ValueError("nothing"))
    with pytest.raises(ValueError, match="nothing"):
        await wait_at_most(failed, 10)


async def test_limit() -> None:
    """At the limit what is awaited is cancelled, and has ended when the error comes."""
    waiting = asyncio.create_task(asyncio.sleep(60))
    with pytest.raises(asyncio.TimeoutError):
        await wait_at_most(waiting, 0.01)
    assert waiting.cancelled()


async def test_cancellation_at_the_end() -> None:
    """A cancellation in the same turn as the end is not swallowed, as by wait_for of 3.10."""
    end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(wait_at_most(end, 60))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    end.set_result(None)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


class OtherHost:
    """A network namespace, joined to this one by a cable that can be cut.

    router_address: where routers of this test listen.
    """

    def __init__(self) -> None:
        self.namespace = f"ttft-host-{os.getpid()}"
        self.router_address = "127.0.0.1"

    def run_ip(self, *words: str) -> None:
        """Run `ip` in there."""
        subprocess.run(("ip", "-n", self.namespace, *words), check=True, capture_output=True)

    def open_socket(self, address: str = "") -> socket.socket:
        """A socket that is bound to a free port: of that host for its address, else of this one."""
        if address != THERE:
            return open_socket(address or self.router_address)
        with ThreadPoolExecutor(1) as enter:  # only the thread changes over
            return enter.submit(self._enter_and_open).result()

    def _enter_and_open(self) -> socket.socket:
        library = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.namespace}", "rb") as namespace:
            if library.setns(namespace.fileno(), NETWORK_FLAG):
                raise OSError(ctypes.get_errno(), "setns")
        return open_socket(THERE)

    def cut_cable(self) -> None:
        """From now on no packet comes or goes, as when the host has lost its power."""
        self.run_ip("link", "set", "there", "down")


@pytest.fixture
def other_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtherHost]:
    """A host for instances that are given its address; the router gives silent hosts up within seconds."""
    host = OtherHost()
    subprocess.run(("ip", "netns", "add", host.namespace), check=True)
    near = f"tt{os.getpid()}"
    try:
        far = ("there", "type", "veth", "peer", "name", near, "netns", str(os.getpid()))
        host.run_ip("link", "add", *far)
        host.run_ip("addr", "add", f"{THERE}/30", "dev", "there")
        host.run_ip("link", "set", "there", "up")
        subprocess.run(("ip", "addr", "add", f"{HERE}/30", "dev", near), check=True)
        subprocess.run(("ip", "link", "set", near, "up"), check=True)
        for module in (fake_instances, instances):
            monkeypatch.setattr(module, "open_listening_socket", host.open_socket)
        monkeypatch.setattr(time_limits, "TCP_OPTIONS", SHORT_TIMES)
        yield host
    finally:
        # The namespace itself stays for as long as a socket is in it.
        subprocess.run(("ip", "link", "del", near), check=False, capture_output=True)
        subprocess.run(("ip", "netns", "del", host.namespace), check=True)


async def measure_end(router: RunningRouter) -> tuple[int, bool, str, float]:
    """A streamed request: status, whether its answer was cut, its attempt's error, and seconds."""
    began, is_cut = time.monotonic(), False
    chat = fake_instances.build_chat()
    async with router.client.post(f"{router.url}{CHAT}", json=chat) as response:
        try:
            await response.read()
        except aiohttp.ClientPayloadError:
            is_cut = True
    seconds = time.monotonic() - began
    (call,) = (await router.wait_for_records(1))[-1].calls
    return response.status, is_cut, call.error, seconds


def test_a_minute() -> None:
    """Without a test's short times, the kernel waits a minute for either sign of a host."""
    with socket.socket() as connection:
        time_limits.end_with_host(connection)
        idle, interval, probes, unacknowledged_ms = [
            connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
            for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
        ]
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert idle + interval * probes == unacknowledged_ms / 1000 == 60


@pytest.mark.full
@needs_network
async def test_lost_instances(other_host: OtherHost) -> None:
    """Whoever waits for a host that is gone is told so; a busy process on one that is there has its time."""
    permits = asyncio.Semaphore(0)
    plans = (InstancePlan({"prefill.compute": 14_000}), InstancePlan(permits=permits))
    async with contextlib.AsyncExitStack() as stack:
        routers = []
        for plan in (*plans, InstancePlan()):
            one = await stack.enter_async_context(fake_instances.run_instance(plan, THERE))
            router = fake_instances.run_router([one.url], probe_interval_s=600.0)
            routers.append(await stack.enter_async_context(router))
        waiting, streaming, kept = routers
        under_way = [asyncio.create_task(measure_end(each)) for each in (waiting, streaming)]
        await asyncio.sleep(GONE_AFTER_S + 2)
        assert not any(each.done() for each in under_way)
        assert (await measure_end(kept))[:3] == (200, False, "")

        other_host.cut_cable()
        # Sent on the connection of the one before, which nobody knows to be lost.
        *ends, late = await asyncio.gather(*under_way, measure_end(kept))

        permits.release()
        permits.release()
        assert [end[:3] for end in ends] == [
            (502, False, "ClientOSError"),
            (200, True, "ClientPayloadError"),
        ]
        assert late[:3] == (502, False, "ClientOSError")
        assert GONE_AFTER_S - 1 < late[3] < 20
        for each in routers:
            (instance,) = each.fleet
            assert instance.breaker.consecutive_failures == 1


@pytest.mark.full
@needs_network
@pytest.mark.parametrize("is_streaming", [False, True])
async def test_lost_client(other_host: OtherHost, is_streaming: bool) -> None:
    """The instance is told that nobody waits any more, but not while a client merely has nothing to say.

    is_streaming: it is sent events all the time, so that its host is asked nothing; it takes nothing.
    """
    other_host.router_address = HERE
    plan = InstancePlan({"prefill.compute": 600_000})
    if is_streaming:
        plan = InstancePlan(chunks=fake_instances.STREAM_EVENTS[:1] * 10_000, gap_s=0.05)

    async with (
        fake_instances.run_instance(plan, "127.0.0.1") as one,
        fake_instances.run_router([one.url]) as router,
    ):
        with other_host.open_socket(THERE) as client:
            client.connect((HERE, int(router.url.rpartition(":")[2])))
            body = json.dumps(fake_instances.build_chat()).encode()
            client.sendall(raw_http.encode_request(body=body))
            await asyncio.sleep(GONE_AFTER_S + 2)
            (received,) = one.received
            assert not received.cancelled_us

            other_host.cut_cable()
            await fake_instances.wait_until(lambda: received.cancelled_us)
