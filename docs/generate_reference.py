# SPDX-License-Identifier: Apache-2.0
"""Write the tables of flags and limits into the reference pages: run it after one has changed.

Tables stand between `<!-- flags NAME -->` and `<!-- end of flags NAME -->`, where NAME is a subcommand of
`ttft-otel`; between `<!-- limits -->` and `<!-- end of limits -->`; of what others call our stages, from
vocabulary.json, between `<!-- vocabulary -->` and `<!-- end of vocabulary -->`; of OpenTelemetry's variables
between `<!-- otel -->` and `<!-- end of otel -->`. tests/test_docs.py fails when a page is not what this
script makes.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import click

from ttft_otel.commands import main as cli
from ttft_otel.model.names import otel_variables
from ttft_otel.router.limits import RouterLimits

# Which requests are read, and from where: flags of several commands are shown in the table of the first one.
SOURCE_COMMAND = "report"
SOURCE_FLAG = "--tempo"  # what the others have of it
FOLDER = Path(__file__).parent / "reference"
PAGES = tuple(
    FOLDER / f"{name}.md"
    for name in ("commands", "router-flags", "limits", "settings", "vocabulary")
)
IN_HELP = re.compile(r"\s*\[default: ([^]]+)]")
TABLE = re.compile(r"(<!-- flags ([a-z]+) -->\n).*?(<!-- end of flags \2 -->)", re.DOTALL)
LIMITS = re.compile(r"(<!-- limits -->\n).*?(<!-- end of limits -->)", re.DOTALL)
VARIABLES = re.compile(r"(<!-- otel -->\n).*?(<!-- end of otel -->)", re.DOTALL)
VOCABULARY = re.compile(r"(<!-- vocabulary -->\n).*?(<!-- end of vocabulary -->)", re.DOTALL)


def describe_default(option: click.Option) -> str:
    """Write an option's default, in brackets behind its name; "" where there is none.

    A default that depends on something is text: click's `show_default`, or in brackets in the help.
    """
    in_help = IN_HELP.search(option.help or "")
    if in_help or isinstance(option.show_default, str):
        return f" ({in_help[1] if in_help else option.show_default})"
    value = option.default() if callable(option.default) else option.default
    if value is None or isinstance(value, bool) or value in ((), "") or "UNSET" in repr(value):
        return ""
    return f" (`{value:g}`)" if isinstance(value, float) else f" (`{value}`)"


def describe_option(option: click.Option) -> str:
    """Make an option's table row: names with the default, meaning with the words that it accepts."""
    flags = ", ".join(f"`{flag}`" for flag in option.opts)
    text = IN_HELP.sub("", option.help or "").replace("; see docs/router.md", "")
    meaning = [text] if text else []
    if isinstance(option.type, click.Choice):
        meaning.append("One of " + ", ".join(f"`{word}`" for word in option.type.choices) + ".")
    if option.multiple and "repeat" not in text.lower():
        meaning.append("Repeatable.")
    return f"| {flags}{describe_default(option)} | {' '.join(meaning)} |\n"


def render_flags(name: str) -> str:
    """Make the table of a command's flags, without --help and what other tables show."""
    command = cli.load_subcommand(name, cli.SUBCOMMANDS[name])
    parts = command.commands if isinstance(command, click.Group) else {"": command}
    options = {
        f"{part} {each.opts[0]}".strip(): each
        for part, commands in parts.items()
        for each in commands.params
        if isinstance(each, click.Option) and not each.hidden
    }
    elsewhere = {f"--{each.name.replace('_', '-')}" for each in dataclasses.fields(RouterLimits)}
    rows = {
        flag: describe_option(each).replace("| `", f"| `{flag.removesuffix(each.opts[0])}", 1)
        for flag, each in options.items()
        if flag not in elsewhere
    }
    shared: list[str] = []
    if name != SOURCE_COMMAND and SOURCE_FLAG in options:
        source = cli.load_subcommand(SOURCE_COMMAND, cli.SUBCOMMANDS[SOURCE_COMMAND]).params
        known = {describe_option(each) for each in source if isinstance(each, click.Option)}
        shared = [flag for flag, row in rows.items() if row in known]
    head = "| flag (default) | meaning |\n|---|---|\n"
    own = "".join(row for flag, row in rows.items() if flag not in shared)
    if not shared:
        return head + own
    return (
        f"{head}{own}| `{'`, `'.join(shared)}` | As of [{SOURCE_COMMAND}](#{SOURCE_COMMAND}). |\n"
    )


def render_limits() -> str:
    """Make the table of the router's limits."""
    rows = [
        f"| `--{each.name.replace('_', '-')}` | `{each.default:.10g}` | {each.metadata['answer']} "
        f"| {each.metadata['text']} |\n"
        for each in dataclasses.fields(RouterLimits)
    ]
    return "| limit | default | beyond it | meaning |\n|---|---|---|---|\n" + "".join(rows)


def render_variables() -> str:
    """Make the lists of OpenTelemetry's variables: those that are followed, and the others."""
    followed = [
        f"- `{name}`{'' if default == '-' else f' ({default})'}: {meaning}\n"
        for name, (default, meaning) in otel_variables.FOLLOWED.items()
    ]
    others = [
        f"- {', '.join(f'`{name}`' for name in names)}: {reason}\n"
        for reason, names in otel_variables.NOT_FOLLOWED.items()
    ]
    return f"{''.join(followed)}\nNot followed:\n\n{''.join(others)}"


def render_vocabulary() -> str:
    """Make a list for each product: our stage, their names for it, what they mean beyond it."""
    sections = []
    for each in json.loads((FOLDER / "vocabulary.json").read_text("utf-8")):
        rows = [
            f"- {ours if ' ' in ours else f'`{ours}`' if ours else 'no stage'}: "
            f"{', '.join(f'`{name}`' for name in names)}{f'; {note}' if note else ''}\n"
            for ours, names, note in each["rows"]
        ]
        sections.append(f"**{each['product']}** ({each['read']}):\n\n{''.join(rows)}\n")
    return "".join(sections)


def render_page(text: str) -> str:
    """Replace every table between marks in a page's text."""
    text = TABLE.sub(lambda found: found[1] + render_flags(found[2]) + found[3], text)
    text = VOCABULARY.sub(lambda found: f"{found[1]}\n{render_vocabulary()}{found[2]}", text)
    text = VARIABLES.sub(lambda found: found[1] + render_variables() + found[2], text)
    return LIMITS.sub(lambda found: found[1] + render_limits() + found[2], text)


def main() -> None:
    """Rewrite the pages."""
    for page in PAGES:
        page.write_text(render_page(page.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
