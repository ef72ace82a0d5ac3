# SPDX-License-Identifier: Apache-2.0
"""The only broad except but plugin.py's: our code in a host is caught, counted, logged once a place.

Used around our own code only; the host's call is never inside. Under pytest it re-raises, unless
TTFT_OTEL_GUARD=keep says that the test wants the production behaviour.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeAlias

Call: TypeAlias = Callable[..., Any]

log = logging.getLogger("ttft_otel")
errors: Counter[str] = Counter()


def _strict() -> bool:
    return "PYTEST_CURRENT_TEST" in os.environ and os.environ.get("TTFT_OTEL_GUARD") != "keep"


def caught(place: str, error: BaseException) -> None:
    """Count an error of ours; log its first occurrence in each place. Under pytest: raise it."""
    if _strict():
        raise error
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
        if error is None or not isinstance(error, Exception):
            return False
        caught(self.place, error)
        return True


def around(place: str, host: Call, before: Call | None, after: Call | None, ready: object) -> Call:
    """The host's call with ours before and after it: `before(*args)`, `after(token, result, *args)`.

    Ours are caught here, in line (a guarding layer of its own would cost 0.2 us a call); the host's
    call stands outside, and what it raises passes by. While `ready` is empty the host's call is all
    there is. `after` is left out when `before` gave no token.
    """
    if inspect.iscoroutinefunction(host):
        return _awaited(place, host, before, after, ready)
    if before is None:
        return _ended(place, host, after or _nothing, ready)

    @functools.wraps(host)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not ready:
            return host(*args, **kwargs)
        token = None
        try:
            token = before(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the guest's promise, kept here alone
            caught(place, error)
        result = host(*args, **kwargs)
        if token is not None and after is not None:
            try:
                after(token, result, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - the guest's promise, kept here alone
                caught(place, error)
        return result

    return wrapper


def _ended(place: str, host: Call, after: Call, ready: object) -> Call:
    @functools.wraps(host)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = host(*args, **kwargs)
        if ready:
            try:
                after(None, result, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - the guest's promise, kept here alone
                caught(place, error)
        return result

    return wrapper


def _awaited(
    place: str, host: Call, before: Call | None, after: Call | None, ready: object
) -> Call:
    first, last = silent(place, before or _nothing), silent(place, after or _nothing)

    @functools.wraps(host)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not ready:
            return await host(*args, **kwargs)
        token = first(*args, **kwargs)
        result = await host(*args, **kwargs)
        if token is not None:
            last(token, result, *args, **kwargs)
        return result

    return wrapper


def arriving(place: str, host: Call, before: Call, after: Call, ready: object) -> Call:
    """As `around`, for a hook that must run to its end: also after a call that raised."""

    @functools.wraps(host)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not ready:
            return host(*args, **kwargs)
        token = result = None
        try:
            token = before(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the guest's promise, kept here alone
            caught(place, error)
        try:
            result = host(*args, **kwargs)
        finally:
            try:
                after(token, result, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - the guest's promise, kept here alone
                caught(place, error)
        return result

    return wrapper


def replaced(place: str, host: Call, replace: Call) -> Call:
    """The host's call with its result replaced; by itself where ours fails."""
    ours = silent(place, replace)

    @functools.wraps(host)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = host(*args, **kwargs)
        return ours(result) or result

    return wrapper


def silent(place: str, call: Call) -> Call:
    """The same call with its errors caught; None then."""

    @functools.wraps(call)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the guest's promise, kept here alone
            caught(place, error)
            return None

    return guarded


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None
