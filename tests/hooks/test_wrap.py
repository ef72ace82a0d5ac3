# SPDX-License-Identifier: Apache-2.0
"""The only patching code, on throwaway modules: what the host sees never changes."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ttft_otel import guard
from ttft_otel.hooks import wrap
from ttft_otel.hooks.targets import Place, Target

HOST = """
class Host:
    kind = "host"

    def plain(self, request, more=0):
        if request == "raise":
            raise KeyError("the host's own")
        return (self.kind, request, more)

    @staticmethod
    def fixed(request):
        return ("fixed", request)

    @classmethod
    def classy(cls, request):
        return (cls.kind, request)

    async def later(self, request):
        if request == "raise":
            raise KeyError("the host's own")
        return ("later", request)


class Child(Host):
    pass


def function(request):
    return ("function", request)
"""


class Seen:
    """A hook's two halves, remembering what they were given."""

    def __init__(self) -> None:
        self.before: list[tuple[Any, ...]] = []
        self.after: list[tuple[Any, ...]] = []

    def hook(self, **more: Any) -> wrap.Hook:
        """Both halves as a Hook."""

        def before(*args: Any, **kwargs: Any) -> str:
            self.before.append((*args, kwargs))
            return "token"

        def after(token: Any, result: Any, *args: Any, **kwargs: Any) -> None:
            self.after.append((token, result))

        return wrap.Hook(before, after, **more)


def row(*places: str, reads: tuple[str, ...] = ("request",)) -> Target:
    """A ledger row for names in the module `guesthost`."""
    found = tuple(Place("guesthost", name) for name in places)
    return Target("host.call", "api", found, "", (), "", "", reads)


@pytest.fixture
def install(
    fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[..., None]]:
    """Install one row around the throwaway module, which can be imported as `guesthost`."""
    (tmp_path / "guesthost.py").write_text(HOST)
    monkeypatch.syspath_prepend(tmp_path)

    def done(target: Target, hook: wrap.Hook) -> None:
        monkeypatch.setattr(wrap, "TARGETS", (target,))
        wrap.install({target.name: hook})

    yield done
    sys.modules.pop("guesthost", None)


def load() -> Any:
    """The throwaway module."""
    return importlib.import_module("guesthost")


def test_already_imported(install: Callable[..., None]) -> None:
    """A module that is loaded is patched at once; arguments and result pass unchanged."""
    host, seen = load(), Seen()
    install(row("Host.plain"), seen.hook())
    instance = host.Host()

    assert instance.plain("r", more=3) == ("host", "r", 3)

    assert seen.before == [(instance, "r", {"more": 3})]
    assert seen.after == [("token", ("host", "r", 3))]
    assert wrap.active("host.call")


def test_imported_later(install: Callable[..., None]) -> None:
    """A module that is not loaded is not imported by us, and patched when the host imports it."""
    seen = Seen()
    install(row("Host.plain"), seen.hook())

    assert "guesthost" not in sys.modules
    assert not wrap.active("host.call")
    assert load().Host().plain("r") == ("host", "r", 0)
    assert len(seen.after) == 1
    assert load().__spec__.loader is not None


def test_idempotent(install: Callable[..., None]) -> None:
    """A plugin that is called five times wraps once."""
    host, seen = load(), Seen()
    for _ in range(5):
        install(row("Host.plain"), seen.hook())

    host.Host().plain("r")

    assert len(seen.after) == 1
    assert len(wrap.installed["host.call"]) == 1


def test_idempotent_before_import(install: Callable[..., None]) -> None:
    """Repeated installs before the import leave one finder, and wrap once."""
    seen = Seen()
    for _ in range(3):
        install(row("Host.plain"), seen.hook())
    load().Host().plain("r")

    assert sum(isinstance(finder, wrap._Finder) for finder in sys.meta_path) == 1
    assert len(seen.after) == 1


@pytest.mark.parametrize("name", ["fixed", "classy"])
def test_kinds(install: Callable[..., None], name: str) -> None:
    """Static and class methods stay what they are, called on the class or on an instance."""
    host, seen = load(), Seen()
    was = type(inspect.getattr_static(host.Host, name))
    install(row(f"Host.{name}"), seen.hook())

    first, second = getattr(host.Host, name)("r"), getattr(host.Host(), name)("r")

    assert type(inspect.getattr_static(host.Host, name)) is was
    assert first == second and first[1] == "r"
    assert len(seen.after) == 2


def test_function(install: Callable[..., None]) -> None:
    """A module's function is patched too."""
    host, seen = load(), Seen()
    install(row("function"), seen.hook())

    assert host.function("r") == ("function", "r")
    assert seen.before == [("r", {})]


def test_coroutine(install: Callable[..., None]) -> None:
    """A coroutine function stays one; the second half runs when it is done."""
    host, seen = load(), Seen()
    install(row("Host.later"), seen.hook())

    assert inspect.iscoroutinefunction(host.Host.later)
    assert asyncio.run(host.Host().later("r")) == ("later", "r")
    assert seen.after == [("token", ("later", "r"))]


def test_signature(install: Callable[..., None]) -> None:
    """Whoever inspects the host's function sees the host's function."""
    host = load()
    was = inspect.signature(host.Host.plain)
    install(row("Host.plain"), Seen().hook())

    assert inspect.signature(host.Host.plain) == was
    assert host.Host.plain.__qualname__ == "Host.plain"


@pytest.mark.parametrize(
    ("place", "reads", "said"),
    [
        ("Host.gone", ("request",), "guesthost:Host.gone"),
        ("Gone.plain", ("request",), "guesthost:Gone.plain"),
        ("Child.plain", ("request",), "guesthost:Child.plain"),
        ("Host.plain", ("renamed",), "guesthost:Host.plain(renamed)"),
    ],
)
def test_missing(
    install: Callable[..., None], place: str, reads: tuple[str, ...], said: str
) -> None:
    """A target that is gone, inherited only, or lacks a parameter is recorded, nothing is patched."""
    host, seen = load(), Seen()
    install(row(place, reads=reads), seen.hook())

    assert host.Host().plain("r") == ("host", "r", 0)
    assert wrap.missing == {"host.call": said}
    assert not wrap.active("host.call")
    assert not seen.before


def test_second_place(install: Callable[..., None]) -> None:
    """One place of several is enough for a target not to be missing."""
    host, seen = load(), Seen()
    install(row("Host.gone", "Host.plain"), seen.hook())
    host.Host().plain("r")

    assert wrap.active("host.call")
    assert not wrap.missing


@pytest.mark.parametrize("arrives", [False, True])
def test_host_raises(install: Callable[..., None], arrives: bool) -> None:
    """The host's exception passes unchanged; the second half runs only where it asked for that."""
    host, seen = load(), Seen()
    install(row("Host.plain"), seen.hook(arrives=arrives))

    with pytest.raises(KeyError, match="the host's own") as caught:
        host.Host().plain("raise")

    assert caught.value.__context__ is None
    assert seen.after == ([("token", None)] if arrives else [])


def test_host_coroutine_raises(install: Callable[..., None]) -> None:
    """The same for a coroutine."""
    host, seen = load(), Seen()
    install(row("Host.later"), seen.hook())

    with pytest.raises(KeyError, match="the host's own"):
        asyncio.run(host.Host().later("raise"))
    assert not seen.after


@pytest.mark.parametrize("name", ["plain", "later"])
def test_hook_raises(
    install: Callable[..., None], keep: None, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Our exception never reaches the host; it is counted each time and logged once."""
    host = load()

    def broken(*args: Any, **kwargs: Any) -> None:
        raise ValueError("ours")

    install(row(f"Host.{name}"), wrap.Hook(broken, broken))
    for _ in range(3):
        result = getattr(host.Host(), name)("r")
        assert (asyncio.run(result) if name == "later" else result)[1] == "r"

    assert guard.errors["host.call"] == 3  # without its first half the second is left out
    assert caplog.text.count("host.call failed") <= 1


def test_ready(install: Callable[..., None]) -> None:
    """While the shared container is empty the host's call is all that happens."""
    host, seen = load(), Seen()
    ready: list[Any] = []
    install(row("Host.plain"), seen.hook(ready=ready))

    host.Host().plain("r")
    assert not seen.before
    ready.append(1)
    host.Host().plain("r")
    assert len(seen.before) == len(seen.after) == 1


def test_after_only(install: Callable[..., None]) -> None:
    """With a second half alone, readiness counts after the host's call."""
    host, seen = load(), Seen()
    install(row("Host.plain"), wrap.Hook(after=seen.hook().after))

    host.Host().plain("r")

    assert seen.after == [(None, ("host", "r", 0))]


def test_replace(install: Callable[..., None], keep: None) -> None:
    """A replacing hook gives the caller something else, or the host's result when it fails."""
    host = load()

    def replace(result: Any) -> Any:
        if result[1] == "bad":
            raise ValueError("ours")
        return ("wrapped", result)

    install(row("Host.plain"), wrap.Hook(replace=replace))

    assert host.Host().plain("r") == ("wrapped", ("host", "r", 0))
    assert host.Host().plain("bad") == ("host", "bad", 0)


@pytest.mark.parametrize("name", ["plain", "fixed", "classy"])
def test_switch(install: Callable[..., None], keep: None, name: str) -> None:
    """A target can be taken out, made to fail, and put back, whatever kind of method it is."""
    host, seen = load(), Seen()
    install(row(f"Host.{name}"), seen.hook())

    wrap.switch(off=["host.call"])
    assert getattr(host.Host(), name)("r")[1] == "r"
    assert not seen.before and not wrap.active("host.call")

    wrap.switch(fail=["host.call"])
    assert getattr(host.Host(), name)("r")[1] == "r"
    assert not seen.before and guard.errors["host.call"] == 1

    wrap.switch()
    assert getattr(host.Host(), name)("r")[1] == "r"
    assert len(seen.before) == 1 and wrap.active("host.call")


def test_import_error(install: Callable[..., None], tmp_path: Path) -> None:
    """A host module that fails to import fails as it would without us; a second try is patched."""
    (tmp_path / "guesthost.py").write_text("raise RuntimeError('host broke')")
    seen = Seen()
    install(row("Host.plain"), seen.hook())

    with pytest.raises(RuntimeError, match="host broke"):
        load()
    assert "guesthost" not in sys.modules
    (tmp_path / "guesthost.py").write_text(HOST + "# of another length\n")
    importlib.invalidate_caches()
    load().Host().plain("r")
    assert len(seen.after) == 1


def test_asking_is_not_importing(install: Callable[..., None]) -> None:
    """Someone who only asks whether the module exists does not use up its patch."""
    seen = Seen()
    install(row("Host.plain"), seen.hook())

    assert importlib.util.find_spec("guesthost") is not None
    load().Host().plain("r")

    assert len(seen.after) == 1


def test_absent_module(install: Callable[..., None]) -> None:
    """A module that does not exist is still absent."""
    target = Target("host.call", "api", (Place("guestabsent", "x"),), "", (), "", "")
    install(target, Seen().hook())

    assert importlib.util.find_spec("guestabsent") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("guestabsent")
