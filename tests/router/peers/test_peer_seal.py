# SPDX-License-Identifier: Apache-2.0
"""Datagrams of replicas: taken from who has the key, once, and not late."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ttft_otel.router.peers import peer_seal
from ttft_otel.router.peers.peer_seal import ReplayGuard, open_datagram, read_keys, seal_body

OLD, NEW = b"0123456789abcdef", b"fedcba9876543210"
SENDER = ("replica", "process")


def test_keys_can_be_changed_one_replica_after_the_other() -> None:
    """Who has both keys understands who has one of them, whichever is first."""
    for keys in ((OLD, NEW), (NEW, OLD)):
        for sealing in (OLD, NEW):
            assert open_datagram(seal_body(b"body", (sealing,)), keys) == b"body"
    assert open_datagram(seal_body(b"body", (NEW, OLD)), (OLD,)) is None


def test_any_changed_byte_is_noticed() -> None:
    """In the hash and in the body, and where something is missing or too much."""
    sealed = seal_body(b"body", (OLD,))
    for position in range(len(sealed)):
        changed = bytearray(sealed)
        changed[position] ^= 1
        assert open_datagram(bytes(changed), (OLD,)) is None
    for length in range(len(sealed)):
        assert open_datagram(sealed[:length], (OLD,)) is None
    assert open_datagram(sealed + b"x", (OLD,)) is None


@pytest.mark.parametrize(
    "text", ["", "\n\n", "short\n", "0123456789abcdef\nshort\n", "0123456789abcdef\n" * 5]
)
def test_a_file_without_keys(tmp_path: Path, text: str) -> None:
    """The message says what to write."""
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ValueError, match="openssl rand -hex 32"):
        read_keys(path)


def test_a_file_of_keys(tmp_path: Path) -> None:
    """One a line; ends of lines and blanks around are no part of a key."""
    path = tmp_path / "keys"
    path.write_bytes(OLD + b"\r\n\n  " + NEW + b" \n")
    assert read_keys(path) == (OLD, NEW)
    with pytest.raises(ValueError, match="cannot be read"):
        read_keys(tmp_path / "none")


@pytest.mark.parametrize("seed", range(10))
def test_each_number_is_taken_once(seed: int) -> None:
    """In any order within the window, however often each comes."""
    chance = random.Random(seed)
    numbers = list(range(5, 5 + peer_seal.WINDOW // 2)) * 3
    chance.shuffle(numbers)
    guard = ReplayGuard()
    # The first to come is the highest: all others are then within the window.
    assert guard.judge_frame(SENDER, max(numbers), 0, 0) == ""
    taken = [number for number in numbers if guard.judge_frame(SENDER, number, 0, 0) == ""]
    assert sorted(taken) == sorted(set(numbers) - {max(numbers)})


def test_what_is_too_far_behind_is_no_news() -> None:
    """Nobody remembers whether it came; and a jump ahead forgets nothing that matters."""
    guard = ReplayGuard()
    assert guard.judge_frame(SENDER, 1, 0, 0) == ""
    assert guard.judge_frame(SENDER, 2**53, 0, 0) == ""
    assert guard.judge_frame(SENDER, 1, 0, 0) == "replayed"
    assert guard.judge_frame(SENDER, 2**53, 0, 0) == "replayed"
    assert guard.judge_frame(SENDER, 2**53 - 1, 0, 0) == ""


def test_late_ones_are_dropped_and_first_ones_remembered_for_long_enough() -> None:
    """At no moment is something taken a second time, also if its sender's clock is ahead."""
    guard = ReplayGuard()
    sent_ms = peer_seal.MAX_SKEW_MS
    assert guard.judge_frame(SENDER, 1, sent_ms, 0) == ""
    for now_ms in range(0, 200_000, 500):
        # Others come and go, which is when silent senders are forgotten.
        guard.judge_frame(("other", str(now_ms)), 1, now_ms, now_ms)
        assert guard.judge_frame(SENDER, 1, sent_ms, now_ms) in ("replayed", "stale")
    assert guard.judge_frame(SENDER, 2, sent_ms, 200_000) == "stale"


def test_senders_are_bounded() -> None:
    """More than fit are refused until some are silent for long."""
    guard = ReplayGuard()
    for number in range(peer_seal.MAX_SENDERS):
        assert guard.judge_frame(("replica", str(number)), 1, 0, 0) == ""
    assert guard.judge_frame(SENDER, 1, 0, 0) == "full"
    assert guard.judge_frame(SENDER, 1, 70_000, 70_000) == ""
