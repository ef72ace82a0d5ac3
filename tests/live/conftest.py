# SPDX-License-Identifier: Apache-2.0
"""Real vLLM servers for the live tests, one deployment at a time: two cores cannot hold two in truth.

Tests ask for `epd` (E, PD, router, receiver; V1 runner), `pd` (P and D over NIXL, router), `epd3` (E,
P, D, router), `newer` (one server, V2 runner, async scheduling) or `newer_pd` (P and D like it). Each is
started once; a test that needs another one stops the one that runs. Only `newer` starts beside another
one, `small` (test_kv_events.py), which takes no times and leaves it a core.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.live.bench import Bench
from ttft_otel.lab import models
from ttft_otel.lab.fleet import Fleet, Plan, deployed
from ttft_otel.lab.injection import Control
from ttft_otel.lab.recipes import Options
from ttft_otel.lab.servers import terminable


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder is live; without vLLM it is skipped, with the remedy.

    Live tests run last, deployment by deployment: each is started once.
    """
    items.sort(key=lambda item: (DECKS.index(deployment(item)), item.path.stem == "test_killed"))
    missing = importlib.util.find_spec("vllm") is None
    for item in items:
        if "tests/live/" in str(item.path):
            item.add_marker(pytest.mark.live)
            if missing:
                item.add_marker(pytest.mark.skip(reason="no vLLM here; run scripts/install"))


DECKS = ("", "epd", "pd", "epd3", "small", "newer", "newer_pd", "other")
NEWER = "v2-async"


def deployment(item: pytest.Item) -> str:
    """Which deployment a test needs; "other" starts its own, "" none."""
    if "tests/live/" not in str(item.path):
        return ""
    names = getattr(item, "fixturenames", ())
    return next((name for name in DECKS if name in names), "other")


class Deck:
    """What runs now, and how to change it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.stack = ExitStack()
        self.shape = ""
        self.bench: Bench | None = None
        self.coming: tuple[str, Future[tuple[Fleet, Control]]] | None = None
        self.broken: dict[str, BaseException] = {}  # a start takes minutes: never tried twice

    def use(self, shape: str) -> Bench:
        """Start a deployment unless it is the one that runs; nothing is injected into it."""
        if self.shape != shape or self.bench is None:
            if shape in self.broken:
                raise RuntimeError(f"{shape} did not start before") from self.broken[shape]
            if self.coming is None or self.coming[0] != shape:
                self.stop()
            try:
                fleet, control = self.coming[1].result() if self.coming else self.start(shape)
            except BaseException as error:
                self.broken[shape] = error
                raise
            self.coming = None
            self.bench = Bench(fleet, control)
            self.shape = shape
            self.bench.warm()
        self.bench.control.set()
        return self.bench

    def start(self, shape: str) -> tuple[Fleet, Control]:
        """Start a deployment and wait for it."""
        control = Control(self.folder / f"{shape}.json")
        plan = plan_of(shape, self.folder / shape, control)
        return self.stack.enter_context(deployed(plan, progress=self.say)), control

    def begin(self, shape: str) -> None:
        """Stop what runs and start a deployment without waiting for it: `use` does."""
        self.stop()
        models.build(models.VISION)  # seeds are the process's: not while another model is made
        self.stack.enter_context(terminable())  # which only this thread can be
        pool = ThreadPoolExecutor(1)
        self.coming = shape, pool.submit(self.start, shape)
        pool.shutdown(wait=False)

    def say(self, name: str, seconds: float, line: str) -> None:
        """Long starts are announced where -s or a terminal shows them."""
        if int(seconds) % 20 == 0:
            sys.stderr.write(f"[live] {name}: {seconds:.0f} s\n")

    def stop(self) -> None:
        """Stop what runs, or what is about to."""
        if self.coming:
            wait([self.coming[1]])
            self.coming = None
        self.stack.close()
        self.bench = None
        self.shape = ""


def plan_of(shape: str, folder: Path, control: Control) -> Plan:
    """Servers of several roles with the V1 runner, or one as CUDA has it: V2, async scheduling."""
    model = models.build(models.VISION)
    # Servers inherit pytest's environment; ours must behave as it does without pytest.
    guard = {"TTFT_OTEL_GUARD": "keep"}
    if shape in ("epd", "pd", "epd3"):
        options = Options(model=model, control=control.path)
        return Plan(shape, options, waiting=shape == "epd", folder=folder, env=guard)
    runner = "v2" if "v2" in shape else "v1"
    ahead = shape.endswith("async")
    options = Options(model=model, control=control.path, runner=runner, async_scheduling=ahead)
    kind = "pd" if shape.startswith("pd") else "mono"
    return Plan(kind, options, folder=folder, env=guard)


@pytest.fixture(scope="session")
def deck(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deck]:
    """The one deck of this run."""
    found = Deck(Path(os.environ.get("TTFT_OTEL_LIVE") or tmp_path_factory.mktemp("live")))
    try:
        yield found
    finally:
        found.stop()


@pytest.fixture
def epd(deck: Deck) -> Bench:
    """E, PD, router, receiver; V1 runner."""
    return deck.use("epd")


@pytest.fixture
def pd(deck: Deck) -> Bench:
    """P, D (NIXL over host memory), router, receiver; V1 runner."""
    return deck.use("pd")


@pytest.fixture
def epd3(deck: Deck) -> Bench:
    """E, P, D, router, receiver; V1 runner."""
    return deck.use("epd3")


@pytest.fixture
def newer(deck: Deck) -> Bench:
    """One server, V2 runner, async scheduling: CUDA's defaults."""
    return deck.use(NEWER)


@pytest.fixture
def newer_pd(deck: Deck) -> Bench:
    """P and D with CUDA's defaults."""
    return deck.use("pd-v2-async")
