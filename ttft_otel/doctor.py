# SPDX-License-Identifier: Apache-2.0
"""`ttft-otel doctor`: is every hop set up, patched, sending and answering? cli.py offers it.

It looks at this environment as a server started from it would, and at running servers by --url.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ttft_otel import __version__, context, names, record, settings, stages, timing
from ttft_otel.hooks import ledger
from ttft_otel.hooks.targets import BY_NAME

State = Literal["ok", "note", "fail"]

GROUP: Final = "vllm.general_plugins"
ENV_PLUGINS: Final = "VLLM_PLUGINS"  # vLLM's own: which plugins it may load
SERVICE: Final = "ttft-otel-doctor"
STYLES: Final[dict[State, str]] = {"ok": "green", "note": "yellow", "fail": "bold red"}
RECEIVER: Final = f"start a receiver there (ttft-otel serve) or set {names.ENV_ENDPOINT}"
ANSWERS: Final = {
    "401": "the endpoint wants credentials: set OTEL_EXPORTER_OTLP_HEADERS",
    "403": "the endpoint refuses these credentials: mend OTEL_EXPORTER_OTLP_HEADERS",
    "404": "no OTLP receiver at this path: http/protobuf is port 4318 as a rule; for port 4317 "
    f"set {names.ENV_PROTOCOL}=grpc",
    "UNIMPLEMENTED": f"no OTLP receiver there: set {names.ENV_PROTOCOL}=http/protobuf for port 4318",
}
EXAMPLES: Final = """
\b
Examples:
  ttft-otel doctor                                  this environment and its endpoint
  TTFT_OTEL=1 ttft-otel doctor                      ... as a server started with it sees it
  ttft-otel doctor --url http://127.0.0.1:8000      and a running server or router
  ttft-otel doctor --json | jq '.checks[] | select(.state == "fail")'
"""


@dataclass(frozen=True, slots=True)
class Check:
    """One line: what was looked at, how it is, and what to do where that is not well."""

    name: str
    state: State
    says: str
    remedy: str = ""


def switched(now: settings.Settings) -> Iterator[Check]:
    """The environment's own words."""
    for line in settings.validate(now):
        says, _, remedy = line.partition("; ")
        yield Check("settings", "fail", says, remedy)
    if now.on:
        yield Check("settings", "ok", f"{names.ENV_ON} is on, sampler {now.sampler}")
    else:
        remedy = f"set {names.ENV_ON}=1 where vllm serve is started"
        yield Check("settings", "note", f"{names.ENV_ON} is off in this environment", remedy)


def loaded() -> Iterator[Check]:
    """Will vLLM call our plugin?"""
    found = importlib.metadata.entry_points(group=GROUP)
    ours = [point.name for point in found if point.value.startswith("ttft_otel.")]
    allowed = os.environ.get(ENV_PLUGINS)
    if not ours:
        remedy = f"install it into vLLM's Python: {sys.executable} -m pip install ttft-otel"
        yield Check("plugin", "fail", "vLLM cannot find the plugin", remedy)
    elif allowed is not None and ours[0] not in allowed.split(","):
        remedy = f"add {ours[0]} to {ENV_PLUGINS}, or unset it"
        yield Check("plugin", "fail", f"{ENV_PLUGINS}={allowed} leaves it out", remedy)
    else:
        yield Check("plugin", "ok", f"ttft-otel {__version__}, found by its entry point")


def targets() -> Iterator[Check]:
    """Has the vLLM that is installed here what we hang into? Read, not imported."""
    root = ledger.root()
    if root is None:
        yield Check("vllm", "note", "not installed here, which is right for a router alone")
        return
    states = ledger.check(root)
    for name, what in states.items():
        if what:
            target = BY_NAME[name]
            lost = ", ".join(target.lost) or f"no stage ({target.marks})"
            remedy = "upgrade ttft-otel; until then the time of these stages is unattributed"
            yield Check("vllm", "fail", f"{name}: {what} is gone; costs {lost}", remedy)
    if not any(states.values()):
        yield Check("vllm", "ok", f"all {len(states)} targets are there")


def endpoint(now: settings.Settings) -> Iterator[Check]:
    """Send one span over the exporter's own code and tell what the endpoint answered."""
    from opentelemetry.sdk.trace.export import SpanExporter  # 0.3 s that --help need not take

    from ttft_otel.exporter import health, identity, ship, spans

    logging.getLogger("ttft_otel").addHandler(logging.NullHandler())
    made = _record()
    hurry = threading.Event()
    hurry.set()  # one try
    exporter: SpanExporter = ship.exporter(now)
    sending = ship.Ship(exporter, health.Health(), now.endpoint, hurry)
    sending.send(spans.build(made, identity.Resources(os.getpid()).get(SERVICE)))
    exporter.shutdown()
    where = f"{now.protocol} to {now.endpoint}"
    if sending.health.counts()["exported"]:
        yield Check("endpoint", "ok", f"{where}: accepted, trace {made.trace_id}")
        return
    reason = sending.reason.text or "no answer"
    remedy = next((text for code, text in ANSWERS.items() if code in reason), RECEIVER)
    yield Check("endpoint", "fail", f"{where}: {reason}", remedy)


def _record() -> record.Record:
    made = context.start("", "", settings.Settings(sampler="always_on"))
    return record.Record(
        version=record.VERSION,
        trace_id=made.trace_id,
        span_id=made.span_id,
        parent_id="",
        flags=made.flags,
        state="",
        start_ns=time.time_ns(),
        role="mono",
        outermost=False,
        service=SERVICE,
        request_id="",
        server=record.Server("ttft-otel doctor", 1, 0),
    )


def server(url: str, timeout: float) -> Iterator[Check]:
    """Does a running server or router answer with timings? One request of one token."""
    base = url.rstrip("/").removesuffix("/v1")
    try:
        told = _first_token(base, timeout)
    except HTTPError as error:
        remedy = "the server's log says why; doctor needs one request of one token to succeed"
        yield Check(base, "fail", f"{error.url} answers {error.code}", remedy)
        return
    except (URLError, OSError, ValueError, LookupError, TypeError) as error:
        reason = getattr(error, "reason", None) or str(error) or type(error).__name__
        yield Check(base, "fail", f"no answer: {reason}", f"is it up? curl {base}/v1/models")
        return
    found = timing.read(told)
    if found is None:
        remedy = (
            f"start it with {names.ENV_ON}=1 and ttft-otel in its Python; its log has one line "
            "that begins with 'ttft-otel'"
        )
        yield Check(base, "fail", "answers without timings: it is not traced", remedy)
        return
    lost = found.unattributed
    says = f"first token after {found.ttft / 1000:.1f} ms in {len(found.stages)} stages"
    if lost * 20 > found.ttft:
        remedy = "its log names the targets that are missing"
        yield Check(base, "note", f"{says}, {lost / 1000:.1f} ms {stages.UNATTRIBUTED}", remedy)
    else:
        yield Check(base, "ok", f"{says}, {lost / 1000:.1f} ms {stages.UNATTRIBUTED}")


def _first_token(base: str, timeout: float) -> str:
    """The Server-Timing of a request of one token: chat, or a completion where there is no chat."""
    _, models = _ask(f"{base}/v1/models", None, timeout)
    model = models["data"][0]["id"]
    body = {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": "1"}]}
    try:
        return _ask(f"{base}/v1/chat/completions", body, timeout)[0]
    except HTTPError as error:
        if error.code not in (400, 404):
            raise
    prompt = {"model": model, "max_tokens": 1, "prompt": "1"}
    return _ask(f"{base}/v1/completions", prompt, timeout)[0]


def _ask(url: str, body: Any, timeout: float) -> tuple[str, Any]:
    headers = {names.ASK: "1", "content-type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(url, data, headers), timeout=timeout) as answer:
        return answer.headers.get(names.TIMING, ""), json.load(answer)


def checks(urls: tuple[str, ...], timeout: float) -> Iterator[Check]:
    """Everything, in the order in which a request passes."""
    now = settings.read()
    yield from switched(now)
    yield from loaded()
    yield from targets()
    yield from endpoint(now)
    for url in urls:
        yield from server(url, timeout)


def show(found: list[Check]) -> None:
    """A line each, its remedy below it."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in found:
        says = Text(check.says)
        if check.remedy:
            says.append(f"\n-> {check.remedy}", style="bold" if check.state == "fail" else "dim")
        table.add_row(Text(check.state, style=STYLES[check.state]), Text(check.name), says)
    Console(highlight=False).print(table)


@click.command("doctor", epilog=EXAMPLES)
@click.option(
    "--url",
    "urls",
    multiple=True,
    metavar="URL",
    help="A running server or router to ask too; repeatable. It is sent ONE REQUEST OF ONE TOKEN "
    "(model taken from /v1/models), with the header that asks for timings.",
)
@click.option("--json", "plain", is_flag=True, help="Print JSON: ok, and checks with their state.")
@click.option(
    "--timeout", default=30.0, show_default=True, help="Seconds to wait for a server's answer."
)
def command(urls: tuple[str, ...], plain: bool, timeout: float) -> None:
    """Say which hop is not traced, and how to mend it.

    Looks at the settings, the plugin, the vLLM installed here, and sends one test span to the
    endpoint. Exit code 1 when something fails; a note is no failure.
    """
    found = list(checks(urls, timeout))
    well = all(check.state != "fail" for check in found)
    if plain:
        click.echo(json.dumps({"ok": well, "checks": [asdict(check) for check in found]}, indent=2))
    else:
        show(found)
    sys.exit(0 if well else 1)
