# SPDX-License-Identifier: Apache-2.0
"""Steering delays: the control file, the guest that obeys it, and its hook into imports."""

from __future__ import annotations

import asyncio
import importlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ttft_otel.lab import injection
from ttft_otel.lab.guests import guests_path


class Guest:
    """The guest's modules, imported from its folder as a server would."""

    def __init__(self, control: injection.Control) -> None:
        """Import them anew, pointed at this control file."""
        self.control: Any = importlib.import_module("ttft_inject.control")
        self.control.PATH = str(control.path)
        self.places: Any = importlib.import_module("ttft_inject.places")
        self.importing: Any = importlib.import_module("ttft_inject.importing")


@pytest.fixture
def control(tmp_path: Path) -> injection.Control:
    """A control file of this test."""
    return injection.Control(tmp_path / "control.json")


@pytest.fixture
def guest(control: injection.Control, monkeypatch: pytest.MonkeyPatch) -> Iterator[Guest]:
    """The guest for the length of a test."""
    monkeypatch.syspath_prepend(guests_path("inject"))
    before = list(sys.meta_path)
    yield Guest(control)
    sys.meta_path[:] = before
    for name in [name for name in sys.modules if name.split(".")[0] in ("ttft_inject", "hosted")]:
        del sys.modules[name]


def test_places(guest: Guest) -> None:
    """Both sides of the control file know the same places."""
    assert injection.PLACES == guest.places.PLACES
    assert {spot.place for spot in guest.places.SPOTS} <= set(injection.PLACES)


def test_unknown(control: injection.Control) -> None:
    """A place that does not exist is refused instead of silently never waiting."""
    with pytest.raises(ValueError, match="no such place: nowhere"):
        control.set({"nowhere": 5})


@pytest.mark.parametrize("busy", [False, True])
def test_delay(control: injection.Control, guest: Guest, busy: bool) -> None:
    """A delay holds from the next call on, ends with its block, and is logged as it happened."""
    with control.delaying("forward", 30, busy=busy):
        guest.control.delay("forward")
        asyncio.run(guest.control.delay_async("forward"))
        guest.control.delay("sample")
    guest.control.delay("forward")
    delays = control.delays()

    assert ["forward", "forward"] == [delay.place for delay in delays]
    assert all(30 <= delay.ms < 60 for delay in delays)


def test_since(control: injection.Control, guest: Guest) -> None:
    """The log can be read from a moment on."""
    control.set({"sample": 1})
    guest.control.delay("sample")
    middle = time.monotonic_ns()
    guest.control.delay("sample")

    assert (2, 1) == (len(control.delays()), len(control.delays(middle)))


def test_broken(control: injection.Control, guest: Guest) -> None:
    """A file that cannot be read leaves things as they were."""
    control.set({"sample": 4})
    guest.control.read()
    control.path.write_text("{", encoding="utf-8")

    assert 0.004 == guest.control.seconds("sample")


def test_import(guest: Guest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module is patched once, after its own import and not before."""
    (tmp_path / "hosted.py").write_text("value = 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[int] = []

    def patch(module: ModuleType) -> None:
        seen.append(module.value)
        module.value = 2

    guest.importing.install({"hosted": patch})
    assert [] == seen
    hosted = importlib.import_module("hosted")

    assert ([1], 2) == (seen, hosted.value)


def test_spots(control: injection.Control, guest: Guest) -> None:
    """A delayed function still returns what it returned, plain or coroutine, before or after."""
    spot = guest.places.Spot
    control.set({"output": 10})

    async def late(value: int | None) -> int | None:
        return value

    plain = guest.places.delayed(spot("output", "", "", ""), lambda value: value)
    after = guest.places.delayed(spot("output", "", "", "", after=True), late)

    assert 1 == plain(1)
    assert (2, None) == (asyncio.run(after(2)), asyncio.run(after(None)))
    assert 2 == len(control.delays())


def test_arrivals(control: injection.Control, guest: Guest) -> None:
    """Finished transfers are told of late, each once; those that failed are told at once."""
    arrivals: Any = importlib.import_module("ttft_inject.arrivals")
    answers = [({"a"}, set()), (set(), {"b"}), (set(), set()), (set(), set())]
    pop = arrivals.late(lambda worker, transfers: answers.pop(0))
    control.set({"kv_wait": 20})

    assert (set(), set()) == pop(None, {})
    assert (set(), {"b"}) == pop(None, {})
    time.sleep(0.02)
    assert ({"a"}, set()) == pop(None, {})
    assert (set(), set()) == pop(None, {})
    assert ["kv_wait"] == [delay.place for delay in control.delays()]


def test_first_layer(guest: Guest) -> None:
    """Of the files of a request's layers the first one waits; other files all do."""
    first = guest.places.first_layer

    assert first("/s/ab/encoder.safetensors") and first("/s/model.layers.0.attn.safetensors")
    assert not first("/s/model.layers.10.attn.safetensors")
