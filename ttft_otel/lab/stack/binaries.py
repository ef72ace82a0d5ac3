# SPDX-License-Identifier: Apache-2.0
"""Find the stack's programs: named by a variable, built from our pins, or on PATH; parts.py starts them."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from ttft_otel.lab.stack import golang, pins
from ttft_otel.lab.stack.golang import Say
from ttft_otel.lab.stack.pins import Program, Tool


@dataclass(frozen=True, slots=True)
class Binaries:
    """Where each program lies."""

    collector: Path
    tempo: Path
    prometheus: Path
    promtool: Path
    compose: Path


def named(program: Program) -> Path | None:
    """What the program's environment variable names; raises LookupError if nothing is there."""
    text = os.environ.get(program.variable)
    if not text:
        return None
    found = shutil.which(text)
    if not found:
        raise LookupError(f"{program.variable}={text} is no program; name one, or unset it")
    return Path(found).absolute()


def locate(tool: Tool, program: Program) -> Path | None:
    """One program, without building anything: its variable, the cache, PATH, in this order."""
    if found := named(program):
        return found
    if (tool.folder / program.name).is_file():
        return tool.folder / program.name
    for name in (program.name, *program.aliases):
        if path := shutil.which(name):
            return Path(path)
    return None


def gather(say: Say) -> Binaries:
    """All programs; what nobody named is built from the pins, or taken from PATH where Go is missing."""
    return Binaries(**{role: obtain(role, say) for role in ROLES})


def obtain(role: str, say: Say) -> Path:
    """One program, built if need be; raises GoMissing with the remedy."""
    tool, program = ROLES[role]
    if found := named(program):
        return found
    if not golang.built(tool):
        try:
            golang.version()
        except golang.GoMissing as error:
            if found := locate(tool, program):
                return found
            remedy = f"or name a program: {program.variable}=/path/to/{program.name}"
            raise golang.GoMissing(f"no {role} here: {error}, {remedy}") from error
    return golang.build(tool, say) / program.name


ROLES = {
    role: (tool, program)
    for role, program in (
        ("collector", pins.OTELCOL),
        ("tempo", pins.TEMPO),
        ("prometheus", pins.PROMETHEUS),
        ("promtool", pins.PROMTOOL),
        ("compose", pins.COMPOSE),
    )
    for tool in pins.TOOLS
    if program in tool.programs
}
