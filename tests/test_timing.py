# SPDX-License-Identifier: Apache-2.0
"""Server-Timing text: what a server writes, its router reads back to the microsecond."""

from __future__ import annotations

import random

import pytest

from ttft_otel import stages, timing


def test_round_trip() -> None:
    """Any breakdown comes back exactly, with and without a rest."""
    chance = random.Random(3)
    for _ in range(300):
        parts = {name: chance.randrange(10**9) for name in stages.NAMES if chance.random() < 0.6}
        lost = chance.randrange(1000)
        total = sum(parts.values()) + lost
        rest = chance.choice([None, 0, chance.randrange(10**8)])
        told = timing.read(timing.write(parts, lost, total, rest))
        assert told == timing.Timing(parts, lost, total, rest)


def test_text() -> None:
    """Milliseconds with three decimals, in the order of the way."""
    text = timing.write({"receive": 1500, "encode.preprocess": 7}, 0, 1507, 20)

    assert text == (
        "receive;dur=1.500, encode.preprocess;dur=0.007, unattributed;dur=0.000, "
        "ttft;dur=1.507, rest;dur=0.020"
    )


def test_tokens() -> None:
    """The prompt's tokens come back; a reader that does not know the entry reads the rest as before."""
    told = timing.Tokens(4096, 512, 3584, 3600)
    text = timing.write({"receive": 1500}, 0, 1500, 20, told)

    assert text.endswith(', tokens;desc="prompt=4096 cached=512 own=3584 step=3600"')
    assert timing.read(text) == timing.Timing({"receive": 1500}, 0, 1500, 20, told)
    assert timing.read(text + ", cdn;dur=1") == timing.Timing({"receive": 1500}, 0, 1500, 20, told)
    found = dict(timing._ENTRY.findall(text))  # all that an older reader sees
    assert found == {"receive": "1.500", "unattributed": "0.000", "ttft": "1.500", "rest": "0.020"}


def test_tokens_that_cannot_be() -> None:
    """Of a server that has more cached than there is nothing is learnt; its stages stay."""
    text = timing.write({"receive": 1500}, 0, 1500, None, timing.Tokens(10, 20, 1, 1))
    told = timing.read(text)

    assert told is not None and told.tokens is None and told.stages == {"receive": 1500}


def test_others() -> None:
    """Other people's entries in the same header are skipped."""
    text = 'cache;desc="hit, or not", db;dur=53, receive;dur=1.000, ttft;dur=1.000, cpu;dur="2"'
    told = timing.read(text)

    assert told is not None and told.stages == {"receive": 1000}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        "receive;dur=1.000",
        "receive;dur=1.000, ttft;dur=2.000",
        "receive;dur=-1.000, ttft;dur=-1.000",
        "receive;dur=1e3, ttft;dur=1000",
        "receive;dur=nan, ttft;dur=nan",
        "receive;dur=1, ttft;dur=1" + " " * timing.LIMIT,
    ],
)
def test_refused(text: str) -> None:
    """What does not close is not believed."""
    assert timing.read(text) is None
