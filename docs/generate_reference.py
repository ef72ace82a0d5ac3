# SPDX-License-Identifier: Apache-2.0
"""Write the tables of flags and limits into the reference pages: run it after one has changed.

Tables stand between a mark and `<!--end-->`. Marks: `<!--flags:NAME-->`, where NAME is a subcommand of
`ttft-otel`; `<!--limits-->`; `<!--vocabulary-->`, of what others call our stages, from
ttft_otel/report/foreign/products.py; `<!--otel-->`, of OpenTelemetry's variables; `<!--semconv:NAME-->` of
semconv/, where NAME is a group of attributes, `spans`, or a section of metrics. tests/test_docs.py fails
when a page is not what this script makes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import yaml

from ttft_otel.commands import main as cli
from ttft_otel.model.names import env_names
from ttft_otel.report.foreign.products import PRODUCTS
from ttft_otel.router.limits import RouterLimits

# Which requests are read, and from where: flags of several commands are shown in the table of the first one.
SOURCE_COMMAND = "report"
SOURCE_FLAG = "--tempo"  # what the others have of it
FOLDER = Path(__file__).parent / "reference"
PAGES = tuple(
    FOLDER / f"{name}.md"
    for name in (
        *("attributes", "commands", "limits", "metrics", "router-flags", "settings", "trace"),
        "vocabulary",
    )
)
IN_HELP = re.compile(r"\s*\[default: ([^]]+)]")
MARK = re.compile(r"(<!--(\w+):?([\w.]*)-->\n).*?(<!--end-->)", re.DOTALL)
REGISTRY = Path(__file__).parents[1] / "semconv"


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
    """Make the list of the router's limits: default, what a client gets beyond it, and meaning."""
    return "".join(
        f"- `--{each.name.replace('_', '-')}` (`{each.default:.10g}`; beyond it {each.metadata['answer']}): "
        f"{each.metadata['text']}\n"
        for each in dataclasses.fields(RouterLimits)
    )


def render_variables() -> str:
    """Make the lists of OpenTelemetry's variables: those that are followed, and the others."""
    followed = [
        f"- `{name}`{'' if default == '-' else f' ({default})'}: {meaning}\n"
        for name, (default, meaning) in env_names.FOLLOWED.items()
    ]
    others = [
        f"- {', '.join(f'`{name}`' for name in names)}: {reason}\n"
        for reason, names in env_names.NOT_FOLLOWED.items()
    ]
    return f"{''.join(followed)}\nNot followed:\n\n{''.join(others)}"


def render_vocabulary() -> str:
    """Make a list for each product: our stage, their names for it, what they mean beyond it."""
    sections = []
    for product in PRODUCTS:
        rows = [
            f"- {each.stage if ' ' in each.stage else f'`{each.stage}`' if each.stage else 'no stage'}: "
            f"{', '.join(f'`{name}`' for name in each.names)}{f'; {each.note}' if each.note else ''}\n"
            for each in product.rows
        ]
        sections.append(f"**{product.name}** ({product.read}):\n\n{''.join(rows)}\n")
    return "\n" + "".join(sections)


def load_registry() -> dict[str, dict[str, Any]]:
    """The groups of semconv/, by their IDs."""
    files = ("attributes", "spans", "metrics")
    texts = ((REGISTRY / f"{name}.yaml").read_text("utf-8") for name in files)
    return {each["id"]: each for text in texts for each in yaml.safe_load(text)["groups"]}


def render_table(*rows: tuple[str, ...]) -> str:
    """Make a table, whose head is the first row."""
    lines = [rows[0], ("---",) * len(rows[0]), *rows[1:]]
    return "".join(
        f"| {' | '.join(cells)} |\n".replace("| --- ", "|---").replace("--- |", "---|")
        for cells in lines
    )


def render_attributes(group: dict[str, Any]) -> str:
    """Make the table of a group of attributes; neighbours that mean the same share a row."""
    rows = dict[tuple[str, ...], list[str]]()
    for each in group["attributes"]:
        notes = each.get("annotations", {})
        name = notes.get("name") or each.get("id") or each["ref"]
        rows.setdefault((*filter(None, [notes.get("where")]), each["brief"]), []).append(
            f"`{name}`"
        )
    head = (
        ("attribute", "on", "meaning") if len(next(iter(rows))) == 2 else ("attribute", "setting")
    )
    return render_table(head, *((", ".join(names), *rest) for rest, names in rows.items()))


def render_semconv(name: str) -> str:
    """Make the table of attributes, spans or metrics that a mark names."""
    registry = load_registry()
    if name in registry:
        return render_attributes(registry[name])
    notes = {key: each.get("annotations", {}) for key, each in registry.items()}
    if name == "spans":
        return render_table(
            ("span", "kind", "parent", "what it is"),
            *(
                (f"`{notes[key]['name']}`", each["span_kind"], notes[key]["parent"], each["brief"])
                for key, each in registry.items()
                if each["type"] == "span"
            ),
        )
    rows = []
    for key, each in registry.items():
        if each["type"] != "metric" or notes[key]["section"] != name:
            continue
        is_counter, shown = each["instrument"] == "counter", each["metric_name"]
        if name == "collector":
            ending = "total" if is_counter else "seconds"
            second = f"`{shown.replace('.', '_')}_{ending}`"
        else:
            shown += "_total" * is_counter
            words = notes[key].get("labels", "").split(", ")
            second = ", ".join(f"`{word}`" for word in words if word) or "–"
        rows.append((f"`{shown}`", second, each["brief"]))
    return render_table(
        ("metric", "in Prometheus" if name == "collector" else "labels", "meaning"), *rows
    )


RENDERERS: dict[str, Callable[..., str]] = {
    "flags": render_flags,
    "limits": render_limits,
    "otel": render_variables,
    "semconv": render_semconv,
    "vocabulary": render_vocabulary,
}


def render_page(text: str) -> str:
    """Replace everything between marks in a page's text."""

    def render(found: re.Match[str]) -> str:
        names = [found[3]] if found[3] else []
        return found[1] + RENDERERS[found[2]](*names) + found[4]

    return MARK.sub(render, text)


def main() -> None:
    """Rewrite the pages."""
    for page in PAGES:
        page.write_text(render_page(page.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
