# SPDX-License-Identifier: Apache-2.0
"""The servers, routers and load of benchmarks/whatif.py: the same requests at the same times in every run."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from lab import session_processes, tiny_models
from lab.injection import InjectionControl
from lab.local_deployment import build_router_command
from lab.local_servers import LocalServer, run_servers
from lab.server_commands import (
    ServerCommand,
    VllmOptions,
    build_encoder_command,
    build_mono_command,
    build_prefill_decode_command,
)
from lab.ttft_client import TimedRequest, send_timed_request
from ttft_otel.explain.whatif.replay_facts import Recording
from ttft_otel.explain.window.window_reading import record_window
from ttft_otel.model.endpoints import COMPLETIONS_PATH
from ttft_otel.model.names import env_names
from ttft_otel.report.store.database_reader import RequestFilter, open_reader

RATE_BY_STEP: Final = 0.16  # requests that arrive within a step's sleep, on average
MAX_SEQS, MAX_TOKENS = 4, 512
MAX_PROMPT: Final = 1600
MAX_TOKEN_ID: Final = 90  # the tiny model's vocabulary is small
# Of a KV block, the least on a CPU: what a prefix cache finds is a multiple.
BLOCK_TOKENS: Final = 32
WARM_UP: Final = 12  # requests before the first window; not counted
SETTLE_S: Final = 4.0  # until the exporters have sent the last spans
START_TIMEOUT_S: Final = 400
CPU_PRESSURE: Final = Path("/proc/pressure/cpu")


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of the load.

    at_s: when it is sent, seconds after the first one. tokens: of its prompt. answer: tokens to generate.
    picture: it has an image, for servers that take some.
    """

    at_s: float
    tokens: int
    answer: int
    picture: bool = False


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """What one run gave. clients: their TTFTs, milliseconds.

    pressure: share of its time in which something waited for a core; -1 where the kernel does not tell.
    """

    recording: Recording
    clients: Sequence[float]
    pressure: float


def plan_load(
    count: int, delay_ms: float, seed: int = 1, *, pictures: bool = False
) -> list[PlannedRequest]:
    """Poisson arrivals; log-normal prompts of one to four chunks, short answers.

    delay_ms: that each step sleeps; slower servers get fewer requests.
    """
    chance, at_s, planned = random.Random(seed), 0.0, []
    for _ in range(count):
        at_s += chance.expovariate(RATE_BY_STEP / delay_ms * 1000)
        tokens = round(min(max(chance.lognormvariate(5.6, 0.9), 16), MAX_PROMPT))
        planned.append(PlannedRequest(at_s, tokens, chance.randint(3, 12), pictures))
    return planned


def build_request(planned: PlannedRequest, chance: random.Random, cached: float) -> TimedRequest:
    """One request. cached: share of its prompt that begins like SHARED, in whole blocks."""
    if planned.picture:
        return TimedRequest(
            prompt="what is in the picture",
            pictures=(chance.getrandbits(31),),
            max_tokens=planned.answer,
        )
    known = round(planned.tokens * cached / BLOCK_TOKENS) * BLOCK_TOKENS
    own = [chance.randint(11, MAX_TOKEN_ID) for _ in range(planned.tokens - known)]
    return TimedRequest(
        path=COMPLETIONS_PATH,
        max_tokens=planned.answer,
        extra={"prompt": [*draw_shared(known), *own], "ignore_eos": True},
    )


def draw_shared(count: int) -> list[int]:
    """The first tokens of what prompts may share."""
    chance = random.Random("shared")
    return [chance.randint(11, MAX_TOKEN_ID) for _ in range(count)]


def send_load(
    url: str, planned: Sequence[PlannedRequest], rate: float, seed: int, cached: float = 0.0
) -> list[float]:
    """Send all requests at their times, `rate` times as fast; the clients' TTFTs in milliseconds.

    seed: of the tokens. Each run has its own, so that nothing is found in a prefix cache but the share
    `cached` of each prompt.
    """
    chance, found = random.Random(seed), [0.0] * len(planned)
    requests = [build_request(each, chance, cached) for each in planned]

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
        return {env_names.TTFT_OTEL: "1", env_names.OTEL_EXPORTER_OTLP_ENDPOINT: self.receiver.url}

    def build_server(self, core: int, **limits: int) -> Any:
        """A server's command; limits: of VllmOptions."""
        options = VllmOptions(
            model=tiny_models.build_model(tiny_models.TEXT_RECIPE),
            core=core,
            control=self.control.path,
            max_num_seqs=MAX_SEQS,
            max_num_batched_tokens=MAX_TOKENS,
            extra=("--block-size", str(BLOCK_TOKENS)),
            env=self.environment,
        )
        command = build_mono_command(replace(options, **limits))  # type: ignore[arg-type]
        return replace(command, name=f"vllm-{core}")

    def build_encoders(self) -> list[ServerCommand]:
        """Two encoder instances and one that prefills and decodes."""
        storage = self.folder / "encoder-cache"
        storage.mkdir(exist_ok=True)
        options = VllmOptions(
            model=tiny_models.build_model(tiny_models.VISION_RECIPE),
            control=self.control.path,
            env=self.environment,
        )
        encoders = [
            replace(build_encoder_command(replace(options, core=core), storage), name=f"e-{core}")
            for core in (0, 1)
        ]
        return [*encoders, build_prefill_decode_command(replace(options, core=1), storage)]

    @contextmanager
    def route(
        self, urls: Sequence[str] | Mapping[str, Sequence[str]], policy: str
    ) -> Iterator[str]:
        """A router in front of servers, given by role or all of role `mono`; its URL."""
        roles = urls if isinstance(urls, Mapping) else {"mono": urls}
        command = build_router_command(roles, self.environment, "--routing-logic", policy)
        with run_servers(command, timeout=120, logs=self.folder) as (router,):
            pictures = self.planned[0].picture
            warm = [PlannedRequest(each * 0.3, 64, 2, pictures) for each in range(WARM_UP)]
            raise_priority(session_processes.list_session_pids(router.pid))
            send_load(router.url, warm, 1.0, seed=0)
            time.sleep(1)
            yield router.url

    def run_window(self, url: str, rate: float, seed: int, cached: float = 0.0) -> RecordedRun:
        """Send the load; what the spans tell of it, the clients' TTFTs, and how busy the machine was."""
        if cached:
            # Twice: a block is in the cache once its request has ended.
            known = PlannedRequest(0.0, MAX_PROMPT + BLOCK_TOKENS, 2)
            for more in range(2):
                send_load(url, [known], 1.0, seed=-1 - more, cached=1.0)
        since_ns, stalled = time.time_ns(), read_pressure()
        clients = send_load(url, self.planned, rate, seed, cached)
        spent_s = (time.time_ns() - since_ns) / 1e9
        pressure = (read_pressure() - stalled) / spent_s if stalled >= 0 else -1.0
        time.sleep(SETTLE_S)
        with open_reader(self.folder / "spans.db") as reader:
            recording, _ = record_window(reader, RequestFilter(since_ns=since_ns))
            return RecordedRun(recording, clients, pressure)


def read_pressure() -> float:
    """Seconds since the machine's start in which something waited for a core; -1 where that is not told."""
    if not CPU_PRESSURE.exists():
        return -1.0
    some = CPU_PRESSURE.read_text("ascii").splitlines()[0]
    return int(some.rpartition("total=")[2]) / 1e6


def raise_priority(pids: Sequence[int]) -> None:
    """Let these processes go before others of the machine, where we may: a step's sleep is to decide.

    After their start, which takes a minute of all cores; by then they sleep most of the time.
    """
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").glob("[0-9]*"):
            # Not root, or a thread that has ended.
            with suppress(OSError):
                os.sched_setscheduler(int(thread.name), os.SCHED_RR, os.sched_param(1))
