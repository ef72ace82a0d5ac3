# SPDX-License-Identifier: Apache-2.0
"""What a router adds to the time of the first token and of each later one, under a share of its load.

router.py starts instance and routers, and calls `measure_latency`. Requests arrive at random moments, as
many a second for every router: 25, 50 and 80 % of what one core could do of ours with tracing off, by its
CPU time, or of what this machine does with instance and load generator beside it, if that is less: past it
only the benchmark's own queues would be measured. All take turns, so that what else runs affects them alike.

Each event says when it left the instance (bare_transport.py), so that a token's latency is one
subtraction of one clock; of the first one the request's way counts too.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, cast

import uvloop

from benchmarks import bare_transport
from benchmarks.figures import Figure, build_figure
from benchmarks.process_cpu import read_process_cpu_s
from ttft_otel.bench.http_exchange import BenchTarget
from ttft_otel.model.endpoints import CHAT_PATH
from ttft_otel.model.statistics import compute_quantile

LOAD_SHARES: Final = (0.25, 0.5, 0.8)
CALIBRATION_REQUESTS: Final = 400
ROUNDS: Final = 7  # of each load, in which all routers take turns
MAX_CONNECTIONS: Final = 256
MAX_DRAIN_S: Final = 20.0  # seconds after the last arrival until everything has to be answered
DIRECT: Final = ""  # the name of the instance itself, which is the reference
PEERS: Final = ("rust", "fastapi")
_BEFORE_STAMP: Final = bare_transport.EVENT.partition(bare_transport.STAMP_PLACE)[0]
_STAMP_BYTES: Final = len(bare_transport.STAMP_PLACE)
BODY: Final = json.dumps(
    {"model": "tiny", "messages": [{"role": "user", "content": "?"}], "stream": True}
    | {"user": "stamped"},
    separators=(",", ":"),
).encode()


@dataclass(slots=True)
class LatencySamples:
    """Microseconds: of first tokens from the planned arrival on, of later ones from the instance on."""

    first: list[float] = field(default_factory=list)
    later: list[float] = field(default_factory=list)


class StampedClient(asyncio.Protocol):
    """A connection that asks when it is told to, and takes the times of what comes."""

    def __init__(self, samples: LatencySamples, idle: list[StampedClient]) -> None:
        self.samples = samples
        self.idle = idle
        self.began_ns = 0
        self.has_first = False
        self.left = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the connection, which is free."""
        self.transport = cast(asyncio.Transport, transport)
        self.idle.append(self)

    def ask(self, request_bytes: bytes, began_ns: int) -> None:
        """Send a request that was due at `began_ns`, nanoseconds of CLOCK_MONOTONIC."""
        self.began_ns = began_ns
        self.has_first = False
        self.left = b""
        self.transport.write(request_bytes)

    def data_received(self, data: bytes) -> None:
        """Compare the time with those in the events; at the end the connection is free again."""
        now_ns = time.monotonic_ns()
        *events, self.left = (self.left + data).split(b"\n\n")
        for event in events:
            _, _, event_text = event.partition(_BEFORE_STAMP)
            stamp = event_text[:_STAMP_BYTES]
            if not stamp.isdigit():
                continue
            if not self.has_first:
                self.has_first = True
                self.samples.first.append((now_ns - self.began_ns) / 1000)
            self.samples.later.append((now_ns - int(stamp)) / 1000)
        if self.left.endswith(b"0\r\n\r\n"):
            self.left = b""
            self.idle.append(self)


async def load_router(url: str, rate: float, seconds: float) -> LatencySamples:
    """Send `rate` requests a second at random moments for `seconds`, and take the times."""
    target = BenchTarget.parse_url(url)
    request_bytes = target.encode_request(CHAT_PATH, BODY, {"connection": "keep-alive"})
    samples = LatencySamples()
    idle: list[StampedClient] = []
    loop = asyncio.get_running_loop()
    arrivals = random.Random(17)  # the same for all
    for _ in range(MAX_CONNECTIONS):
        make_client = partial(StampedClient, samples, idle)
        await loop.create_connection(make_client, target.host, target.port)
    clients = list(idle)
    due_s = time.monotonic()
    end_s = due_s + seconds
    while due_s < end_s:
        due_s += arrivals.expovariate(rate)
        await asyncio.sleep(max(due_s - time.monotonic(), 0))
        while not idle:  # it waits on, which counts
            await asyncio.sleep(0.001)
        idle.pop().ask(request_bytes, int(due_s * 1e9))
    while len(idle) < len(clients):
        if time.monotonic() > end_s + MAX_DRAIN_S:
            raise RuntimeError(f"{url} left {len(clients) - len(idle)} requests unanswered")
        await asyncio.sleep(0.01)
    for client in clients:
        client.transport.close()
    return samples


def measure_limits(url: str, pid: int) -> tuple[float, float]:
    """Requests a second: a core's, by the CPU time of the process at `url`, and this machine's."""
    uvloop.run(load_router(url, CALIBRATION_REQUESTS, 0.5))
    before_s = read_process_cpu_s(pid)
    samples = uvloop.run(load_router(url, CALIBRATION_REQUESTS, 1.0))
    core_limit = len(samples.first) / (read_process_cpu_s(pid) - before_s)
    # All connections are busy all the time: more arrive than a core could do.
    began_s = time.monotonic()
    samples = uvloop.run(load_router(url, 2 * core_limit, 0.5))
    return core_limit, len(samples.first) / (time.monotonic() - began_s)


def measure_latency(urls: Mapping[str, str], pid: int, seconds: float) -> dict[str, Figure]:
    """Percentiles that each router of `urls` adds to those of the instance itself, which is DIRECT.

    pid: of the router whose limit sets the loads. seconds: of each load. Raises KeyError without DIRECT.
    """
    core_limit, machine_limit = measure_limits(urls["untraced"], pid)
    limit = min(core_limit, machine_limit)
    figures = {
        "limit of a core, requests/s": build_figure([core_limit], digits=0),
        "limit of this machine, requests/s": build_figure([machine_limit], digits=0),
    }
    for share in LOAD_SHARES:
        rounds: dict[str, list[float]] = {}
        for _ in range(ROUNDS):
            samples = {
                name: uvloop.run(load_router(url, share * limit, seconds / ROUNDS))
                for name, url in urls.items()
            }
            for name, added_us in compare_samples(samples, f"{share:.0%}").items():
                rounds.setdefault(name, []).append(added_us)
        figures |= {name: build_figure(values, digits=0) for name, values in rounds.items()}
        figures |= compare_routers(
            rounds, [name for name in urls if name != DIRECT], f"{share:.0%}"
        )
    return figures


def compare_routers(
    rounds: Mapping[str, Sequence[float]], names: Sequence[str], load: str
) -> dict[str, Figure]:
    """What ours add as multiples of what each peer adds, of rounds in which the peer added something."""
    figures: dict[str, Figure] = {}
    for peer in PEERS:
        for name in (each for each in names if each not in PEERS and peer in names):
            for what in ("TTFT p50", "TTFT p99", "token p50", "token p99"):
                pairs = zip(
                    rounds[name_added(load, what, name)],
                    rounds[name_added(load, what, peer)],
                    strict=True,
                )
                # Noise may make a peer look faster than no router at all: a ratio to that says nothing.
                if ratios := [value / reference for value, reference in pairs if reference > 0]:
                    figures[f"{load}: {what}, {name} / {peer}"] = build_figure(ratios)
    return figures


def compare_samples(samples: Mapping[str, LatencySamples], load: str) -> dict[str, float]:
    """Added microseconds, p50 and p99 of first and later tokens, by the name of the figure."""
    direct = samples[DIRECT]
    added: dict[str, float] = {}
    for name, taken in samples.items():
        if name == DIRECT:
            continue
        for label, values, references in (
            ("TTFT", taken.first, direct.first),
            ("token", taken.later, direct.later),
        ):
            for percent in (50, 99):
                added[name_added(load, f"{label} p{percent}", name)] = compute_quantile(
                    values, percent / 100
                ) - compute_quantile(references, percent / 100)
    return added


def name_added(load: str, what: str, router: str) -> str:
    """The name of a figure: what the router adds to a percentile at this load."""
    return f"{load}: {what} added by {router}, us"
