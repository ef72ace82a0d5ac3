# SPDX-License-Identifier: Apache-2.0
"""Wrappers of the two calls that every step makes: silent without traced requests, never in the way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ttft_otel.tracing import guard

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
    wrapper = guard.wrap_marked(
        "p",
        take,
        lambda *_, **__: calls.append("before") or 1,
        lambda *_: calls.append("after"),
        opened,
    )

    assert wrapper("self", PLAIN, 3) == ("self", PLAIN, 3) and calls == []
    assert wrapper("self", MARKED) == ("self", MARKED) and calls == ["before", "after"]
    opened.append(1)
    assert wrapper("self", PLAIN) == ("self", PLAIN) and calls == ["before", "after"] * 2


def test_marked_by_name() -> None:
    """A step that is passed by name is looked at by the hook itself."""
    seen: list[Any] = []
    wrapper = guard.wrap_marked("p", take, lambda *_, **kw: seen.append(kw["step"]), take, [])

    assert wrapper("self", step=PLAIN) == ("self", PLAIN) and seen == [PLAIN]


def test_host_refuses(guard_keeps: None) -> None:
    """A call without a step raises what the host raises."""
    wrapper = guard.wrap_marked("p", take, lambda *_: None, lambda *_: None, [])
    with pytest.raises(TypeError, match="the host's own"):
        wrapper("self")


def test_new_requests() -> None:
    """After a schedule() with new requests, or while any is unanswered; else not."""
    seen: list[Any] = []
    unanswered: dict[str, Any] = {}
    idle, admits = SimpleNamespace(scheduled_new_reqs=[]), SimpleNamespace(scheduled_new_reqs=[1])
    wrapper = guard.wrap_new_requests(
        "p", lambda output: output, lambda _, result, *args: seen.append(result), unanswered
    )

    assert wrapper(idle) is idle and seen == []
    assert wrapper(admits) is admits and seen == [admits]
    unanswered["r"] = None
    assert wrapper(idle) is idle and seen == [admits, idle]


def test_keywords() -> None:
    """A later release may pass keywords: its function gets them, ours runs without."""
    seen: list[Any] = []

    def note(_: Any, result: Any, *args: Any) -> None:
        seen.append((result, args))

    schedule = guard.wrap_new_requests("p", take, note, {"r": None})

    assert schedule("self", later=2) == ("self", 2)
    assert seen == [(("self", 2), ("self",))]


def test_without_the_field(guard_keeps: None) -> None:
    """A release whose result has no such field loses its marks, which is counted, and nothing else."""
    before = guard.error_counts["p"]
    wrapper = guard.wrap_new_requests("p", lambda output: output, lambda *_: None, {})

    assert wrapper(5) == 5
    assert guard.error_counts["p"] == before + 1
