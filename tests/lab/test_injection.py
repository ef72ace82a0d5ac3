# SPDX-License-Identifier: Apache-2.0
"""Injected delays: the control file, the module in the server that obeys it, and its import hook."""

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


class InjectPlugin:
    """The plugin's modules, imported from its folder as a server would."""

    def __init__(self, control: injection.InjectionControl) -> None:
        """Import them anew, pointed at this control file."""
        self.control: Any = importlib.import_module("lab.vllm_plugins.inject.ttft_inject.control")
        self.control.PATH = str(control.path)
        self.places: Any = importlib.import_module("lab.vllm_plugins.inject.ttft_inject.places")
        self.importing: Any = importlib.import_module(
            "lab.vllm_plugins.inject.ttft_inject.importing"
        )


@pytest.fixture
def control(tmp_path: Path) -> injection.InjectionControl:
    """A control file of this test."""
    return injection.InjectionControl(tmp_path / "control.json")


@pytest.fixture
def plugin(
    control: injection.InjectionControl, monkeypatch: pytest.MonkeyPatch
) -> Iterator[InjectPlugin]:
    """The plugin for the length of a test."""
    monkeypatch.syspath_prepend(join_plugin_paths("inject"))
    before = list(sys.meta_path)
    yield InjectPlugin(control)
    sys.meta_path[:] = before
    for name in [name for name in sys.modules if name.split(".")[0] in ("ttft_inject", "hosted")]:
        del sys.modules[name]


def test_places(plugin: InjectPlugin) -> None:
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
def test_delay(control: injection.InjectionControl, plugin: InjectPlugin, busy: bool) -> None:
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
    control: injection.InjectionControl, plugin: InjectPlugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change has been applied when every living process with hooks has noted its number."""
    switched: list[tuple[set[str], set[str]]] = []
    hooks = SimpleNamespace(switch=lambda off, fail: switched.append((off, fail)))
    module: Any = importlib.import_module("lab.vllm_plugins.inject.ttft_inject.switch")
    switch = module.HookSwitch()
    control.set_injections(off=["a"])

    monkeypatch.setitem(sys.modules, module.WRAP_MODULE, SimpleNamespace())
    switch.apply_changes()
    with pytest.raises(TimeoutError, match="not applied by any"):
        control.wait_applied(0)  # this process has no hooks, and there is no other one

    monkeypatch.setitem(sys.modules, module.WRAP_MODULE, hooks)
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


def test_since(control: injection.InjectionControl, plugin: InjectPlugin) -> None:
    """The log can be read from a moment on."""
    control.set_injections({"sample": 1})
    plugin.control.delay("sample")
    middle = time.monotonic_ns()
    plugin.control.delay("sample")

    assert (2, 1) == (len(control.read_delays()), len(control.read_delays(middle)))


def test_broken(control: injection.InjectionControl, plugin: InjectPlugin) -> None:
    """An unreadable control file leaves the delays as they were."""
    control.set_injections({"sample": 4})
    plugin.control.read()
    control.path.write_text("{", encoding="utf-8")

    assert 0.004 == plugin.control.read_delay_s("sample")


def test_import(plugin: InjectPlugin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module is patched once, after its own import and not before."""
    (tmp_path / "hosted.py").write_text("value = 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[int] = []

    def patch(module: ModuleType) -> None:
        seen.append(module.value)
        module.value = 2

    plugin.importing.install({"hosted": patch})
    assert [] == seen
    hosted = importlib.import_module("hosted")

    assert ([1], 2) == (seen, hosted.value)


def test_spots(control: injection.InjectionControl, plugin: InjectPlugin) -> None:
    """A delayed function still returns what it returned, plain or coroutine, before or after."""
    spot = plugin.places.InjectionPoint
    control.set_injections({"output": 10})

    async def late(value: int | None) -> int | None:
        return value

    plain = plugin.places.wrap_with_delay(spot("output", "", "", ""), lambda value: value)
    after = plugin.places.wrap_with_delay(spot("output", "", "", "", after=True), late)

    assert 1 == plain(1)
    assert (2, None) == (asyncio.run(after(2)), asyncio.run(after(None)))
    assert 2 == len(control.read_delays())


def test_arrivals(control: injection.InjectionControl, plugin: InjectPlugin) -> None:
    """Finished transfers are told of late, each once; those that failed are told at once."""
    arrivals: Any = importlib.import_module("lab.vllm_plugins.inject.ttft_inject.arrivals")
    answers = [({"a"}, set()), (set(), {"b"}), (set(), set()), (set(), set())]
    pop = arrivals.delay_finished_transfers(lambda worker, transfers: answers.pop(0))
    control.set_injections({"kv_wait": 20})

    assert (set(), set()) == pop(None, {})
    assert (set(), {"b"}) == pop(None, {})
    time.sleep(0.02)
    assert ({"a"}, set()) == pop(None, {})
    assert (set(), set()) == pop(None, {})
    assert ["kv_wait"] == [delay.place for delay in control.read_delays()]


def check_logged_delay(control: injection.InjectionControl, place: str, least_ms: float) -> None:
    """Check that the log has exactly one delay, of this place and at least this long."""
    (delay,) = control.read_delays()
    assert delay.place == place and delay.duration_ms >= least_ms


def test_a_late_copy_is_reported_late_and_once(
    control: injection.InjectionControl, plugin: InjectPlugin
) -> None:
    """Copies to host memory are held back, those to the device are not; the log has their length."""
    encodings: Any = importlib.import_module("lab.vllm_plugins.inject.ttft_inject.encodings")

    def finish_all(_worker: Any, inflight: list[Any], _direction: str) -> list[str]:
        return [inflight.pop(0).name for _ in list(inflight)]

    collect = encodings.delay_copies(finish_all)
    save, load = [SimpleNamespace(name="save")], [SimpleNamespace(name="load")]
    control.set_injections({"ec_copy": 20})

    assert collect(None, save, "save") == []
    assert collect(None, load, "load") == ["load"]
    time.sleep(0.02)
    assert collect(None, save, "save") == ["save"]
    assert collect(None, save, "save") == []
    check_logged_delay(control, "ec_copy", 20)


def test_a_read_is_refused_until_its_delay_is_over(
    control: injection.InjectionControl, plugin: InjectPlugin
) -> None:
    """Counted from its first refusal, each encoding for itself; the log has the length."""
    encodings: Any = importlib.import_module("lab.vllm_plugins.inject.ttft_inject.encodings")
    grant = encodings.delay_grants(lambda session, request: "granted", lambda request: "refused")
    one, other = SimpleNamespace(mm_hash="one"), SimpleNamespace(mm_hash="other")

    assert grant(None, one) == "granted"
    control.set_injections({"ec_asked": 20})
    assert grant(None, one) == "refused"
    time.sleep(0.02)
    assert (grant(None, other), grant(None, one)) == ("refused", "granted")
    check_logged_delay(control, "ec_asked", 20)


def test_patience_follows_the_control_file(
    control: injection.InjectionControl, plugin: InjectPlugin
) -> None:
    """A consumer's limit changes between two looks, and is vLLM's own again afterwards."""
    encodings: Any = importlib.import_module("lab.vllm_plugins.inject.ttft_inject.encodings")
    module: Any = ModuleType("scheduler")
    module.ECCPUScheduler = type("", (), {"ensure_cache_available": lambda self: True})
    encodings.patch_scheduler(module)
    scheduler, limits = module.ECCPUScheduler(), []

    for patience in (1.5, None):
        control.set_injections(ec_patience_s=patience)
        assert scheduler.ensure_cache_available()
        limits.append(module._ADMIT_DEFER_TIMEOUT_S)

    assert limits == [1.5, 60.0]


def test_first_layer(plugin: InjectPlugin) -> None:
    """Of the files of a request's layers the first one waits; other files all do."""
    first = plugin.places.is_first_layer

    assert first("/s/ab/encoder.safetensors") and first("/s/model.layers.0.attn.safetensors")
    assert not first("/s/model.layers.10.attn.safetensors")
