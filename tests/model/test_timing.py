# SPDX-License-Identifier: Apache-2.0
"""What the router answers to whoever asks: Server-Timing text, exact to the microsecond; the old report."""

from __future__ import annotations

import random
import time

import pytest

from ttft_otel.model import stages, timing
from ttft_otel.model.timing import build_ttft_report


def test_round_trip() -> None:
    """Any breakdown comes back exactly, with and without a rest."""
    chance = random.Random(3)
    for _ in range(300):
        parts = {
            name: chance.randrange(10**9) for name in stages.STAGE_NAMES if chance.random() < 0.6
        }
        lost = chance.randrange(1000)
        total = sum(parts.values()) + lost
        rest = chance.choice([None, 0, chance.randrange(10**8)])
        told = timing.parse_server_timing(timing.format_server_timing(parts, lost, total, rest))
        assert told == timing.ServerTiming(parts, lost, total, rest)


def test_text() -> None:
    """Milliseconds with three decimals, in the order of the way."""
    text = timing.format_server_timing({"receive": 1500, "encode.preprocess": 7}, 0, 1507, 20)

    assert text == (
        "receive;dur=1.500, encode.preprocess;dur=0.007, unattributed;dur=0.000, "
        "ttft;dur=1.507, rest;dur=0.020"
    )


def test_items_of_an_encoder_cache_consumer() -> None:
    """Where its encodings came from comes back, with and without tokens; older readers skip it."""
    items = timing.EncoderCacheCounts(items=4, remote=2, local=1, recomputed=1, bytes=10**12)
    tokens = timing.TokenCounts(4096, 512, 3584, 3600)
    both = timing.format_server_timing({"receive": 1500}, 0, 1500, 20, tokens, items)
    alone = timing.format_server_timing({"receive": 1500}, 0, 1500, ec=items)

    assert both.endswith(
        ', tokens;desc="prompt=4096 cached=512 own=3584 step=3600"'
        ', ec;desc="items=4 remote=2 local=1 recomputed=1 bytes=1000000000000"'
    )
    assert timing.parse_server_timing(both) == timing.ServerTiming(
        {"receive": 1500}, 0, 1500, 20, tokens, items
    )
    assert timing.parse_server_timing(f"{both}, cdn;dur=1") == timing.parse_server_timing(both)
    assert timing.parse_server_timing(alone) == timing.ServerTiming(
        {"receive": 1500}, 0, 1500, ec=items
    )
    found = dict(timing._ENTRY.findall(both))  # all that an older reader sees
    assert found == {"receive": "1.500", "unattributed": "0.000", "ttft": "1.500", "rest": "0.020"}


@pytest.mark.parametrize(
    "said",
    [
        "items=1 remote=2 local=0 recomputed=0 bytes=1",
        "items=1 remote=0 local=0 recomputed=2 bytes=1",
        "items=1 remote=0 local=0 recomputed=0",
        "items=1 remote=0 local=0 recomputed=0 bytes=" + "9" * 16,
    ],
)
def test_items_that_cannot_be(said: str) -> None:
    """Counts of more items than there are, or of another form, are not believed; the stages stay."""
    told = timing.parse_server_timing(f'receive;dur=1.500, ttft;dur=1.500, ec;desc="{said}"')

    assert told == timing.ServerTiming({"receive": 1500}, 0, 1500)


def test_others() -> None:
    """Other people's entries in the same header are skipped."""
    text = 'cache;desc="hit, or not", db;dur=53, receive;dur=1.000, ttft;dur=1.000, cpu;dur="2"'
    told = timing.parse_server_timing(text)

    assert told is not None and told.stages == {"receive": 1000}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        "receive;dur=1.000",
        "receive;dur=1.000, ttft;dur=2.000",
        "receive;dur=-1.000, ttft;dur=-1.000",
        "receive;dur=Infinity, ttft;dur=Infinity",
        'receive";dur=1.000, ttft;dur=1.000',
        "\udc80;dur=1.000, receive;dur=1.000, ttft;dur=2.000",
        "receive;dur=1, ttft;dur=1" + " " * timing.MAX_HEADER_CHARS,
    ],
)
def test_refused(text: str) -> None:
    """What does not close is not believed."""
    assert timing.parse_server_timing(text) is None


@pytest.mark.parametrize("unit", ["a", "a ", "a;dur=", "a;dur=1.1"])
def test_text_of_others_is_read_in_linear_time(unit: str) -> None:
    """Eight times as long a text that does not match takes about eight times as long, not 64 times."""

    def measure_s(length: int) -> float:
        text = (unit * length)[:length]
        times = []
        for _ in range(9):
            start_s = time.process_time()
            for _ in range(5):
                assert timing.parse_server_timing(text) is None
            times.append(time.process_time() - start_s)
        return min(times)

    assert measure_s(timing.MAX_HEADER_CHARS) < 32 * measure_s(timing.MAX_HEADER_CHARS // 8)


def test_clock_note() -> None:
    """The clock's entry comes back beside the stages; one of another form is ignored."""
    note = timing.ClockNote("device", 31)
    text = timing.format_server_timing({"receive": 5}, 0, 5, clock=note)
    parsed = timing.parse_server_timing(text)
    foreign = timing.parse_server_timing(text.replace("device", "sundial"))

    assert parsed is not None and parsed.clock == note
    assert foreign is not None and foreign.clock is None and foreign.stages == {"receive": 5}


ENCODE = timing.ServerTiming(
    {"encoder.queue": 1500, "encoder.compute": 7000, "ec.transfer": 400}, 100, 9000
)
DECODE = timing.ServerTiming(
    {"prefill.queue": 2000, "ec.transfer": 600, "prefill.compute": 30001}, 0, 32601
)
CLIENT_STAGES = {
    "router.receive": 50,
    "router.hop.encode": 300,
    **{f"encode.{name}": us for name, us in ENCODE.stages.items()},
    **{f"prefill_decode.{name}": us for name, us in DECODE.stages.items()},
}
CLIENT = timing.ServerTiming(CLIENT_STAGES, 120, 41971)


def test_combined() -> None:
    """The combined entry sums the legs' stages under the original names, transfers of both legs."""
    report = build_ttft_report("r1", {"encode": ENCODE, "prefill_decode": DECODE}, CLIENT)
    combined = report["combined"]
    assert {name: value for name, value in combined.items() if name != "stages"} == {
        "enc_queue_time_ms": 1.5,
        "enc_compute_time_ms": 7.0,
        "emb_cache_transfer_time_ms": 1.0,
        "prefill_queue_time_ms": 2.0,
        "prefill_compute_time_ms": 30.001,
        "ttft_ms": 41.971,
        "unattributed_ms": 0.12,
    }
    assert report["by_role"]["encode"]["emb_cache_transfer_time_ms"] == 0.4
    assert "prefill_queue_time_ms" not in report["by_role"]["encode"]
    assert combined["stages"]["prefill_decode.prefill.compute"] == 30.001


def test_router_share() -> None:
    """The router's entry is what no leg accounts for, and it closes like every other entry."""
    report = build_ttft_report("r1", {"encode": ENCODE, "prefill_decode": DECODE}, CLIENT)
    assert report["by_role"]["router"] == {
        "ttft_ms": 0.37,
        "unattributed_ms": 0.02,
        "stages": {"router.receive": 0.05, "router.hop.encode": 0.3},
    }


def test_without_router() -> None:
    """One server alone keeps its stages' own names; `combined` has zeros for what it has not."""
    alone = build_ttft_report("r2", {"mono": DECODE}, DECODE)
    assert [*alone["by_role"]] == ["mono"]
    assert alone["combined"]["stages"] == alone["by_role"]["mono"]["stages"]
    assert alone["combined"]["enc_queue_time_ms"] == 0.0
