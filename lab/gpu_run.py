# SPDX-License-Identifier: Apache-2.0
"""Unpack the pieces of gpu_pack.py on a machine with a GPU, and run a benchmark over them there.

scripts/gpu starts it with that machine's own python3; nothing but its standard library is imported here.
The benchmark runs in a process of its own, with this checkout before the unpacked packages.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from lab.gpu_pieces import (
    CLOCK_PIECE,
    KERNELS_PIECE,
    PIECES,
    PIECES_FOLDER,
    PROJECT_ROOT,
    list_unpacked,
    unpack_piece,
)

SITE: Final = Path(tempfile.gettempdir()) / "ttft-otel-gpu"
# What each benchmark needs besides torch with CUDA.
PIECES_NEEDED: Final = {
    "clock": frozenset[str](),
    "runners": frozenset({CLOCK_PIECE}),
    "serve": frozenset({CLOCK_PIECE, KERNELS_PIECE}),
}
# Beside the tests' runners and loops, which it uses.
MODULES: Final = {
    "clock": "benchmarks.gpu_clock",
    "runners": "hooks.device.gpu_runners",
    "serve": "benchmarks.gpu_serve",
}
ATTENTION_FLAG: Final = "--plain-attention"  # where FlashAttention 3 was not brought
ASK_FOR_DEVICE: Final = "import sys, torch; sys.exit(not torch.cuda.is_available())"


def unpack_pieces(folder: Path, site: Path) -> list[str]:
    """Unpack what is in `folder` and not in `site` yet; the names of all pieces that are there."""
    for name in PIECES:
        if (folder / name).is_dir() and unpack_piece(folder / name, site):
            sys.stderr.write(f"unpacked {name} into {site}\n")
    return sorted(list_unpacked(site))


def build_environment(site: Path) -> dict[str, str]:
    """The environment in which the unpacked packages are importable, behind this checkout's code."""
    roots = [str(PROJECT_ROOT), str(PROJECT_ROOT / "tests"), str(site)]
    paths = [*roots, os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": ":".join(filter(None, paths))}


def find_obstacle(what: str, unpacked: list[str], env: dict[str, str]) -> str:
    """Why the benchmark `what` cannot run here, with its remedy; empty if it can."""
    missing = PIECES_NEEDED[what] - set(unpacked)
    if missing:
        return (
            f"not unpacked yet: {', '.join(sorted(missing))}. Run `scripts/gpu pack` where there is a"
            f" network, bring out/gpu/PIECE, and run `scripts/gpu unpack`: all pieces one by one"
        )
    ask = [sys.executable, "-c", ASK_FOR_DEVICE]
    if subprocess.run(ask, env=env, capture_output=True, check=False).returncode:
        return f"{sys.executable} has no torch with a CUDA device: run this where there is one"
    return ""


def run_benchmark(what: str, arguments: list[str], folder: Path, site: Path) -> int:
    """Unpack, check, run; the benchmark's exit code (1: a goal is missed), 2 where it cannot run."""
    unpacked = unpack_pieces(folder, site)
    env = build_environment(site)
    if obstacle := find_obstacle(what, unpacked, env):
        sys.stderr.write(obstacle + "\n")
        return 2
    if what == "serve" and "attention" not in unpacked and ATTENTION_FLAG not in arguments:
        arguments = [*arguments, ATTENTION_FLAG]
    command = [sys.executable, "-m", MODULES[what], *arguments]
    return subprocess.run(command, cwd=PROJECT_ROOT, env=env, check=False).returncode


def main() -> int:
    """`unpack`, or `run clock|runners|serve` with the benchmark's own arguments."""
    parser = argparse.ArgumentParser(prog="scripts/gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, default=PIECES_FOLDER, help="where the pieces are")
    parser.add_argument("--site", type=Path, default=SITE, help="where they are unpacked")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("unpack", help="unpack the pieces that are here")
    run = verbs.add_parser("run", help="unpack, then run a benchmark; more arguments are its own")
    run.add_argument("what", choices=list(PIECES_NEEDED))
    options, arguments = parser.parse_known_args()
    if options.verb == "unpack":
        if arguments:
            parser.error(f"unknown: {' '.join(arguments)}")
        sys.stdout.write(f"unpacked: {', '.join(unpack_pieces(options.folder, options.site))}\n")
        return 0
    return run_benchmark(options.what, arguments, options.folder, options.site)


if __name__ == "__main__":
    sys.exit(main())
