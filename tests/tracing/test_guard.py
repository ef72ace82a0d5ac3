# SPDX-License-Identifier: Apache-2.0
"""guard.py: errors of our code are caught, counted and logged once; those of vLLM's code pass."""

from __future__ import annotations

import logging

import pytest

from ttft_otel.tracing import guard


def raise_error() -> None:
    """Some code of ours."""
    raise ValueError("ours")


def test_block(guard_keeps: None) -> None:
    """A block that fails is left, and the program goes on."""
    for _ in range(3):
        with guard.Guard("here"):
            raise_error()

    assert guard.error_counts["here"] == 3


def test_logged_once(guard_keeps: None, caplog: pytest.LogCaptureFixture) -> None:
    """Each place complains once, with its traceback, however often it fails."""
    logging.getLogger("ttft_otel").propagate = True
    for place in ("one", "two", "one", "one"):
        with guard.Guard(place):
            raise_error()

    assert [record.args for record in caplog.records] == [("one",), ("two",)]
    assert all(record.exc_info for record in caplog.records)


def test_call(guard_keeps: None) -> None:
    """A guarded call gives None when it failed, and otherwise what it gives."""
    assert guard.silence_errors("there", raise_error)() is None
    assert guard.silence_errors("there", lambda: 7)() == 7
    assert guard.error_counts["there"] == 1


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_not_ours(guard_keeps: None, kind: type[BaseException]) -> None:
    """What ends the program is never caught."""

    def ending() -> None:
        raise kind

    with pytest.raises(kind), guard.Guard("here"):
        ending()
    with pytest.raises(kind):
        guard.silence_errors("here", ending)()


def test_strict() -> None:
    """Under pytest our errors fail the test, unless it wants production's way."""
    with pytest.raises(ValueError, match="ours"), guard.Guard("here"):
        raise_error()
    with pytest.raises(ValueError, match="ours"):
        guard.silence_errors("here", raise_error)()
