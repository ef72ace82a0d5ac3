# SPDX-License-Identifier: Apache-2.0
"""Try ttft-otel on several vLLM releases, one server at a time, with known delays injected into each.

scripts/compat runs it; releases.py makes the environments, matrix.py judges and draws the table.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import click

from ttft_otel import names, stages, timing
from ttft_otel.hooks import ledger
from ttft_otel.lab import client, matrix, models, releases, screen
from ttft_otel.lab.client import Answer
from ttft_otel.lab.fleet import Fleet, Plan, deployed
from ttft_otel.lab.injection import Control
from ttft_otel.lab.matrix import Cell, Row, Sample
from ttft_otel.lab.recipes import Options
from ttft_otel.lab.screen import Screen
from ttft_otel.lab.servers import ServerError, terminable

DELAY: Final = 80.0  # ms
TOLERANCE: Final = 5.0  # ms
PAIRS: Final = 5
COMPLAINT: Final = re.compile(r"(WARNING|ERROR).*ttft.otel|ttft.otel.*(missing|failed|wrong)")


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="""\b
Examples:
  scripts/compat                           all releases; an environment of 3 GB each, made once
  scripts/compat 0.24.0                    one release, 2 to 5 minutes
  scripts/compat --markdown --json out/compat.json
Exit code 1 unless a text and an image request close on every release.
""",
)
@click.argument("versions", nargs=-1, type=click.Choice(releases.RUNNABLE))
@click.option("--json", "to", type=click.Path(path_type=Path, dir_okay=False), help="Write a file.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Only the table, for the README.")
def command(versions: tuple[str, ...], to: Path | None, as_markdown: bool) -> None:
    """Say for each vLLM release which stages work, which are unattributed, and why."""
    with screen.showing(stderr=as_markdown) as show, terminable():
        rows = [examine(show, version) for version in versions or releases.RUNNABLE]
        for line in matrix.remarks(rows):
            show.say(line)
    click.echo(matrix.markdown(rows))
    if to:
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", "utf-8")
    sys.exit(0 if all(row.closed for row in rows) else 1)


def examine(show: Screen, version: str) -> Row:
    """Everything about one release."""
    show.step(f"vLLM {version}: environment")
    python = releases.environment(version)
    missing = absent(python)
    show.step(f"vLLM {version}: starting a server")
    try:
        with tried(show, python) as bench:
            closes = {kind: bench.closes(kind) for kind in matrix.PLACES}
            # Without a breakdown there is nothing to look for a delay in.
            open_kinds = [kind for kind, why in closes.items() if why]
            cells = {
                place: bench.inject(place, kind, stage, missing)
                for kind, places in matrix.PLACES.items()
                if kind not in open_kinds
                for place, stage in places.items()
            }
            left = {kind: bench.left(kind) for kind in closes}
            return Row(version, closes, cells, missing, bench.complaints(), left)
    except ServerError as error:
        why = f"no server: {error}"
        return Row(version, dict.fromkeys(matrix.PLACES, why), {}, missing)


def absent(python: Path) -> dict[str, str]:
    """Targets that the release in this environment lacks, and what exactly is not there."""
    found = next(python.parents[1].glob("lib/python*/site-packages/vllm"))
    return {name: what for name, what in ledger.check(found).items() if what}


@contextmanager
def tried(show: Screen, python: Path) -> Iterator[Bench]:
    """One traced server of the release, warmed up, gone when the block ends."""
    with tempfile.TemporaryDirectory(prefix="ttft-otel-") as scratch:
        control = Control(Path(scratch) / "control.json")
        options = Options(
            model=models.build(models.VISION), python=str(python), control=control.path
        )
        plan = Plan("mono", options, folder=Path(scratch) / "run")
        with deployed(plan, progress=show.waiting) as fleet:
            bench = Bench(show, fleet, control)
            show.step("warming up")
            for kind in matrix.PLACES:
                for _ in range(3):
                    bench.ask(kind)
            yield bench


@dataclass(slots=True)
class Bench:
    """One server under test."""

    show: Screen
    fleet: Fleet
    control: Control
    seed: int = field(default=100)

    def ask(self, kind: str) -> Answer:
        """One request that asks for its timings; an image is new each time."""
        self.seed += 1
        question: dict[str, Any] = {"pictures": (self.seed,)} if kind == "image" else {}
        return client.ask(self.fleet.front, headers={names.ASK: "1"}, max_tokens=1, **question)

    def closes(self, kind: str) -> str:
        """Why a request of this kind does not close; "" when it does."""
        answer = self.ask(kind)
        if answer.status != 200:
            return f"status {answer.status}: {answer.body[:200]!r}"
        text = answer.headers.get(names.TIMING, "")
        return "" if timing.read(text) else f"{names.TIMING}: {text or 'no such header'}"

    def left(self, kind: str) -> float:
        """Unattributed milliseconds of one request."""
        return self.sample(kind).get(stages.UNATTRIBUTED, 0) / 1000

    def sample(self, kind: str) -> Sample:
        """One request's stages and remainder, µs."""
        found = timing.read(self.ask(kind).headers.get(names.TIMING, ""))
        return {**found.stages, stages.UNATTRIBUTED: found.unattributed} if found else {}

    def inject(self, place: str, kind: str, stage: str, missing: dict[str, str]) -> Cell:
        """Plain and delayed requests in turn; where the delay went."""
        self.show.step(f"{DELAY:.0f} ms at {place}: must show in {stage}")
        plain: list[Sample] = []
        delayed: list[Sample] = []
        for _ in range(PAIRS):
            plain.append(self.sample(kind))
            with self.control.delaying(place, DELAY):
                delayed.append(self.sample(kind))
        if not any(delay.place == place for delay in self.control.delays()):
            return Cell(matrix.ABSENT, "the delay found nothing to wait in")
        cell = matrix.judge(matrix.moved(plain, delayed), stage, DELAY, TOLERANCE, missing)
        self.show.say(f"          {cell.state}: {cell.note}")
        return cell

    def complaints(self) -> list[str]:
        """What ttft-otel itself wrote into the server's log, if it was not pleased."""
        lines = self.fleet.servers["mono"].read_log()
        return [line for line in lines if COMPLAINT.search(line)]


if __name__ == "__main__":
    command()
