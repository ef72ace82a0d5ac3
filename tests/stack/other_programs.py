# SPDX-License-Identifier: Apache-2.0
"""Programs beside the stack's own, found, built and started for tests of other backends."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab import free_ports
from lab.server_commands import HOST, ServerCommand
from lab.stack import binaries, go_builds, stack_parts
from lab.stack.go_builds import GoMissingError
from lab.stack.program_pins import GoTool
from lab.stack.stack_parts import StackAddresses
from tests.build_progress import make_announcer
from tests.stack.running_stack import StackPart, StackStarter


def obtain_tool(tool: GoTool) -> Path:
    """The program of a tool: named, or built. Raises GoMissingError."""
    (program,) = tool.programs
    if named := binaries.find_named_program(program):
        return named
    return go_builds.build_tool(tool, make_announcer("stack")) / program.name


def find_tool(tool: GoTool) -> Path:
    """The program of a tool, for a test; skips without Go."""
    try:
        return obtain_tool(tool)
    except GoMissingError as error:
        (program,) = tool.programs
        pytest.skip(f"{error}, or name a {program.name} in {program.variable}")


def start_program(
    bench: StackStarter, name: str, binary: Path, port: int, *flags: str, health: str = "/health"
) -> str:
    """Start a program that listens on a port as its flags say; its URL."""
    command = ServerCommand(name, (str(binary), *flags), {}, port, health)
    bench.started.append(part := StackPart(command, StackAddresses(), bench.make_folder(name)))
    part.start()
    return stack_parts.format_loopback_url(port)


def start_victoria(bench: StackStarter, name: str, binary: Path, *flags: str) -> str:
    """Start a VictoriaMetrics or VictoriaTraces with data of its own; its URL."""
    port, data = free_ports.find_free_port(), bench.make_folder(f"{name}-data")
    words = (f"-httpListenAddr={HOST}:{port}", f"-storageDataPath={data}", *flags)
    return start_program(bench, name, binary, port, *words)
