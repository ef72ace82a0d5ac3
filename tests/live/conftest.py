# SPDX-License-Identifier: Apache-2.0
"""Real vLLM servers for the live tests. One deployment runs at a time: two cores are too few for two.

Fixtures: `small` is one text server with few places, tokens, KV blocks and adapters; `features` is the same
one with a single place. `epd` (the encoder, prefill_decode; V1 runner, encodings through a folder), `pd`
(prefill and decode over NIXL), `epd3` (the encoder, prefill, decode). With CUDA's defaults, V2 runner and
async scheduling: `nixl` (the encoder, prefill_decode; encodings over NIXL), `newer` (only its prefill_decode,
which does everything when no encodings are announced to it), `nixl3` (the encoder, prefill, decode; all over
NIXL). With the text model: `files` (a server that keeps KV blocks in files), `tiers` (prefill and decode over
NIXL, each of which offloads blocks to memory, too), `ranks` (two ranks of a model with experts). Each has a
receiver, and a router if it is several servers.

Each deployment is started once; a test that needs another one stops the one that runs. `epd` is started
beside `small`, whose tests hold on a busy machine; the next ones while nothing is measured because tests of
units and of the stack still run: what waits takes no CPU time. scripts/test runs those beside these: tests
marked `untimed` come first and hold on a busy machine, the others wait until those have ended.
"""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lab import tiny_models
from lab.injection import InjectionControl
from lab.local_deployment import DeploymentPlan, start_deployment
from lab.local_servers import exit_on_sigterm
from lab.server_commands import EC_CPU_CONNECTOR, VllmOptions
from tests.live.bench import LiveDeployment

# In the order of the run: "" needs none, "other" starts its own.
DEPLOYMENT_ORDER = (
    *("", "small", "epd", "pd", "epd3", "nixl", "nixl3", "files", "tiers", "ranks", "other"),
)
# What they show, `epd` and `pd` show on the V1 runner; a start takes a minute or two.
ONLY_FULL = ("epd3", "nixl", "nixl3", "files", "tiers", "ranks")
STARTED_AHEAD = ("epd", "pd", "nixl")  # their tests measure times
MAX_AHEAD = 2  # deployments in memory at once
DEPLOYMENT_GB = 6  # of memory
MAX_WAIT_S = 1800.0  # for tests that run beside

# Of `small`: few of everything that requests can wait for, so that few of them suffice to use it up.
TEXT_PLACES = 4  # max_num_seqs; the control file can leave one of them
TEXT_CHUNK = 128  # max_num_batched_tokens
BLOCK_TOKENS = 128  # tokens of a KV block on CPU
CACHE_BLOCKS = 72  # of them is one for nothing; the longest prompt takes 64
ADAPTERS = ("first", "second")  # of which one at a time has a place
TEXT_ENV = {
    "VLLM_SERVER_DEV_MODE": "1",  # /pause, /resume, /sleep; the cache can be reset
    "VLLM_ENABLE_RESPONSES_API_STORE": "1",  # background responses
}
# Servers inherit pytest's environment; ours must behave as it does without pytest.
GUARD = {"TTFT_OTEL_GUARD": "keep"}
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
OFFLOAD = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "cpu_bytes_to_use": 2**27,
        "spec_name": "HostOffloadingSpec",
        "spec_module_path": "ttft_inject.host_offload",
    },
}
BOTH = {
    "kv_connector": "MultiConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"connectors": [NIXL, OFFLOAD]},
}


def build_plan(name: str, folder: Path, control: InjectionControl) -> DeploymentPlan:
    """The plan of the deployment `name`: V1 runner for all but those with NIXL in their name."""
    if name == "small":
        return build_small_plan(folder, control)
    if name in ("files", "tiers", "ranks"):
        return build_text_plan(name, folder, control)
    model = tiny_models.build_model(tiny_models.VISION_RECIPE)
    options = VllmOptions(model=model, control=control.path)
    if name.startswith("nixl"):
        options = replace(options, runner="v2", async_scheduling=True, connector=EC_CPU_CONNECTOR)
    shape = {"nixl": "epd", "nixl3": "epd3"}.get(name, name)
    return DeploymentPlan(
        shape, options, use_waiting_connector=name == "epd", folder=folder, env=GUARD
    )


def build_small_plan(folder: Path, control: InjectionControl) -> DeploymentPlan:
    """One text server with few places, tokens, KV blocks and adapters, and all features that go together."""
    adapter = tiny_models.write_adapter(folder / "adapter", tiny_models.TEXT_RECIPE)
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{folder}/events",
        "replay_endpoint": f"ipc://{folder}/replay",
        "topic": "kv",
    }
    extra = (
        "--kv-events-config", json.dumps(events), "--enable-prompt-tokens-details",
        "--num-gpu-blocks-override", str(CACHE_BLOCKS),
        "--enable-lora", "--max-loras", "1", "--max-lora-rank", "8",
        *("--lora-modules", *(f"{name}={adapter}" for name in ADAPTERS)),
        "--scheduling-policy", "priority", "--enable-scale-out",  # which has endpoints that render prompts
    )  # fmt: skip
    options = VllmOptions(
        model=tiny_models.build_model(tiny_models.TEXT_RECIPE),
        core=1,
        max_num_seqs=TEXT_PLACES,
        control=control.path,
        extra=extra,
        env=TEXT_ENV,
    )
    return DeploymentPlan("mono", options, folder=folder, env=GUARD, chunk_tokens=TEXT_CHUNK)


def build_text_plan(name: str, folder: Path, control: InjectionControl) -> DeploymentPlan:
    """A deployment of the text model whose flags are its own."""
    from_files = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "blocks")},
    }
    flags: dict[str, tuple[str, ...]] = {
        "files": ("--kv-transfer-config", json.dumps(from_files), "--no-enable-prefix-caching"),
        "tiers": ("--kv-transfer-config", json.dumps(BOTH)),
        # They ask after each step whether any of them has work left.
        "ranks": (
            *("--data-parallel-size", "2", "--dp-sync-interval", "1", "--api-server-count", "1"),
        ),
    }
    recipe = tiny_models.EXPERTS_RECIPE if name == "ranks" else tiny_models.TEXT_RECIPE
    model = tiny_models.build_model(recipe)
    options = VllmOptions(model=model, control=control.path, extra=flags[name], env=TEXT_ENV)
    env = GUARD
    if name == "ranks":
        options = replace(options, plugins=("cpu_experts",))
        env = {**GUARD, "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    shape = "pd" if name == "tiers" else "mono"
    return DeploymentPlan(shape, options, folder=folder, env=env)


def get_needed_deployment(item: pytest.Item) -> str:
    """The deployment that a test needs; "other" when it starts its own, "" when it needs none."""
    if "tests/live/" not in str(item.path):
        return ""
    names = {*getattr(item, "fixturenames", ())}
    if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
        named = item.callspec.params.get("deployment")
        names.add({"newer": "nixl"}.get(named, named))
    return next((name for name in DEPLOYMENT_ORDER if name in names), "other")


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
    # One counts what has happened to the server's cache, others end the deployment.
    place = 1 if "killed" in item.name else -("engines_cache" in item.name)
    return DEPLOYMENT_ORDER.index(needed), not is_untimed, place


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Before the first test that measures times, wait until nothing else runs.

    Before the test, so that its time limit does not count the wait. Meanwhile the next deployments start.
    """
    if item.get_closest_marker("live") and not item.get_closest_marker("untimed"):
        deck = item.session.stash.get(DECK, None)
        if deck and list_running():
            import psutil  # which vLLM needs

            if psutil.virtual_memory().available > 1.5 * DEPLOYMENT_GB * 2**30:
                items = item.session.items
                later = map(get_needed_deployment, items[items.index(item) :])
                needed = [name for name in dict.fromkeys(later) if name in STARTED_AHEAD]
                for name in needed[:MAX_AHEAD]:
                    deck.start_in_background(name)
        deadline = time.monotonic() + MAX_WAIT_S
        while running := list_running():
            if time.monotonic() > deadline:
                raise RuntimeError(f"processes {running} did not end within {MAX_WAIT_S:.0f} s")
            time.sleep(0.2)
        if deck:
            wait([coming.result for coming in deck.coming.values()])
    return (yield)


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


class ComingDeployment(NamedTuple):
    """A deployment that is being started in the background; `stack` stops what has started of it."""

    stack: ExitStack
    result: Future[LiveDeployment]


class DeploymentDeck:
    """The deployment that runs now; starts another one when a test needs it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.stack = ExitStack()
        self.name = ""
        self.bench: LiveDeployment | None = None
        # One that has failed stays: a start takes minutes, and is never tried twice.
        self.coming: dict[str, ComingDeployment] = {}

    def use_deployment(self, name: str, beside: str = "") -> LiveDeployment:
        """The deployment `name`, started unless it runs already; all injections are reset.

        beside: another one that is started meanwhile; use_deployment waits for it once it is wanted itself.
        """
        if self.name != name or self.bench is None:
            self.stop_running()
            for each in filter(None, (name, beside)):
                self.start_in_background(each)
            bench = self.coming[name].result.result()
            self.bench, self.stack, self.name = bench, self.coming.pop(name).stack, name
            bench.warm_up()
        self.bench.control.max_active = 0
        self.bench.control.set_injections()
        return self.bench

    def start_in_background(self, name: str) -> None:
        """Begin to start `name`, unless that has begun."""
        if name == self.name or name in self.coming:
            return
        control = InjectionControl(self.folder / f"{name}.json")
        # Not in the thread: seeds are the process's, and another model may be made meanwhile.
        plan = build_plan(name, self.folder / name, control)
        stack, pool = ExitStack(), ThreadPoolExecutor(1)

        def start() -> LiveDeployment:
            return LiveDeployment(stack.enter_context(start_deployment(plan)), control)

        self.coming[name] = ComingDeployment(stack, pool.submit(start))
        pool.shutdown(wait=False)

    def stop_running(self) -> None:
        """Stop the deployment that runs."""
        self.stack.close()
        self.bench = None
        self.name = ""

    def stop_all(self) -> None:
        """Stop the deployment that runs, and those that are being started."""
        self.stop_running()
        wait([coming.result for coming in self.coming.values()])
        for coming in self.coming.values():
            coming.stack.close()
        self.coming.clear()


DECK: pytest.StashKey[DeploymentDeck] = pytest.StashKey()


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


def make_deployment_fixture(name: str) -> Any:
    """A fixture that gives the deployment `name`, which runs from then on."""

    def use_deployment(deck: DeploymentDeck) -> LiveDeployment:
        return deck.use_deployment(name)

    return pytest.fixture(use_deployment)


epd, pd, epd3, nixl, nixl3, files, tiers, ranks = map(
    make_deployment_fixture, ("epd", "pd", "epd3", "nixl", "nixl3", "files", "tiers", "ranks")
)


@pytest.fixture
def newer(nixl: LiveDeployment) -> LiveDeployment:
    """The prefill_decode server of `nixl`, called directly: a single server with CUDA's defaults."""
    return LiveDeployment(nixl.fleet, nixl.control, "prefill_decode")


@pytest.fixture
def deployment(request: pytest.FixtureRequest) -> LiveDeployment:
    """The deployment that a test's parameter names."""
    found: LiveDeployment = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def small(deck: DeploymentDeck, request: pytest.FixtureRequest) -> LiveDeployment:
    """One text server; its tests hold on a busy machine: what comes next is started beside it."""
    wanted = any(get_needed_deployment(item) == "epd" for item in request.session.items)
    return deck.use_deployment("small", beside="epd" if wanted else "")


@pytest.fixture
def features(small: LiveDeployment) -> LiveDeployment:
    """The server of `small` with one place, so that a second request waits."""
    small.control.max_active = 1
    small.control.set_injections()
    return small
