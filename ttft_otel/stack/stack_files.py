# SPDX-License-Identifier: Apache-2.0
"""The stack's files, from the wheel or from a checkout, and the folders that `stack init` writes of them.

A folder has the layout of the repository, and the package itself, of which compose builds images.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ttft_otel import __version__

PACKAGE: Final = Path(__file__).resolve().parents[1]
# In the wheel they lie below ttft_otel/_stack: pyproject.toml's force-include has the same list.
STACK_FILES: Final = (
    ".dockerignore",
    ".env",
    "LICENSE",
    "README.md",
    "collector",
    "deploy/alerts",
    "deploy/docker-compose.admin.yml",
    "deploy/docker-compose.alerts.yml",
    "deploy/docker-compose.secure.yml",
    "deploy/router.Dockerfile",
    "deploy/targets",
    "docker-compose.yml",
    "grafana/dashboards",
    "grafana/prometheus",
    "grafana/provisioning",
    "grafana/tempo",
    "hatch_build.py",
    "pyproject.toml",
)
STAMP_FILE: Final = ".ttft-otel.json"  # version and digests of what was written
NAMED_FILES: Final = 3  # so many are named in a message


class StackFilesError(RuntimeError):
    """The files are not there, or a folder cannot take them; the message has the remedy."""


@dataclass(frozen=True, slots=True)
class StackFolder:
    """What a folder holds, compared with this package.

    version: of the package that wrote it. outdated: files that the package has otherwise by now.
    edited: files that were changed since they were written.
    """

    version: str
    outdated: list[str]
    edited: list[str]


def find_root() -> Path:
    """The folder that has STACK_FILES. Raises StackFilesError."""
    packed = PACKAGE / "_stack"
    # An editable install has none: its files are those of the checkout.
    root = packed if packed.is_dir() else PACKAGE.parent
    if not (root / "docker-compose.yml").is_file():
        raise StackFilesError(
            "this installation has no files of the stack; install ttft-otel from its wheel again"
        )
    return root


def list_files() -> dict[str, Path]:
    """Path within a folder -> the file that it is a copy of. Raises StackFilesError."""
    root = find_root()
    found = dict[str, Path]()
    for name in STACK_FILES:
        path = root / name
        for each in path.rglob("*") if path.is_dir() else (path,):
            found[each.relative_to(root).as_posix()] = each
    for each in PACKAGE.rglob("*"):
        inside = each.relative_to(PACKAGE)
        if not {"__pycache__", "_stack"} & set(inside.parts):
            found[f"ttft_otel/{inside.as_posix()}"] = each
    return {name: path for name, path in sorted(found.items()) if path.is_file()}


def compute_digest(path: Path) -> str:
    """The digest of a file's content; "" where there is none."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def read_stamp(folder: Path) -> tuple[str, dict[str, str]]:
    """The version that wrote a folder, and its files' digests. Raises StackFilesError."""
    try:
        stamp = json.loads((folder / STAMP_FILE).read_text("utf-8"))
        return str(stamp["version"]), dict(stamp["files"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise StackFilesError(
            f"{folder} was not written by `ttft-otel stack init {folder}`: run that first"
        ) from error


def compare_folder(folder: Path) -> StackFolder:
    """Compare a folder with this package. Raises StackFilesError for one without a stamp."""
    version, written = read_stamp(folder)
    new = {name: compute_digest(path) for name, path in list_files().items()}
    outdated = [name for name in {**new, **written} if new.get(name) != written.get(name)]
    edited = [name for name in written if compute_digest(folder / name) != written[name]]
    return StackFolder(version, sorted(outdated), sorted(edited))


def write_folder(folder: Path, force: bool = False) -> list[str]:
    """Write all files, or bring a folder to this version; gives the files that a user edited, which are kept.

    force: replace those, too. Raises StackFilesError where other files are in the way, and OSError.
    """
    files = list_files()
    written = read_stamp(folder)[1] if (folder / STAMP_FILE).exists() else {}
    new = {name: compute_digest(path) for name, path in files.items()}
    kept = [
        name
        for name in files
        if compute_digest(folder / name) not in ("", new[name], written.get(name))
    ]
    if kept and not written and not force:
        raise StackFilesError(
            f"{folder} has other files of these names ({', '.join(kept[:NAMED_FILES])}); "
            "choose another folder, or --force to replace them"
        )
    for name, source in files.items():
        if force or name not in kept:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    # A rule that this version no longer has would go on firing.
    for name in written.keys() - files.keys():
        if compute_digest(folder / name) == written[name]:
            (folder / name).unlink()
    stamp = json.dumps({"version": __version__, "files": new}, indent=1)
    (folder / STAMP_FILE).write_text(f"{stamp}\n", "utf-8")
    return [] if force else kept
