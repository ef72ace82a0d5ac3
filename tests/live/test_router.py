# SPDX-License-Identifier: Apache-2.0
"""The router's TTFT equals the client's by the client's clock, and a delay on the wire shows in its hop."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lab import free_ports, local_deployment
from lab.delay_proxy import DelayProxy
from lab.evidence import Errors, ErrorTolerance, measure_until_decided
from lab.local_servers import LocalServer
from lab.ttft_client import TimedResponse
from tests.live.bench import LiveDeployment, mark_repeated, read_breakdown, read_metric
from tests.live.echo_server import EchoServer, measure_clock
from tests.live.test_injected import CONTROL_MS, DELAY_MS, MAX_STRAY_MS
from tests.live.test_routing import READ_PROMPTS_METRIC
from tests.live.unaccounted_share import MAX_SHARE, check_unaccounted_share
from ttft_otel.model.names import env_names
from ttft_otel.model.stages import REPORT_FIELDS

FEW_ROUNDS, ALL_ROUNDS = 8, 50  # every day, and with --full
WIRE_MS = 0.02 * DELAY_MS + 0.5


def compute_quantile(values: list[float], share: float) -> float:
    """The quantile `share` of `values` by nearest rank."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def send_long_prompt(bench: LiveDeployment, pictures: int) -> TimedResponse:
    """Send a prompt of five chunks that is in no cache, from its first word on."""
    images = tuple(bench.new_picture_seed() for _ in range(pictures))
    prompt = f"{bench.new_picture_seed()}"
    return bench.send_request(
        bench.front_url, prompt=prompt, pictures=images, words=2500, max_tokens=1
    )


def measure_router_clock(epd: LiveDeployment, pictures: int) -> tuple[float, float]:
    """One request: the client's TTFT, and that minus the router's; ms."""
    answer = send_long_prompt(epd, pictures)
    assert answer.client_ttft_us is not None
    excess_us = answer.client_ttft_us - read_breakdown(answer)["ttft"]
    return answer.client_ttft_us / 1000, excess_us / 1000


@pytest.mark.parametrize(
    ("pictures", "rounds"),
    ((1, FEW_ROUNDS), *(pytest.param(many, ALL_ROUNDS, marks=pytest.mark.full) for many in (0, 1))),
)
def test_the_routers_ttft_is_what_the_client_measured(
    epd: LiveDeployment, echo: EchoServer, pictures: int, rounds: int
) -> None:
    """The median difference is at most 1 ms and p95 at most 3 % of the client's TTFT, beyond a bare echo's.

    Each request is followed by an echo, so that both compete for the cores in the same moments. Few rounds
    have no p95.
    """
    shares: dict[str, list[float]] = {"router": [], "echo": []}

    def measure_round() -> Errors:
        (ttft_ms, excess_ms), own_ms = measure_router_clock(epd, pictures), measure_clock(echo)
        shares["router"].append(abs(excess_ms) / ttft_ms)
        shares["echo"].append(own_ms / ttft_ms)
        return {"router's clock": excess_ms - own_ms}

    measure_until_decided(
        measure_round, lambda _: ErrorTolerance(-1.0, 1.0, 4.0), min_rounds=rounds, max_rounds=80
    )
    if rounds == ALL_ROUNDS:
        p95 = {name: compute_quantile(values, 0.95) for name, values in shares.items()}
        assert p95["router"] <= 0.03 + p95["echo"], p95


@pytest.mark.full
def test_a_router_that_starts_its_clock_late_fails(epd: LiveDeployment, echo: EchoServer) -> None:
    """The measurement itself: five milliseconds that the router does not see are found."""

    def measure_round() -> Errors:
        (_, excess_ms), own_ms = measure_router_clock(epd, 0), measure_clock(echo)
        return {"late": excess_ms + 5 - own_ms}

    with pytest.raises(AssertionError, match="late: .* is outside"):
        measure_until_decided(measure_round, lambda _: ErrorTolerance(-1.0, 1.0, 4.0))


@pytest.mark.parametrize("rounds", (FEW_ROUNDS, pytest.param(ALL_ROUNDS, marks=pytest.mark.full)))
def test_what_no_server_accounts_for_is_little(
    epd: LiveDeployment, echo: EchoServer, rounds: int
) -> None:
    """hop + unattributed: median <= 5 % of the router's TTFT, p99 <= 15 %, each beyond an echo's.

    Prompts of five chunks, in turns without and with an image. Few rounds have no p99.
    """
    shares = check_unaccounted_share(
        lambda number: send_long_prompt(epd, number % 2), echo, min_rounds=rounds, max_rounds=80
    )
    if rounds == ALL_ROUNDS:
        p99 = {name: compute_quantile(values, 0.99) for name, values in shares.items()}
        assert p99["router"] <= 0.15 + p99["echo"], p99


@pytest.mark.full
def test_twice_the_allowed_unaccounted_time_fails(epd: LiveDeployment, echo: EchoServer) -> None:
    """The measurement itself fails when twice the allowed share of the TTFT is added."""
    with pytest.raises(AssertionError, match="unaccounted: .* is outside"):
        check_unaccounted_share(
            lambda _: send_long_prompt(epd, 0), echo, max_rounds=10, added_share=2 * MAX_SHARE
        )


@contextmanager
def run_router_behind_proxies(
    bench: LiveDeployment,
) -> Iterator[tuple[LocalServer, dict[str, DelayProxy]]]:
    """Run a second router that reaches the encoder and prefill_decode through TCP proxies."""
    legs = {name: DelayProxy(bench.fleet.get_url(name)) for name in ("encode", "prefill_decode")}
    sink = {env_names.OTEL_EXPORTER_OTLP_ENDPOINT: bench.fleet.get_url("receiver")}
    command = local_deployment.build_router_command(
        {name: [proxy.url] for name, proxy in legs.items()}, sink
    )
    try:
        with LocalServer(command) as server:
            yield server, legs
    finally:
        for proxy in legs.values():
            proxy.close()


@pytest.mark.parametrize("leg", mark_repeated(("encode", "prefill_decode"), ("prefill_decode",)))
def test_a_delay_on_the_wire_shows_in_its_hop(epd: LiveDeployment, leg: str) -> None:
    """A delay of 80 ms between router and instance shows in `router.hop.<leg>` and nowhere else."""
    hop = f"router.hop.{leg}"
    with run_router_behind_proxies(epd) as (router, legs):

        def measure(delay_ms: float) -> dict[str, float]:
            legs[leg].delay_s = delay_ms / 1000
            found = read_breakdown(
                epd.send_request(router.url, pictures=(epd.new_picture_seed(),), max_tokens=1)
            )
            return {**{name: us / 1000 for name, us in found.items()}, "slept": legs[leg].slept_ms}

        def measure_round() -> Errors:
            control, delayed = measure(CONTROL_MS), measure(DELAY_MS)
            expected = {hop: delayed.pop("slept") - control.pop("slept")}
            return {
                name: delayed.get(name, 0) - control.get(name, 0) - expected.get(name, 0)
                for name in {*delayed, *control} - {"ttft"}
            }

        measure(0)
        limits = {hop: ErrorTolerance(-WIRE_MS, WIRE_MS, 0.75 * DELAY_MS)}
        other = ErrorTolerance(-MAX_STRAY_MS, MAX_STRAY_MS, 0.75 * DELAY_MS)
        measure_until_decided(measure_round, lambda name: limits.get(name, other))


@pytest.mark.untimed
def test_the_report_speaks_the_original_names(epd: LiveDeployment) -> None:
    """GET /ttft_report/{id} of router and receiver has by_role, combined and the original fields, or 404."""
    answer = epd.send_request(epd.front_url, pictures=(epd.new_picture_seed(),), max_tokens=2)

    found = epd.get_json(f"/ttft_report/{answer.request_id}", "router")

    assert found["request_id"] == answer.request_id
    assert {"encode", "prefill_decode"} <= set(found["by_role"])
    assert set(REPORT_FIELDS) | {"ttft_ms"} <= set(found["combined"])
    assert found["by_role"]["encode"]["enc_compute_time_ms"] > 0
    assert found["by_role"]["prefill_decode"]["prefill_compute_time_ms"] > 0
    assert found["combined"]["enc_compute_time_ms"] > 0


@pytest.mark.untimed
def test_a_real_encoders_items_are_learnt_from(epd: LiveDeployment) -> None:
    """With --encoder-routing-logic ttft GET /instances shows how long an item takes on the encoder."""
    legs = {name: [epd.fleet.get_url(name)] for name in ("encode", "prefill_decode")}
    sink, port = (
        {env_names.OTEL_EXPORTER_OTLP_ENDPOINT: epd.fleet.get_url("receiver")},
        free_ports.find_free_port(),
    )
    flags = ("--routing-logic", "ttft", "--encoder-routing-logic", "ttft")
    command = local_deployment.build_router_command(legs, sink, *flags, "--admin-port", str(port))
    with LocalServer(command) as router:
        for _ in range(100):  # until the tokenizer is there
            epd.send_request(router.url, prompt=f"{epd.new_picture_seed()}", max_tokens=1)
            if read_metric(router.url, READ_PROMPTS_METRIC):
                break
            time.sleep(1)
        for _ in range(12):
            found = read_breakdown(
                epd.send_request(router.url, pictures=(epd.new_picture_seed(),), max_tokens=1)
            )
            assert found["router.tokenize"] > 0 and found["encode.encoder.compute"] > 0
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/instances", timeout=10) as answer:
            reported = json.loads(answer.read())

    assert reported["routing"]["encoders"] == "ttft"
    encoder = next(each for each in reported["instances"] if each["leg"] == "encode")
    (fit,) = encoder["fits"].values()
    assert fit["samples"] == 12 and max(fit["a"], fit["b"], fit["d"]) > 0
    assert encoder["predictions"]["outcomes"] >= 4 and encoder["besides"] > 0
    assert encoder["pending"] == {"requests": 0, "tokens": 0, "pairs": 0}
