# SPDX-License-Identifier: Apache-2.0
"""What live tests measure with: ask a server, read its Server-Timing back, find the trace it left."""

from __future__ import annotations

import functools
import json
import statistics
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

from ttft_otel import names, stages, timing
from ttft_otel.lab import client, matrix
from ttft_otel.lab.client import Answer, Question
from ttft_otel.lab.fleet import Fleet
from ttft_otel.lab.injection import Control
from ttft_otel.router.plan import KEEP

ASK = {names.ASK: "1"}


def breakdown(answer: Answer) -> dict[str, int]:
    """Stages, `unattributed` and `ttft` of an answer in microseconds; fails unless they close."""
    found = timing.read(answer.headers.get(names.TIMING, ""))
    assert found is not None, (answer.status, answer.headers, answer.body[:300])
    assert all(us >= 0 for us in found.stages.values())
    return {**found.stages, stages.UNATTRIBUTED: found.unattributed, "ttft": found.ttft}


def lows(samples: Sequence[dict[str, int]]) -> dict[str, float]:
    """Lower quartile of each stage: what it takes when nothing else is in the way."""
    keys = {key for sample in samples for key in sample}
    return {
        key: sorted(sample.get(key, 0) for sample in samples)[len(samples) // 4] for key in keys
    }


def medians(samples: Sequence[dict[str, int]]) -> dict[str, float]:
    """Median of each stage over some requests; a stage that a request lacks is 0 there."""
    keys = {key for sample in samples for key in sample}
    return {key: statistics.median(sample.get(key, 0) for sample in samples) for key in keys}


def again(test: Callable[..., None]) -> Callable[..., None]:
    """Measure once more where the first measurement was off, and say so.

    Medians on two cores meet a busy moment now and then; what is really wrong is wrong twice.
    """

    @functools.wraps(test)
    def run(*args: Any, **fields: Any) -> None:
        try:
            test(*args, **fields)
        except AssertionError as error:
            sys.stderr.write(f"[live] {test.__name__}: measured again after: {str(error)[:300]}\n")
            test(*args, **fields)

    return run


class Bench:
    """One deployment under test."""

    def __init__(self, fleet: Fleet, control: Control) -> None:
        self.fleet = fleet
        self.control = control
        self.seed = time.time_ns() % 10**9  # caches on disk outlive a deployment

    def warm(self) -> None:
        """First requests import and compile; no test wants to see that."""
        for _ in range(3):
            self.ask(self.front, stream=True)
            if "prefill_decode" in self.fleet.servers:
                self.pair(self.fresh())
            else:
                self.ask(self.front, pictures=(self.fresh(),))

    @property
    def front(self) -> str:
        """Where clients ask."""
        return self.fleet.front

    def fresh(self) -> int:
        """A picture that no cache has seen."""
        self.seed += 1
        return self.seed

    def ask(self, url: str, **fields: Any) -> Answer:
        """One request that asks for its timings."""
        headers = {**ASK, **fields.pop("headers", {})}
        return client.ask(url, headers=headers, **fields)

    def pair(self, picture: int, **fields: Any) -> tuple[dict[str, int], dict[str, int]]:
        """One image through E, then through PD, both asked directly: their two breakdowns."""
        first = self.ask(
            self.fleet.url("encode"), pictures=(picture,), max_tokens=1, stream=False, **fields
        )
        second = self.ask(
            self.fleet.url("prefill_decode"), pictures=(picture,), max_tokens=2, **fields
        )
        return breakdown(first), breakdown(second)

    def handed(self, **fields: Any) -> tuple[Answer, Answer]:
        """One new prompt through P, then through D, both asked directly: their two answers."""
        question = {"prompt": str(self.fresh()), "words": 300, "max_tokens": 1, **fields}
        extra = {"kv_transfer_params": KEEP}
        headers = fields.pop("headers", {})
        leg = {**headers, names.LEG_HEADER: "prefill"}
        kept = {**question, "max_tokens": 1, "stream": False, "headers": leg, "extra": extra}
        first = self.ask(self.fleet.url("prefill"), **kept)
        question["extra"] = {"kv_transfer_params": first.json()["kv_transfer_params"]}
        leg = {**headers, names.LEG_HEADER: "decode"}
        return first, self.ask(self.fleet.url("decode"), **{**question, "headers": leg})

    def trace(self, trace_id: str, enough: Callable[[list[dict[str, Any]]], bool]) -> Any:
        """The spans of a trace, once `enough` of them have arrived."""
        deadline = time.monotonic() + 15
        spans: list[dict[str, Any]] = []
        while time.monotonic() < deadline:
            try:
                spans = self.get(f"/api/trace/{trace_id}")["spans"]
            except urllib.error.HTTPError as error:
                assert error.code == 404
            if enough(spans):
                return spans
            time.sleep(0.2)
        raise AssertionError(f"only {[span['name'] for span in spans]} of {trace_id}")

    def complaints(self, server: str) -> list[str]:
        """Lines in which our hooks said that they failed."""
        text = self.fleet.servers[server].log.read_text(errors="replace")
        return [line for line in text.splitlines() if "tracing loses it" in line]

    def get(self, path: str, server: str = "receiver") -> Any:
        """JSON from one of the deployment's servers."""
        with urllib.request.urlopen(self.fleet.url(server) + path, timeout=10) as answer:
            return json.load(answer)


def moved(plain: Sequence[dict[str, int]], changed: Sequence[dict[str, int]]) -> dict[str, float]:
    """How far each stage's median moved, in milliseconds."""
    return {name: ms for name, ms in matrix.moved(plain, changed).items() if name != "ttft"}


__all__ = ["ASK", "Answer", "Bench", "Question", "again", "breakdown", "medians", "moved"]
