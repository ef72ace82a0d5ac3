# SPDX-License-Identifier: Apache-2.0
"""Listeners: each is called in order until it is removed, which may happen meanwhile."""

from __future__ import annotations

from ttft_otel.router.upstream.instance_pool import Listeners


def test_each_is_called_until_it_is_removed() -> None:
    """One that is gone hears nothing more; removing it again does nothing."""
    heard: list[tuple[str, int]] = []
    listeners: Listeners[[int]] = Listeners()
    remove_first = listeners.add(lambda number: heard.append(("first", number)))
    listeners.add(lambda number: heard.append(("second", number)))

    listeners.notify(1)
    remove_first()
    remove_first()
    listeners.notify(2)

    assert heard == [("first", 1), ("second", 1), ("second", 2)]


def test_one_may_remove_itself() -> None:
    """The others are called all the same."""
    heard: list[str] = []
    listeners: Listeners[[]] = Listeners()

    def listen_once() -> None:
        heard.append("once")
        remove()

    remove = listeners.add(listen_once)
    listeners.add(lambda: heard.append("always"))
    listeners.notify()
    listeners.notify()

    assert heard == ["once", "always", "always"]
