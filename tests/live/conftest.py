# SPDX-License-Identifier: Apache-2.0
"""Real vLLM servers for the live tests. One deployment runs at a time: two cores are too few for two.

Fixtures: `epd` (the encoder, prefill_decode, router, receiver; V1 runner, encodings through a folder), `pd`
(prefill and decode over NIXL, router), `epd3` (the encoder, prefill, decode, router). With CUDA's defaults,
V2 runner and async scheduling: `nixl` (the encoder, prefill_decode, router; encodings over NIXL), `newer`
(only its prefill_decode, which does everything when no encodings are announced to it), `newer_pd` (prefill
and decode), `nixl3` (the encoder, prefill, decode; all over NIXL). `small` is one text server with few
places, tokens, KV blocks and adapters (test_limits.py and others); `features` is the same one with
a single place (test_engine_features.py and others). Each deployment is started once; a test that needs
another one stops the one that runs. `epd` is started beside `small`, whose tests hold on a busy machine; the
next ones while nothing is measured because tests of units and of the stack still run: what waits takes no
CPU time.

scripts/test runs tests of units and of the stack beside these: tests marked `untimed` come first and
hold on a busy machine, the others wait until those have ended.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lab import tiny_models
from lab.injection import InjectionControl
from lab.local_deployment import LocalDeployment, start_deployment
from lab.local_servers import exit_on_sigterm
from tests.live.bench import LiveDeployment
from tests.live.echo_server import EchoServer
from tests.live.server_plans import NIXL_SHAPE, build_plan


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder as live, and skip them with the remedy where vLLM is missing.

    They run last, sorted by deployment, so that each deployment is started once; first what measures
    no times, which need not wait until it is alone on the machine.
    """
    missing = importlib.util.find_spec("vllm") is None
    for item in items:
        if "tests/live/" in str(item.path):
            item.add_marker(pytest.mark.live)
            if get_needed_deployment(item) == "small":
                item.add_marker(pytest.mark.untimed)
            if get_needed_deployment(item) in ONLY_FULL:
                item.add_marker(pytest.mark.full)
            if missing:
                item.add_marker(pytest.mark.skip(reason="no vLLM here; run scripts/install"))
    items.sort(key=rank_item)


def rank_item(item: pytest.Item) -> tuple[int, bool, int]:
    """The place of a test in the order of the run; the smaller, the earlier."""
    needed, is_untimed = get_needed_deployment(item), bool(item.get_closest_marker("untimed"))
    if needed == "other" and is_untimed:
        needed = ""
    # One counts what has happened to the server's cache, the other one ends the server.
    place = {"test_kv_events": -1, "test_killed": 1}.get(item.path.stem, 0)
    return DEPLOYMENT_ORDER.index(needed), not is_untimed, place


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Before the first test that measures times, wait until nothing else runs.

    Before the test, so that its time limit does not count the wait. Meanwhile the next deployments start.
    """
    if item.get_closest_marker("live") and not item.get_closest_marker("untimed"):
        deck = item.session.stash.get(DECK, None)
        if deck and list_running() and read_available_gb() > 1.5 * DEPLOYMENT_GB:
            for shape in list_next_shapes(item):
                deck.start_in_background(shape)
        wait_until_alone()
        if deck:
            wait([coming.result for coming in deck.coming.values()])
    return (yield)


def read_available_gb() -> float:
    """The memory that is left, as Linux estimates it."""
    lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
    return int(next(each for each in lines if each.startswith("MemAvailable:")).split()[1]) / 2**20


def list_next_shapes(item: pytest.Item) -> list[str]:
    """The deployments that the tests after `item` need next, at most MAX_AHEAD."""
    items = item.session.items
    needed = (get_needed_deployment(each) for each in items[items.index(item) :])
    shapes = dict.fromkeys(SHAPES[each] for each in needed if each in SHAPES)
    return list(shapes)[:MAX_AHEAD]


DEPLOYMENT_ORDER = (
    "",
    "small",
    "epd",
    "pd",
    "epd3",
    "nixl",
    "newer",
    "newer_pd",
    "nixl3",
    "other",
)
# What they show, `epd` and `pd` show on the V1 runner; a start takes a minute or two.
ONLY_FULL = ("epd3", "nixl", "newer", "newer_pd", "nixl3")
# Shapes of the deployments that tests measure times with, by fixture.
SHAPES = {"epd": "epd", "pd": "pd", "epd3": "epd3", "nixl": NIXL_SHAPE, "newer": NIXL_SHAPE}
MAX_AHEAD = 2  # deployments in memory at once
DEPLOYMENT_GB = 6  # of memory
MAX_WAIT_S = 1800.0  # for tests that run beside
DECK: pytest.StashKey[DeploymentDeck] = pytest.StashKey()


def get_needed_deployment(item: pytest.Item) -> str:
    """The deployment that a test needs; "other" when it starts its own, "" when it needs none."""
    if "tests/live/" not in str(item.path):
        return ""
    names = getattr(item, "fixturenames", ())
    return next((name for name in DEPLOYMENT_ORDER if name in names), "other")


@dataclass(frozen=True)
class ComingDeployment:
    """A deployment that is being started in the background; `stack` stops what has started of it."""

    stack: ExitStack
    result: Future[tuple[LocalDeployment, InjectionControl]]


class DeploymentDeck:
    """The deployment that runs now; starts another one when a test needs it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.stack = ExitStack()
        self.shape = ""
        self.bench: LiveDeployment | None = None
        self.coming: dict[str, ComingDeployment] = {}  # by shape
        self.broken: dict[str, BaseException] = {}  # a start takes minutes: never tried twice

    def use_deployment(self, shape: str, beside: str = "") -> LiveDeployment:
        """The deployment of `shape`, started unless it runs already; all injections are reset.

        beside: another one that is started meanwhile in the background; use_deployment waits for it
        once it is wanted itself.
        """
        if self.shape != shape or self.bench is None:
            if shape in self.broken:
                raise RuntimeError(f"{shape} did not start before") from self.broken[shape]
            try:
                coming = self.coming.pop(shape, None)
                self.stop_running()
                if coming:
                    self.stack = coming.stack
                    fleet, control = coming.result.result()
                else:
                    if beside:
                        self.start_in_background(beside)
                    fleet, control = self.start_and_wait(shape, self.stack)
            except BaseException as error:
                self.broken[shape] = error
                raise
            self.bench = LiveDeployment(fleet, control)
            self.shape = shape
            self.bench.warm_up()
        self.bench.control.max_active = 0
        self.bench.control.set_injections()
        return self.bench

    def start_and_wait(
        self, shape: str, stack: ExitStack
    ) -> tuple[LocalDeployment, InjectionControl]:
        """Start the deployment of `shape` and wait until its servers answer; `stack` stops them."""
        control = InjectionControl(self.folder / f"{shape}.json")
        plan = build_plan(shape, self.folder / shape, control)
        return stack.enter_context(start_deployment(plan, progress=self.report_start)), control

    def start_in_background(self, shape: str) -> None:
        """Begin to start `shape`, unless that has begun."""
        if shape == self.shape or shape in self.coming:
            return
        tiny_models.build_model(
            tiny_models.VISION_RECIPE
        )  # seeds are the process's: not while another model is made
        stack = ExitStack()
        pool = ThreadPoolExecutor(1)
        self.coming[shape] = ComingDeployment(stack, pool.submit(self.start_and_wait, shape, stack))
        pool.shutdown(wait=False)

    def report_start(self, name: str, seconds: float, line: str) -> None:
        """Print every 20 s which server is still starting; visible with -s."""
        if int(seconds) % 20 == 0:
            sys.stderr.write(f"[live] {name}: {seconds:.0f} s\n")

    def stop_running(self) -> None:
        """Stop the deployment that runs."""
        self.stack.close()
        self.bench = None
        self.shape = ""

    def stop_all(self) -> None:
        """Stop the deployment that runs, and those that are being started."""
        self.stop_running()
        wait([coming.result for coming in self.coming.values()])
        for coming in self.coming.values():
            coming.stack.close()
        self.coming.clear()


def wait_until_alone() -> None:
    """Wait until the processes in TTFT_OTEL_LIVE_AFTER have ended: scripts/test's tests beside these."""
    deadline = time.monotonic() + MAX_WAIT_S
    while running := list_running():
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {running} did not end within {MAX_WAIT_S:.0f} s")
        time.sleep(0.2)


def list_running() -> list[str]:
    """The processes in TTFT_OTEL_LIVE_AFTER that have not ended."""
    return [pid for pid in os.environ.get("TTFT_OTEL_LIVE_AFTER", "").split() if is_running(pid)]


def is_running(pid: str) -> bool:
    """Whether there is such a process, and it has not ended: one that nobody waited for is a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.fixture(scope="session")
def deck(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[DeploymentDeck]:
    """The deck that all tests of this run share."""
    found = DeploymentDeck(
        Path(os.environ.get("TTFT_OTEL_LIVE") or tmp_path_factory.mktemp("live"))
    )
    request.session.stash[DECK] = found
    with exit_on_sigterm():  # which deployments that start in the background cannot set
        try:
            yield found
        finally:
            found.stop_all()


@pytest.fixture(scope="session")
def echo() -> Iterator[EchoServer]:
    """A server that answers at once, to measure what an exchange takes on this machine."""
    with EchoServer() as server:
        yield server


def make_deployment_fixture(shape: str, about: str) -> Any:
    """A fixture that gives the deployment of `shape`, which runs from then on; `about` says what it is."""

    def use_shape(deck: DeploymentDeck) -> LiveDeployment:
        return deck.use_deployment(shape)

    use_shape.__doc__ = about
    return pytest.fixture(use_shape)


epd = make_deployment_fixture("epd", "E, PD, router, receiver; V1 runner.")
pd = make_deployment_fixture("pd", "P, D (NIXL over host memory), router, receiver; V1 runner.")
epd3 = make_deployment_fixture("epd3", "E, P, D, router, receiver; V1 runner.")
nixl = make_deployment_fixture(
    NIXL_SHAPE, "E and PD with CUDA's defaults, ECCPUConnector over NIXL; router, receiver."
)
newer_pd = make_deployment_fixture("pd-v2-async", "P and D with CUDA's defaults.")
nixl3 = make_deployment_fixture(
    "epd3-nixl-v2-async", "E, P and D with CUDA's defaults; encodings and KV blocks over NIXL."
)


@pytest.fixture
def newer(deck: DeploymentDeck) -> LiveDeployment:
    """The prefill_decode server of `nixl`, called directly: a single server with CUDA's defaults."""
    bench = deck.use_deployment(NIXL_SHAPE)
    return LiveDeployment(bench.fleet, bench.control, "prefill_decode")


@pytest.fixture
def small(deck: DeploymentDeck, request: pytest.FixtureRequest) -> LiveDeployment:
    """One text server with few places, tokens, KV blocks and adapters, on the second core.

    Its tests hold on a busy machine: what comes next is started beside it.
    """
    wanted = any(get_needed_deployment(item) == "epd" for item in request.session.items)
    return deck.use_deployment("text", beside="epd" if wanted else "")


@pytest.fixture
def features(small: LiveDeployment) -> LiveDeployment:
    """The server of `small` with one place, so that a second request waits."""
    small.control.max_active = 1
    small.control.set_injections()
    return small
