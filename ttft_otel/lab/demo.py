# SPDX-License-Identifier: Apache-2.0
"""The demo: servers, router and receiver on this machine, questions through them, report and verdict.

scripts/demo runs it. questions.py says what is asked, verdict.py whether all of it closed, and the
report's own code writes report.json and report.html next to the database.
"""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import sqlite3
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
import jsonschema

from ttft_otel.lab import client, models, questions, screen, verdict
from ttft_otel.lab.client import Answer
from ttft_otel.lab.fleet import Fleet, Plan, deployed
from ttft_otel.lab.questions import Asked
from ttft_otel.lab.recipes import Options
from ttft_otel.lab.releases import PROJECT
from ttft_otel.lab.screen import Screen
from ttft_otel.lab.servers import ServerError, terminable
from ttft_otel.lab.verdict import Seen
from ttft_otel.report import export, terminal
from ttft_otel.report.export import Measured
from ttft_otel.report.query import Reader, reader

CHUNK: Final = 512  # tokens a step: long prompts take several
ARRIVE_S: Final = 30.0  # for the last spans to reach the receiver
SCHEMA: Final = PROJECT / "tests" / "golden" / "report.schema.json"
INTERRUPTED: Final = 130
TOPOLOGIES: Final = {
    "epd": "encoder, prefill-decode",
    "pd": "prefill, decode",
    "epd3": "encoder, prefill, decode",
}


@dataclass(frozen=True, slots=True)
class Result:
    """What the demo found out; faults: request -> why it did not close."""

    report: dict[str, Any]
    faults: dict[str, list[str]]
    seconds: float


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="""\b
Examples:
  scripts/demo                  everything, then stop; about 3 minutes once installed
  scripts/demo --keep           leave the servers up and look at the page until Ctrl-C
  scripts/demo --topology pd    prefill and decode apart, KV blocks over NIXL; epd3: an encoder too
  scripts/demo --json | jq '.summary.stages'
  scripts/demo --out DIR        report.json, report.html, spans.db and logs go there
Exit codes: 0 every request closed, 1 something did not (it says what), 130 interrupted.
""",
)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="[default: out/demo]")
@click.option("--keep", is_flag=True, help="Leave everything up until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print report.json to stdout.")
@click.option("--topology", type=click.Choice(tuple(TOPOLOGIES)), default="epd", show_default=True)
def command(out: Path | None, keep: bool, as_json: bool, topology: str) -> None:
    """Trace requests through a real vLLM deployment behind our router, on this CPU."""
    # A shell's background job starts with Ctrl-C ignored; it must still stop everything.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with screen.showing(stderr=as_json) as show, terminable():
        try:
            code = demo(show, (out or PROJECT / "out" / "demo").resolve(), keep, as_json, topology)
        except KeyboardInterrupt:
            show.say("Interrupted; everything that was started is stopped.", "bold")
            code = INTERRUPTED
        except (ServerError, OSError, http.client.HTTPException) as error:
            show.say(f"The demo could not run: {error}", "red")
            code = 1
    sys.exit(code)


def demo(show: Screen, out: Path, keep: bool, as_json: bool, shape: str) -> int:
    """All of it; the exit code."""
    clean(out)
    show.step("building the tiny models (once)")
    options = Options(model=models.build(models.VISION))
    show.step(f"starting receiver, {TOPOLOGIES[shape]} and router (1 to 4 minutes)")
    plan = Plan(shape, options, chunk=CHUNK, folder=out)
    try:
        with deployed(plan, progress=show.waiting) as fleet:
            result = measure(show, fleet, out, shape)
            present(show, result, out)
            if as_json:
                click.echo(json.dumps(result.report, indent=2, ensure_ascii=False))
            if keep:
                stay(show, fleet)
            show.step("stopping")
    finally:
        shutil.rmtree(out / "encoder-cache", ignore_errors=True)
    seal(out / "spans.db")
    return 1 if result.faults else 0


def clean(out: Path) -> None:
    """Remove what an earlier demo left in the folder, and nothing else."""
    for name in ("report.json", "report.html", "spans.db", "spans.db-wal", "spans.db-shm"):
        (out / name).unlink(missing_ok=True)
    for name in ("logs", "encoder-cache"):
        shutil.rmtree(out / name, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)


def seal(database: Path) -> None:
    """Fold the write-ahead log in, so that the one file can be copied."""
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def measure(show: Screen, fleet: Fleet, out: Path, shape: str) -> Result:
    """Warm up, ask everything, wait for the traces, write the report, judge."""
    asked = questions.plan()
    warm(show, fleet, asked)
    show.step(f"asking {len(asked)} requests through the router")
    began = time.monotonic()
    answers = ask(show, fleet, asked)
    seconds = time.monotonic() - began
    show.step("waiting for the last spans")
    all_seen = arrive(fleet, asked, answers, shape)
    rows = [
        Measured(each.name, each.kind, milliseconds(answers[each.name].client_ttft_us))
        for each in asked
    ]
    report = export.write(fleet.database, rows, out, "ttft-otel demo")
    faults = verdict.verdict(all_seen)
    for problem in check(report):
        faults.setdefault("report.json", []).append(problem)
    return Result(report, faults, seconds)


def warm(show: Screen, fleet: Fleet, asked: Sequence[Asked]) -> None:
    """The first request of a kind imports and compiles: that belongs into no report."""
    waves = questions.warming(asked)
    show.step(f"warming up with {len(waves)} waves of other requests, not in the report")
    for number, wave in enumerate(waves, 1):
        show.now(f"warming up: {number} of {len(waves)}")
        client.ask_all(fleet.front, wave)


def ask(show: Screen, fleet: Fleet, asked: Sequence[Asked]) -> dict[str, Answer]:
    """Wave after wave; request -> its answer."""
    answers: dict[str, Answer] = {}
    for wave in dict.fromkeys(each.wave for each in asked):
        members = [each for each in asked if each.wave == wave]
        show.now(f"{members[0].name} of {len(asked)}: {members[0].kind}")
        came = client.ask_all(fleet.front, [each.question for each in members])
        answers |= {each.name: answer for each, answer in zip(members, came, strict=True)}
    return answers


def arrive(
    fleet: Fleet, asked: Sequence[Asked], answers: Mapping[str, Answer], shape: str
) -> list[Seen]:
    """Wait until every trace is whole in the receiver, ARRIVE_S at most."""
    deadline = time.monotonic() + ARRIVE_S
    while True:
        with reader(fleet.database) as found:
            all_seen = [look(found, each, answers[each.name], shape) for each in asked]
        if not any(verdict.lacking(seen.trace, seen.legs) for seen in all_seen):
            return all_seen
        if time.monotonic() > deadline:
            return all_seen
        time.sleep(0.5)


def look(found: Reader, asked: Asked, answer: Answer, shape: str) -> Seen:
    """One request as it is stored now."""
    one = found.request(asked.name)
    trace = found.trace(one.trace_id) if one else None
    return Seen(asked.name, answer.status, asked.legs(shape), trace)


def check(report: Mapping[str, Any]) -> list[str]:
    """What is wrong with report.json: its shape, or requests without a trace."""
    schema = json.loads(SCHEMA.read_text("utf-8"))
    found = [
        f"{error.json_path}: {error.message}"
        for error in jsonschema.Draft202012Validator(schema).iter_errors(report)
    ]
    if missing := report["summary"]["missing"]:
        found.append(f"no trace of {', '.join(missing)}")
    if not report["summary"]["closed"]:
        found.append("summary: not closed")
    return found


def milliseconds(us: int | None) -> float | None:
    """Microseconds as the report has them."""
    return None if us is None else us / 1000


def present(show: Screen, result: Result, out: Path) -> None:
    """Both tables, the verdict, and where everything lies."""
    rows = result.report["requests"]
    show.say()
    show.console.print(screen.requests_table(rows, result.faults))
    show.say()
    with reader(out / "spans.db") as found:
        pairs, _ = export.join(found, [Measured(row["request_id"]) for row in rows])
    terminal.table([pair.request for pair in pairs], show.console)
    show.say()
    for name, sentences in result.faults.items():
        show.say(f"✗ {name}: {'; '.join(sentences)}", "red")
    if not result.faults:
        show.say(
            f"✓ {len(rows)} requests in {result.seconds:.1f} s: every trace whole, every sum exact "
            "to the microsecond, nothing unattributed on any server",
            "green",
        )
    show.say(f"page      {out / 'report.html'}")
    show.say(f"data      {out / 'report.json'}")
    show.say(f"database  ttft-otel serve --db {out / 'spans.db'}    then http://127.0.0.1:4318")


def stay(show: Screen, fleet: Fleet) -> None:
    """Leave everything up until Ctrl-C."""
    show.say()
    show.say(f"live page {fleet.url('receiver')}", "bold")
    show.say(f"router    {fleet.front}    (model: tiny; ask it what you like)", "bold")
    try:
        while all(server.alive for server in fleet.servers.values()):
            show.now("everything is up; Ctrl-C stops it")
            time.sleep(1)
        show.say("a server has ended by itself; its log lies in the logs folder", "red")
    except KeyboardInterrupt:
        show.say("Ctrl-C: stopping")


if __name__ == "__main__":
    command()
