# SPDX-License-Identifier: Apache-2.0
"""`ttft-otel doctor`: check settings, plugin, vLLM's patch targets, the OTLP endpoint, and servers.

It checks this environment as a server started from it would see it, and running servers by --url.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import itertools
import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ttft_otel import __version__
from ttft_otel.hooks import target_check
from ttft_otel.hooks.targets import TARGETS_BY_NAME
from ttft_otel.model import record, stages, timing
from ttft_otel.model.endpoints import CHAT_PATH, COMPLETIONS_PATH, MODELS_PATH
from ttft_otel.model.names import env_names, header_names, metric_names
from ttft_otel.tracing import context, settings

CheckState = Literal["ok", "note", "fail"]

PLUGIN_GROUP: Final = "vllm.general_plugins"
ENV_PLUGINS: Final = "VLLM_PLUGINS"  # vLLM's variable: comma-separated plugins that it may load
DOCTOR_SERVICE: Final = "ttft-otel-doctor"
# Packages, and what a server started with them does.
OTHER_TRACERS: Final = {
    "ddtrace": "under ddtrace-run its spans go to Datadog's agent; `traceparent` joins them with ours",
    "opentelemetry-instrumentation-fastapi": "where it is active its span is the parent of ours",
}
STATE_STYLES: Final[dict[CheckState, str]] = {"ok": "green", "note": "yellow", "fail": "bold red"}
NO_RECEIVER_REMEDY: Final = (
    f"start a receiver there (ttft-otel serve) or set {env_names.OTEL_EXPORTER_OTLP_ENDPOINT}"
)
ENDPOINT_REMEDIES: Final = {
    "401": "the endpoint requires credentials: set OTEL_EXPORTER_OTLP_HEADERS",
    "403": "the endpoint refuses these credentials: correct OTEL_EXPORTER_OTLP_HEADERS",
    "404": "no OTLP receiver at this path: http/protobuf is port 4318 as a rule; for port 4317 "
    f"set {env_names.OTEL_EXPORTER_OTLP_PROTOCOL}=grpc",
    "UNIMPLEMENTED": "no OTLP receiver there: set "
    f"{env_names.OTEL_EXPORTER_OTLP_PROTOCOL}=http/protobuf for port 4318",
}
# What stands in the SDK's or the system's text -> the sentence for it; the first that fits.
FAILURE_SENTENCES: Final = (
    ("connection refused", "no answer: nothing listens there"),
    ("not known|failed to resolve|resolution", "no answer: its host name is not known"),
    ("certificate|ssl|tls", "TLS fails: its certificate is not accepted, or it speaks no TLS"),
    ("timed out|timeout|deadline", "no answer in time"),
    ("unreachable|no route", "no answer: its network is not reached"),
    (r"\b(UNIMPLEMENTED|UNAUTHENTICATED|PERMISSION_DENIED|RESOURCE_EXHAUSTED)\b", r"answers \1"),
    (r"code:? ([45]\d\d)\b", r"answers \1"),
)
EXAMPLES: Final = """
\b
Examples:
  ttft-otel doctor                                  this environment and its endpoint
  TTFT_OTEL=1 ttft-otel doctor                      ... as a server started with it sees it
  ttft-otel doctor --url http://127.0.0.1:8000      and a running server or router
  ttft-otel doctor --json | jq '.checks[] | select(.state == "fail")'
"""
NOTABLE_ERROR_US: Final = 200  # docs/reference/device-clock.md: at most 150 at p99, as a rule
CLOCK_REASONS: Final = {
    "host": "host clock: it runs on a CPU, where work is done when a call returns",
    "device": "device clock: CUDA events, places to about {error_us} us",
    "lengths": "lengths only: no CUDA device, or a worker on another host than its engine core",
    "none": "no clock: this accelerator has no timing events",
}
LATE_REMEDY: Final = (
    "the thread that reads the device's results is late (does the server have enough CPU cores?), "
    "or NTP is correcting the host's clock"
)
GAPS_REMEDY: Final = "what lies between the worker's stages is unattributed: docs/limits.md"
MAX_PAGE_BYTES: Final = 8 << 20  # of a /metrics page; the rest is not read
RECOMPUTED_REMEDY: Final = (
    "check, in this order: the encoders' answers have ec_transfer_params; encoder and consumer have the "
    "same EC connector; the consumer reaches the encoder's EC port; ec_cpu_bytes is large enough "
    "(docs/router.md#encoder-cache-parameters)"
)
_SAMPLE: Final = re.compile(
    rf'^{metric_names.ROUTER_RECOMPUTED_ITEMS}_total\{{(?:.*,)?instance="([^"]*)".*\}} '
    r"(\d+(?:\.\d+)?(?:e\+?\d+)?)$",
    re.M,
)


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check: what was checked, its state, a message, and what to do if it is not ok."""

    name: str
    state: CheckState
    says: str
    remedy: str = ""


def check_settings(chosen: settings.Settings) -> Iterator[Check]:
    """Check the environment variables, as read into `chosen`."""
    for line in chosen.problems:
        message, _, remedy = line.partition("; ")
        yield Check("settings", "fail", message, remedy)
    if chosen.on:
        yield Check("settings", "ok", f"{env_names.TTFT_OTEL} is on, sampler {chosen.sampler}")
    else:
        remedy = f"set {env_names.TTFT_OTEL}=1 where vllm serve is started"
        yield Check("settings", "note", f"{env_names.TTFT_OTEL} is off in this environment", remedy)
    yield _check_metrics(chosen)
    for reason, patterns in env_names.NOT_FOLLOWED.items():
        for name in itertools.chain(*map(env_names.expand_names, patterns)):
            if os.environ.get(name):
                says = f"{name} has no effect on ttft-otel: {reason.replace('`', '')}"
                yield Check("settings", "note", says)


def _check_metrics(chosen: settings.Settings) -> Check:
    """Check whether metrics count every request, and say who makes them."""
    if chosen.metrics:
        where = os.environ.get(env_names.OTEL_EXPORTER_OTLP_METRICS_ENDPOINT) or chosen.endpoint
        says = (
            f"{env_names.TTFT_OTEL_METRICS} is on: the exporter process counts every request and sends "
            f"{chosen.temporality} metrics to {where}; the collector makes none of its spans"
        )
        return Check("metrics", "ok", says)
    # endswith(): also parentbased_, whose root requests are all sampled.
    if chosen.sampler.endswith("always_on"):
        says = "the collector makes them of the spans, of which all are sent"
        return Check("metrics", "ok", says)
    sampled = f"sampler {chosen.sampler}"
    if chosen.sampler.endswith("traceidratio"):
        sampled += f", ratio {chosen.ratio:g}"
    # A note, not a failure: shares and quantiles may be right, counts are not.
    says = f"the collector makes them of sampled requests alone ({sampled})"
    remedy = f"set {env_names.TTFT_OTEL_METRICS}=1, and the exporter process counts all of them"
    return Check("metrics", "note", says, remedy)


def _check_plugin() -> Iterator[Check]:
    """Check that vLLM will find our plugin and may load it."""
    entry_points = importlib.metadata.entry_points(group=PLUGIN_GROUP)
    ours = [point.name for point in entry_points if point.value.startswith("ttft_otel.")]
    allowed = os.environ.get(ENV_PLUGINS)
    if not ours:
        remedy = f"install it into vLLM's Python: {sys.executable} -m pip install ttft-otel"
        yield Check("plugin", "fail", "vLLM cannot find the plugin", remedy)
    # Set and empty is an allowlist without names for vLLM, not "unset" (plugins/__init__.py).
    elif allowed is not None and ours[0] not in allowed.split(","):
        remedy = f"add {ours[0]} to {ENV_PLUGINS}, or unset it"
        yield Check("plugin", "fail", f"{ENV_PLUGINS}={allowed} leaves it out", remedy)
    else:
        yield Check("plugin", "ok", f"ttft-otel {__version__}, found by its entry point")


def check_other_tracers() -> Iterator[Check]:
    """Name what else traces this environment's servers, and how its spans and ours belong together."""
    for package, says in OTHER_TRACERS.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield Check("others", "ok", f"{package} {importlib.metadata.version(package)}: {says}")
    distro = os.environ.get("OTEL_PYTHON_DISTRO", "")
    if distro not in ("", "ttft_otel"):
        says = f"OTEL_PYTHON_DISTRO={distro}: its SDK sends beside ttft-otel's exporter process"
        yield Check("others", "ok", says)


def check_vllm() -> Iterator[Check]:
    """Check that the installed vLLM has the functions that we patch; its sources are only parsed."""
    root = target_check.find_vllm_folder()
    if root is None:
        yield Check("vllm", "note", "not installed here, which is right for a router alone")
        return
    states = target_check.check_targets(root)
    for name, what in states.items():
        if what:
            target = TARGETS_BY_NAME[name]
            lost = ", ".join(target.lost) or f"no stage ({target.marks})"
            remedy = "upgrade ttft-otel; until then the time of these stages is unattributed"
            yield Check("vllm", "fail", f"{name}: {what} is gone; costs {lost}", remedy)
    if not any(states.values()):
        yield Check("vllm", "ok", f"all {len(states)} targets are there")
    for name, package in target_check.find_unhooked_runners().items():
        says = f"{name} of {package} has an execute_model() of its own, which is not measured"
        yield Check("vllm", "note", says, "on this platform the worker's stages are unattributed")
    if target_check.has_rust_frontend():
        says = f"{target_check.RUST_FRONTEND} is set: {target_check.RUST_FRONTEND_LIMITS}"
        yield Check(
            "front-end", "note", says, f"unset {target_check.RUST_FRONTEND} for whole traces"
        )
    if importlib.util.find_spec("ray") is not None:
        yield _check_ray()


def _check_ray() -> Check:
    """Check that vLLM copies our switch to Ray's actors, which see few variables of the server."""
    folder = os.environ.get("VLLM_CONFIG_ROOT") or os.path.join(
        os.environ.get("XDG_CONFIG_HOME") or "~/.config", "vllm"
    )
    excluded = Path(folder).expanduser() / "ray_non_carry_over_env_vars.json"
    if excluded.is_file() and f'"{env_names.TTFT_OTEL}"' in excluded.read_text("utf-8"):
        remedy = f"take {env_names.TTFT_OTEL} out of it: engine cores that are Ray actors need it"
        return Check("ray", "fail", f"{excluded} keeps {env_names.TTFT_OTEL} from Ray", remedy)
    says = f"vLLM copies {env_names.TTFT_OTEL} to Ray's actors; each node needs ttft-otel"
    return Check("ray", "ok", says)


def _check_endpoint(chosen: settings.Settings) -> Iterator[Check]:
    """Send one span with the exporter's own code, to the endpoint and protocol of `chosen`."""
    from opentelemetry.sdk.trace.export import SpanExporter  # 0.3 s that --help need not take

    from ttft_otel.exporter import export_worker, otlp_exporter, record_queue, span_batch

    logging.getLogger("ttft_otel").addHandler(logging.NullHandler())
    probe = _make_probe_record()
    stop_retrying = threading.Event()
    stop_retrying.set()  # a single attempt
    exporter: SpanExporter = export_worker.create_span_exporter(chosen)
    # The exporter's own class and settings: what passes here passes for a server, too.
    sending = export_worker.BatchExporter(
        exporter, record_queue.ExporterCounters(), chosen.endpoint, stop_retrying
    )
    builder = span_batch.BatchBuilder(span_batch.ResourceCache(os.getpid()))
    builder.add_record(probe)
    for batch in builder.take_batches():
        sending.export_batch(batch)
    exporter.shutdown()
    destination = f"{chosen.protocol} (by {chosen.protocol_reason}) to {chosen.endpoint}"
    if sending.counters.get_counts()["exported"]:
        yield Check("endpoint", "ok", f"{destination}: accepted, trace {probe.trace_id}")
        return
    reason = sending.failure_log.text
    # The SDK's words where there was no time to try again: they tell no cause.
    if "max retries" in reason:
        reason = otlp_exporter.find_connection_error(chosen.endpoint) or reason
    remedy = otlp_exporter.find_protocol_remedy(chosen.protocol, chosen.endpoint) or next(
        (text for code, text in ENDPOINT_REMEDIES.items() if code in reason), NO_RECEIVER_REMEDY
    )
    yield Check("endpoint", "fail", f"{destination}: {describe_failure(reason)}", remedy)


def describe_failure(reason: str) -> str:
    """One short sentence for what the SDK, or a socket, says of a failed attempt."""
    for pattern, sentence in FAILURE_SENTENCES:
        if found := re.search(pattern, reason, re.I):
            return found.expand(sentence)
    return "no answer"


def _make_probe_record() -> record.Record:
    trace_context = context.start_context("", "", settings.Settings(sampler="always_on"))
    return record.Record(
        version=record.RECORD_VERSION,
        trace_id=trace_context.trace_id,
        span_id=trace_context.span_id,
        parent_id="",
        flags=trace_context.flags,
        state="",
        start_ns=time.time_ns(),
        role="mono",
        outermost=False,
        service=DOCTOR_SERVICE,
        request_id="",
        server=record.Server("ttft-otel doctor", 1, 0),
    )


def _check_server(url: str, timeout: float) -> Iterator[Check]:
    """Check that a running server or router answers a request of one token with Server-Timing.

    url: base URL, with or without /v1. timeout: seconds to wait for each answer.
    """
    base = url.rstrip("/").removesuffix("/v1")
    try:
        header = _request_first_token(base, timeout)
    except HTTPError as error:
        remedy = "the server's log says why; doctor needs one request of one token to succeed"
        yield Check(base, "fail", f"{error.url} answers {error.code}", remedy)
        return
    except (URLError, OSError) as error:
        says = describe_failure(str(error))
        yield Check(base, "fail", says, f"is it up? curl {base}/v1/models")
        return
    except (ValueError, LookupError, TypeError):
        remedy = f"is it an OpenAI-compatible server? curl {base}/v1/models"
        yield Check(base, "fail", "answers what no vLLM server or router answers", remedy)
        return
    parsed = timing.parse_server_timing(header)
    if parsed is None:
        remedy = (
            f"start it with {env_names.TTFT_OTEL}=1 and ttft-otel in its Python; its log has one line "
            "that begins with 'ttft-otel'"
        )
        yield Check(base, "fail", "answers without timings: it is not traced", remedy)
        return
    says = (
        f"first token after {parsed.ttft / 1000:.1f} ms in {len(parsed.stages)} stages, "
        f"{parsed.unattributed / 1000:.1f} ms {stages.UNATTRIBUTED}"
    )
    # More than 5 % (a twentieth) unattributed: a patch target is probably missing.
    if parsed.unattributed * 20 > parsed.ttft:
        yield Check(base, "note", says, "its log names the targets that are missing")
    else:
        yield Check(base, "ok", says)
    if parsed.clock is not None:
        yield _check_clock(f"{base} worker", parsed.clock)
    yield from _check_recomputed_items(base, timeout)


def _check_clock(name: str, note: timing.ClockNote) -> Check:
    """The clock that a server uses for its worker's marks, as its Server-Timing names it."""
    says = CLOCK_REASONS[note.word].format(error_us=note.error_us)
    if note.word not in ("host", "device"):
        return Check(name, "note", says, GAPS_REMEDY)
    # A host clock has no such error; it reads 0.
    if note.error_us > NOTABLE_ERROR_US:
        return Check(name, "note", says, LATE_REMEDY)
    return Check(name, "ok", says)


def _check_recomputed_items(base: str, timeout: float) -> Iterator[Check]:
    """Media items that each instance behind a router has encoded again since the router started.

    doctor's own request is text and cannot show that, so this reads what the router has counted for its
    clients. Nothing where this is no router with encoders, or /metrics cannot be read (another check
    reports servers that do not answer).
    """
    try:
        with urlopen(f"{base}/metrics", timeout=timeout) as answer:
            page = answer.read(MAX_PAGE_BYTES).decode("utf-8", "replace")
    except (URLError, OSError, ValueError):
        return
    # float() first: the page's numbers are floats, and large ones have an exponent.
    items = {instance: int(float(count)) for instance, count in _SAMPLE.findall(page)}
    # No sample: not a router with encoders. Zeros are an answer, and are shown.
    if not items:
        return
    name = f"{base}/metrics"
    since = "encoded twice since this router started"
    total = sum(items.values())
    if not total:
        yield Check(name, "ok", f"no media item was {since}")
        return
    by = ", ".join(f"{instance} ({count})" for instance, count in items.items() if count)
    were = "media item was" if total == 1 else "media items were"
    yield Check(name, "note", f"{total} {were} {since}, by {by}", RECOMPUTED_REMEDY)


def _request_first_token(base: str, timeout: float) -> str:
    """The Server-Timing of a request of one token: chat, or a completion where there is no chat."""
    _, models = _request_json(f"{base}{MODELS_PATH}", None, timeout)
    model = models["data"][0]["id"]
    body = {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": "1"}]}
    try:
        return _request_json(f"{base}{CHAT_PATH}", body, timeout)[0]
    except HTTPError as error:
        # 400 and 404: a base model without a chat template, or a server without this API.
        if error.code not in (400, 404):
            raise
    prompt = {"model": model, "max_tokens": 1, "prompt": "1"}
    return _request_json(f"{base}{COMPLETIONS_PATH}", prompt, timeout)[0]


def _request_json(url: str, body: Any, timeout: float) -> tuple[str, Any]:
    headers = {header_names.ASK_TIMING: "1", "content-type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(url, data, headers), timeout=timeout) as answer:
        return answer.headers.get(header_names.SERVER_TIMING, ""), json.load(answer)


def _run_checks(urls: tuple[str, ...], timeout: float) -> Iterator[Check]:
    """All checks, in the order in which a request passes what they check.

    urls: servers and routers to send a request to. timeout: seconds to wait for each answer.
    """
    chosen = settings.read_settings()
    yield from check_settings(chosen)
    # As the exporter process has it.
    replaced = dict(settings.replace_variables(os.environ, chosen.variables))
    os.environ.clear()
    os.environ.update(replaced)
    yield from _check_plugin()
    yield from check_other_tracers()
    yield from check_vllm()
    yield from _check_endpoint(chosen)
    for url in urls:
        yield from _check_server(url, timeout)


def _print_checks(checks: list[Check]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        message = Text(check.says)
        if check.remedy:
            message.append(f"\n-> {check.remedy}", style="bold" if check.state == "fail" else "dim")
        table.add_row(Text(check.state, style=STATE_STYLES[check.state]), Text(check.name), message)
    Console(highlight=False).print(table)


@click.command("doctor", epilog=EXAMPLES)
@click.option(
    "--url",
    "urls",
    multiple=True,
    metavar="URL",
    help="A running server or router to check too; repeatable. It is sent ONE REQUEST OF ONE TOKEN "
    "(model taken from /v1/models), with the header that asks for timings.",
)
@click.option("--json", "plain", is_flag=True, help="Print JSON: ok, and checks with their state.")
@click.option(
    "--timeout", default=30.0, show_default=True, help="Seconds to wait for a server's answer."
)
def command(urls: tuple[str, ...], plain: bool, timeout: float) -> None:
    """Check the setup; say what is not traced, and how to fix it.

    Checks the settings, the plugin and the vLLM installed here, and sends one test span to the
    endpoint. The exit code is 1 when a check fails; a note is not a failure.
    """
    results = list(_run_checks(urls, timeout))
    passed = all(check.state != "fail" for check in results)
    if plain:
        click.echo(
            json.dumps({"ok": passed, "checks": [asdict(check) for check in results]}, indent=2)
        )
    else:
        _print_checks(results)
    sys.exit(0 if passed else 1)
