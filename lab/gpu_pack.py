# SPDX-License-Identifier: Apache-2.0
"""Pack vLLM for CUDA into pieces that fit through a narrow door to a machine with a GPU.

From the package index come wheels whole, and of vLLM's wheel (300 MB) only the parts that are used: the
index is asked for byte ranges. scripts/gpu pack starts it; gpu_run.py unpacks and uses the pieces.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from lab.gpu_pieces import (
    ATTENTION_PIECE,
    CLOCK_PIECE,
    KERNELS_PIECE,
    MAX_PIECE_BYTES,
    PIECES,
    PIECES_FOLDER,
    PROJECT_ROOT,
    measure_piece,
)
from lab.vllm_releases import PYTHON_READ_SUFFIXES, run_uv

# The newest release for the torch that such a machine has: 2.11 for CUDA 13, Python 3.12.
VLLM_VERSION: Final = "0.26.0"
PYTHON_VERSION: Final = "3.12"
MAX_GLIBC_MINOR: Final = 39  # pip matches each manylinux tag exactly, so all are named
WHEEL_LIST: Final = PROJECT_ROOT / "scripts" / "gpu_wheels.txt"
METADATA_NAMES: Final = ("METADATA", "WHEEL", "entry_points.txt")
KERNEL_FILES: Final = ("vllm/_C_stable_libtorch.abi3.so", "vllm/spinloop.abi3.so")
ATTENTION_FILES: Final = ("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",)
READ_AHEAD_BYTES: Final = 4 << 20
RANGE_TIMEOUT_S: Final = 180


class RemoteFile(io.RawIOBase):
    """A file behind an http(s) URL whose server answers byte ranges; seekable, for zipfile."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.position = 0
        _, spans = self._read_span(0, 0)
        self.size = int(spans.split("/")[-1])  # "bytes 0-0/SIZE"

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """The offset of the next byte."""
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to `offset` from the start, the position or the end."""
        self.position = (0, self.position, self.size)[whence] + offset
        return self.position

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """One request for as much as `buffer` takes."""
        end = min(self.size, self.position + len(buffer))
        if end <= self.position:
            return 0
        data, _ = self._read_span(self.position, end - 1)
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)

    def _read_span(self, first: int, last: int) -> tuple[bytes, str]:
        span = {"Range": f"bytes={first}-{last}"}
        request = urllib.request.Request(self.url, headers=span)
        with urllib.request.urlopen(request, timeout=RANGE_TIMEOUT_S) as answer:
            if answer.status != 206:
                raise SystemExit(f"{self.url}: no byte ranges; use a package index that gives them")
            return answer.read(), answer.headers["Content-Range"]


def build_platform_flags() -> list[str]:
    """pip's flags for wheels of Python 3.12 on x86-64 Linux."""
    tags = ["manylinux1", "manylinux2010", "manylinux2014"]
    tags += [f"manylinux_2_{minor}" for minor in range(5, MAX_GLIBC_MINOR + 1)]
    flags = ["--no-deps", "--only-binary=:all:", "--python-version", PYTHON_VERSION]
    flags += ["--implementation", "cp"]
    return flags + [word for tag in tags for word in ("--platform", f"{tag}_x86_64")]


def run_pip(*arguments: str) -> None:
    """Run pip, which knows the package index; environments made by uv have none of their own."""
    run_uv("tool", "run", "--quiet", "pip", *arguments)


def find_vllm_wheel() -> str:
    """URL of vLLM's wheel, as pip would install it; only its metadata is downloaded."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        place = ("--target", scratch, "--report", str(report))
        run_pip("install", "--dry-run", "--quiet", *place, *build_platform_flags(),
                f"vllm=={VLLM_VERSION}")  # fmt: skip
        (install,) = json.loads(report.read_text("utf-8"))["install"]
    return str(install["download_info"]["url"])


def is_read_by_python(name: str) -> bool:
    """Whether a file of vLLM's wheel belongs to the piece without compiled files."""
    inside_metadata = name.split("/")[0].endswith(".dist-info")
    if inside_metadata:
        return name.split("/")[-1] in METADATA_NAMES
    return name.endswith(PYTHON_READ_SUFFIXES)


def copy_members(source: zipfile.ZipFile, target: Path, wanted: Callable[[str], bool]) -> int:
    """Copy the members whose names are `wanted` into a new archive; how many there were.

    With LZMA, because a piece that just fits should go on fitting; it takes a minute for the kernels.
    """
    names = [name for name in source.namelist() if wanted(name) and not name.endswith("/")]
    with zipfile.ZipFile(target, "w", zipfile.ZIP_LZMA) as archive:
        for name in sorted(names):
            archive.writestr(name, source.read(name), zipfile.ZIP_LZMA)
    return len(names)


def fill_piece(name: str, folder: Path, vllm: zipfile.ZipFile) -> None:
    """Put the piece's archives into the empty `folder`."""
    if name == CLOCK_PIECE:
        wheels = ("--quiet", "-d", str(folder), "-r", str(WHEEL_LIST))
        run_pip("download", *wheels, *build_platform_flags())
        run_uv("build", "--quiet", "--wheel", "--out-dir", str(folder), str(PROJECT_ROOT))
        (folder / ".gitignore").unlink(missing_ok=True)  # uv adds one
        copied = copy_members(vllm, folder / "vllm-python.zip", is_read_by_python)
        expected = 1
    else:
        files = {KERNELS_PIECE: KERNEL_FILES, ATTENTION_PIECE: ATTENTION_FILES}[name]
        copied = copy_members(vllm, folder / f"vllm-{name}.zip", files.__contains__)
        expected = len(files)
    if copied < expected:
        raise SystemExit(
            f"vLLM {VLLM_VERSION} has not all files of the piece {name}: see {__file__}"
        )


def build_pieces(names: list[str], folder: Path) -> dict[str, int]:
    """Build the pieces `names` anew in `folder`; their sizes in bytes."""
    sizes: dict[str, int] = {}
    with zipfile.ZipFile(
        io.BufferedReader(RemoteFile(find_vllm_wheel()), READ_AHEAD_BYTES)
    ) as vllm:
        for name in names:
            target = folder / name
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
            fill_piece(name, target, vllm)
            sizes[name] = measure_piece(target)
    return sizes


def report_sizes(sizes: dict[str, int], file: Path | None) -> int:
    """A line per piece, and the file; 1 when one is too large to be brought along."""
    entries = {
        name: {"bytes": size, "goal": MAX_PIECE_BYTES, "met": size <= MAX_PIECE_BYTES}
        for name, size in sizes.items()
    }
    for name, entry in entries.items():
        missed = "" if entry["met"] else "   MISSED"
        size_mib = entry["bytes"] / 2**20
        goal_mib = MAX_PIECE_BYTES / 2**20
        sys.stdout.write(f"{name:10} {size_mib:6.1f} MiB   goal {goal_mib:g}{missed}\n")
    if file:
        file.write_text(json.dumps(entries, indent=2) + "\n", "utf-8")
    return 0 if all(entry["met"] for entry in entries.values()) else 1


def main() -> int:
    """Build the pieces that are named, or all."""
    parser = argparse.ArgumentParser(prog="scripts/gpu pack", description=__doc__.split("\n")[0])
    parser.add_argument("pieces", nargs="*", metavar="PIECE", help=f"of {', '.join(PIECES)}")
    parser.add_argument("--folder", type=Path, default=PIECES_FOLDER)
    parser.add_argument("--json", type=Path, help="write {piece: {bytes, goal, met}} there")
    options = parser.parse_args()
    if unknown := set(options.pieces) - set(PIECES):
        parser.error(f"no such piece: {', '.join(sorted(unknown))}")
    return report_sizes(build_pieces(options.pieces or list(PIECES), options.folder), options.json)


if __name__ == "__main__":
    sys.exit(main())
