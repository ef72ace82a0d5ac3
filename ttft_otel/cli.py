# SPDX-License-Identifier: Apache-2.0
"""The command `ttft-otel`: operators type it; each subcommand is imported when it is called.

A subcommand is a click command named `command` in the module that this table names.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Final

import click

from ttft_otel import __version__


@dataclass(frozen=True, slots=True)
class Door:
    """Where a subcommand lives, the extra that brings its dependencies, and its one-line help."""

    module: str
    extra: str
    says: str
    command: str = "command"


DOORS: Final[dict[str, Door]] = {
    "serve": Door("ttft_otel.report.serve", "serve", "Receive, keep and show spans.", "serve"),
    "report": Door("ttft_otel.report.command", "", "Print where the time went.", "report"),
    "router": Door("ttft_otel.router.command", "router", "Route requests to vLLM servers, traced."),
    "bench": Door("ttft_otel.bench.command", "bench", "Send load, explain its TTFT.", "bench"),
    "doctor": Door("ttft_otel.doctor", "", "Say which hop is not traced, and how to mend it."),
}

EPILOG: Final = """\b
Examples:
  ttft-otel serve                                 receiver and page on http://127.0.0.1:4318
  TTFT_OTEL=1 vllm serve MODEL                    a traced server, sending there
  ttft-otel report                                p50, p95, p99 and mean of every stage
  ttft-otel report --request ID                   one request's waterfall
"""


class Lazy(click.Group):
    """A group that imports a subcommand only when it is called, never to print the help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All subcommands, in the table's order."""
        return list(DOORS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one subcommand, or say what to install."""
        door = DOORS.get(cmd_name)
        return load(cmd_name, door) if door else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table's lines, so that --help works whatever is installed."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, door.says) for name, door in DOORS.items()])


def load(name: str, door: Door) -> click.Command:
    """Import a subcommand. Raises ClickException, with the remedy, when something is missing."""
    try:
        module = importlib.import_module(door.module)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing.partition(".")[0] == "ttft_otel":
            raise click.ClickException(
                f"ttft-otel {name} is not in this version ({__version__}); "
                "upgrade it: pip install --upgrade ttft-otel"
            ) from error
        raise click.ClickException(missing_text(name, door.extra, missing)) from error
    command = getattr(module, door.command)
    assert isinstance(command, click.Command)
    return command


def missing_text(name: str, extra: str, module: str) -> str:
    """Say which package is missing and the one line that installs it."""
    package = f"ttft-otel[{extra}]" if extra else "ttft-otel"
    return f"ttft-otel {name} needs {module}, which is not installed: pip install '{package}'"


@click.group(cls=Lazy, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ttft-otel")
def main() -> None:
    """Say where each vLLM request's time to first token went."""


if __name__ == "__main__":
    main()
