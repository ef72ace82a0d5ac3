# SPDX-License-Identifier: Apache-2.0
"""The commands `ttft-otel serve`, and `demo`, which tries page and commands on; report_server.py serves.

`demo` sends ten requests to a vLLM of one's own, or has recorded ones. scripts/demo recorded them: 28 that
warm a router, an encoder and a prefill-decode server up, then 28 more.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final, TextIO

import click

from ttft_otel.commands.command_options import OptionDecorator, add_options, make_number_option
from ttft_otel.commands.source_options import add_source_options
from ttft_otel.http.head_checks import is_loopback
from ttft_otel.model.endpoints import COMPLETIONS_PATH
from ttft_otel.model.names import env_names, header_names, keys
from ttft_otel.report import receive
from ttft_otel.report.breakdown_source import Explainer, ServeOptions
from ttft_otel.report.receive import otlp_decoder
from ttft_otel.report.report_server import ReportServer, run_server
from ttft_otel.report.report_types import SourceChoice, StoredSpan
from ttft_otel.report.store import database_schema
from ttft_otel.report.store.database_reader import RequestFilter, open_reader
from ttft_otel.report.store.span_store import SpanStore

MEGABYTE: Final = 1 << 20
DEFAULTS: Final = ServeOptions(Path())
RECORDED: Final = Path(receive.__file__).parents[1] / "recorded" / "requests.otlp.xz"
WARMUP: Final = "warm-"  # request IDs of the warm-up begin with it
STORE_TIMEOUT_S: Final = 60.0
LOOPBACK: Final = "127.0.0.1"
MODEL: Final = "Qwen/Qwen3-0.6B"  # small, and the default of vLLM itself
REQUESTS: Final = 10
WARMUPS: Final = 12  # one after another: with them `explain` knows what is usual
PLACES: Final = 4  # of them at once, so that the others wait
PROMPT: Final = "Where does the time go before the first word of an answer? " * 20
NO_NETWORK: Final = (
    "Without a network: --model FOLDER serves one of this disk, --recorded needs none."
)
START_TIMEOUT_S: Final = 1800.0  # a model may have to be downloaded
END_TIMEOUT_S: Final = 30.0
MAX_LOG_CHARS: Final = 2000


def _check_url(context: click.Context, option: click.Parameter, value: str) -> str:
    """A URL without the slash at its end. Raises BadParameter for what no link may be made of."""
    if value and not value.startswith(("http://", "https://")):
        raise click.BadParameter("write http://HOST:PORT", context, option)
    return value.rstrip("/")


def _make_url_option(flag: str, name: str, help_text: str) -> OptionDecorator:
    return click.option(flag, name, metavar="URL", default="", callback=_check_url, help=help_text)


@click.command(
    epilog="""\b
Examples:
  ttft-otel serve
  ttft-otel serve --keep-requests 5000 --keep-hours 24 --db /data/spans.db
  ttft-otel serve --host 0.0.0.0 --insecure       for servers on other machines
  ttft-otel serve --tempo http://127.0.0.1:3200 --http-port 4319 --grafana http://127.0.0.1:3000
The page, /ttft_report/ID, /api/... and OTLP over HTTP share --http-port.
"""
)
@click.option("--host", default=DEFAULTS.host, show_default=True, help="Address to listen on.")
@add_options(
    *(
        make_number_option(*each)
        for each in (
            ("--http-port", click.IntRange(0, 65535), DEFAULTS.http_port,
             "Pages, API and OTLP/HTTP; 0 takes a free port."),
            ("--grpc-port", click.IntRange(-1, 65535), DEFAULTS.grpc_port,
             "OTLP/gRPC; 0 takes a free port, -1 disables it."),
            # Three limits, since any of them may be what a disk or a policy demands; the first one counts.
            ("--keep-requests max_traces", click.IntRange(1), DEFAULTS.max_traces,
             "Traces to keep; older ones are removed."),
            ("--keep-hours max_age_hours", click.FloatRange(0.001), DEFAULTS.max_age_hours,
             "Age in hours at which traces are removed."),
            ("--keep-mb", click.IntRange(1), DEFAULTS.max_bytes // MEGABYTE,
             "Size of the database in MiB at which the oldest traces are removed."),
        )
    )
)  # fmt: skip
@click.option(
    # Its own flag: spans hold request IDs and timings, and whoever reaches the port reads them.
    "--insecure",
    is_flag=True,
    help="Listen on an address that other machines can reach, also without a token.",
)
@click.option(
    "--allowed-host",
    "allowed_hosts",
    multiple=True,
    help="Another name that Host may have on loopback.",
)
@click.option(
    "--token-file",
    type=click.File(),
    help="File with a token that whoever sends or reads has to show; in a browser it is the password.",
)
@_make_url_option(
    "--grafana", "grafana_url", "Where people reach Grafana: pages link to its dashboard."
)
@_make_url_option(
    "--alertmanager",
    "alertmanager_url",
    "Where answers to the alerts of /api/alerts go: http://127.0.0.1:9093.",
)
@_make_url_option("--page-url", "page_url", "Where people reach the pages, for links of answers.")
@add_source_options
# `explain` is from main.py, which may import explain/; None where the command is called by itself.
@click.pass_obj
def serve(
    explain: Explainer | None,
    /,
    insecure: bool,
    token_file: TextIO | None,
    keep_mb: int,
    source: SourceChoice,
    **given: Any,
) -> None:
    """Receive spans over OTLP (gRPC and HTTP), store them, show where the time went, and answer alerts.

    With --tempo nothing is received: pages and answers are of the requests in Tempo.
    """
    token = token_file.read().strip() if token_file else ""
    if token_file and not token:
        raise click.UsageError("--token-file: the file is empty.")
    # The other options are named after ServeOptions' fields.
    options = ServeOptions(
        path=source.db or database_schema.get_default_path(),
        max_bytes=keep_mb * MEGABYTE,
        token=token,
        explain=explain,
        tempo=source if source.tempo else None,
        **given,
    )
    if not (insecure or token or is_loopback(options.host)):
        raise click.UsageError(
            f"--host {options.host} can be reached from other machines, which could read and send "
            "everything: add --token-file, or --insecure if something else decides who reaches it."
        )
    try:
        # Printed when both ports are bound: scripts wait for these lines.
        run_server(options, _print_addresses)
    except database_schema.StoreError as error:
        raise click.ClickException(str(error)) from error


def _print_addresses(server: ReportServer) -> None:
    """Print the addresses, the database's path, and how to start a server that sends here."""
    options = server.options
    at = f"[{options.host}]:" if ":" in options.host else f"{options.host}:"
    if options.tempo:
        click.echo(f"ttft-otel serve: page on http://{at}{server.http_port}, of Tempo's requests")
        return
    lines = [f"ttft-otel serve: page and OTLP/HTTP on http://{at}{server.http_port}"]
    if server.grpc_port >= 0:
        lines.append(f"                 OTLP/gRPC on {at}{server.grpc_port}")
    lines.append(f"                 spans in {options.path}")
    # 4318 is where servers send unless they are configured otherwise (settings.py).
    endpoint_setting = (
        ""
        if server.http_port == 4318
        else f"{env_names.OTEL_EXPORTER_OTLP_ENDPOINT}=http://{at}{server.http_port} "
    )
    # Set already: the line would contradict it.
    if env_names.OTEL_EXPORTER_OTLP_ENDPOINT not in os.environ:
        lines.append(
            f"                 send here: {endpoint_setting}{env_names.TTFT_OTEL}=1 vllm serve MODEL"
        )
    click.echo("\n".join(lines))


def read_recorded(end_ns: int) -> list[StoredSpan]:
    """The recorded spans, moved in time as a whole: the last one ends at `end_ns` (Unix time)."""
    # A Python that was built without liblzma can still serve.
    import lzma

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


@contextlib.contextmanager
def start_vllm(model: str, arguments: Sequence[str], endpoint: str, log: Path) -> Iterator[str]:
    """A traced `vllm serve` that sends to `endpoint`; yields its URL. Ended with its children."""
    with socket.create_server((LOOPBACK, 0)) as free:
        port = free.getsockname()[1]
    program = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model)
    places = ("--host", LOOPBACK, "--port", str(port), "--max-num-seqs", str(PLACES))
    traced = {
        env_names.TTFT_OTEL: "1",
        env_names.OTEL_EXPORTER_OTLP_ENDPOINT: endpoint,
        env_names.OTEL_EXPORTER_OTLP_PROTOCOL: "http/protobuf",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*program, *places, *arguments],
            env={**os.environ, **traced},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is ours: we end it, and wait for it
        )
    try:
        _wait_for_health(process, f"http://{LOOPBACK}:{port}", log)
        yield f"http://{LOOPBACK}:{port}"
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_TIMEOUT_S)


def _wait_for_health(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Until the server answers. Raises ClickException with the end of its log."""
    until = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < until:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        time.sleep(0.5)
    text = log.read_text("utf-8", "replace")[-MAX_LOG_CHARS:]
    raise click.ClickException(f"vLLM did not start; the end of its log:\n{text}\n{NO_NETWORK}")


def send_requests(url: str, model: str) -> None:
    """WARMUPS one after another, then REQUESTS at once, of which some have to wait. Raises OSError."""

    def send(name: str) -> None:
        body = {"model": model, "prompt": PROMPT, "max_tokens": 16, "stream": True}
        headers = {"content-type": "application/json", header_names.REQUEST_ID: name}
        request = urllib.request.Request(url + COMPLETIONS_PATH, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=START_TIMEOUT_S) as answer:
            answer.read()

    for number in range(1, WARMUPS + 1):
        send(f"{WARMUP}{number:02}")
    with ThreadPoolExecutor(REQUESTS) as pool:
        list(pool.map(send, [f"demo-{number:02}" for number in range(1, REQUESTS + 1)]))


def trace_live(model: str, arguments: Sequence[str], database: Path) -> None:
    """Store the traces of REQUESTS requests to a vLLM that runs for them alone. Raises ClickException."""
    if importlib.util.find_spec("vllm") is None:
        raise click.UsageError(
            "vLLM is not installed in this environment: `ttft-otel demo --recorded` needs none"
        )
    click.echo(f"Starting vLLM with {model}; it takes a minute or more.")
    if not Path(model).is_dir():
        size = ", 1.5 GB," if model == MODEL else ""
        click.echo(f"vLLM downloads it{size} from Hugging Face unless it has it. {NO_NETWORK}")
    # A thread receives while this one, which gets Ctrl-C, drives.
    started, servers = threading.Event(), list[ReportServer]()

    def note_started(server: ReportServer) -> None:
        servers.append(server)
        started.set()

    options = ServeOptions(database, http_port=0, grpc_port=-1)
    thread = threading.Thread(target=run_server, args=(options, note_started))
    thread.start()
    started.wait(STORE_TIMEOUT_S)
    try:
        endpoint = f"http://{LOOPBACK}:{servers[0].http_port}"
        with start_vllm(model, arguments, endpoint, database.with_name("vllm.log")) as url:
            send_requests(url, model)
            _wait_for_traces(database)
    except OSError as error:
        raise click.ClickException(f"a request failed: {error}") from error
    finally:
        for server in servers:
            server.close()
        thread.join(STORE_TIMEOUT_S)


def _wait_for_traces(database: Path) -> None:
    until = time.monotonic() + STORE_TIMEOUT_S
    while time.monotonic() < until:
        with open_reader(database) as reader:
            found = reader.list_latest(RequestFilter())
        if len([each for each in found if not each.pending]) >= REQUESTS + WARMUPS:
            return
        time.sleep(0.2)
    raise click.ClickException("no traces came: ask `ttft-otel doctor`")


@click.command(
    epilog="""\b
Examples:
  ttft-otel demo                                  starts vLLM, sends it ten requests, shows the page
  ttft-otel demo --model MODEL -- --dtype float32 another model; what follows -- goes to vllm serve
  ttft-otel demo --recorded                       its page, on a free port, until Ctrl-C
  ttft-otel demo --recorded --db spans.db         keep them in a file, and show no page
"""
)
@click.option("--recorded", is_flag=True, help="Show requests that were recorded; needs no vLLM.")
@click.option("--model", default=MODEL, show_default=True, help="Model that vLLM serves.")
@click.argument("vllm_arguments", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--db",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write them to this database, and end.",
)
@click.option("--http-port", type=click.IntRange(0, 65535), default=0, help="Port of the page.")
# `explain` is from main.py, which may import explain/; None where the command is called by itself.
@click.pass_obj
def demo(
    explain: Explainer | None,
    recorded: bool,
    model: str,
    vllm_arguments: tuple[str, ...],
    db: Path | None,
    http_port: int,
) -> None:
    """Trace ten requests to vLLM, or load recorded ones; serve their page here, and say what to ask."""
    if db and db.exists():
        raise click.UsageError(f"{db} is there already: choose another file")
    with tempfile.TemporaryDirectory(prefix="ttft-otel-demo-") as folder:
        database = db or Path(folder) / "spans.db"
        if recorded:
            spans = read_recorded(time.time_ns() - 1_000_000_000)
            store = SpanStore(database)
            try:
                store.add(spans).result(STORE_TIMEOUT_S)
            finally:
                store.close()
            whose = "Requests of a real vLLM (tiny model, two CPU cores)."
            commands = list_commands(spans, database)
        else:
            trace_live(model, vllm_arguments, database)
            whose = f"{REQUESTS} requests to {model}."
            commands = list_commands(_read_spans(database), database)[:2]  # nothing to compare with
        lines = "".join(f"\n  {line}" for line in commands)
        told = f"{whose} Ask of them:{lines}"
        if db:
            click.echo(told)
        else:
            options = ServeOptions(database, http_port=http_port, grpc_port=-1, explain=explain)
            with contextlib.suppress(KeyboardInterrupt):
                run_server(
                    options,
                    lambda server: click.echo(
                        f"{told}\nPage: http://{LOOPBACK}:{server.http_port}   Ctrl-C ends it"
                    ),
                )


def _read_spans(database: Path) -> list[StoredSpan]:
    with open_reader(database) as reader:
        traces = [reader.find_trace(each.trace_id) for each in reader.list_latest(RequestFilter())]
    return [span for trace in traces if trace for span in trace.spans]
