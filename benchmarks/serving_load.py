# SPDX-License-Identifier: Apache-2.0
"""One round of load on a server, for serving.py: throughput, inter-token latency, CPU time of its processes.

Clients are threads of this process, in a closed loop; the servers are those that serving.py has started.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.process_cpu import read_process_cpu_s
from lab import session_processes, ttft_client
from lab.local_servers import LocalServer
from lab.ttft_client import TimedRequest, TimedResponse
from ttft_otel.model.names import header_names

CONCURRENT_CLIENTS: Final = 12
TOKENS_PER_ANSWER: Final = 48
EXPORT_WAIT_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class LoadResult:
    """One round on one server: requests per second, p99 and median inter-token latency in us, and the
    CPU time of a request in us: in processes that take its spans, and in each of the server's by its name.
    """

    throughput: float
    itl_p99: float
    itl_median: float
    outside_us: float
    process_us: Mapping[str, float]

    @property
    def cpu_us(self) -> float:
        """Of all of the server's processes."""
        return sum(self.process_us.values())


def read_cpu_us(pids: Iterable[int]) -> dict[str, float]:
    """CPU time so far of these processes, by their names as the kernel shows them."""
    found: dict[str, float] = {}
    for pid in pids:
        name = Path(f"/proc/{pid}/comm").read_text("utf-8").strip()
        found[name] = found.get(name, 0.0) + read_process_cpu_s(pid) * 1e6
    return found


def list_exporters(server: LocalServer) -> list[int]:
    """The exporter processes of `server`."""
    return session_processes.find_exporters(session_processes.list_session_pids(server.pid))


def build_trace_headers(flags: str) -> dict[str, str]:
    """The headers of a request that continues a new trace with these flags; "" for one without a trace."""
    parent = f"00-{os.urandom(16).hex()}-{os.urandom(8).hex()}-{flags}"
    return {header_names.TRACEPARENT: parent} if flags else {}


def list_token_gaps_us(answers: Sequence[TimedResponse]) -> list[float]:
    """Times between two tokens of an answer, the shortest first."""
    # The first event has the role and no token: the gap behind it is no time between tokens.
    return sorted(
        later.at_us - earlier.at_us
        for answer in answers
        for earlier, later in zip(answer.events[1:], answer.events[2:], strict=False)
    )


def run_load(
    server: LocalServer, requests: int, receiver: LocalServer, flags: str = ""
) -> LoadResult:
    """CONCURRENT_CLIENTS in a closed loop, streamed answers of TOKENS_PER_ANSWER tokens.

    receiver: takes the spans of `server`. flags: of the traceparent of each request; "" without one.
    """
    url = server.url
    inside = session_processes.list_session_pids(server.pid)
    outside = [*session_processes.list_session_pids(receiver.pid), *list_exporters(server)]
    answers: list[TimedResponse] = []
    # One iterator for all clients: they end together, whichever of them is faster.
    request_numbers = iter(range(requests))
    lock = threading.Lock()

    def run_client() -> None:
        while True:
            with lock:
                number = next(request_numbers, None)
            if number is None:
                return
            # Every prompt is another one; ignore_eos makes all answers equally long.
            question = TimedRequest(
                prompt=f"request {number}",
                max_tokens=TOKENS_PER_ANSWER,
                headers=build_trace_headers(flags),
                extra={"ignore_eos": True},
            )
            answer = ttft_client.send_timed_request(url, question)
            with lock:
                answers.append(answer)

    began_us, outside_us = read_cpu_us(inside), sum(read_cpu_us(outside).values())
    started = time.monotonic()
    threads = [threading.Thread(target=run_client) for _ in range(CONCURRENT_CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed_s = time.monotonic() - started
    ended_us = read_cpu_us(inside)
    process_us = {name: (us - began_us[name]) / len(answers) for name, us in ended_us.items()}
    time.sleep(EXPORT_WAIT_S)  # the last spans leave in batches
    outside_us = sum(read_cpu_us(outside).values()) - outside_us
    gaps = list_token_gaps_us(answers)
    # A server that fails fast would have the best throughput.
    if any(answer.status != 200 for answer in answers):
        raise SystemExit("a request failed; see the servers' logs")
    return LoadResult(
        len(answers) / elapsed_s,
        # A client that is short of CPU reads several events at once, whose gaps are 0.
        max(1.0, gaps[int(len(gaps) * 0.99)]),
        max(1.0, statistics.median(gaps)),
        outside_us / len(answers),
        process_us,
    )
