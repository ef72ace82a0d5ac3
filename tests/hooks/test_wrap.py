# SPDX-License-Identifier: Apache-2.0
"""The only patching code, on throwaway modules: what the host sees never changes, in steps neither."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from hooks.process import PATCHER
from ttft_otel.hooks import wrap
from ttft_otel.hooks.targets import PatchTarget, TargetPlace
from ttft_otel.tracing import guard

HOST_CODE = """
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


class Guest:
    """Installs one target around the throwaway module, which can be imported as `guesthost`.

    before, after: the two halves of its hook, which remember their calls.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.before, self.after = mock.Mock(return_value="token"), mock.Mock()

    def install(
        self,
        *names: str,
        module: str = "guesthost",
        reads: tuple[str, ...] = ("request",),
        hook: guard.Hook | None = None,
        **more: Any,
    ) -> None:
        """Patch these places with `hook`, or with the one that remembers; more: of that one."""
        places = tuple(TargetPlace(module, name) for name in names)
        target = PatchTarget(
            name="host.call", places=places, reads=reads, marks="", why="", drop_when=""
        )
        self.monkeypatch.setattr(wrap, "TARGETS", (target,))
        PATCHER.install_hooks({target.name: hook or guard.Hook(self.before, self.after, **more)})

    def count_calls(self) -> tuple[int, int]:
        """How often each half was called."""
        return self.before.call_count, self.after.call_count

    @property
    def host(self) -> Any:
        """The throwaway module."""
        return importlib.import_module("guesthost")


@pytest.fixture
def guest(
    nothing_patched: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Guest]:
    """For one test."""
    (tmp_path / "guesthost.py").write_text(HOST_CODE)
    monkeypatch.syspath_prepend(tmp_path)
    yield Guest(monkeypatch)
    sys.modules.pop("guesthost", None)


@pytest.mark.parametrize("is_asked_for", [False, True])
def test_imported_later(guest: Guest, is_asked_for: bool) -> None:
    """A module that is not loaded is not imported by us, and patched when the host imports it.

    importlib.util.find_spec() of it does not use up its patch.
    """
    guest.install("Host.plain")
    assert not is_asked_for or importlib.util.find_spec("guesthost") is not None

    assert "guesthost" not in sys.modules
    assert not PATCHER.is_active("host.call")
    assert guest.host.Host().plain("r") == ("host", "r", 0)
    assert guest.count_calls() == (1, 1)
    assert guest.host.__spec__.loader is not None


@pytest.mark.parametrize("is_imported", [True, False])
def test_idempotent(guest: Guest, is_imported: bool) -> None:
    """A plugin that is called five times, before the import or after it, wraps once and leaves one finder."""
    assert not is_imported or guest.host
    for _ in range(5):
        guest.install("Host.plain")
    guest.host.Host().plain("r")

    assert sum(isinstance(finder, wrap.Patcher) for finder in sys.meta_path) == 1
    assert guest.after.call_count == len(PATCHER.installed["host.call"]) == 1


@pytest.mark.parametrize("name", ["plain", "fixed", "classy"])
def test_kinds(guest: Guest, guard_keeps: None, name: str) -> None:
    """Static and class methods stay what they are; all can be taken out, made to fail, and put back."""
    host = guest.host.Host
    was, signature = (
        type(inspect.getattr_static(host, name)),
        inspect.signature(getattr(host, name)),
    )
    guest.install(f"Host.{name}")
    assert type(inspect.getattr_static(host, name)) is was
    assert inspect.signature(getattr(host, name)) == signature
    assert getattr(host, name).__qualname__ == f"Host.{name}"
    if name != "plain":
        assert getattr(host, name)("r") == getattr(host(), name)("r")
        assert guest.after.call_count == 2
        guest.before.reset_mock()

    PATCHER.switch(off=["host.call"])
    assert getattr(host(), name)("r")[1] == "r"
    assert not guest.before.called and not PATCHER.is_active("host.call")

    PATCHER.switch(fail=["host.call"])
    assert getattr(host(), name)("r")[1] == "r"
    assert not guest.before.called and guard.error_counts["host.call"] == 1

    PATCHER.switch()
    assert getattr(host(), name)("r")[1] == "r"
    assert guest.before.call_count == 1 and PATCHER.is_active("host.call")


def test_coroutine(guest: Guest) -> None:
    """A coroutine function stays one; the second half runs when it is done."""
    guest.install("Host.later")

    assert inspect.iscoroutinefunction(guest.host.Host.later)
    assert asyncio.run(guest.host.Host().later("r")) == ("later", "r")
    assert guest.after.call_args.args[:2] == ("token", ("later", "r"))


@pytest.mark.parametrize(
    ("place", "reads"),
    [
        ("Host.gone", "request"),
        ("Gone.plain", "request"),
        ("Child.plain", "request"),
        ("Host.plain", "renamed"),
    ],
)
def test_missing(guest: Guest, place: str, reads: str) -> None:
    """A target that is gone, inherited only, or lacks a parameter is not active, and nothing is patched."""
    guest.install(place, reads=(reads,))

    assert guest.host.Host().plain("r") == ("host", "r", 0)
    assert guest.host.Child().plain("r") == ("host", "r", 0)
    assert not PATCHER.is_active("host.call")
    assert not guest.before.called


def test_second_place(guest: Guest) -> None:
    """One place of several is enough for a target not to be missing."""
    guest.install("Host.gone", "Host.plain")
    guest.host.Host().plain("r")

    assert PATCHER.is_active("host.call")


@pytest.mark.parametrize(("name", "arrives"), [("plain", False), ("plain", True), ("later", False)])
def test_host_raises(guest: Guest, name: str, arrives: bool) -> None:
    """The host's exception passes unchanged; the second half runs only where it asked for that."""
    guest.install(f"Host.{name}", runs_after_error=arrives)

    with pytest.raises(KeyError, match="the host's own") as caught:
        asyncio.run(getattr(guest.host.Host(), name)("raise"))

    assert caught.value.__context__ is None
    told = [call.args[:2] for call in guest.after.call_args_list]
    assert told == ([("token", None)] if arrives else [])


@pytest.mark.parametrize("name", ["plain", "later"])
def test_hook_raises(
    guest: Guest, guard_keeps: None, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Our exception never reaches the host; it is counted each time and logged once."""
    broken = mock.Mock(side_effect=ValueError("ours"))
    guest.install(f"Host.{name}", hook=guard.Hook(broken, broken))
    for _ in range(3):
        result = getattr(guest.host.Host(), name)("r")
        assert (asyncio.run(result) if name == "later" else result)[1] == "r"

    assert guard.error_counts["host.call"] == 3  # without its first half the second is left out
    assert caplog.text.count("host.call failed") <= 1


def test_ready(guest: Guest) -> None:
    """While the shared container is empty the host's call is all that happens."""
    ready: list[Any] = []
    guest.install("Host.plain", ready=ready)

    guest.host.Host().plain("r")
    assert guest.count_calls() == (0, 0)
    ready.append(1)
    guest.host.Host().plain("r")
    assert guest.count_calls() == (1, 1)


def test_replace(guest: Guest, guard_keeps: None) -> None:
    """A replacing hook gives the caller something else, or the host's result when it fails."""

    def replace(_: None, result: Any, owner: Any, name: str) -> Any:
        assert isinstance(owner, guest.host.Host) and result[1] == name
        if name == "bad":
            raise ValueError("ours")
        return ("wrapped", result)

    guest.install("Host.plain", hook=guard.Hook(after=replace, wrap=guard.wrap_result))

    assert guest.host.Host().plain("r") == ("wrapped", ("host", "r", 0))
    assert guest.host.Host().plain("bad") == ("host", "bad", 0)


def test_import_error(guest: Guest, tmp_path: Path) -> None:
    """A host module that fails to import fails as it would without us; a second try is patched."""
    (tmp_path / "guesthost.py").write_text("raise RuntimeError('host broke')")
    guest.install("Host.plain")

    with pytest.raises(RuntimeError, match="host broke"):
        _ = guest.host
    assert "guesthost" not in sys.modules
    (tmp_path / "guesthost.py").write_text(HOST_CODE + "# of another length\n")
    importlib.invalidate_caches()
    guest.host.Host().plain("r")
    assert guest.count_calls() == (1, 1)


def test_absent_module(guest: Guest) -> None:
    """A module that does not exist is still absent."""
    guest.install("x", module="guestabsent")

    assert importlib.util.find_spec("guestabsent") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("guestabsent")


MARKED, PLAIN = SimpleNamespace(**{guard.STEP_MARK: True}), SimpleNamespace()


def take(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """A host function that returns what it was given, and needs a step."""
    if len(args) + len(kwargs) < 2:
        raise TypeError("the host's own")
    return (*args, *kwargs.values())


def test_marked() -> None:
    """Our functions run for a marked step, or while one is open; the host's result is always its own."""
    calls: list[str] = []
    opened: list[int] = []
    hook = guard.Hook(
        lambda *_, **__: calls.append("before") or 1, lambda *_: calls.append("after"), opened
    )
    wrapper = guard.wrap_marked("p", take, hook)

    assert wrapper("self", PLAIN, 3) == ("self", PLAIN, 3) and calls == []
    assert wrapper("self", MARKED) == ("self", MARKED) and calls == ["before", "after"]
    opened.append(1)
    assert wrapper("self", PLAIN) == ("self", PLAIN) and calls == ["before", "after"] * 2


def test_host_refuses(guard_keeps: None) -> None:
    """A call without a step raises what the host raises."""
    wrapper = guard.wrap_marked("p", take, guard.Hook(lambda *_: None, lambda *_: None, []))
    with pytest.raises(TypeError, match="the host's own"):
        wrapper("self")


def test_new_requests() -> None:
    """After a schedule() with new requests, or while any is unanswered; else not.

    A later release may pass keywords: its function gets them, ours runs without.
    """
    after, unanswered = mock.Mock(), dict[str, Any]()
    idle, admits = SimpleNamespace(scheduled_new_reqs=[]), SimpleNamespace(scheduled_new_reqs=[1])
    schedule = mock.Mock(side_effect=lambda output, later=0: output)
    wrapper = guard.wrap_new_requests("p", schedule, guard.Hook(after=after, ready=unanswered))

    assert wrapper(idle) is idle and not after.called
    assert wrapper(admits, later=2) is admits and schedule.call_args == mock.call(admits, later=2)
    after.assert_called_once_with(None, admits, admits)
    unanswered["r"] = None
    assert wrapper(idle) is idle and after.call_args == mock.call(None, idle, idle)


def test_without_the_field(guard_keeps: None) -> None:
    """A release whose result has no such field loses its marks, which is counted, and nothing else."""
    before = guard.error_counts["p"]
    wrapper = guard.wrap_new_requests(
        "p", lambda output: output, guard.Hook(after=lambda *_: None, ready={})
    )

    assert wrapper(5) == 5
    assert guard.error_counts["p"] == before + 1
