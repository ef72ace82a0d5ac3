# SPDX-License-Identifier: Apache-2.0
"""Pieces of vLLM for CUDA that are brought to a machine with a GPU and no network: names, places, limits.

gpu_pack.py fills them here; gpu_run.py unpacks them there. Only the standard library is imported.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import zipfile
from pathlib import Path
from typing import Final

PROJECT_ROOT: Final = Path(__file__).parents[1]
PIECES_FOLDER: Final = PROJECT_ROOT / "out" / "gpu"  # git ignores out/
CLOCK_PIECE: Final = "clock"  # vLLM's Python, the wheels that it needs, our package
KERNELS_PIECE: Final = "kernels"  # vLLM's compiled kernels
ATTENTION_PIECE: Final = "attention"  # FlashAttention 3, compiled
PIECES: Final = (CLOCK_PIECE, KERNELS_PIECE, ATTENTION_PIECE)
# A piece travels with the checkout, which may have so much; together at most 64 MiB.
CHECKOUT_BYTES: Final = 10 << 20
MAX_PIECE_BYTES: Final = (64 << 20) - CHECKOUT_BYTES
_DATA_PREFIX: Final = re.compile(r"^[^/]+\.data/(purelib|platlib)/")


def measure_piece(folder: Path) -> int:
    """Size of a piece's files, in bytes."""
    return sum(path.stat().st_size for path in folder.iterdir())


def unpack_piece(folder: Path, site: Path) -> bool:
    """Extract a piece's archives into the import folder `site`; False when that was done before."""
    archives = sorted(folder.glob("*.whl")) + sorted(folder.glob("*.zip"))
    content = hashlib.sha256(
        "".join(f"{path.name} {path.stat().st_size} " for path in archives).encode()
    ).hexdigest()
    stamp = site / f".{folder.name}.unpacked"
    if stamp.exists() and stamp.read_text("utf-8") == content:
        return False
    site.mkdir(parents=True, exist_ok=True)
    for archive in archives:
        _extract_archive(archive, site)
    stamp.write_text(content, "utf-8")
    return True


def list_unpacked(site: Path) -> set[str]:
    """Names of the pieces that are in `site`."""
    return {name for name in PIECES if (site / f".{name}.unpacked").exists()}


def _extract_archive(archive: Path, site: Path) -> None:
    """A wheel's scripts are left out; its purelib and platlib are what an installer makes of them."""
    with zipfile.ZipFile(archive) as source:
        for member in source.infolist():
            name = _DATA_PREFIX.sub("", member.filename)
            target = (site / name).resolve()
            if member.is_dir() or ".data/" in name or site.resolve() not in target.parents:
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            with source.open(member) as reader, target.open("wb") as writer:
                shutil.copyfileobj(reader, writer, 1 << 20)
