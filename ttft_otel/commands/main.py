# SPDX-License-Identifier: Apache-2.0
"""The command `ttft-otel`. A subcommand's module is imported only when that subcommand is called.

That keeps --help fast, and lets it work without the subcommands' optional dependencies.
"""

from __future__ import annotations

import errno
import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import click
from click.shell_completion import CompletionItem

from ttft_otel import __version__

if TYPE_CHECKING:
    from ttft_otel.report.breakdown_source import (
        ComparedWindows,
        ExplainAnswer,
        ExplainQuestion,
    )
    from ttft_otel.report.report_types import SourceChoice


@dataclass(frozen=True, slots=True)
class Subcommand:
    """One subcommand, which is imported when it is called."""

    module: str
    extra: str  #: the pip extra that it needs, "" without one
    help_text: str
    command: str = "command"  #: the name of its click command in `module`


# Help texts are here once more, because the commands' own would have to be imported.
SUBCOMMANDS: Final = {
    name: Subcommand(f"ttft_otel.commands.{module}", extra, help_text, command)
    for name, module, extra, help_text, command in (
        ("demo", "serve", "serve", "Trace ten requests to a vLLM, or show recorded ones.", "demo"),
        ("serve", "serve", "serve", "Receive, keep and show spans.", "serve"),
        ("top", "top", "", "Show what waits now.", "top"),
        ("report", "report", "", "Print where the time went.", "report"),
        ("diff", "answers", "explain", "Say what changed between two windows.", "diff"),
        ("explain", "answers", "explain", "Say why requests were late.", "explain"),
        ("whatif", "answers", "explain", "Predict the TTFT with other settings.", "whatif"),
        ("mcp", "mcp_server", "mcp", "Offer these answers to an agent, read-only.", "command"),
        ("router", "router.command", "router", "Route requests to servers, traced.", "command"),
        ("bench", "bench", "bench", "Send load and break its TTFT down.", "bench"),
        ("stack", "stack", "", "Run collector, Tempo, Prometheus and Grafana.", "stack"),
        ("dashboards", "stack", "", "Import the dashboards into a Grafana.", "dashboards"),
        ("doctor", "doctor", "", "Check the setup: what is not traced, and why.", "command"),
    )
}

# Of an OSError: the disk, its quota, or a file has reached its limit.
DISK_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

EPILOG: Final = """\b
Examples:
  ttft-otel serve                                 receiver and page on http://127.0.0.1:4318
  TTFT_OTEL=1 vllm serve MODEL                    a traced server, sending there
  ttft-otel report                                p50, p95, p99 and mean of every stage
  ttft-otel report --request ID                   one request's waterfall
"""


class LazyGroup(click.Group):
    """A click group whose help comes from SUBCOMMANDS, without importing the subcommands."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All subcommands, in the order of SUBCOMMANDS."""
        # click's own order would be the alphabet's.
        return list(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the subcommand `cmd_name`; None when there is none of this name."""
        subcommand = SUBCOMMANDS.get(cmd_name)
        try:
            return load_subcommand(cmd_name, subcommand) if subcommand else None
        except click.ClickException:
            if (
                ctx.resilient_parsing
            ):  # a shell that completes: without a suggestion, not with a traceback
                return None
            raise

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Names of subcommands and our options, without importing any."""
        names = [name for name in SUBCOMMANDS if name.startswith(incomplete)]
        found = [CompletionItem(name, help=SUBCOMMANDS[name].help_text) for name in names]
        return found + super(click.Group, self).shell_complete(ctx, incomplete)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand; a full disk behind stdout ends it with a sentence."""
        try:
            return super().invoke(ctx)
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            raise click.ClickException(f"the output is not complete: {error.strerror}") from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the subcommands' help, whatever is installed."""
        # click's own version calls get_command() for each, which would import all of them.
        with formatter.section("Commands"):
            formatter.write_dl([(name, each.help_text) for name, each in SUBCOMMANDS.items()])


def load_subcommand(name: str, subcommand: Subcommand) -> click.Command:
    """Import the subcommand `name`.

    Raises click.ClickException, with the command that installs it, when a package is missing.
    """
    try:
        module = importlib.import_module(subcommand.module)
    except ModuleNotFoundError as error:
        # Only a missing package is explained; any other error of an import keeps its traceback.
        missing = error.name or ""
        # One of our own modules: no extra would install it.
        if missing.partition(".")[0] == "ttft_otel":
            raise click.ClickException(
                f"ttft-otel {name} is not in this version ({__version__}); "
                "upgrade it: pip install --upgrade ttft-otel"
            ) from error
        raise click.ClickException(
            _describe_missing_package(name, subcommand.extra, missing)
        ) from error
    command = getattr(module, subcommand.command)
    assert isinstance(command, click.Command)
    return command


def _describe_missing_package(name: str, extra: str, module: str) -> str:
    """Name the missing `module`, and the pip command that installs it with `extra`."""
    package = f"ttft-otel[{extra}]" if extra else "ttft-otel"
    return f"ttft-otel {name} needs {module}, which is not installed: pip install '{package}'"


def answer_question(
    source: SourceChoice, question: ExplainQuestion | ComparedWindows
) -> ExplainAnswer:
    """What a page or an alert asks, answered by `explain`: the Explainer that `serve` gets from here.

    The page is below explain/ in the layers, and works without its packages.
    """
    try:
        from ttft_otel.explain.explain import window_answer
    except ModuleNotFoundError as error:
        from ttft_otel.report.breakdown_source import ExplainAnswer

        text = _describe_missing_package("explain", "explain", error.name or "")
        return ExplainAnswer.refuse(text)
    return window_answer.answer_question(source, question)


@click.group(cls=LazyGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ttft-otel")
@click.pass_context
def main(context: click.Context) -> None:
    """Say where each vLLM request's time to first token went."""
    context.obj = answer_question


if __name__ == "__main__":
    main()
