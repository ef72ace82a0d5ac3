# SPDX-License-Identifier: Apache-2.0
"""The command `ttft-otel bench compare`: two files of command.py's --output, compared on the terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ttft_otel.bench import screen
from ttft_otel.bench.compare import compare, differing
from ttft_otel.bench.document import FORMAT
from ttft_otel.bench.options import FILE


@click.command()
@click.argument("a", type=FILE)
@click.argument("b", type=FILE)
@click.option("--json", "as_json", is_flag=True, help="JSON instead of a table.")
def contrast(a: Path, b: Path, as_json: bool) -> None:
    """Compare two results of `ttft-otel bench --output`: B minus A, with 95 % intervals."""
    one, other = _read(a), _read(b)
    try:
        found = compare(one["targets"][0], other["targets"][0], paired=False)
        flags = differing(one, other)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise click.ClickException(f"{a} and {b} cannot be compared: {error}") from error
    if flags:
        click.echo(f"The loads differ in: {', '.join(flags)}", err=True)
    if as_json:
        click.echo(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        screen.compared(found, screen.console())


def _read(path: Path) -> Any:
    """A document. Raises ClickException."""
    try:
        found = json.loads(path.read_text("utf-8"))
        known = found["format"] == FORMAT
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise click.ClickException(f"{path}: {error}") from error
    if not known:
        raise click.ClickException(f"{path} is not of this version's form, {FORMAT}")
    return found
