# SPDX-License-Identifier: Apache-2.0
"""Functions that are called when something happens, any number of them, each until it is removed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, ParamSpec

P = ParamSpec("P")


class Listeners(Generic[P]):
    """The listeners of one kind of event; all of it runs on the event loop."""

    def __init__(self) -> None:
        self._listeners: list[Callable[P, None]] = []

    def add(self, listener: Callable[P, None]) -> Callable[[], None]:
        """Call `listener` from now on; the function returned ends that, and may be called twice."""
        self._listeners.append(listener)

        def remove() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return remove

    def notify(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """It happened: call each of them, in the order in which they were added."""
        # A copy: a listener may remove itself, or add another one, while it is called.
        for listener in tuple(self._listeners):
            listener(*args, **kwargs)
