# SPDX-License-Identifier: Apache-2.0
"""Images for a Kubernetes node, as archives in the cache: kube_command.py makes them, the node imports them.

Made by a Docker engine of their own (container_engine.py), from deploy/'s Dockerfiles and this checkout.
The image under vLLM's name is a Debian without vLLM: that comes from this checkout's environment, which the
node mounts into the pod (kube_workload.py).
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from lab.container_engine import ContainerEngine, run_engine
from lab.container_images import ImageMaker, list_named_images, place_busybox
from lab.kube_configs import PAUSE_IMAGE
from lab.stack import binaries
from lab.stack.binaries import StackBinaries
from lab.stack.program_pins import CHECKOUT
from lab.tiny_models import get_cache_root

ROUTER_IMAGE = "ttft-otel-router:local"
INJECT_IMAGE = "ttft-otel-inject:local"
VLLM_IMAGE: Final = "vllm/vllm-openai:v0.32.0"  # as deploy/kubernetes names it
BUSYBOX_IMAGE = "busybox"
PYTHON_IMAGE = "python"
COLLECTOR_IMAGE = "otel/opentelemetry-collector"
# What decides what is in the images, beside programs of the stack, whose pins have folders of their own.
SOURCES: Final = (
    "ttft_otel", "deploy/inject", "deploy/inject.Dockerfile", "deploy/router.Dockerfile",
    "pyproject.toml", "hatch_build.py", "lab/kube_images.py",
)  # fmt: skip
# Collects processes whose parents have ended, and ends on SIGTERM.
PAUSE_SCRIPT: Final = "trap 'exit 0' TERM INT; while :; do /bin/sleep 1000000 & wait $!; done"
VLLM_START: Final = (
    'ENTRYPOINT ["/opt/vllm/bin/python", "-m", "vllm.entrypoints.cli.main", "serve"]'
)


def list_sources(root: Path = CHECKOUT) -> Iterator[Path]:
    """Files of which the images are made."""
    for name in SOURCES:
        path = root / name
        found = [path] if path.is_file() else sorted(path.rglob("*"))
        yield from (each for each in found if each.is_file() and "__pycache__" not in each.parts)


def build_archive_folder(programs: StackBinaries, root: Path = CHECKOUT) -> Path:
    """Where in the cache the archives of this checkout lie, made or not."""
    digest = hashlib.sha256(f"{programs.collector} {sys.version}".encode())
    for path in list_sources(root):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return get_cache_root() / "kube-node" / f"images-{digest.hexdigest()[:16]}"


def prepare_archives(say: Callable[[str], None]) -> list[Path]:
    """Archives of all images that a node needs, made if they are not in the cache.

    Raises EngineError, ImageSourceError, GoBuildError.
    """
    programs = binaries.gather_binaries(say)
    folder = build_archive_folder(programs)
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix="engine-") as scratch:
            (work := Path(scratch, "work")).mkdir()
            (done := Path(scratch, "archives")).mkdir()
            with run_engine(Path(scratch)) as engine:
                make_images(engine, ImageMaker(engine, programs, work), say)
                for name in list_image_names():
                    say(f"writing {name}")
                    file = f"{name.replace('/', '_').replace(':', '_')}.tar"
                    engine.run_docker("save", "--output", str(done / file), name)
            # Of other states of the checkout.
            for old in folder.parent.glob("images-*"):
                shutil.rmtree(old)
            done.rename(folder)
    return sorted(folder.glob("*.tar"))


def list_image_names() -> list[str]:
    """All images of a node, with their tags."""
    named = list_named_images()
    found = [each for each in named if each.startswith((BUSYBOX_IMAGE, COLLECTOR_IMAGE))]
    return sorted([*found, ROUTER_IMAGE, INJECT_IMAGE, VLLM_IMAGE, PAUSE_IMAGE])


def make_images(engine: ContainerEngine, maker: ImageMaker, say: Callable[[str], None]) -> None:
    """Make them all in an engine."""
    bases = (BUSYBOX_IMAGE, PYTHON_IMAGE, COLLECTOR_IMAGE)
    for name in sorted(each for each in list_named_images() if each.startswith(bases)):
        say(f"making {name}")
        maker.make_images([name])
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for name, file, more in (
        (ROUTER_IMAGE, "router", ()),
        (INJECT_IMAGE, "inject", ("--build-arg", f"PYTHONS={version}")),
    ):
        say(f"building deploy/{file}.Dockerfile")
        words = ("build", "--file", f"deploy/{file}.Dockerfile", *more, "--tag", name, ".")
        engine.run_docker(*words)
    say(f"making {VLLM_IMAGE}, {PAUSE_IMAGE}")
    with maker.open_debian() as root:
        engine.import_image(root, VLLM_IMAGE, VLLM_START)
    with maker.open_root() as root:
        place_busybox(root, "sh", "sleep")
        engine.import_image(root, PAUSE_IMAGE, f'ENTRYPOINT ["/bin/sh", "-c", "{PAUSE_SCRIPT}"]')
