# SPDX-License-Identifier: Apache-2.0
"""Steady load on a router while pods come and go, and what became of each request; for kube_trial.py.

Every request streams and has a trace id of ours. A request counts as answered when its stream ended as it
should ([DONE] after status 200): a stream that breaks off is a failed request, however it began.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ttft_otel.model.endpoints import CHAT_PATH

PAUSE_S: Final = 0.15  # between two requests of a client
REQUEST_TIMEOUT_S: Final = 120.0
DONE: Final = b"data: [DONE]"


@dataclass(frozen=True, slots=True)
class LoadClient:
    """One client of the load. kept_alive: it sends on one connection as long as that stays open."""

    max_tokens: int
    kept_alive: bool


# Short answers on new connections and on kept ones, and streams that last for seconds.
CLIENTS: Final = (
    LoadClient(8, kept_alive=False),
    LoadClient(8, kept_alive=True),
    LoadClient(600, kept_alive=False),
    LoadClient(600, kept_alive=True),
)


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """What became of one request. Times are time.monotonic(); failure: "" if it was answered."""

    trace_id: str
    started: float
    ended: float
    failure: str


class RouterConnection:
    """A connection to the router, opened anew where the router has closed it or a client wants no other."""

    def __init__(self, host: str, port: int, kept_alive: bool) -> None:
        self.http = http.client.HTTPConnection(host, port, timeout=REQUEST_TIMEOUT_S)
        self.kept_alive = kept_alive

    def send_request(self, max_tokens: int, trace_id: str) -> str:
        """Ask once and read all of the answer; gives what was wrong with it."""
        # As client libraries do: readable before anything was sent means closed.
        if self.http.sock and (
            not self.kept_alive or select.select([self.http.sock], [], [], 0)[0]
        ):
            self.http.close()
        body = {
            **{"model": "tiny", "stream": True, "max_tokens": max_tokens, "ignore_eos": True},
            "messages": [{"role": "user", "content": "what is in the picture"}],
        }
        headers = {
            "content-type": "application/json",
            "traceparent": f"00-{trace_id}-{os.urandom(8).hex()}-01",
        }
        try:
            self.http.request("POST", CHAT_PATH, json.dumps(body), headers)
            response = self.http.getresponse()
            reported = response.read()
        except (OSError, http.client.HTTPException) as error:
            self.http.close()
            return f"{type(error).__name__}: {error}"
        if response.status != 200:
            return f"status {response.status}: {reported[:200].decode(errors='replace')}"
        return "" if reported.rstrip().endswith(DONE) else f"broken off after {len(reported)} bytes"


class SteadyLoad:
    """Clients that ask one request after another until stop(); outcomes grow meanwhile."""

    def __init__(self, host: str, port: int, clients: Sequence[LoadClient] = CLIENTS) -> None:
        self.outcomes: list[RequestOutcome] = []
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run_client, args=(host, port, each), daemon=True)
            for each in clients
        ]

    def start(self) -> None:
        """Begin to ask."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> list[RequestOutcome]:
        """Wait for the answers that are under way, and give all outcomes."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(2 * REQUEST_TIMEOUT_S)
        return self.outcomes

    def _run_client(self, host: str, port: int, client: LoadClient) -> None:
        connection = RouterConnection(host, port, client.kept_alive)
        while not self._stopping.is_set():
            trace_id = os.urandom(16).hex()
            started = time.monotonic()
            failure = connection.send_request(client.max_tokens, trace_id)
            self.outcomes.append(RequestOutcome(trace_id, started, time.monotonic(), failure))
            self._stopping.wait(PAUSE_S)
        connection.http.close()


@contextlib.contextmanager
def run_load(host: str, port: int) -> Iterator[SteadyLoad]:
    """Load while the block runs; afterwards all of its requests have ended."""
    load = SteadyLoad(host, port)
    load.start()
    try:
        yield load
    finally:
        load.stop()


def summarize_outcomes(outcomes: Sequence[RequestOutcome]) -> dict[str, Any]:
    """Figures of a load: requests, failures with their words (each once), the longest answer."""
    failed = [each for each in outcomes if each.failure]
    return {
        "requests": len(outcomes),
        "failed": len(failed),
        "failures": sorted({each.failure for each in failed})[:5],
        "longest_s": round(max((each.ended - each.started for each in outcomes), default=0.0), 1),
    }
