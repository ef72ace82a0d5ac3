# SPDX-License-Identifier: Apache-2.0
"""`ttft-otel demo`: requests that a real vLLM served, to try page, report, explain and diff on.

scripts/demo recorded them: 28 that warm a router, an encoder and a prefill-decode server up, then 28 more.
"""

from __future__ import annotations

import contextlib
import lzma
import shlex
import tempfile
import time
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Final

import click

from ttft_otel.model.names import keys
from ttft_otel.report import receive
from ttft_otel.report.breakdown_source import Explainer
from ttft_otel.report.receive import otlp_decoder
from ttft_otel.report.report_server import ReportServer, run_server
from ttft_otel.report.report_types import StoredSpan
from ttft_otel.report.serve_options import ServeOptions
from ttft_otel.report.store.span_store import SpanStore

RECORDED: Final = Path(receive.__file__).parents[1] / "recorded" / "requests.otlp.xz"
WARMUP: Final = "warm-"  # request IDs of the warm-up begin with it
STORE_TIMEOUT_S: Final = 60.0


def read_recorded(end_ns: int) -> list[StoredSpan]:
    """The recorded spans, moved in time as a whole: the last one ends at `end_ns` (Unix time)."""
    spans = list(otlp_decoder.decode_export(lzma.decompress(RECORDED.read_bytes())).spans)
    shift = end_ns - max(span.end_ns for span in spans)
    return [
        replace(span, start_ns=span.start_ns + shift, end_ns=span.end_ns + shift) for span in spans
    ]


def list_commands(spans: list[StoredSpan], database: Path) -> list[str]:
    """What to ask of them: the three commands to try."""
    # The longest of a trace is the client's: its request ID is the client's, too.
    requests = dict[str, StoredSpan]()
    for span in sorted(spans, key=lambda each: each.end_ns - each.start_ns):
        if keys.REQUEST_ID in span.attributes and span.is_ttft_span:
            requests[span.trace_id] = span
    names = {trace: str(span.attributes[keys.REQUEST_ID]) for trace, span in requests.items()}
    after = [span for trace, span in requests.items() if not names[trace].startswith(WARMUP)]
    slowest = max(after, key=lambda span: int(span.attributes[keys.TOTAL_US]))
    begin, middle, end = (
        datetime.fromtimestamp(ns / 1e9, timezone.utc).isoformat(timespec="milliseconds")
        for ns in (
            min(span.start_ns for span in spans),
            min(span.start_ns for span in after),
            max(span.end_ns for span in spans),
        )
    )
    at = f"--db {shlex.quote(str(database))}"
    return [
        f"ttft-otel report {at}",
        f"ttft-otel explain {at} --request {names[slowest.trace_id]}",
        f"ttft-otel diff {at} --a {begin}..{middle} --b {middle}..{end}",
    ]


@click.command(
    epilog="""\b
Examples:
  ttft-otel demo --recorded                       its page, on a free port, until Ctrl-C
  ttft-otel demo --recorded --db spans.db         keep them in a file, and show no page
"""
)
@click.option("--recorded", is_flag=True, help="Show requests that were recorded; needs no vLLM.")
@click.option(
    "--db",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write them to this database, and end.",
)
@click.option("--http-port", type=click.IntRange(0, 65535), default=0, help="Port of the page.")
# `explain` is from main.py, which may import explain/; None where the command is called by itself.
@click.pass_obj
def demo(explain: Explainer | None, recorded: bool, db: Path | None, http_port: int) -> None:
    """Load requests of a real vLLM, serve their page on this machine, and say what to ask."""
    if not recorded:
        raise click.UsageError(
            "add --recorded. With a vLLM of your own: ttft-otel serve, then TTFT_OTEL=1 vllm serve MODEL"
        )
    if db and db.exists():
        raise click.UsageError(f"{db} is there already: choose another file")
    spans = read_recorded(time.time_ns() - 1_000_000_000)
    with tempfile.TemporaryDirectory(prefix="ttft-otel-demo-") as folder:
        database = db or Path(folder) / "spans.db"
        store = SpanStore(database)
        try:
            store.add(spans).result(STORE_TIMEOUT_S)
        finally:
            store.close()
        commands = "\n".join(f"  {line}" for line in list_commands(spans, database))
        click.echo(f"Requests of a real vLLM (tiny model, two CPU cores). Ask of them:\n{commands}")
        if db:
            return

        def print_address(server: ReportServer) -> None:
            click.echo(f"Page: http://127.0.0.1:{server.http_port}   Ctrl-C ends it")

        options = ServeOptions(database, http_port=http_port, grpc_port=-1, explain=explain)
        with contextlib.suppress(KeyboardInterrupt):
            run_server(options, print_address)
