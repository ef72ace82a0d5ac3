# SPDX-License-Identifier: Apache-2.0
"""Check ttft-otel on several vLLM releases, one server at a time, with known delays injected into each.

scripts/compat runs it; vllm_releases.py creates the environments, compat_matrix.py evaluates the
measurements. With --source it only parses a vLLM checkout (source_check.py).
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

from lab import (
    compat_matrix,
    progress_screen,
    source_report,
    tiny_models,
    ttft_client,
    vllm_releases,
)
from lab.compat_matrix import MatrixCell, ReleaseRow, StageSample
from lab.injection import InjectionControl
from lab.local_deployment import DeploymentPlan, LocalDeployment, start_deployment
from lab.local_servers import LocalServerError, exit_on_sigterm
from lab.progress_screen import ProgressScreen
from lab.server_commands import VllmOptions
from lab.source_check import SourceError, check_source
from lab.ttft_client import TimedResponse
from ttft_otel.hooks import target_check
from ttft_otel.model import stages, timing
from ttft_otel.model.names import header_names

# Sixteen times the tolerance: what shows elsewhere is told from noise.
DELAY_MS: Final = 80.0  # injected into one place at a time
TOLERANCE_MS: Final = 5.0  # accepted deviation of a stage's median
# Alternating, so that a drift of the machine is in both medians.
SAMPLE_PAIRS: Final = 5  # requests without and with the delay, alternating
# Levels as vLLM's log prints them, or our own words where another level is used.
COMPLAINT_PATTERN: Final = re.compile(
    r"(WARNING|ERROR).*ttft.otel|ttft.otel.*(missing|failed|wrong)"
)


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="""\b
Examples:
  scripts/compat                           all releases; an environment of 3 GB each, made once
  scripts/compat 0.24.0                    one release, 2 to 5 minutes
  scripts/compat --markdown --json out/compat.json
  scripts/compat --source ../vllm          a checkout that has no wheel yet: what moved
  scripts/compat --source ../vllm --json -
Exit code 1 unless a text and an image request close on every release; with --source, 1 when one of
our targets is lost; 2 when something is wrong with the command or the folder.
""",
)
@click.argument("versions", nargs=-1, type=click.Choice(list(vllm_releases.VLLM_RELEASES)))
@click.option(
    "--json",
    "to",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    metavar="FILE",
    help="Write a file of results; - is standard output, which then holds nothing else.",
)
@click.option("--markdown", "as_markdown", is_flag=True, help="Only the table, for the docs.")
@click.option(
    "--source",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Check this vLLM source tree by reading it: no server, no environment, nothing imported.",
)
def run_compat(
    versions: tuple[str, ...], to: Path | None, as_markdown: bool, source: Path | None
) -> None:
    """Report for each vLLM release which stages work, which are unattributed, and why."""
    if source is not None:
        if versions or as_markdown:
            # Both need servers, which --source does not start.
            raise click.UsageError("--source checks one folder: leave VERSION and --markdown out")
        sys.exit(report_source(source, to))
    # Progress goes to stderr then, so that the output can be redirected into a file.
    only_results = as_markdown or to == Path("-")
    with progress_screen.open_screen(stderr=only_results) as show, exit_on_sigterm():
        rows = [
            examine_release(show, version) for version in versions or vllm_releases.VLLM_RELEASES
        ]
        for line in compat_matrix.list_remarks(rows):
            show.print_line(line)
    # After the screen is closed: its changing line would cut through the table.
    write_results(compat_matrix.format_release_matrix(rows), [asdict(row) for row in rows], to)
    sys.exit(0 if all(row.closed for row in rows) else 1)


def report_source(folder: Path, to: Path | None) -> int:
    """Check the source tree `folder` and print what is lost or moved; returns the exit code."""
    try:
        result = check_source(folder)
    except SourceError as error:
        raise click.UsageError(str(error)) from error
    write_results(
        source_report.format_source_result(result), source_report.source_result_to_dict(result), to
    )
    return 0 if result.complete else 1


def write_results(text: str, results: object, to: Path | None) -> None:
    """Print `text` and write `results` as JSON to `to`; when that is stdout (-), only the JSON."""
    content = json.dumps(results, indent=2) + "\n"
    # No newline of click's: the content ends with one.
    if to == Path("-"):
        click.echo(content, nl=False)
        return
    click.echo(text)
    if to:
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text(content, "utf-8")


def examine_release(show: ProgressScreen, version: str) -> ReleaseRow:
    """Check one release: install it, start a server, inject delays, evaluate."""
    show.begin_step(f"vLLM {version}: environment")
    python = vllm_releases.prepare_environment(version)
    # Before the server runs: what a release lacks is known from its files alone.
    missing = find_missing_targets(python)
    show.begin_step(f"vLLM {version}: starting a server")
    try:
        with start_release_server(show, python) as bench:
            closes = {kind: bench.explain_unclosed(kind) for kind in compat_matrix.PLACES_BY_KIND}
            # Without a breakdown there is nothing to look for a delay in.
            open_kinds = [kind for kind, why in closes.items() if why]
            cells = {
                place: bench.inject_and_judge(place, kind, stage, missing)
                for kind, places in compat_matrix.PLACES_BY_KIND.items()
                if kind not in open_kinds
                for place, stage in places.items()
            }
            unattributed_ms = {kind: bench.measure_unattributed_ms(kind) for kind in closes}
            return ReleaseRow(
                version, closes, cells, missing, bench.list_complaints(), unattributed_ms
            )
    # A release whose server does not start is a result; the other releases are still tried.
    except LocalServerError as error:
        why = f"no server: {error}"
        return ReleaseRow(version, dict.fromkeys(compat_matrix.PLACES_BY_KIND, why), {}, missing)


def find_missing_targets(python: Path) -> dict[str, str]:
    """Targets that the release in the environment of `python` lacks -> what exactly is missing."""
    # Its own interpreter is not asked: importing vLLM takes seconds and may fail.
    package = next(python.parents[1].glob("lib/python*/site-packages/vllm"))
    return {name: what for name, what in target_check.check_targets(package).items() if what}


@contextmanager
def start_release_server(show: ProgressScreen, python: Path) -> Iterator[ReleaseProbe]:
    """Start and warm up a traced server of the release in `python`; stopped when the block ends."""
    with tempfile.TemporaryDirectory(prefix="ttft-otel-") as scratch:
        control = InjectionControl(Path(scratch) / "control.json")
        options = VllmOptions(
            model=tiny_models.build_model(tiny_models.VISION_RECIPE),
            python=str(python),
            control=control.path,
        )
        plan = DeploymentPlan("mono", options, folder=Path(scratch) / "run")
        with start_deployment(plan, progress=show.report_waiting) as fleet:
            bench = ReleaseProbe(show, fleet, control)
            show.begin_step("warming up")
            for kind in compat_matrix.PLACES_BY_KIND:
                # The first request of a kind imports and compiles.
                for _ in range(3):
                    bench.send_probe(kind)
            yield bench


@dataclass(slots=True)
class ReleaseProbe:
    """One server under test."""

    show: ProgressScreen
    fleet: LocalDeployment
    control: InjectionControl
    seed: int = field(default=100)

    def send_probe(self, kind: str) -> TimedResponse:
        """Send a request that asks for Server-Timing. kind: "text", or "image" (always a new one)."""
        # A new image each time: one that was seen would come from
        # the encoder cache, without encoding.
        self.seed += 1
        question: dict[str, Any] = {"pictures": (self.seed,)} if kind == "image" else {}
        # One token: nothing of TTFT comes after it.
        return ttft_client.send_timed_request(
            self.fleet.front_url, headers={header_names.ASK_TIMING: "1"}, max_tokens=1, **question
        )

    def explain_unclosed(self, kind: str) -> str:
        """Why the stages of a request of this `kind` do not add up to its TTFT; "" when they do."""
        answer = self.send_probe(kind)
        if answer.status != 200:
            return f"status {answer.status}: {answer.body[:200]!r}"
        text = answer.headers.get(header_names.SERVER_TIMING, "")
        return (
            ""
            if timing.parse_server_timing(text)
            else f"{header_names.SERVER_TIMING}: {text or 'no such header'}"
        )

    def measure_unattributed_ms(self, kind: str) -> float:
        """Unattributed milliseconds of one request."""
        return self.sample_stages_us(kind).get(stages.UNATTRIBUTED, 0) / 1000

    def sample_stages_us(self, kind: str) -> StageSample:
        """One request's stages and remainder, µs."""
        # Without a breakdown an empty sample: its stages count as 0, which the judgement shows.
        breakdown = timing.parse_server_timing(
            self.send_probe(kind).headers.get(header_names.SERVER_TIMING, "")
        )
        return (
            {**breakdown.stages, stages.UNATTRIBUTED: breakdown.unattributed} if breakdown else {}
        )

    def inject_and_judge(
        self, place: str, kind: str, stage: str, missing: dict[str, str]
    ) -> MatrixCell:
        """Send requests without and with a delay at `place`, and judge in which stage it shows.

        stage: the stage in which it should show. missing: targets that the release lacks.
        """
        self.show.begin_step(f"{DELAY_MS:.0f} ms at {place}: must show in {stage}")
        plain: list[StageSample] = []
        delayed: list[StageSample] = []
        for _ in range(SAMPLE_PAIRS):
            plain.append(self.sample_stages_us(kind))
            with self.control.inject_delay(place, DELAY_MS):
                delayed.append(self.sample_stages_us(kind))
        # The guest logs each delay that took place: a function
        # that this release lacks waits nowhere.
        if not any(delay.place == place for delay in self.control.read_delays()):
            return MatrixCell(compat_matrix.STATE_NOT_TRIED, "the delay found nothing to wait in")
        cell = compat_matrix.judge_shift(
            compat_matrix.compute_stage_shifts(plain, delayed),
            stage,
            DELAY_MS,
            TOLERANCE_MS,
            missing,
        )
        self.show.print_line(f"          {cell.state}: {cell.note}")
        return cell

    def list_complaints(self) -> list[str]:
        """Warnings and errors of ttft-otel in the server's log."""
        lines = self.fleet.servers["mono"].read_log()
        return [line for line in lines if COMPLAINT_PATTERN.search(line)]


if __name__ == "__main__":
    run_compat()
