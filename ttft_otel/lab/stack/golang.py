# SPDX-License-Identifier: Apache-2.0
"""Build a Tool of pins.py with the Go toolchain, once per pin; binaries.py asks, the user's cache keeps.

A build takes minutes the first time and seconds from Go's own cache afterwards, so it says what it does.
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

from ttft_otel.lab.stack.pins import BUILDER, FLAGS, Tool

OLDEST: Final = (1, 25)
REMEDY: Final = "install Go 1.25 or newer from https://go.dev/dl/"
# Called with a line of what is going on, several times a second.
Say = Callable[[str], None]


class GoError(RuntimeError):
    """A build failed; the message holds Go's own words."""


class GoMissing(GoError):
    """There is no Go, or it is too old; the message holds the remedy."""


def version() -> tuple[int, int]:
    """Of the Go on PATH; raises GoMissing if there is none or it is too old."""
    try:
        told = subprocess.run(["go", "version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise GoMissing(f"Go is missing; {REMEDY}") from error
    found = re.search(r"\bgo(\d+)\.(\d+)", told.stdout)
    if not found:
        raise GoMissing(f"no version in {told.stdout.strip()!r}; {REMEDY}")
    have = int(found[1]), int(found[2])
    if have < OLDEST:
        raise GoMissing(f"Go {have[0]}.{have[1]} is too old; {REMEDY}")
    return have


def built(tool: Tool) -> bool:
    """Whether all programs of these very pins are in the cache."""
    return all((tool.folder / program.name).is_file() for program in tool.programs)


def build(tool: Tool, say: Say) -> Path:
    """Return the folder of the tool's programs, building them first if they are not there."""
    if built(tool):
        return tool.folder
    version()
    tool.folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(tool, say):
        if not built(tool):  # another process may have been faster
            shutil.rmtree(scratch := tool.folder.parent / f"{tool.name}.new", ignore_errors=True)
            made = scratch / "bin"
            made.mkdir(parents=True)
            source = sources(tool, scratch, say)
            for program in tool.programs:
                target = ["-o", str(made / program.name), program.package]
                options = [*FLAGS, f"-tags={tool.tags}", "-v"]
                run(("go", "build", *options, *target), source, f"go build {program.name}", say)
            made.replace(tool.folder)
            shutil.rmtree(scratch)
    return tool.folder


def sources(tool: Tool, scratch: Path, say: Say) -> Path:
    """The module to compile: the tool's own, or what the collector's builder writes, with our hashes."""
    if not tool.generated:
        return tool.module
    build(BUILDER, say)
    generate(tool, scratch, say, "--skip-get-modules")
    for name in ("go.mod", "go.sum"):
        shutil.copy(tool.module / name, scratch / "build" / name)
    return scratch / "build"


def generate(tool: Tool, scratch: Path, say: Say, *options: str) -> None:
    """Let the collector's builder write sources into scratch/build (the manifest says so)."""
    builder = str(BUILDER.folder / BUILDER.programs[0].name)
    words = (builder, "--config", str(tool.generated), "--skip-compilation", *options)
    run(words, scratch, "collector sources", say)


def resolve(tool: Tool, say: Say) -> None:
    """Write a generated tool's go.mod and go.sum anew, after its manifest has changed."""
    build(BUILDER, say)
    with tempfile.TemporaryDirectory() as scratch:
        generate(tool, Path(scratch), say)
        for name in ("go.mod", "go.sum"):
            shutil.copy(Path(scratch) / "build" / name, tool.module / name)


@contextmanager
def locked(tool: Tool, say: Say) -> Iterator[None]:
    """Two builds of one tool at once would do the work twice: the second waits for the first."""
    with (tool.folder.parent / f"{tool.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{tool.name}: waiting for another build")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run(words: Sequence[str], folder: Path, what: str, say: Say) -> None:
    """Run a command and pass its progress on; raises GoError with its last words if it fails.

    The checksum database does not know all versions: where go.sum is written, not read, it is off.
    """
    env = {**os.environ, "CGO_ENABLED": "0", "GOWORK": "off", "GOFLAGS": "", "GOSUMDB": "off"}
    began, count = time.monotonic(), 0
    last: deque[str] = deque(maxlen=25)
    with subprocess.Popen(
        words,
        cwd=folder,
        env=env,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                count += 1
                last.append(line.rstrip())
                say(f"{what}, {time.monotonic() - began:.0f} s, {count} packages · {line.strip()}")
        except BaseException:
            process.terminate()
            raise
    if process.returncode:
        story = "\n".join(last)
        raise GoError(f"{what} failed in {folder}:\n{story}")
