# SPDX-License-Identifier: Apache-2.0
"""The only broad except: our code in someone's process is caught, counted and logged once per place.

Used around our own code only; the host's call is never inside. Under pytest it re-raises, unless
TTFT_OTEL_GUARD=keep says that the test wants the production behaviour.
"""

from __future__ import annotations

import functools
import logging
import os
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any

log = logging.getLogger("ttft_otel")
errors: Counter[str] = Counter()


def _strict() -> bool:
    return "PYTEST_CURRENT_TEST" in os.environ and os.environ.get("TTFT_OTEL_GUARD") != "keep"


def caught(place: str, error: BaseException) -> None:
    """Count an error of ours; log its first occurrence in each place."""
    errors[place] += 1
    if errors[place] == 1:
        log.warning(
            "ttft-otel: %s failed; tracing loses it, serving goes on", place, exc_info=error
        )


class Guard:
    """`with Guard("place"):` swallows what our block raises (Exception, not BaseException)."""

    __slots__ = ("place",)

    def __init__(self, place: str) -> None:
        self.place = place

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is None or not isinstance(error, Exception) or _strict():
            return False
        caught(self.place, error)
        return True


def silent(place: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The same call, its errors caught: for hooks that run per step, where `with` is too slow."""

    @functools.wraps(call)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except Exception as error:
            if _strict():
                raise
            caught(place, error)
            return None

    return guarded
