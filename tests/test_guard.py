# SPDX-License-Identifier: Apache-2.0
"""The only broad except: ours is caught, counted, logged once; the host's never."""

from __future__ import annotations

import logging

import pytest

from ttft_otel import guard


def broken() -> None:
    """Some code of ours."""
    raise ValueError("ours")


def test_block(keep: None) -> None:
    """A block that fails is left, and the program goes on."""
    for _ in range(3):
        with guard.Guard("here"):
            broken()

    assert guard.errors["here"] == 3


def test_logged_once(keep: None, caplog: pytest.LogCaptureFixture) -> None:
    """Each place complains once, with its traceback, however often it fails."""
    logging.getLogger("ttft_otel").propagate = True
    for place in ("one", "two", "one", "one"):
        with guard.Guard(place):
            broken()

    assert [record.args for record in caplog.records] == [("one",), ("two",)]
    assert all(record.exc_info for record in caplog.records)


def test_call(keep: None) -> None:
    """A guarded call gives None when it failed, and otherwise what it gives."""
    assert guard.silent("there", broken)() is None
    assert guard.silent("there", lambda: 7)() == 7
    assert guard.errors["there"] == 1


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_not_ours(keep: None, kind: type[BaseException]) -> None:
    """What ends the program is never caught."""

    def ending() -> None:
        raise kind

    with pytest.raises(kind), guard.Guard("here"):
        ending()
    with pytest.raises(kind):
        guard.silent("here", ending)()


def test_strict() -> None:
    """Under pytest our errors fail the test, unless it wants production's way."""
    with pytest.raises(ValueError, match="ours"), guard.Guard("here"):
        broken()
    with pytest.raises(ValueError, match="ours"):
        guard.silent("here", broken)()
