# SPDX-License-Identifier: Apache-2.0
"""One request's trip: sampled or not, bounded, counted, and always cut into parts that add up."""

from __future__ import annotations

import pytest

from ttft_otel import carrier, names, recorder, testing, timing
from ttft_otel.context import start
from ttft_otel.record import VERSION
from ttft_otel.settings import Settings
from ttft_otel.trip import Trip

ON = Settings(on=True)
UNSAMPLED = (b"traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00")

pytestmark = pytest.mark.usefixtures("unknown", "nothing_left")


def trip(asked: bool = False) -> Trip:
    """A sampled trip that arrived at 1000."""
    made = Trip(1000, start("", "", ON), asked)
    made.path, made.method = "/v1/completions", "POST"
    return made


def test_begin() -> None:
    """Only what we know is read from the headers, and it is bounded."""
    made = recorder.begin(
        [
            (b"x-ttft-timing", b"1"),
            (b"x-ttft-leg", b"encode"),
            (b"x-request-id", b"r" * 1000),
            (b"authorization", b"Bearer secret"),
        ],
        ON,
    )

    assert made is not None
    assert (made.asked, made.leg, made.request_id) == (True, "encode", "r" * 256)
    assert made.context.sampled


def test_nobody_asked() -> None:
    """Neither sampled nor asked for: there is no trip."""
    assert recorder.begin([UNSAMPLED], ON) is None
    assert recorder.begin([UNSAMPLED, (b"x-ttft-timing", b"0")], ON) is None


def test_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for a first token has a bound; the oldest goes, and ends unattributed."""
    monkeypatch.setattr(recorder, "AWAITING_LIMIT", 3)
    trips = [trip() for _ in range(5)]
    for number, made in enumerate(trips):
        recorder.register(made, f"e{number}")

    assert list(recorder.awaiting) == ["e2", "e3", "e4"]
    recorder.arrived("e0", "", 5, 6)
    assert trips[0].first is None
    for made in trips:
        recorder.forget(made)


def test_first_of_several() -> None:
    """The engine request whose output came first is the trip's."""
    made = trip()
    made.assigned = {"p": 1100}
    for number in range(3):
        recorder.register(made, f"{number}_p")
    for number in (1, 0, 2):
        recorder.arrived(f"{number}_p", "", 1500 + number, 1600 + number)

    assert made.first is made.engines["1_p"]
    assert made.first.assign == 1100


def test_unknown_output() -> None:
    """An output that nobody waits for is nobody's."""
    recorder.arrived("unknown", "", 1, 2)

    assert not recorder.awaiting


def test_no_marks() -> None:
    """A trip of which nothing is known but its ends is unattributed as a whole."""
    made = trip()
    recorder.register(made, "e")
    recorder.arrived("e", "", 1900, 2000)
    cut = recorder.close(made, 2100)

    assert (cut.stages, cut.unattributed) == ({"egress": 100}, 1000)


@pytest.mark.parametrize("end", [1000, 1001, 5000])
def test_failed(end: int) -> None:
    """One that failed before anything is known of it was in `receive`."""
    made = trip()
    cut = recorder.fail(made, end)

    assert made.died == "receive"
    assert sum(cut.stages.values()) + cut.unattributed == end - 1000


def test_handed_once(records: testing.Records) -> None:
    """The ttft half goes once, whoever hands it; the halves share their ids."""
    made = trip()
    recorder.register(made, "e")
    recorder.arrived("e", "", 1900, 2000)
    recorder.close(made, 2100)
    recorder.hand(made, records, server=False)
    recorder.hand(made, records, server=True)
    recorder.hand(made, records, server=True)

    assert [record.ttft is not None for record in records.kept] == [True, False, False]
    assert [record.server is not None for record in records.kept] == [False, True, True]
    assert {record.version for record in records.kept} == {VERSION}


def test_nothing_to_tell(records: testing.Records) -> None:
    """Before its first token a trip hands nothing over."""
    recorder.hand(trip(), records, server=False)

    assert not records.kept


def test_no_content(records: testing.Records) -> None:
    """No header, prompt or token goes into a record beyond the names we publish."""
    made = trip()
    recorder.fail(made, 2000)
    recorder.hand(made, records, server=True)
    (record,) = records.kept
    known = {value for key, value in vars(names).items() if key.isupper()}

    assert record.ttft is not None and record.server is not None
    for attributes in (record.attributes, record.ttft.attributes, record.server.attributes):
        assert set(attributes) <= known


@pytest.mark.parametrize(
    ("configured", "leg", "role"),
    [
        ("", "", "mono"),
        ("", "decode", "decode"),
        ("mono", "prefill", "prefill"),
        ("encode", "prefill", "encode"),
    ],
)
def test_role(configured: str, leg: str, role: str) -> None:
    """The configuration's role counts; a router's word where that cannot tell."""
    recorder.identity.role = configured
    made = trip()
    made.leg = leg

    assert recorder.role(made) == role


def test_unknown_leg() -> None:
    """A leg that is no role is not believed: its span stays outermost."""
    headers = [(b"x-ttft-leg", b"nonsense"), (b"x-ttft-timing", b"1")]
    made = recorder.begin(headers, Settings())

    assert made is not None
    assert made.leg == ""


def test_header_counts_tokens() -> None:
    """Server-Timing says how long the prompt was and how much of it was cached; without marks nothing."""
    made = trip(asked=True)
    recorder.register(made, "e")
    journey = carrier.Journey(prompt=4096, cached=512, own_tokens=3584, step_tokens=3600)
    recorder.arrived("e", carrier.fold(journey), 2000, 2100)
    recorder.close(made, 2200)
    told = timing.read(recorder.header(made, 2200))

    assert told is not None and told.tokens == timing.Tokens(4096, 512, 3584, 3600)
    blind = trip(asked=True)
    recorder.close(blind, 2200)
    told = timing.read(recorder.header(blind, 2200))
    assert told is not None and told.tokens is None
