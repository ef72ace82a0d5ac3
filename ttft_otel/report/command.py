# SPDX-License-Identifier: Apache-2.0
"""`ttft-otel report`: options in; query.py finds, terminal.py prints. Needs no extra."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ttft_otel.report import answer, schema, terminal
from ttft_otel.report.query import MOST, Trace, Wanted, reader
from ttft_otel.report.shape import Request
from ttft_otel.report.summary import summarize


@click.command(
    epilog="""\b
Examples:
  ttft-otel report                     percentiles of the last 200 requests
  ttft-otel report --last 1            the newest request's waterfall
  ttft-otel report --request ID --json | jq .combined
  ttft-otel report --trace 4bf92f3577b34da6a3ce929d0e0e4736
"""
)
@click.option("--last", type=click.IntRange(1, MOST), help="The newest N requests.  [default: 200]")
@click.option("--trace", "trace_id", metavar="ID", help="One trace, by its 32 hex digits.")
@click.option("--request", "request_id", metavar="ID", help="One request, by its request id.")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of tables.")
@click.option("--db", type=click.Path(path_type=Path, dir_okay=False), help=schema.HELP)
def report(
    last: int | None, trace_id: str | None, request_id: str | None, as_json: bool, db: Path | None
) -> None:
    """Print where the time to first token went: one request, or percentiles over many."""
    if sum(each is not None for each in (last, trace_id, request_id)) > 1:
        raise click.UsageError("--last, --trace and --request exclude each other")
    try:
        with reader(db or schema.default()) as found:
            if request_id is not None:
                one = found.request(request_id)
                _one(found.trace(one.trace_id) if one else None, one, request_id, as_json)
            elif trace_id is not None:
                _one(found.trace(trace_id.lower()), None, trace_id, as_json)
            else:
                _many(found.latest(Wanted(last=last or 200)), found, last, as_json)
    except schema.Trouble as error:
        raise click.ClickException(str(error)) from error


def _one(trace: Trace | None, one: Request | None, name: str, as_json: bool) -> None:
    if trace is None:
        raise click.ClickException(
            f"nothing of {name!r} is stored: not traced, not here yet, or evicted; "
            "`ttft-otel report --last 20 --json` lists what is"
        )
    if as_json:
        _dump(answer.report(one) if one else answer.trace(trace))
    else:
        terminal.waterfall(trace, one)


def _many(requests: list[Request], found: Any, last: int | None, as_json: bool) -> None:
    if not requests:
        raise click.ClickException(
            "no request is stored yet; start a server with TTFT_OTEL=1 and send it one"
        )
    if as_json:
        summary = answer.summary(summarize(requests))
        _dump({"requests": [answer.request(each) for each in requests], "summary": summary})
    elif last == 1:
        _one(found.trace(requests[0].trace_id), requests[0], requests[0].request_id, False)
    else:
        terminal.table(requests)


def _dump(value: object) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))
