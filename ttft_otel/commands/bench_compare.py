# SPDX-License-Identifier: Apache-2.0
"""The command `ttft-otel bench compare`: compare two result files of `ttft-otel bench --output`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ttft_otel.bench import terminal_report
from ttft_otel.bench.comparison import compare_targets, list_load_differences
from ttft_otel.bench.result_document import RESULT_FORMAT
from ttft_otel.commands.bench_options import RESULT_FILE


@click.command()
@click.argument("a", type=RESULT_FILE)
@click.argument("b", type=RESULT_FILE)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def compare_files(a: Path, b: Path, as_json: bool) -> None:
    """Compare two results of `ttft-otel bench --output`: B minus A, with 95 % intervals."""
    results_a, results_b = _read_results(a), _read_results(b)
    try:
        # Not paired: two files were measured at different times, so
        # their rounds have nothing in common.
        comparison = compare_targets(results_a["targets"][0], results_b["targets"][0], paired=False)
        differences = list_load_differences(results_a, results_b)
    # The files come from anywhere: each missing field or wrong type of one ends up here.
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise click.ClickException(f"{a} and {b} cannot be compared: {error}") from error
    if differences:
        # To stderr, so that --json stays JSON; a warning, since a
        # change of load may be the question.
        click.echo(f"The loads differ in: {', '.join(differences)}", err=True)
    if as_json:
        click.echo(json.dumps(comparison, indent=2, ensure_ascii=False))
    else:
        terminal_report.print_comparison(comparison, terminal_report.create_console())


def _read_results(path: Path) -> Any:
    """Read a result file. Raises ClickException."""
    try:
        results = json.loads(path.read_text("utf-8"))
        # Looked up within `try`: JSON of another program lacks it, or is no object.
        is_current_format = results["format"] == RESULT_FORMAT
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise click.ClickException(f"{path}: {error}") from error
    if not is_current_format:
        raise click.ClickException(f"{path} is not of this version's form, {RESULT_FORMAT}")
    return results
