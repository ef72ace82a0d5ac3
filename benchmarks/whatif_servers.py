# SPDX-License-Identifier: Apache-2.0
"""The servers, routers and load of benchmarks/whatif.py: the same requests at the same times in every run."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from lab import session_processes, tiny_models
from lab.injection import InjectionControl
from lab.local_deployment import build_router_command
from lab.local_servers import LocalServer, run_servers
from lab.server_commands import VllmOptions, build_mono_command
from lab.ttft_client import TimedRequest, send_timed_request
from ttft_otel import names
from ttft_otel.endpoints import COMPLETIONS_PATH
from ttft_otel.explain.replay_facts import Recording, read_recording
from ttft_otel.report.database_reader import MAX_REQUESTS, RequestFilter, open_reader

RATE_BY_STEP: Final = 0.16  # requests that arrive within a step's sleep, on average
MAX_SEQS, MAX_TOKENS = 4, 512
MAX_TOKEN_ID: Final = 90  # the tiny model's vocabulary is small
WARM_UP: Final = 12  # requests before the first window; not counted
SETTLE_S: Final = 4.0  # until the exporters have sent the last spans
START_TIMEOUT_S: Final = 400


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of the load.

    at_s: when it is sent, seconds after the first one. tokens: of its prompt. answer: tokens to generate.
    """

    at_s: float
    tokens: int
    answer: int


def plan_load(count: int, delay_ms: float, seed: int = 1) -> list[PlannedRequest]:
    """Poisson arrivals; log-normal prompts of one to four chunks, short answers.

    delay_ms: that each step sleeps; slower servers get fewer requests.
    """
    chance, at_s, planned = random.Random(seed), 0.0, []
    for _ in range(count):
        at_s += chance.expovariate(RATE_BY_STEP / delay_ms * 1000)
        tokens = round(min(max(chance.lognormvariate(5.6, 0.9), 16), 1600))
        planned.append(PlannedRequest(at_s, tokens, chance.randint(3, 12)))
    return planned


def send_load(url: str, planned: Sequence[PlannedRequest], rate: float, seed: int) -> list[float]:
    """Send all requests at their times, `rate` times as fast; the clients' TTFTs in milliseconds.

    seed: of the tokens. Each run has its own, so that nothing is found in a prefix cache.
    """
    chance, found = random.Random(seed), [0.0] * len(planned)
    requests = [
        TimedRequest(
            path=COMPLETIONS_PATH,
            max_tokens=each.answer,
            extra={
                "prompt": [chance.randint(11, MAX_TOKEN_ID) for _ in range(each.tokens)],
                "ignore_eos": True,
            },
        )
        for each in planned
    ]

    def send(number: int) -> None:
        answer = send_timed_request(url, requests[number])
        # Not an assertion in a thread: without a first token the window's figures would be others.
        found[number] = (answer.client_ttft_us or 0) / 1000 if answer.status == 200 else -1.0

    threads, begun = [], time.monotonic()
    for number, each in enumerate(planned):
        time.sleep(max(0.0, begun + each.at_s / rate - time.monotonic()))
        threads.append(threading.Thread(target=send, args=(number,), daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join()
    if min(found) <= 0:
        raise RuntimeError(f"{sum(each <= 0 for each in found)} requests got no first token")
    return found


@dataclass(frozen=True, slots=True)
class Bench:
    """What all phases share."""

    folder: Path
    receiver: LocalServer
    control: InjectionControl
    planned: Sequence[PlannedRequest]

    @property
    def environment(self) -> dict[str, str]:
        """Of servers and routers: traced, sending to the receiver."""
        return {names.ENV_ON: "1", names.ENV_ENDPOINT: self.receiver.url}

    def build_server(self, core: int, **limits: int) -> Any:
        """A server's command; limits: of VllmOptions."""
        options = VllmOptions(
            model=tiny_models.build_model(tiny_models.TEXT_RECIPE),
            core=core,
            control=self.control.path,
            max_num_seqs=MAX_SEQS,
            max_num_batched_tokens=MAX_TOKENS,
            env=self.environment,
        )
        command = build_mono_command(replace(options, **limits))  # type: ignore[arg-type]
        return replace(command, name=f"vllm-{core}")

    @contextmanager
    def route(self, urls: Sequence[str], policy: str) -> Iterator[str]:
        """A router in front of servers; its URL."""
        command = build_router_command({"mono": urls}, self.environment, "--routing-logic", policy)
        with run_servers(command, timeout=120, logs=self.folder) as (router,):
            warm = [PlannedRequest(number * 0.3, 64, 2) for number in range(WARM_UP)]
            raise_priority(session_processes.list_session_pids(router.pid))
            send_load(router.url, warm, 1.0, seed=0)
            time.sleep(1)
            yield router.url

    def run_window(self, url: str, rate: float, seed: int) -> tuple[Recording, list[float]]:
        """Send the load; what the spans tell of it, and the clients' TTFTs."""
        since_ns = time.time_ns()
        clients = send_load(url, self.planned, rate, seed)
        time.sleep(SETTLE_S)
        with open_reader(self.folder / "spans.db") as reader:
            wanted = RequestFilter(since_ns=since_ns, last=MAX_REQUESTS)

            def find_spans(trace_id: str) -> Any:
                trace = reader.find_trace(trace_id)
                return trace.spans if trace else ()

            return read_recording(reader.list_latest(wanted), find_spans), clients


def raise_priority(pids: Sequence[int]) -> None:
    """Let these processes go before others of the machine, where we may: a step's sleep is to decide.

    After their start, which takes a minute of all cores; by then they sleep most of the time.
    """
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").glob("[0-9]*"):
            # Not root, or a thread that has ended.
            with suppress(OSError):
                os.sched_setscheduler(int(thread.name), os.SCHED_RR, os.sched_param(1))
