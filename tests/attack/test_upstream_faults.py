# SPDX-License-Identifier: Apache-2.0
"""Every fault of an instance, on every leg: what the client gets, what counts, what the spans say.

Run for each fault, leg, form and attempt. The outcomes are compared with the table in
benchmarks/results/upstream-faults.md, which docs/generate_upstream_faults.py writes with `render_table`.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from unittest import mock

import aiohttp
import pytest
from router import fake_instances
from router.raw_http import FAULTS, run_instance

from ttft_otel.model.names import keys
from ttft_otel.model.stages import DECODE, ENCODE, MONO, PREFILL, PREFILL_DECODE
from ttft_otel.router.limits import RouterLimits
from ttft_otel.router.types import Instance
from ttft_otel.router.upstream import failures

LEGS: Final = (ENCODE, PREFILL, DECODE, PREFILL_DECODE, MONO)
FORMS: Final = ("stream", "plain")
ATTEMPTS: Final = ("first", "second")  # the second after one that was answered with 503
LIMITS: Final = RouterLimits(first_byte_timeout=2.0, total_timeout=4.0)  # seconds
HANGING_FAULTS: Final = {"hangs", "hangs after head", "content length too long"}
MAX_CONCURRENT_CELLS: Final = 24
CHAT_PATH: Final = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class FaultCell:
    """One combination of the matrix.

    fault: what the instance does wrong. leg: which of the request's legs it serves. form: streamed or not.
    attempt: whether the request's first or second attempt at that leg meets it.
    """

    fault: str
    leg: str
    form: str
    attempt: str


@dataclass(frozen=True, slots=True)
class FaultOutcome:
    """What the client got, what the instance's breaker counted, the errors of server and client span."""

    client: str
    breaker: str
    server_error: str
    attempt_error: str


def list_cells() -> list[FaultCell]:
    """Every combination."""
    return [
        FaultCell(fault, leg, form, attempt)
        for fault in FAULTS
        for attempt in ATTEMPTS
        for leg in LEGS
        for form in FORMS
    ]


async def run_cells(cells: Iterable[FaultCell]) -> dict[FaultCell, FaultOutcome]:
    """Run `cells`, some at a time."""
    semaphore = asyncio.Semaphore(MAX_CONCURRENT_CELLS)

    async def run_bounded(cell: FaultCell) -> tuple[FaultCell, FaultOutcome]:
        async with semaphore:
            return cell, await run_cell(cell)

    # on a busy machine an old connection that was closed is noticed later
    with mock.patch.object(failures, "RACE_WINDOW_US", 10_000_000):
        outcomes = dict(await asyncio.gather(*map(run_bounded, cells)))
        # A busy machine can stand still for longer than the time-out, of any leg: what was merely slow is
        # asked again, one at a time. Where the router is wrong it stays wrong.
        for cell, outcome in outcomes.items():
            is_late = "504" in (outcome.client, outcome.server_error) or (
                "Timeout" in outcome.attempt_error
            )
            is_counted = outcome.client != "200" or outcome.breaker != "not counted"
            if (is_late and cell.fault not in HANGING_FAULTS) or (
                cell.fault == "slow first byte" and is_counted
            ):
                outcomes[cell] = await run_cell(cell)
        return outcomes


async def run_cell(cell: FaultCell) -> FaultOutcome:
    """Send one request to a router whose instances are well, but for the one with the fault.

    Of an instance that closes kept connections it is the next request that finds such a connection.
    """
    async with contextlib.AsyncExitStack() as stack:
        faulty = await stack.enter_async_context(run_instance(cell.fault))
        other = await stack.enter_async_context(
            run_instance("" if cell.attempt == "first" else "status 503")
        )
        urls = [faulty.url, other.url]
        if cell.attempt == "second" and cell.fault != "closes kept connections":
            urls.reverse()  # instances are asked by turns
        router = await stack.enter_async_context(
            fake_instances.run_router(
                await _list_urls(cell, urls, MONO, stack),
                await _list_urls(cell, urls, ENCODE, stack),
                prefills=await _list_urls(cell, urls, PREFILL, stack),
                decodes=await _list_urls(cell, urls, DECODE, stack),
                limits=LIMITS,
                probe_interval_s=60.0,
            )
        )
        health_monitor = router.app.endpoint.upstream.health_monitor
        await health_monitor.wait_probed()
        await health_monitor.close()  # a probe would take the faulty instance out meanwhile
        (instance,) = [each for each in router.fleet if each.url == faulty.url]
        router.fleet.mark_healthy(instance)  # it was, until now
        client_text = await _send_request(router, cell)
        if cell.fault == "closes kept connections":
            if cell.attempt == "first":
                await _send_request(router, cell)  # to the other one
            client_text = await _send_request(router, cell)
        while router.app.admission.requests_under_way:
            await asyncio.sleep(0.005)
        (record,) = [each for each in router.records if each.server is not None][-1:]
        assert record.server is not None
        address = faulty.url.rpartition(":")[2]
        attempt_errors = [
            call.error for call in record.calls if f"{call.attributes[keys.SERVER_PORT]}" == address
        ]
        return FaultOutcome(
            client_text,
            _describe_breaker(instance),
            record.server.error,
            (*attempt_errors, "")[0],
        )


async def _list_urls(
    cell: FaultCell, urls: list[str], leg: str, stack: contextlib.AsyncExitStack
) -> list[str]:
    """URLs of one leg of the cell's router: those in question, one that is well, or none."""
    backend_legs = (MONO, PREFILL_DECODE)
    if leg == cell.leg or (leg == MONO and cell.leg in backend_legs):
        return urls
    needed = {
        ENCODE: (MONO,),
        PREFILL: (DECODE,),
        DECODE: (PREFILL,),
        PREFILL_DECODE: (ENCODE,),
        MONO: (),
    }
    if leg not in needed[cell.leg]:
        return []
    return [(await stack.enter_async_context(run_instance())).url]


async def _send_request(router: fake_instances.RunningRouter, cell: FaultCell) -> str:
    """Send the request, and tell what came back."""
    images = ["a"] if cell.leg in (ENCODE, PREFILL_DECODE) else []
    body = fake_instances.build_chat(*images, stream=cell.form == "stream") | {"max_tokens": 4}
    data = b""
    async with router.client.post(f"{router.url}{CHAT_PATH}", json=body) as response:
        try:
            async for chunk in response.content.iter_any():
                data += chunk
        except aiohttp.ClientError:
            return f"{response.status}, cut"
        if response.status >= 400:
            return str(response.status)
        if b'"error"' in data:
            return f"{response.status}, then an error event"
        is_whole = data.endswith(b"data: [DONE]\n\n" if cell.form == "stream" else b"}")
        return str(response.status) if is_whole else f"{response.status}, incomplete"


def _describe_breaker(instance: Instance) -> str:
    if instance.state == "failed":
        return "counted, out until a probe succeeds"
    return "counted" if instance.breaker.consecutive_failures else "not counted"


def render_table(outcomes: Mapping[FaultCell, FaultOutcome]) -> str:
    """The table of the reference page: a row for each fault and attempt, legs of one outcome together."""
    lines = [
        "| fault | attempt | leg | client | breaker | server span | span of the attempt |",
        "|---|---|---|---|---|---|---|",
    ]
    for fault in FAULTS:
        for attempt in ATTEMPTS:
            places: dict[FaultOutcome, list[str]] = {}
            for leg in LEGS:
                by_form = [outcomes[FaultCell(fault, leg, form, attempt)] for form in FORMS]
                if by_form[0] == by_form[1]:
                    places.setdefault(by_form[0], []).append(leg)
                    continue
                for form, outcome in zip(FORMS, by_form, strict=True):
                    places.setdefault(outcome, []).append(f"{leg} ({form})")
            lines += [
                f"| {fault} | {attempt} | {', '.join(legs)} | {each.client} | {each.breaker} "
                f"| {_format_error(each.server_error)} | {_format_error(each.attempt_error)} |"
                for each, legs in places.items()
            ]
    return "\n".join(lines) + "\n"


def read_table(text: str) -> dict[FaultCell, FaultOutcome]:
    """What `render_table` wrote, by cell."""
    outcomes = {}
    for line in re.findall(r"^\| (.*) \|$", text, re.MULTILINE)[1:]:
        fault, attempt, legs, client, breaker, *errors = line.split(" | ")
        outcome = FaultOutcome(client, breaker, *(each.strip("`–") for each in errors))
        for place in legs.split(", "):
            leg, _, form = place.rstrip(")").partition(" (")
            for each in (form,) if form else FORMS:
                outcomes[FaultCell(fault, leg, each, attempt)] = outcome
    return outcomes


def _format_error(error: str) -> str:
    return f"`{error}`" if error else "–"


PAGE = Path(__file__).parents[2] / "benchmarks" / "results" / "upstream-faults.md"
TOLD = read_table(PAGE.read_text("utf-8"))
ALL = list_cells()
# Of each fault some legs, streamed or not, and of either attempt.
FEW = [each for at, each in enumerate(ALL) if at % 7 == 0]


@pytest.mark.parametrize(
    "cells", [pytest.param(FEW, id="some"), pytest.param(ALL, id="all", marks=pytest.mark.full)]
)
async def test_the_page_is_what_the_run_gives(cells: list[FaultCell]) -> None:
    """No outcome has changed since docs/generate_upstream_faults.py wrote the page."""
    outcomes = await run_cells(cells)
    assert outcomes == {each: TOLD[each] for each in cells}


def test_what_the_page_tells() -> None:
    """Of every cell: no fault becomes a 500 of the router, nor an incomplete answer a complete one."""
    assert set(TOLD) == set(ALL)
    for cell, outcome in TOLD.items():
        assert outcome.client != "500" or cell.fault == "status 500", cell
        assert "incomplete" not in outcome.client, cell
        assert (not outcome.server_error) == (outcome.client == "200"), cell
        # Whatever the client gets, a counted fault is on the span of its attempt.
        assert outcome.breaker == "not counted" or outcome.attempt_error, cell
