# SPDX-License-Identifier: Apache-2.0
"""The command `ttft-otel mcp`: a Model Context Protocol server whose read-only tools are our answers.

A client of the protocol starts it and speaks to it on stdin and stdout; each call of a tool runs the
command of its name with --json, so that answers keep to the same schemas.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote

import click
from mcp import types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

from ttft_otel import __version__
from ttft_otel.commands import source_options
from ttft_otel.model.names import env_names
from ttft_otel.report.report_types import SourceChoice

TOOLS: Final = ("report", "explain", "diff", "whatif")
MAX_ANSWER_BYTES: Final = 200_000  # a client's model reads all of it
CALL_TIMEOUT_S: Final = 300.0
MAX_CALLS_AT_ONCE: Final = 2  # what-if takes a CPU core for some seconds
# Of the commands' options: where requests come from is chosen at the start, files are not written, and an
# answer is JSON.
_NOT_OFFERED: Final = {"as_json", "markdown", "verbose", "watch", "db", "help"}
_REPORT_LAST: Final = 20  # where the caller does not say; 200 make more than MAX_ANSWER_BYTES


@click.command(
    "mcp",
    epilog="""\b
Examples:
  ttft-otel mcp                                    tools over the database of ttft-otel serve
  ttft-otel mcp --tempo http://127.0.0.1:3200
A client's configuration: {"mcpServers": {"ttft": {"command": "ttft-otel", "args": ["mcp"]}}}
""",
)
@source_options.add_source_options
def command(source: SourceChoice) -> None:
    """Offer report, explain, diff and whatif as read-only tools to a client of the Model Context Protocol."""
    context = click.get_current_context().find_root()
    assert isinstance(context.command, click.Group)
    found = {name: context.command.get_command(context, name) for name in TOOLS}
    asyncio.run(_serve_tools({name: each for name, each in found.items() if each}, source))


async def _serve_tools(commands: Mapping[str, click.Command], source: SourceChoice) -> None:
    """Answer one client until it closes stdin. commands: those of TOOLS."""
    limit = asyncio.Semaphore(MAX_CALLS_AT_ONCE)

    async def list_tools(_context: Any, _page: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[describe_tool(*each) for each in commands.items()])

    async def call_tool(_context: Any, call: Any) -> types.CallToolResult:
        try:
            arguments = list_arguments(commands, call.name, call.arguments or {})
            async with limit:
                answer, is_error = await _run_command(arguments, source), False
        except ValueError as error:
            answer, is_error = str(error), True
        text = types.TextContent(type="text", text=answer)
        return types.CallToolResult(content=[text], is_error=is_error)

    server = Server(
        "ttft-otel", version=__version__, on_list_tools=list_tools, on_call_tool=call_tool
    )
    async with stdio_server() as (received, sent):
        await server.run(received, sent, server.create_initialization_options())


def _list_options(command: click.Command) -> dict[str, click.Option]:
    """The options of a command that its tool has, by their flags without dashes."""
    return {
        each.opts[0].lstrip("-"): each
        for each in command.params
        if isinstance(each, click.Option)
        and each.name not in _NOT_OFFERED
        and not each.name.startswith("tempo")
        and not isinstance(each.type, click.Path)
    }


def describe_tool(name: str, command: click.Command) -> types.Tool:
    """The tool of the command `name`: its help, and its options as a JSON schema."""
    options = _list_options(command)
    return types.Tool(
        name=name,
        description=f"{command.help} Answers with JSON: docs/{name}.schema.json.",
        input_schema={
            "type": "object",
            "properties": {flag: _describe_option(each) for flag, each in options.items()},
            "required": [flag for flag, each in options.items() if each.required],
            "additionalProperties": False,
        },
        annotations=types.ToolAnnotations(read_only_hint=True),
    )


def _describe_option(option: click.Option) -> dict[str, Any]:
    if option.is_flag:
        kind: dict[str, Any] = {"type": "boolean"}
    elif isinstance(option.type, click.Choice):
        kind = {"type": "string", "enum": [str(each) for each in option.type.choices]}
    elif isinstance(option.type, click.types.IntParamType):
        kind = {"type": "integer"}
    elif isinstance(option.type, click.types.FloatParamType):
        kind = {"type": "number"}
    else:
        kind = {"type": "string"}
    if option.multiple:
        kind = {"type": "array", "items": kind}
    return {**kind, "description": option.help or ""}


def list_arguments(
    commands: Mapping[str, click.Command], name: str, values: dict[str, Any]
) -> list[str]:
    """The command line of a tool's call. Raises ValueError for a tool or an option that there is not."""
    if name not in commands:
        raise ValueError(f"there is no tool {name!r}; there are {', '.join(commands)}")
    options = _list_options(commands[name])
    if unknown := [each for each in values if each not in options]:
        raise ValueError(f"{name} has no {', '.join(unknown)}; it has {', '.join(options)}")
    if name == "report" and not {"last", "request", "trace"} & values.keys():
        values = {**values, "last": _REPORT_LAST}
    arguments = [name, "--json"]
    for flag, value in values.items():
        if options[flag].is_flag:
            arguments += [f"--{flag}"] if value else []
            continue
        # With =, so that no value is read as a flag.
        arguments += [
            f"--{flag}={each}" for each in (value if isinstance(value, list) else [value])
        ]
    return arguments


async def _run_command(arguments: list[str], source: SourceChoice) -> str:
    """The JSON that the command prints. Raises ValueError with what it says when it prints none."""
    flags: dict[str, object] = {"db": source.db, "tempo": source.tempo, "tempo-ca": source.ca_file}
    if source.tempo:
        flags["tempo-timeout"] = source.timeout_s
    # Headers may be credentials, and others see a command line.
    pairs = ",".join(f"{name}={quote(value)}" for name, value in source.headers.items())
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ttft_otel.commands.main", *arguments),
        *(f"--{name}={value}" for name, value in flags.items() if value),
        env=os.environ | ({env_names.TTFT_OTEL_TEMPO_HEADERS: pairs} if pairs else {}),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=PIPE,
        stderr=PIPE,
    )
    try:
        out, said = await asyncio.wait_for(process.communicate(), CALL_TIMEOUT_S)
    except asyncio.TimeoutError:  # another one than Python's own before 3.11
        raise ValueError(f"no answer within {CALL_TIMEOUT_S:.0f} s: ask for less time") from None
    finally:
        if process.returncode is None:
            process.kill()
    if len(out) > MAX_ANSWER_BYTES:
        raise ValueError(
            f"the answer has {len(out)} bytes, more than {MAX_ANSWER_BYTES}: ask for fewer requests (last)"
        )
    try:
        json.loads(out)
    except ValueError:
        raise ValueError(said.decode("utf-8", "replace").strip() or "no answer") from None
    return out.decode("utf-8")
