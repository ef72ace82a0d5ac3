# SPDX-License-Identifier: Apache-2.0
"""Plugins that are loaded into vLLM's processes: injected delays with their control file, and ECCPUConnector
without a GPU: its copy, its events, what it patches.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lab import injection
from lab.vllm_plugins import join_plugin_paths


@pytest.fixture
def control(tmp_path: Path) -> injection.InjectionControl:
    """A control file of this test."""
    return injection.InjectionControl(tmp_path / "control.json")


@pytest.fixture
def plugin(control: injection.InjectionControl, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The plugin's modules, imported from its folder as a server would, with this control file."""
    monkeypatch.syspath_prepend(join_plugin_paths("inject"))
    before = list(sys.meta_path)
    modules = ("control", "places", "switch")
    package = "lab.vllm_plugins.inject.ttft_inject"
    found = {each: importlib.import_module(f"{package}.{each}") for each in modules}
    vars(found["control"])["PATH"] = str(control.path)
    yield SimpleNamespace(**found)
    sys.meta_path[:] = before
    for name in [name for name in sys.modules if name.split(".")[0] in ("ttft_inject", "hosted")]:
        del sys.modules[name]


def test_places(plugin: Any) -> None:
    """Both sides of the control file know the same places."""
    assert set(injection.INJECTION_PLACES) == set(plugin.places.PLACES)
    assert {spot.place for spot in plugin.places.INJECTION_POINTS} <= set(
        injection.INJECTION_PLACES
    )


def test_unknown(control: injection.InjectionControl) -> None:
    """A place that does not exist is refused instead of silently never waiting."""
    with pytest.raises(ValueError, match="no such place: nowhere"):
        control.set_injections({"nowhere": 5})


@pytest.mark.parametrize("busy", [False, True])
def test_delay(control: injection.InjectionControl, plugin: Any, busy: bool) -> None:
    """A delay holds from the next call on, ends with its block, and is logged as it happened."""
    before_ns = time.monotonic_ns()
    with control.inject_delay("forward", 30, busy=busy):
        plugin.control.delay("forward")
        asyncio.run(plugin.control.delay_async("forward"))
        plugin.control.delay("sample")
    after_ns = time.monotonic_ns()
    plugin.control.delay("forward")
    delays = control.read_delays()

    assert ["forward", "forward"] == [delay.place for delay in delays]
    assert all(delay.duration_ms >= 30 for delay in delays)
    times = [
        before_ns,
        *(ns for delay in delays for ns in (delay.start_ns, delay.end_ns)),
        after_ns,
    ]
    assert times == sorted(times)  # each within the call, one after the other


def test_applied(
    control: injection.InjectionControl, plugin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change has been applied when every living process with hooks has noted its number."""
    switched: list[tuple[set[str], set[str]]] = []
    patcher = SimpleNamespace(switch=lambda off, fail: switched.append((off, fail)))
    hooks = SimpleNamespace(find_patcher=lambda: patcher)
    switch, wrap_module = plugin.switch.HookSwitch(), plugin.switch.WRAP_MODULE
    control.set_injections(off=["a"])

    monkeypatch.setitem(sys.modules, wrap_module, SimpleNamespace())
    switch.apply_changes()
    with pytest.raises(TimeoutError, match="not applied by any"):
        control.wait_applied(0)  # this process has no hooks, and there is no other one

    monkeypatch.setitem(sys.modules, wrap_module, hooks)
    switch.apply_changes()
    switch.apply_changes()
    control.wait_applied(0)
    assert switched == [({"a"}, set())]

    control.set_injections(fail=["b"])
    with pytest.raises(TimeoutError, match=rf"not applied by \[{os.getpid()}\]"):
        control.wait_applied(0)
    switch.apply_changes()
    (control.applied / "999999999").write_text("1")  # a process that is gone holds nobody up
    control.wait_applied(0)
    assert switched[1:] == [(set(), {"b"})]


def test_broken(control: injection.InjectionControl, plugin: Any) -> None:
    """An unreadable control file leaves the delays as they were."""
    control.set_injections({"sample": 4})
    plugin.control.read()
    control.path.write_text("{", encoding="utf-8")

    assert 0.004 == plugin.control.read_delay_s("sample")


@pytest.fixture
def ec_plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of ec_cpu, imported from its folder as a server would."""
    monkeypatch.syspath_prepend(join_plugin_paths("ec_cpu"))
    yield importlib.import_module("ttft_ec_cpu")
    del sys.modules["ttft_ec_cpu"]


@pytest.mark.parametrize("producer", [False, True])
@pytest.mark.parametrize("what", ["nothing", "waits", "holds", "asked"])
def test_only_an_idle_engine_rests(
    ec_plugin: Any, monkeypatch: pytest.MonkeyPatch, what: str, producer: bool
) -> None:
    """With work under way or a peer's question the next step runs at once, else after a pause."""
    now = [100.0]
    monkeypatch.setattr(ec_plugin, "time", SimpleNamespace(monotonic=lambda: now[0]))
    module: Any = ModuleType("scheduler")
    module.ECCPUScheduler = type("", (), {"build_connector_meta": lambda self, output: output})
    ec_plugin.patch_scheduler(module)
    scheduler = module.ECCPUScheduler()
    poller = SimpleNamespace(poll=lambda _: ["a request"] if what == "asked" else [])
    session = SimpleNamespace(_transport=SimpleNamespace(_poller=poller))
    scheduler._producer_session = session if producer else None
    scheduler._deferred_since = {("request", "hash"): 1.0} if what == "waits" else {}
    scheduler._cache = SimpleNamespace(has_held_entries=lambda: what == "holds")
    busy = what in ("waits", "holds") or (what == "asked" and producer)

    for _ in range(2):
        assert scheduler.build_connector_meta("output") == "output"
        now[0] += 1  # however long the step takes
        assert scheduler.has_pending_push_work() == busy
        now[0] += 2 * ec_plugin.REST_S
        assert scheduler.has_pending_push_work()


def test_the_region_leaves_no_file_behind(ec_plugin: Any, tmp_path: Path) -> None:
    """Scheduler and worker share one memory region; its file is unlinked once both have it."""
    path = tmp_path / "region"

    def open_region(region: Any) -> None:
        region._mmap_path, region._is_creator = str(path), not path.exists()
        path.touch()

    module: Any = ModuleType("region")
    module.ECSharedRegion = type("", (), {"__init__": open_region})
    ec_plugin.patch_region(module)

    module.ECSharedRegion()
    assert path.exists()
    module.ECSharedRegion()
    assert not path.exists()
