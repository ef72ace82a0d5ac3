# SPDX-License-Identifier: Apache-2.0
"""Check ttft-otel on several vLLM releases, one server at a time, with known delays injected into each.

scripts/compat runs it; vllm_releases.py creates the environments. With --source it only parses a vLLM
checkout (source_check.py).
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import click

from lab import (
    progress_screen,
    tiny_models,
    ttft_client,
    vllm_releases,
)
from lab.injection import InjectionControl
from lab.local_deployment import DeploymentPlan, LocalDeployment, start_deployment
from lab.local_servers import LocalServerError, exit_on_sigterm
from lab.progress_screen import ProgressScreen
from lab.server_commands import VllmOptions
from lab.source_check import (
    SourceError,
    check_source,
    format_source_result,
    source_result_to_dict,
)
from lab.ttft_client import TimedResponse
from ttft_otel.hooks import target_check
from ttft_otel.hooks.targets import TARGETS
from ttft_otel.model import stages, timing
from ttft_otel.model.names import header_names
from ttft_otel.model.stages import UNATTRIBUTED

StageSample = dict[str, int]

# Kind of request -> place of an injected delay -> stage in which it has to show.
# Places are those of the `inject` plugin; the encoder runs for images only.
PLACES_BY_KIND: Final[dict[str, dict[str, str]]] = {
    "text": {
        "receive": "receive",
        "tokenize": "preprocess",
        "ipc": "ipc",
        "queue": "prefill.queue",
        "dispatch": "dispatch",
        "forward": "prefill.compute",
        "sample": "sample",
        "output": "output",
        "egress": "egress",
    },
    "image": {"multimodal": "preprocess", "encoder": "encoder.compute"},
}
EXPECTED_STAGES: Final[dict[str, str]] = {
    place: stage for places in PLACES_BY_KIND.values() for place, stage in places.items()
}
STATE_WORKS: Final = "works"
STATE_WRONG: Final = "wrong"
# The release lacks the function in which the delay would be injected.
STATE_NOT_TRIED: Final = "not tried"


@dataclass(frozen=True, slots=True)
class MatrixCell:
    """Result for one place on one release; moved: stage -> change of its median in ms."""

    state: str
    note: str = ""
    moved: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReleaseRow:
    """Results of one release.

    closes: kind of request -> "" when its stages add up to its TTFT, else why not.
    cells: by place of the delay. missing: target -> what of it the release lacks.
    complaints: our log lines. left: kind of request -> unattributed ms without any delay.
    """

    version: str
    closes: Mapping[str, str]
    cells: Mapping[str, MatrixCell]
    missing: Mapping[str, str]
    complaints: Sequence[str] = ()
    left: Mapping[str, float] = field(default_factory=dict)

    @property
    def closed(self) -> bool:
        """Whether the stages of every kind of request add up to its TTFT."""
        return bool(self.closes) and not any(self.closes.values())


def compute_stage_shifts(
    plain: Sequence[StageSample], changed: Sequence[StageSample]
) -> dict[str, float]:
    """Change of each stage's median from `plain` to `changed`, in ms; a missing stage counts as 0."""
    # Of all samples: a stage that is in one of them only has moved, too.
    keys = {key for sample in (*plain, *changed) for key in sample}
    return {
        key: (_compute_median(changed, key) - _compute_median(plain, key)) / 1000
        for key in sorted(keys)
    }


def judge_shift(
    shift: Mapping[str, float],
    stage: str,
    delay_ms: float,
    tolerance_ms: float,
    missing: Mapping[str, str],
) -> MatrixCell:
    """Judge whether a delay shows in its stage, in unattributed time, or elsewhere.

    shift: result of compute_stage_shifts(). stage: where it should show. missing: see ReleaseRow.
    """
    # A delay must show in its stage and nowhere else.
    strays = {name: ms for name, ms in shift.items() if name != stage and abs(ms) > tolerance_ms}
    if abs(shift.get(stage, 0.0) - delay_ms) <= tolerance_ms and not strays:
        return MatrixCell(STATE_WORKS, f"{shift[stage]:+.1f} ms", shift)
    # The second best result: time that is known to be missing, not wrongly named.
    if abs(shift.get(UNATTRIBUTED, 0.0) - delay_ms) <= tolerance_ms:
        return MatrixCell(UNATTRIBUTED, find_responsible_targets(stage, missing), shift)
    went = ", ".join(f"{name} {ms:+.1f}" for name, ms in strays.items()) or "nowhere"
    return MatrixCell(STATE_WRONG, f"{stage} {shift.get(stage, 0.0):+.1f} ms; {went}", shift)


def find_responsible_targets(stage: str, missing: Mapping[str, str]) -> str:
    """The `missing` targets without which `stage` is unattributed, for a cell's note."""
    rows = [row for row in TARGETS if stage in row.lost and missing.get(row.name)]
    # Without a missing target the cause is elsewhere, and the note must not hide that.
    return "; ".join(f"{row.name}: {missing[row.name]}" for row in rows) or "no target is missing"


def format_release_matrix(rows: Sequence[ReleaseRow]) -> str:
    """A table for docs/reference/releases.md: stages down, releases across."""
    head = ["stage (delay injected at)", *(f"vLLM {row.version}" for row in rows)]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for kind in ("text", "image"):
        cells = [_format_closing(row, kind) for row in rows]
        lines.append(f"| {kind} request | {' | '.join(cells)} |")
    for place, stage in EXPECTED_STAGES.items():
        # A kind that did not close was not tried any further, so its cells are missing.
        cells = [_format_state(row.cells.get(place, MatrixCell(STATE_NOT_TRIED))) for row in rows]
        lines.append(f"| `{stage}` ({place}) | {' | '.join(cells)} |")
    return "\n".join(lines)


def list_remarks(rows: Sequence[ReleaseRow]) -> list[str]:
    """Sentences with details for which the table's cells have no space."""
    sentences = []
    for row in rows:
        sentences += [f"{row.version}: {kind}: {why}" for kind, why in row.closes.items() if why]
        sentences += [
            f"{row.version}: missing {missing_part} ({name})"
            for name, missing_part in row.missing.items()
        ]
        sentences += [
            f"{row.version}: {place}: {cell.state}: {cell.note}"
            for place, cell in row.cells.items()
            if cell.state != STATE_WORKS
        ]
        sentences += [f"{row.version}: log: {line}" for line in row.complaints]
    return sentences


def _format_closing(row: ReleaseRow, kind: str) -> str:
    if row.closes.get(kind, "?"):
        return "**open**"
    left = row.left.get(kind, 0.0)
    # Three decimals: a microsecond is the unit of all marks.
    return f"closes, {left:.3f} ms unattributed" if left else "closes"


def _format_state(cell: MatrixCell) -> str:
    return "✓" if cell.state == STATE_WORKS else cell.state


def _compute_median(samples: Sequence[StageSample], key: str) -> float:
    return statistics.median(sample.get(key, 0) for sample in samples)


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
  scripts/compat --newest                  the newest release on the index, read the same way
Exit code 1 unless a text and an image request close on every release; with --source, 1 when one of
our targets is lost or a decision of the scheduler is new; 2 when something is wrong with the command
or the folder.
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
@click.option("--newest", is_flag=True, help="As --source, of the newest release on the index.")
def run_compat(
    versions: tuple[str, ...],
    to: Path | None,
    as_markdown: bool,
    source: Path | None,
    newest: bool,
) -> None:
    """Report for each vLLM release which stages work, which are unattributed, and why."""
    if newest:
        source = vllm_releases.fetch_sources(vllm_releases.find_newest())
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
        for line in list_remarks(rows):
            show.print_line(line)
    # After the screen is closed: its changing line would cut through the table.
    write_results(format_release_matrix(rows), [asdict(row) for row in rows], to)
    sys.exit(0 if all(row.closed for row in rows) else 1)


def report_source(folder: Path, to: Path | None) -> int:
    """Check the source tree `folder` and print what is lost or moved; returns the exit code."""
    try:
        result = check_source(folder)
    except SourceError as error:
        raise click.UsageError(str(error)) from error
    write_results(format_source_result(result), source_result_to_dict(result), to)
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
            closes = {kind: bench.explain_unclosed(kind) for kind in PLACES_BY_KIND}
            # Without a breakdown there is nothing to look for a delay in.
            open_kinds = [kind for kind, why in closes.items() if why]
            cells = {
                place: bench.inject_and_judge(place, kind, stage, missing)
                for kind, places in PLACES_BY_KIND.items()
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
        return ReleaseRow(version, dict.fromkeys(PLACES_BY_KIND, why), {}, missing)


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
            for kind in PLACES_BY_KIND:
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
        # The plugin logs each delay that took place: a function
        # that this release lacks waits nowhere.
        if not any(delay.place == place for delay in self.control.read_delays()):
            return MatrixCell(STATE_NOT_TRIED, "the delay found nothing to wait in")
        cell = judge_shift(
            compute_stage_shifts(plain, delayed),
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
