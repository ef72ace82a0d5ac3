# SPDX-License-Identifier: Apache-2.0
"""Build a GoTool of program_pins.py with the Go toolchain, once per pin, into the cache; for binaries.py.

A build takes minutes the first time, seconds from Go's own cache afterwards, and reports its progress.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from lab.stack.program_pins import BUILDER_TOOL, GoTool

MIN_GO_VERSION: Final = (1, 25)
GO_REMEDY: Final = "install Go 1.25 or newer from https://go.dev/dl/"
# Called with a line of progress, several times a second.
LineCallback = Callable[[str], None]


class GoBuildError(RuntimeError):
    """A build failed; the message has Go's output."""


class GoMissingError(GoBuildError):
    """Go is missing or too old; the message has the remedy."""


def check_go_version() -> tuple[int, int]:
    """Check the Go on PATH. Raises GoMissingError if there is none, or it is too old."""
    try:
        output = subprocess.run(["go", "version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise GoMissingError(f"Go is missing; {GO_REMEDY}") from error
    # "go version go1.25.1 linux/amd64", or "devel go1.26-..." of a build from source.
    match = re.search(r"\bgo(\d+)\.(\d+)", output.stdout)
    if not match:
        raise GoMissingError(f"no version in {output.stdout.strip()!r}; {GO_REMEDY}")
    installed = int(match[1]), int(match[2])
    if installed < MIN_GO_VERSION:
        raise GoMissingError(f"Go {installed[0]}.{installed[1]} is too old; {GO_REMEDY}")
    return installed


def is_built(tool: GoTool) -> bool:
    """Whether the cache has all programs of `tool` for exactly these pins."""
    return all((tool.build_folder / program.name).is_file() for program in tool.programs)


def build_tool(tool: GoTool, say: LineCallback) -> Path:
    """Return the folder of the programs of `tool`; build them first if needed."""
    if is_built(tool):
        return tool.build_folder
    check_go_version()
    tool.build_folder.parent.mkdir(parents=True, exist_ok=True)
    with lock_build(tool, say):
        if not is_built(tool):  # another process may have been faster
            # What a killed build left: nobody else uses it, because this process has the lock.
            shutil.rmtree(
                scratch := tool.build_folder.parent / f"{tool.name}.new", ignore_errors=True
            )
            bin_folder = scratch / "bin"
            bin_folder.mkdir(parents=True)
            source = prepare_sources(tool, scratch, say)
            for program in tool.programs:
                target = ["-o", str(bin_folder / program.name), program.package]
                options = [*tool.build_flags, f"-tags={tool.tags}", "-v"]
                run_build_command(
                    ("go", "build", *options, *target), source, f"go build {program.name}", say
                )
            # One rename: is_built() finds all programs or none, even if this process is killed here.
            bin_folder.replace(tool.build_folder)
            shutil.rmtree(scratch)
    return tool.build_folder


def prepare_sources(tool: GoTool, scratch: Path, say: LineCallback) -> Path:
    """The module to compile: the tool's own, or what the collector's builder writes, with our hashes."""
    if not tool.generated:
        return tool.module_folder
    build_tool(BUILDER_TOOL, say)
    generate_collector(tool, scratch, say, "--skip-get-modules")
    # The committed files replace those that the builder wrote: `go build` then checks every module's hash.
    for name in ("go.mod", "go.sum"):
        shutil.copy(tool.module_folder / name, scratch / "build" / name)
    return scratch / "build"


def generate_collector(tool: GoTool, scratch: Path, say: LineCallback, *options: str) -> None:
    """Let the collector's builder write sources into scratch/build (the manifest says so)."""
    builder = str(BUILDER_TOOL.build_folder / BUILDER_TOOL.programs[0].name)
    words = (builder, "--config", str(tool.generated), "--skip-compilation", *options)
    run_build_command(words, scratch, "collector sources", say)


def resolve_modules(tool: GoTool, say: LineCallback) -> None:
    """Regenerate a generated tool's go.mod and go.sum, after its manifest has changed."""
    build_tool(BUILDER_TOOL, say)
    with tempfile.TemporaryDirectory() as scratch:
        generate_collector(tool, Path(scratch), say)
        for name in ("go.mod", "go.sum"):
            shutil.copy(Path(scratch) / "build" / name, tool.module_folder / name)


@contextmanager
def lock_build(tool: GoTool, say: LineCallback) -> Iterator[None]:
    """Lock a tool's build, so that a second process waits instead of building it too."""
    with (tool.build_folder.parent / f"{tool.name}.lock").open("w") as lock:
        try:
            # First without waiting, to be able to say so. The kernel frees a killed process's lock.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{tool.name}: waiting for another build")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run_build_command(
    command: Sequence[str], folder: Path, step_name: str, say: LineCallback
) -> None:
    """Run a command and pass its progress on; raises GoBuildError with its last words if it fails.

    The checksum database does not know all versions: where go.sum is written, not read, it is off.
    """
    # Without cgo no C compiler is needed; a go.work or GOFLAGS of the user must not matter.
    env = {**os.environ, "CGO_ENABLED": "0", "GOWORK": "off", "GOFLAGS": "", "GOSUMDB": "off"}
    started = time.monotonic()
    count = 0
    # With -v there is a line for each package: the errors are among the last.
    last: deque[str] = deque(maxlen=25)
    with subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        text=True,
        # A module proxy that asks for a password must fail, not wait.
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        # In one stream: Go's progress (-v) goes to stderr, and order matters for the story.
        stderr=subprocess.STDOUT,
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                count += 1
                last.append(line.rstrip())
                say(
                    f"{step_name}, {time.monotonic() - started:.0f} s, {count} packages · {line.strip()}"
                )
        # Ctrl-C, too: the compiler would go on without us.
        except BaseException:
            process.terminate()
            raise
    if process.returncode:
        story = "\n".join(last)
        raise GoBuildError(f"{step_name} failed in {folder}:\n{story}")
