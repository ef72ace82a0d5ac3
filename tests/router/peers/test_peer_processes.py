# SPDX-License-Identifier: Apache-2.0
"""`--peers` as processes: replicas decide on the load of all, whoever dies, and believe nobody else."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner
from commands.router.test_router_process import START_TIMEOUT_S
from commands.router.test_worker_processes import list_worker_pids, post_alone, wait_for_workers

from router import fake_instances
from router.fake_instances import FakeInstance, InstancePlan
from router.peers.peer_site import KEY, Replica, run_replicas
from ttft_otel.commands.router.command import command
from ttft_otel.router.peers.peer_frames import PeerFrame, PeerPlace, encode_peer_frame
from ttft_otel.router.peers.peer_seal import seal_body

TIMEOUT_S = 2 * START_TIMEOUT_S
STREAMS = 6


@dataclass(frozen=True)
class StreamSite:
    """Two replicas before two instances whose answers go on until end_streams()."""

    plan: InstancePlan
    instances: tuple[FakeInstance, FakeInstance]
    replicas: list[Replica]

    def end_streams(self) -> None:
        """Let all answers end."""
        assert self.plan.permits is not None
        for _ in range(100):
            self.plan.permits.release()

    def count_received(self) -> list[int]:
        """How many requests each instance got."""
        return [len(each.received) for each in self.instances]


@asynccontextmanager
async def run_stream_site(
    folder: Path, *flags: str, keys: tuple[str, str] = (KEY, KEY)
) -> AsyncIterator[StreamSite]:
    """A StreamSite; `flags` and `keys` are those of the replicas."""
    plan = InstancePlan(permits=asyncio.Semaphore(0))
    async with (
        fake_instances.run_instance(plan) as a,
        fake_instances.run_instance(plan) as b,
        run_replicas(folder, (a, b), keys, *flags) as (replicas, _),
    ):
        yield StreamSite(plan, (a, b), replicas)


async def open_streams(
    replicas: list[Replica], known: list[Replica], number: int
) -> list[asyncio.Task[int]]:
    """Begin so many answers that go on, at one replica after the other; `known`: wait until they know."""
    streams = []
    for count in range(1, number + 1):
        replica = replicas[count % len(replicas)]
        streams.append(asyncio.create_task(post_alone(replica.process)))
        for each in known:
            await each.wait_for_load(count)
    return streams


@pytest.mark.parametrize("policy", ["least_requests", "ttft"])
@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.slow)])
async def test_replicas_decide_on_the_whole_load(tmp_path: Path, policy: str, workers: str) -> None:
    """Streams that stay open are spread evenly, whichever replica gets them, and when they end all know."""
    async with run_stream_site(tmp_path, "--routing-logic", policy, "--workers", workers) as site:
        for each in site.replicas:
            if workers == "2":
                await wait_for_workers(each.process, 2)
            await each.wait_for_messages("taken", 2)
        streams = await open_streams(site.replicas, site.replicas, STREAMS)
        if policy == "least_requests":
            assert site.count_received() == [STREAMS // 2] * 2
        site.end_streams()
        assert await asyncio.gather(*streams) == [200] * STREAMS
        for each in site.replicas:
            await each.wait_for_load(0)
            messages = await each.read_messages()
            dropped = {"forged", "malformed", "stale", "replayed", "full"}
            assert not any(messages[reason] for reason in dropped), messages


async def test_a_wrong_key_changes_nothing(tmp_path: Path) -> None:
    """Said once and counted; each replica goes on with what it knows itself."""
    async with run_stream_site(
        tmp_path, "--routing-logic", "least_requests", keys=(KEY, KEY.replace("0", "1"))
    ) as site:
        one, other = site.replicas
        streams = await open_streams([one], [one], 4)
        before = (await other.read_messages())["forged"]
        await other.wait_for_messages("forged", before + 2)
        assert await other.read_in_flight() == 0
        assert (await other.read_messages())["taken"] == 0
        assert other.process.log.read_text().count("its sender has another key") == 1
        site.end_streams()
        assert await asyncio.gather(*streams) == [200] * 4


@pytest.mark.slow
async def test_a_replica_is_killed(tmp_path: Path) -> None:
    """It can say nothing any more: what it had under way counts until it expires."""
    async with run_stream_site(tmp_path, "--routing-logic", "ttft") as site:
        one, other = site.replicas
        await other.wait_for_messages("taken", 2)
        streams = await open_streams([one], site.replicas, 4)
        one.process.send_signal(signal.SIGKILL)
        assert await asyncio.gather(*streams) == [0] * 4
        await other.wait_for_load(0)
        site.end_streams()


@pytest.mark.slow
async def test_the_worker_with_the_port_is_killed(tmp_path: Path) -> None:
    """Its successor has the port again, and both workers hear of the other replica as before."""
    async with run_stream_site(
        tmp_path, "--routing-logic", "least_requests", "--workers", "2"
    ) as site:
        for each in site.replicas:
            await wait_for_workers(each.process, 2)
        one, other = site.replicas
        os.kill(list_worker_pids(one.process)[0], signal.SIGKILL)
        await wait_for_workers(one.process, 2, 1)
        streams = await open_streams([other], site.replicas, 4)
        assert site.count_received() == [2, 2]
        site.end_streams()
        assert await asyncio.gather(*streams) == [200] * 4
        for each in site.replicas:
            await each.wait_for_load(0)


def build_body(sequence: int, url: str, late_ms: int = 0) -> bytes:
    """A frame that tells of five requests at `url`."""
    now_ms = time.time_ns() // 1_000_000
    place = PeerPlace("mono", url, 5, 5)
    frame = PeerFrame("made up", "process", sequence, now_ms - late_ms, places=(place,))
    return encode_peer_frame(frame)


async def tell_on(it: Replica, url: str) -> None:
    """Tell it anew, with the key, until it is enough."""
    sequence = 100
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
        while True:
            sequence += 1
            peer.sendto(seal_body(build_body(sequence, url), (KEY.encode(),)), (it.host, it.port))
            await asyncio.sleep(0.1)


async def test_made_up_datagrams(tmp_path: Path) -> None:
    """Noise, nonsense with the key, an old time, a repetition: counted and dropped, the router serves."""
    async with fake_instances.run_instance() as a, fake_instances.run_instance() as b:
        flags = ("--routing-logic", "least_requests")
        async with run_replicas(tmp_path, (a, b), (KEY,), *flags) as ((it,), server):
            keys = (KEY.encode(),)
            fine, late = build_body(9, a.url), build_body(10, a.url, 60_000)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as anybody:
                for data in (
                    *(b"", b"x", bytes(65_000), fine),
                    *(seal_body(b"\xc1", keys), seal_body(late, keys)),
                    *(seal_body(fine, keys), seal_body(fine, keys)),
                ):
                    anybody.sendto(data, (it.host, it.port))
            await it.wait_for_messages("replayed", 1)
            counted = await it.read_messages()
            assert counted["forged"] == 4
            assert counted["malformed"] == counted["stale"] == counted["replayed"] == 1
            assert counted["taken"] == 1 and server.questions
            telling = asyncio.create_task(tell_on(it, a.url))
            await it.wait_for_load(5)
            for _ in range(3):
                assert await post_alone(it.process) == 200
            assert [len(each.received) for each in (a, b)] == [0, 3]
            telling.cancel()
            # Whoever made it up is silent since.
            await it.wait_for_load(0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--peers", "dns://routers:9000"], "--peers-key-file FILE"),
        (["--peers", "dns://_peers._udp.routers"], "dns://SERVICE:PORT"),
        (["--peers", "k8s://default/app=router"], "dns://SERVICE:PORT"),
        (["--peers-key-file", "/dev/null"], "need --peers"),
        (["--peers", "dns://routers:9000", "--peers-key-file", "/dev/null"], "openssl rand"),
        (["--peers", "dns://routers:9000", "--peers-key-file", "/none"], "cannot be read"),
    ],
)
@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_what_is_missing_is_said(flags: list[str], words: str, workers: str) -> None:
    """Before anything listens."""
    refused = CliRunner().invoke(
        command, ["--backend", "http://127.0.0.1:1", "--workers", workers, *flags]
    )
    assert refused.exit_code == 2 and words in " ".join(refused.output.split())
