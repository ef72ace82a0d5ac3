# SPDX-License-Identifier: Apache-2.0
"""The command `ttft-otel report`: print requests from the database or Tempo, or those of a result file.

Its JSON keeps to docs/report.schema.json. Needs a pip extra for Tempo only. With --join the requests are
those of another load generator's result: AIPerf's profile_export.jsonl has each request's ID, which it sends
as x-request-id; vLLM's `bench serve --save-result --save-detailed` sends its prefix and the request's number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
from rich import progress
from rich.console import Console

from ttft_otel.commands import source_options
from ttft_otel.commands.command_options import add_watch_option, write_whole
from ttft_otel.model.stages import OUTSIDE
from ttft_otel.report import breakdown_source
from ttft_otel.report.assemble.summary import summarize
from ttft_otel.report.breakdown_source import WINDOW_HELP, BreakdownSource, filter_window
from ttft_otel.report.report_types import Request, SourceChoice
from ttft_otel.report.show import json_answers, terminal
from ttft_otel.report.store.database_reader import (
    MAX_REQUESTS,
    DatabaseReader,
    RequestFilter,
    StoredTrace,
)
from ttft_otel.report.store.database_schema import StoreError

MAX_JOINED_BYTES: Final = 1 << 30  # of a result file; answers' texts are in vLLM's
# A client cannot have waited for less than its server took; clocks and time stamps differ by less.
TOLERANCE_US: Final = 2000
MAX_IMPOSSIBLE: Final = 0.01  # of the joined requests


class JoinError(Exception):
    """The file cannot be read, or does not fit the stored requests; the message has the remedy."""


@click.command(
    epilog="""\b
Examples:
  ttft-otel report                     percentiles of the last 200 requests
  ttft-otel report --last 1            the newest request's waterfall
  ttft-otel report --since 2h..1h --model chat --instance vllm-0
  ttft-otel report --request ID --json | jq .combined
  ttft-otel report --trace 4bf92f3577b34da6a3ce929d0e0e4736
  ttft-otel report --last 50 --perfetto trace.json
  ttft-otel report --tempo http://127.0.0.1:3200 --last 50
  ttft-otel report --since 1h --join profile_export.jsonl
"""
)
@click.option(
    "--last", type=click.IntRange(1, MAX_REQUESTS), help="The newest N requests.  [default: 200]"
)
@click.option("--trace", "trace_id", metavar="ID", help="One trace, by its 32 hex digits.")
@click.option("--request", "request_id", metavar="ID", help="One request, by its request id.")
@click.option("--since", metavar="WINDOW", default="", help=f"Requests of a window: {WINDOW_HELP}")
@click.option("--model", default="", help="Only requests for this model.")
@click.option(
    "--instance", metavar="ID", default="", help="Only requests that this service.instance.id had."
)
@click.option("--json", "as_json", is_flag=True, help="JSON instead of text.")
@click.option(
    "--perfetto",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    help="Write the spans to this file instead, for Perfetto's UI.",
)
@click.option(
    "--join",
    "joined_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Only requests of this result of AIPerf (profile_export.jsonl) or `vllm bench serve "
    "--save-result --save-detailed`, up to the TTFT that it measured.",
)
@click.option(
    "--join-prefix",
    metavar="NAME",
    help="Of vLLM's result: what its --request-id-prefix was.",
)
@add_watch_option
@source_options.add_source_options
def report(
    last: int | None,
    trace_id: str | None,
    request_id: str | None,
    since: str,
    model: str,
    instance: str,
    as_json: bool,
    perfetto: Path | None,
    joined_file: Path | None,
    join_prefix: str | None,
    source: SourceChoice,
) -> None:
    """Print where the time to first token went: one request, or percentiles over many."""
    # An empty ID counts as given, too: the answer is that it is unknown.
    if sum(each is not None for each in (last, trace_id, request_id)) > 1:
        raise click.UsageError("--last, --trace and --request exclude each other")
    if (trace_id is not None or request_id is not None) and (since or model or instance):
        raise click.UsageError("--since, --model and --instance choose among many requests")
    if as_json and perfetto:
        raise click.UsageError("--json and --perfetto exclude each other")
    if joined_file and (trace_id is not None or request_id is not None or perfetto):
        raise click.UsageError("--join excludes --trace, --request and --perfetto")
    # Read-only: a command must not create an empty database where there is none.
    refusals = source_options.report_refusals(JoinError, as_json=as_json)
    with refusals, breakdown_source.open_source(source) as opened:
        count = last or (MAX_REQUESTS if joined_file else 200)
        listed = partial(_list_requests, opened, filter_window(since, model, count), instance)
        name, request = trace_id, None
        if request_id is not None:
            name, request = request_id, opened.find_request(request_id)
            trace_id = request.trace_id if request else ""
        if perfetto:
            wanted = (
                [each.trace_id for each in listed()] if trace_id is None else [trace_id.lower()]
            )
            _write_perfetto(_find_traces(opened, wanted), perfetto)
        elif trace_id is not None:
            # Without --request all requests of the trace; with it the sum of its own only.
            _print_trace(opened.find_trace(trace_id.lower()), request, name or "", as_json)
        elif joined_file:
            # Before the requests are read, which takes a while from Tempo: a wrong file is told at once.
            client_ttfts = read_client_ttfts(joined_file, join_prefix)
            _print_joined(listed(), client_ttfts, as_json)
        else:
            _print_requests(listed(), opened, last, as_json)


def _list_requests(opened: BreakdownSource, wanted: RequestFilter, instance: str) -> list[Request]:
    """The newest requests that match; `instance`, "" for all, is that of the router or of a server."""
    if not instance:
        return opened.list_latest(wanted)
    # No column of the store has it: it is looked for in as many as one answer may have.
    found = opened.list_latest(replace(wanted, last=MAX_REQUESTS))
    if len(found) == MAX_REQUESTS:
        click.echo(f"--instance: only the newest {MAX_REQUESTS} requests were searched", err=True)
    return [
        each
        for each in found
        if instance in {leg.instance for leg in (each.router, *each.legs) if leg is not None}
    ][: wanted.last]


def _find_traces(opened: BreakdownSource, wanted: Sequence[str]) -> list[StoredTrace]:
    """The stored ones of these traces, each once, in their order."""
    console = Console(stderr=True)
    # Tempo draws a bar of its own, and has read these traces before.
    is_drawn = console.is_terminal and isinstance(opened, DatabaseReader)
    names = progress.track(
        list(dict.fromkeys(wanted)),
        "reading traces",
        console=console,
        transient=True,
        disable=not is_drawn,
    )
    traces = (opened.find_trace(each) for each in names)
    return [trace for trace in traces if trace is not None]


def _write_perfetto(traces: list[StoredTrace], path: Path) -> None:
    if not traces:
        raise click.ClickException("nothing is stored for that; `ttft-otel report --last 20` lists")
    document = json_answers.build_perfetto_trace(traces)
    try:
        # Perfetto shows escapes of characters beyond ASCII as they are written.
        write_whole(path, json.dumps(document, ensure_ascii=False))
    except OSError as error:
        raise click.ClickException(f"cannot write {path}: {error.strerror}") from error
    drawn = sum(event["ph"] == "X" for event in document["traceEvents"])
    click.echo(
        f"{path}: {len(traces)} traces, {drawn} spans. Open it in Perfetto's UI (Open trace file)."
    )


def _print_trace(
    trace: StoredTrace | None, request: Request | None, name: str, as_json: bool
) -> None:
    if trace is None:
        raise StoreError(
            f"nothing is stored for {name!r}: it was not traced, has not arrived yet, or was removed; "
            "`ttft-otel report --last 20 --json` lists what is"
        )
    if as_json:
        _print_json(
            json_answers.describe_one(request, trace)
            if request
            else json_answers.describe_trace(trace)
        )
    else:
        terminal.print_waterfall(trace, request)


def _print_requests(
    requests: list[Request], opened: BreakdownSource, last: int | None, as_json: bool
) -> None:
    if not requests:
        raise StoreError(
            "no such request is stored; start a server with TTFT_OTEL=1 and send it one"
        )
    if as_json:
        _print_json(_describe_requests(requests))
    # Percentiles of one request would be that request four times.
    elif last == 1:
        _print_trace(
            opened.find_trace(requests[0].trace_id), requests[0], requests[0].request_id, False
        )
    else:
        terminal.print_summary(requests)


def _print_joined(requests: list[Request], client_ttfts: Mapping[str, int], as_json: bool) -> None:
    joined = join_requests(requests, client_ttfts)
    beside = sum(each.request_id not in client_ttfts for each in requests)
    counts = {"in_file": len(client_ttfts), "joined": len(joined), "not_in_file": beside}
    if as_json:
        _print_json({**_describe_requests(joined), "join": counts})
        return
    terminal.print_summary(joined)
    click.echo(
        f"{len(joined)} of the file's {len(client_ttfts)} requests are stored; {beside} stored "
        f"ones that were read are not in the file. `{OUTSIDE}` is what the client waited beyond our span."
    )


def _describe_requests(requests: list[Request]) -> dict[str, Any]:
    return {
        "requests": [json_answers.describe_request(each) for each in requests],
        "summary": json_answers.describe_summary(summarize(requests)),
    }


def _print_json(value: object) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False)
    # json.dumps() leaves controls beyond ASCII as they are, of which a terminal obeys some.
    click.echo(re.sub(r"[^\x00-\x7e]", _escape_control, text))


def _escape_control(found: re.Match[str]) -> str:
    return found[0] if found[0].isprintable() else json.dumps(found[0])[1:-1]


def read_client_ttfts(path: Path, prefix: str | None) -> dict[str, int]:
    """The client's TTFT in microseconds by request ID, of those that have one.

    prefix: what `vllm bench serve --request-id-prefix` was given, for its files.
    Raises JoinError.
    """
    try:
        if path.stat().st_size > MAX_JOINED_BYTES:
            raise JoinError(f"{path} is larger than {MAX_JOINED_BYTES >> 20} MiB")
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise JoinError(f"{path} cannot be read: {error}") from error
    try:
        if '"x_request_id"' in text:
            return dict(_list_aiperf(text))
        return dict(_list_vllm_bench(json.loads(text), prefix))
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError) as error:
        raise JoinError(
            f"{path} is neither AIPerf's profile_export.jsonl nor a result of `vllm bench serve "
            "--save-result --save-detailed`"
        ) from error


def join_requests(requests: Sequence[Request], client_ttfts: Mapping[str, int]) -> list[Request]:
    """Those of `requests` that the file has; what the client waited beyond them is their stage `outside`.

    client_ttfts: microseconds by request ID. Raises JoinError where none fits, or clients would have
    waited for less than their servers took, so that the IDs are those of other requests.
    """
    joined = [
        replace(
            each,
            ttft_us=client_ttfts[each.request_id],
            stages={**each.stages, OUTSIDE: client_ttfts[each.request_id] - each.ttft_us},
        )
        for each in requests
        if each.request_id in client_ttfts and not each.error
    ]
    if not joined:
        raise JoinError(
            f"none of the {len(client_ttfts)} requests of the file is among the {len(requests)} that were "
            "read: --since names the window; both have to have the same x-request-id"
        )
    impossible = sum(each.stages[OUTSIDE] < -TOLERANCE_US for each in joined)
    if impossible > MAX_IMPOSSIBLE * len(joined):
        raise JoinError(
            f"{impossible} of {len(joined)} clients would have waited for less than their server took: "
            "the IDs are those of another run, or the file has its requests in another order"
        )
    return joined


def _list_aiperf(text: str) -> Iterator[tuple[str, int]]:
    factors = {"ns": 0.001, "us": 1.0, "ms": 1000.0, "sec": 1e6, "s": 1e6}
    for line in filter(None, map(str.strip, text.splitlines())):
        record: dict[str, Any] = json.loads(line)
        ttft = record["metrics"].get("time_to_first_token")
        # Warm-up is in the file, too, and a failed request has no first token.
        if ttft and record["metadata"].get("benchmark_phase", "profiling") == "profiling":
            yield record["metadata"]["x_request_id"], round(ttft["value"] * factors[ttft["unit"]])


def _list_vllm_bench(result: Any, prefix: str | None) -> Iterator[tuple[str, int]]:
    ttfts, errors = result["ttfts"], result.get("errors") or []
    if prefix is None:
        raise JoinError(
            "vLLM's file has no request IDs: start `vllm bench serve` with --request-id-prefix NAME, "
            "and give NAME here as --join-prefix"
        )
    for number, seconds in enumerate(ttfts):
        if seconds and not (number < len(errors) and errors[number]):
            yield f"{prefix}{number}", round(seconds * 1e6)
