# SPDX-License-Identifier: Apache-2.0
"""Find the stack's programs: named by a variable, built from our pins, or on PATH; for stack_parts.py."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from lab.stack import go_builds, program_pins
from lab.stack.go_builds import LineCallback
from lab.stack.program_pins import GoTool, StackProgram


@dataclass(frozen=True, slots=True)
class StackBinaries:
    """The path of each program."""

    collector: Path
    tempo: Path
    prometheus: Path
    promtool: Path
    compose: Path
    alertmanager: Path


def find_named_program(program: StackProgram) -> Path | None:
    """The path in the program's environment variable. Raises LookupError if there is no such file."""
    # A program that somebody names is used as it is, never replaced by ours.
    text = os.environ.get(program.variable)
    if not text:
        return None
    found = shutil.which(text)
    if not found:
        # Not silently the built one: a misspelt path would test another program.
        raise LookupError(f"{program.variable}={text} is not a program; name one, or unset it")
    # Programs are started from other folders.
    return Path(found).absolute()


def locate_program(tool: GoTool, program: StackProgram) -> Path | None:
    """One program, without building anything: its variable, the cache, PATH, in this order."""
    if found := find_named_program(program):
        return found
    # Built from our pins: before anything on PATH, which may be of any version.
    if (tool.build_folder / program.name).is_file():
        return tool.build_folder / program.name
    # Distributions rename it: otelcol-contrib is the stock build.
    for name in (program.name, *program.aliases):
        if path := shutil.which(name):
            return Path(path)
    return None


def gather_binaries(say: LineCallback) -> StackBinaries:
    """All programs: from environment variables, else built from the pins, or from PATH without Go."""
    return StackBinaries(**{role: obtain_program(role, say) for role in PROGRAMS_BY_ROLE})


def obtain_program(role: str, say: LineCallback) -> Path:
    """The path of one program, which is built if needed. Raises GoMissingError."""
    tool, program = PROGRAMS_BY_ROLE[role]
    if program_path := find_named_program(program):
        return program_path
    # Go is asked for only when it is needed.
    if not go_builds.is_built(tool):
        try:
            go_builds.check_go_version()
        # Without Go a program on PATH is better than none.
        except go_builds.GoMissingError as error:
            if program_path := locate_program(tool, program):
                return program_path
            remedy = f"or name a program: {program.variable}=/path/to/{program.name}"
            raise go_builds.GoMissingError(f"no {role} here: {error}, {remedy}") from error
    return go_builds.build_tool(tool, say) / program.name


# By role: of a tool several programs may be built, as Prometheus and promtool.
PROGRAMS_BY_ROLE = {
    role: (tool, program)
    for role, program in (
        ("collector", program_pins.OTELCOL),
        ("tempo", program_pins.TEMPO),
        ("prometheus", program_pins.PROMETHEUS),
        ("promtool", program_pins.PROMTOOL),
        ("compose", program_pins.COMPOSE),
        ("alertmanager", program_pins.ALERTMANAGER),
    )
    for tool in program_pins.GO_TOOLS
    if program in tool.programs
}
