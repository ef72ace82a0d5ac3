# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode on two servers, KV blocks over NIXL: each closes, what D waits for is kv.transfer."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from tests.live.bench import Bench, again, breakdown
from tests.live.test_closing import parent, sums, trace_id
from tests.live.test_injected import check, compare
from ttft_otel import names, stages
from ttft_otel.lab import client

WAIT = "kv_wait"
NOISE = 0.5  # a transfer takes 2 to 6 ms here: as many polls as it takes
CROWDED = 1.0  # three servers on two cores
KINDS: dict[str, dict[str, Any]] = {
    "chat": {},
    "chat plain": {"stream": False},
    "completion": {"path": client.COMPLETIONS},
    "completion plain": {"path": client.COMPLETIONS, "stream": False},
}
LEGS = ("prefill", "decode")


def trunks(spans: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Role -> attributes of its `ttft` (or `encode`) span."""
    return {
        span["attributes"][names.ROLE]: span["attributes"]
        for span in spans
        if span["name"] in (names.TTFT, names.ENCODE)
    }


def whole(spans: list[dict[str, Any]], *roles: str) -> bool:
    """Whether each of these has told its TTFT and ended, and P's blocks have been fetched."""
    servers = {span["attributes"][names.ROLE] for span in spans if span["kind"] == "server"}
    fetched = any(span["name"] == names.KEPT for span in spans)
    return set(roles) <= set(trunks(spans)) and set(roles) <= servers and fetched


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_closes_on_prefill_and_decode(pd: Bench, kind: str) -> None:
    """Client, router, P and D: one trace, every parent in it, every sum exact."""
    trace = trace_id()

    answer = pd.ask(
        pd.front, prompt=str(pd.fresh()), words=300, headers=parent(trace), **KINDS[kind]
    )
    spans = pd.trace(trace, lambda found: whole(found, "router", *LEGS))

    assert answer.status == 200
    closed(spans)
    found = trunks(spans)
    assert found["prefill"][names.UNATTRIBUTED_US] == found["decode"][names.UNATTRIBUTED_US] == 0
    assert found["decode"][names.stage_us("kv.transfer")] > 0
    # A connector's call that has nothing to do, and whose process had to wait for its core.
    assert found["prefill"].get(names.stage_us("kv.transfer"), 0) < 5_000
    timing = breakdown(answer)
    assert sum(us for name, us in timing.items() if name != "ttft") == timing["ttft"]


def closed(spans: list[dict[str, Any]]) -> None:
    """Every parent is there, every sum is exact, nothing had to be cut."""
    ids = {span["span_id"] for span in spans} | {"c" * 16}
    assert [span for span in spans if span["parent_id"] not in ids] == []
    for span in spans:
        if span["name"] in (names.TTFT, names.ENCODE):
            total, length = sums(span)
            assert total == length
            if span["attributes"][names.ROLE] != "router":
                assert span["attributes"][names.CLAMPED_US] <= max(1, length // 1000), span


def test_what_moved_is_told(pd: Bench) -> None:
    """D says how much came and P how long it kept it, both in the caller's trace."""
    trace = trace_id()

    first, second = pd.handed(headers=parent(trace))
    spans = pd.trace(trace, lambda found: whole(found, *LEGS))

    params = first.json()["kv_transfer_params"]
    (blocks,) = params["remote_block_ids"]
    found = trunks(spans)["decode"]
    assert second.status == 200
    assert found[names.KV_CONNECTOR] == "NixlConnector"
    assert found[names.KV_TOKENS] == params["remote_num_tokens"]
    assert found[names.KV_BLOCKS] == len(blocks)
    assert found[names.KV_BYTES] > 0 and found[names.KV_BYTES] % len(blocks) == 0
    assert 0 < found[names.KV_MOVE] <= found[names.stage_us("kv.transfer")]
    (kept,) = [span for span in spans if span["name"] == names.KEPT]
    own = kept["attributes"]
    assert (own[names.KV_TOKENS], own[names.KV_BLOCKS]) == (found[names.KV_TOKENS], len(blocks))
    assert names.ERROR_TYPE not in own
    above = next(span for span in spans if span["span_id"] == kept["parent_id"])
    assert (above["kind"], above["attributes"][names.ROLE]) == ("server", "prefill")
    assert above["start_ns"] <= kept["start_ns"] <= kept["end_ns"]


@again
def test_a_late_transfer_shows_in_kv_transfer(pd: Bench) -> None:
    """80 ms until D hears of P's blocks: in its `kv.transfer`, nowhere else."""
    check(compare(pd, WAIT, lambda: breakdown(pd.handed()[1])), "kv.transfer", noise=NOISE)


@again
def test_a_late_transfer_shows_in_the_routers_sum(pd: Bench) -> None:
    """The same through the router: `decode.kv.transfer`."""

    def once() -> dict[str, int]:
        answer = pd.ask(pd.front, prompt=str(pd.fresh()), words=300, max_tokens=2, stream=False)
        return breakdown(answer)

    check(compare(pd, WAIT, once), "decode.kv.transfer", noise=NOISE)


@again
def test_what_no_server_accounts_for_is_little_with_two_legs(pd: Bench) -> None:
    """hop + unattributed of the router: <= 5 % at the median, on prompts of ten chunks.

    A hop costs 2 to 4 ms here, whatever the TTFT: the instance that waits polls, on the same core.
    """
    shares = []
    for _ in range(12):
        answer = pd.ask(pd.front, prompt=str(pd.fresh()), words=5000, max_tokens=2)
        found = breakdown(answer)
        own = found[stages.UNATTRIBUTED]
        own += sum(us for name, us in found.items() if name.startswith("router.hop."))
        shares.append(own / found["ttft"])

    assert statistics.median(shares) <= 0.05, shares


def test_one_that_hangs_up_while_blocks_move_died_there(pd: Bench) -> None:
    """The client goes while D waits for P's blocks: it died in kv.transfer, and nothing stays."""
    pd.control.set({WAIT: 1500})
    trace = trace_id()

    _, second = pd.handed(headers=parent(trace), abort_s=0.6)
    spans = pd.trace(trace, lambda found: "decode" in trunks(found))
    pd.control.set()

    assert second.aborted
    found = trunks(spans)["decode"]
    assert found[names.DIED_IN] == "kv.transfer", found
    assert found[names.stage_us("kv.transfer")] > 300_000
    assert breakdown(pd.handed()[1])[stages.UNATTRIBUTED] == 0


@pytest.mark.full
def test_closes_on_cudas_runner(newer_pd: Bench) -> None:
    """V2 runner and async scheduling on both: a connector works after the sampler there."""
    trace = trace_id()

    first, second = newer_pd.handed(headers=parent(trace))
    spans = newer_pd.trace(trace, lambda found: whole(found, *LEGS))

    assert breakdown(first)[stages.UNATTRIBUTED] == breakdown(second)[stages.UNATTRIBUTED] == 0
    assert breakdown(second)["kv.transfer"] > 0
    closed(spans)


@pytest.mark.full
@again
def test_a_late_transfer_shows_in_kv_transfer_on_cudas_runner(newer_pd: Bench) -> None:
    """80 ms until D hears of P's blocks."""
    found = compare(newer_pd, WAIT, lambda: breakdown(newer_pd.handed()[1]))

    check(found, "kv.transfer", noise=NOISE)


@pytest.mark.full
@pytest.mark.parametrize("kind", ("chat", "chat plain"))
def test_an_image_closes_through_all_three(epd3: Bench, kind: str) -> None:
    """Client, router, E, P and D: one trace, every sum exact."""
    trace = trace_id()
    roles = ("router", "encode", *LEGS)

    picture = (epd3.fresh(),)
    answer = epd3.ask(epd3.front, pictures=picture, words=300, headers=parent(trace), **KINDS[kind])
    spans = epd3.trace(trace, lambda found: whole(found, *roles))

    assert answer.status == 200
    closed(spans)
    found = trunks(spans)
    assert all(found[role][names.UNATTRIBUTED_US] == 0 for role in roles[1:])
    assert found["decode"][names.stage_us("kv.transfer")] > 0
    assert found["encode"][names.stage_us("encoder.compute")] > 0
    assert names.stage_us("encoder.compute") not in found["prefill"]


@pytest.mark.full
@again
def test_delays_show_in_their_stage_on_all_three(epd3: Bench) -> None:
    """E encodes slowly, or P's blocks come late: each in its own leg's stage."""

    def once() -> dict[str, int]:
        picture = (epd3.fresh(),)
        answer = epd3.ask(epd3.front, pictures=picture, words=200, max_tokens=2, stream=False)
        return breakdown(answer)

    check(compare(epd3, "encoder", once), "encode.encoder.compute", noise=CROWDED)
    check(compare(epd3, WAIT, once), "decode.kv.transfer", noise=CROWDED)
