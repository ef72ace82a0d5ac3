# SPDX-License-Identifier: Apache-2.0
"""What a release is made of, from the files that git knows; release.py calls it.

The version and every other place that tells one, the changelog's section, copies of the checkout, and
archives whose bytes depend on nothing but their files.
"""

from __future__ import annotations

import fnmatch
import gzip
import hashlib
import io
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Final

import yaml

ROOT: Final = Path(__file__).resolve().parents[1]
VERSION_FILE: Final = "ttft_otel/__init__.py"
CHART: Final = "deploy/helm/ttft-otel"
VERSION: Final = re.compile(r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?")
TOLD_VERSION: Final = re.compile(r'^__version__ = "([^"]*)"$', re.M)
# An image of ours with a tag: in a compose file, a manifest or a page.
OWN_IMAGE: Final = re.compile(r"\bttft-otel-(?:router|inject|answers):([\w.-]+)")
COPIED: Final = re.compile(r"^COPY (?!--from)(\S+) ", re.M)
FROM_CONTEXT: Final = re.compile(r"/src/(\S+)")


class ReleaseError(RuntimeError):
    """Something stands against a release; the message names the file and has the remedy."""


def run_git(root: Path, *words: str) -> str:
    """What git says of the checkout `root`. Raises ReleaseError."""
    done = subprocess.run(("git", "-C", root, *words), capture_output=True, text=True)
    if done.returncode:
        raise ReleaseError(f"{root}: git {words[0]}: {done.stderr.strip()}")
    return done.stdout


def list_tracked_files(root: Path) -> list[str]:
    """Paths of the files and links that are in git, or new and not ignored; deleted ones apart."""
    found = run_git(root, "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    paths = [path for path in found.split("\0") if path]
    return sorted(path for path in paths if (root / path).is_symlink() or (root / path).is_file())


def read_version(root: Path) -> str:
    """The version, from the only place that has it. Raises ReleaseError."""
    found = TOLD_VERSION.search((root / VERSION_FILE).read_text("utf-8"))
    if not found or not VERSION.fullmatch(found[1]):
        raise ReleaseError(f'{VERSION_FILE}: write __version__ = "1.2.3", or 1.2.3rc1')
    return found[1]


def find_other_versions(root: Path, version: str) -> Iterator[str]:
    """Each file that tells another version than `version`, with what to write there."""
    project = (root / "pyproject.toml").read_text("utf-8")
    if re.search(r"^version = ", project, re.M) or f'path = "{VERSION_FILE}"' not in project:
        yield f'pyproject.toml: has a version of its own; write dynamic = ["version"], of {VERSION_FILE}'
    chart = yaml.safe_load((root / CHART / "Chart.yaml").read_text("utf-8"))
    if chart["appVersion"] != version:
        yield (
            f'{CHART}/Chart.yaml: appVersion is {chart["appVersion"]}; write "{version}", '
            "and raise the chart's version"
        )
    if f"\n## {chart['version']}\n" not in (root / CHART / "UPGRADING.md").read_text("utf-8"):
        yield f"{CHART}/UPGRADING.md: has no section of the chart's version {chart['version']}"
    for path in list_tracked_files(root):
        if path.startswith(("docker-compose.yml", "deploy/")) and (root / path).is_file():
            for tag in OWN_IMAGE.findall((root / path).read_text("utf-8")):
                if tag not in ("local", version):
                    yield f"{path}: names an image of ours by {tag}; write local or {version}"


def read_changes(root: Path, version: str, final: bool) -> str:
    """The changelog's section of `version`; before the release, without `final`, also the unreleased one.

    Raises ReleaseError.
    """
    text = (root / "CHANGELOG.md").read_text("utf-8")
    heads = re.split(r"^## (.+)\n", text, flags=re.M)[1:]
    sections = dict(zip(heads[::2], heads[1::2], strict=True))
    for head, body in sections.items():
        name, _, day = head.partition(" - ")
        if name == f"[{version}]" and body.strip():
            if not re.fullmatch(r"\d{4}-\d\d-\d\d", day) or day > date.today().isoformat():
                raise ReleaseError(
                    f"CHANGELOG.md: {head!r} has no day of release: [{version}] - YYYY-MM-DD"
                )
            return body.strip() + "\n"
    unreleased = sections.get("[Unreleased]", "").strip()
    if final or f"To become {version}" not in unreleased:
        raise ReleaseError(
            f"CHANGELOG.md: there is no section [{version}] - YYYY-MM-DD"
            + ("" if final else f", and [Unreleased] does not begin with: To become {version}")
        )
    return unreleased + "\n"


def check_final(root: Path, version: str) -> None:
    """The checkout is a commit that has the version's tag. Raises ReleaseError."""
    if changed := run_git(root, "status", "--porcelain").splitlines():
        raise ReleaseError(f"{changed[0].split()[-1]}: is not committed; {len(changed)} such files")
    if f"v{version}" not in run_git(root, "tag", "--points-at", "HEAD").split():
        raise ReleaseError(
            f"this commit has no tag v{version}: git tag v{version} && git push --tags"
        )


def copy_files(root: Path, paths: Iterable[str], target: Path) -> None:
    """Copy files into an empty folder; links stay links."""
    for path in paths:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / path, target / path, follow_symlinks=False)


def list_context_files(root: Path) -> list[str]:
    """Files of git that .dockerignore lets into the context of deploy/*.Dockerfile.

    Raises ReleaseError where a Dockerfile copies or runs one that it does not let in.
    """
    lines = (root / ".dockerignore").read_text("utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    found = []
    for path in list_tracked_files(root):
        parts = path.split("/")
        ends = ["/".join(parts[: count + 1]) for count in range(len(parts))]
        kept = True
        for rule in rules:  # the last one that fits decides
            pattern = rule.removeprefix("!").removeprefix("**/")
            if any(fnmatch.fnmatch(each, pattern) for each in ends):
                kept = rule.startswith("!")
        if kept and not (root / path).is_symlink():
            found.append(path)
    for file in sorted((root / "deploy").glob("*.Dockerfile")):
        text = file.read_text("utf-8")
        for name in (*COPIED.findall(text), *FROM_CONTEXT.findall(text)):
            if name != "." and name not in found:
                raise ReleaseError(f"{file.name}: needs {name}, which .dockerignore keeps out")
    return found


def read_files(root: Path, paths: Iterable[str]) -> dict[str, tuple[bytes, bool]]:
    """Content of each file below `root`, and whether it can be executed."""
    return {
        path: ((root / path).read_bytes(), bool((root / path).stat().st_mode & 0o100))
        for path in paths
    }


def write_archive(files: Mapping[str, tuple[bytes, bool]], target: Path, epoch: int) -> None:
    """Write a .tar.gz of what read_files() gives; the same bytes for the same files.

    epoch: the time of all files, in seconds since 1970.
    """
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path, (body, executable) in sorted(files.items()):
            info = tarfile.TarInfo(path)
            info.size, info.mtime, info.mode = len(body), epoch, 0o755 if executable else 0o644
            archive.addfile(info, io.BytesIO(body))
    target.write_bytes(gzip.compress(raw.getvalue(), mtime=epoch))


def repack_archive(archive: Path, epoch: int) -> None:
    """Write helm's .tar.gz anew: its own bytes depend on the time."""
    files = dict[str, tuple[bytes, bool]]()
    with tarfile.open(archive) as packed:
        for each in packed:
            content = packed.extractfile(each)
            if content is not None:
                files[each.name] = (content.read(), bool(each.mode & 0o100))
    write_archive(files, archive, epoch)


def compute_digest(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
