# SPDX-License-Identifier: Apache-2.0
"""The plugin that lets ECCPUConnector run without a GPU: its copy, its events, what it patches."""

from __future__ import annotations

import importlib
import sys
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
