# SPDX-License-Identifier: Apache-2.0
"""The plugin that lets ECCPUConnector run without a GPU: its copy, its events, what it patches."""

from __future__ import annotations

import ctypes
import importlib
import queue
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lab.vllm_plugins import join_plugin_paths


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The plugin's module, imported from its folder as a server would."""
    monkeypatch.syspath_prepend(join_plugin_paths("ec_cpu"))
    yield importlib.import_module("ttft_ec_cpu")
    del sys.modules["ttft_ec_cpu"]


def test_a_batch_of_blocks_is_copied_to_where_it_belongs(plugin: Any) -> None:
    """Each size from its own address to its own address, and not a byte more."""
    source = ctypes.create_string_buffer(b"abcdefgh")
    target = ctypes.create_string_buffer(8)
    begin, end = ctypes.addressof(source), ctypes.addressof(target)

    plugin.copy_blocks(
        array("q", [begin, begin + 6]),
        array("q", [end + 4, end]),
        array("q", [3, 2]),
        is_src_access_order_any=True,
    )

    assert target.raw == b"gh\0\0abc\0"


def test_events_measure_host_time_and_return_to_the_pool(plugin: Any) -> None:
    """Later minus earlier in milliseconds; an idle event is used again before one is made."""
    worker = SimpleNamespace(_event_pool=[])
    start, end = plugin.acquire_event(worker), plugin.acquire_event(worker)
    start.recorded_ns, end.recorded_ns = 1_000_000, 3_500_000
    worker._event_pool.append(start)

    assert end.query() and start.elapsed_time(end) == 2.5
    assert plugin.acquire_event(worker) is start
    assert worker._event_pool == []


@pytest.mark.parametrize("producer", [False, True])
@pytest.mark.parametrize("what", ["nothing", "waits", "holds", "asked"])
def test_only_an_idle_engine_rests(
    plugin: Any, monkeypatch: pytest.MonkeyPatch, what: str, producer: bool
) -> None:
    """With work under way or a peer's question the next step runs at once, else after a pause."""
    now = [100.0]
    monkeypatch.setattr(plugin, "time", SimpleNamespace(monotonic=lambda: now[0]))
    module: Any = ModuleType("scheduler")
    module.ECCPUScheduler = type("", (), {"build_connector_meta": lambda self, output: output})
    plugin.patch_scheduler(module)
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
        now[0] += 2 * plugin.REST_S
        assert scheduler.has_pending_push_work()


def test_a_waiting_engine_looks_up_and_takes_a_request_at_once(plugin: Any) -> None:
    """An idle engine's get() raises Empty after a while instead of blocking; a request is taken at once."""

    core = SimpleNamespace(input_queue=queue.Queue())
    module: Any = ModuleType("core")
    module.EngineCoreProc = type("", (), {"_process_input_queue": lambda core: None})
    plugin.patch_engine(module)
    for _ in range(2):  # vLLM calls it again and again
        module.EngineCoreProc._process_input_queue(core)
    waiting: Any = core.input_queue

    with pytest.raises(queue.Empty):
        waiting.get(block=True)
    waiting.put("request")
    assert waiting.get(block=True) == "request"
    with pytest.raises(queue.Empty):
        waiting.get_nowait()


def test_the_region_leaves_no_file_behind(plugin: Any, tmp_path: Path) -> None:
    """Scheduler and worker share one memory region; its file is unlinked once both have it."""
    path = tmp_path / "region"

    def open_region(region: Any) -> None:
        region._mmap_path, region._is_creator = str(path), not path.exists()
        path.touch()

    module: Any = ModuleType("region")
    module.ECSharedRegion = type("", (), {"__init__": open_region})
    plugin.patch_region(module)

    module.ECSharedRegion()
    assert path.exists()
    module.ECSharedRegion()
    assert not path.exists()
