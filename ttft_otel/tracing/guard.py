# SPDX-License-Identifier: Apache-2.0
"""Catch exceptions of our own code inside vLLM: count them, log the first one of each place.

With plugin.py the only place with a broad `except`. Only our own code runs inside it; what vLLM's
functions raise passes through. Under pytest exceptions are raised again, unless TTFT_OTEL_GUARD=keep
asks for the production behaviour. `place` names the hook or code block, for the counter and the log.
A Hook says what runs around one of vLLM's functions; hooks/wrap.py makes the wrapper from it.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

AnyCall: TypeAlias = Callable[..., Any]

STEP_MARK: Final = "_ttft_marked"  # the scheduler's, on steps with a traced request

log = logging.getLogger("ttft_otel")
error_counts: Counter[str] = Counter()


def _is_strict() -> bool:
    # Read at each error, not at import: pytest sets its variable per test.
    return "PYTEST_CURRENT_TEST" in os.environ and os.environ.get("TTFT_OTEL_GUARD") != "keep"


def record_error(place: str, error: BaseException) -> None:
    """Count `error` under `place`, and log the first one of each place. Under pytest: raise it."""
    if _is_strict():
        raise error
    error_counts[place] += 1
    # A hook that fails may fail at every token: one traceback must not become millions.
    if error_counts[place] == 1:
        log.warning(
            "ttft-otel: %s failed; its measurement is lost, the server is not affected",
            place,
            exc_info=error,
        )


class Guard:
    """`with Guard("place"):` catches and counts any Exception of the block; not BaseException.

    BaseException has to pass: asyncio.CancelledError and SystemExit are the server's.
    """

    __slots__ = ("place",)

    def __init__(self, place: str) -> None:
        self.place = place

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is None or not isinstance(error, Exception):
            return False
        record_error(self.place, error)
        return True


@dataclass(frozen=True, slots=True)
class Hook:
    """What runs around one vLLM function."""

    #: Called as `before(*args)`; what it returns is the token. None (also after an exception) skips `after`.
    before: AnyCall | None = None
    #: Called as `after(token, result, *args)`; with token None where there is no `before`.
    after: AnyCall | None = None
    #: While this container is empty only vLLM's function is called.
    ready: Collection[Any] = (1,)
    #: `after` also runs when vLLM's function raised (with result None): for hooks that would leave state
    #: behind otherwise.
    runs_after_error: bool = False
    #: Makes the wrapper of place, function and hook: wrap_call() or another one of this module.
    wrap: AnyCall = lambda place, host, hook: wrap_call(place, host, hook)
    #: Called once with the class whose method is patched, to which it adds methods of ours.
    extend: Callable[[type[Any]], None] | None = None


def wrap_call(place: str, host: AnyCall, hook: Hook) -> AnyCall:
    """Wrap the vLLM function `host` so that our functions run before and after it.

    Our exceptions are caught in line: a separate guarding wrapper would cost 0.2 us per call. `host` is
    called outside every `try` that catches. Handing on keywords that are not there costs a dictionary.
    """
    # Its call only creates the coroutine: `after` would run before vLLM's code had begun.
    if inspect.iscoroutinefunction(host):
        return _wrap_coroutine(place, host, hook)
    before, after, ready = hook.before, hook.after, hook.ready
    runs_after_error = hook.runs_after_error
    is_always = runs_after_error or before is None

    @functools.wraps(host)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not ready:
            return host(*args, **kwargs) if kwargs else host(*args)
        token = result = None
        if before is not None:
            try:
                token = before(*args, **kwargs) if kwargs else before(*args)
            except Exception as error:  # noqa: BLE001 - vLLM must not fail because of us
                record_error(place, error)
        is_wanted = runs_after_error
        try:
            result = host(*args, **kwargs) if kwargs else host(*args)
            is_wanted = is_always or token is not None
        finally:
            if is_wanted and after is not None:
                try:
                    if kwargs:
                        after(token, result, *args, **kwargs)
                    else:
                        after(token, result, *args)
                except Exception as error:  # noqa: BLE001 - vLLM must not fail because of us
                    record_error(place, error)
        return result

    return wrapper


def _wrap_coroutine(place: str, host: AnyCall, hook: Hook) -> AnyCall:
    run_before = silence_errors(place, hook.before or _do_nothing)
    run_after = silence_errors(place, hook.after or _do_nothing)

    @functools.wraps(host)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not hook.ready:
            return await host(*args, **kwargs)
        token = run_before(*args, **kwargs)
        result = await host(*args, **kwargs)
        if token is not None:
            run_after(token, result, *args, **kwargs)
        return result

    return wrapper


def wrap_new_requests(place: str, host: AnyCall, hook: Hook) -> AnyCall:
    """As wrap_call() with `after` alone, which also runs where the result has `scheduled_new_reqs`.

    For schedule(), which ends every step: looking that up here costs a tenth of calling `after` for it.
    `after` gets no keywords: a function that takes any makes a dictionary for each call.
    """
    ready, after = hook.ready, hook.after or _do_nothing

    @functools.wraps(host)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = host(*args, **kwargs) if kwargs else host(*args)
        try:
            if ready or result.scheduled_new_reqs:
                after(None, result, *args)
        except Exception as error:  # noqa: BLE001 - vLLM must not fail because of us
            record_error(place, error)
        return result

    return wrapper


def wrap_marked(place: str, host: AnyCall, hook: Hook) -> AnyCall:
    """As wrap_call(), but while `ready` is empty it only calls `host` for an argument without our mark.

    For execute_model(), which begins every step; its argument is the step, positional in all releases.
    """
    ready = hook.ready
    wrapped = wrap_call(place, host, Hook(hook.before, hook.after))

    @functools.wraps(host)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            is_marked = ready or kwargs or hasattr(args[1], STEP_MARK)
        except IndexError:  # a call that `host` will refuse
            is_marked = True
        return wrapped(*args, **kwargs) if is_marked else host(*args, **kwargs)

    return wrapper


def wrap_result(place: str, host: AnyCall, hook: Hook) -> AnyCall:
    """Wrap `host` so that it returns what `after` makes of its result; its own one where that fails."""
    # Once per server start, so that the guard's extra call does not matter.
    replace = silence_errors(place, hook.after or _do_nothing)

    @functools.wraps(host)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = host(*args, **kwargs)
        # Whatever happens, the middleware stack is returned: without it there is no app.
        return replace(None, result, *args) or result

    return wrapper


def silence_errors(place: str, call: AnyCall) -> AnyCall:
    """Wrap `call`, one of our functions, so that it returns None instead of raising."""

    @functools.wraps(call)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - vLLM must not fail because of us
            record_error(place, error)
            return None

    return guarded


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    return None
