# SPDX-License-Identifier: Apache-2.0
"""Images under the names that docker-compose.yml and deploy/ use, of our own builds, for tests/containers.

For machines that reach no registry. A program alone in its image, as upstream's, or on a Debian made by
debootstrap; users, entry points, folders and shells are those of the official images as far as compose
files and Dockerfiles rely on them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from lab.container_engine import ContainerEngine
from lab.release_files import copy_files, list_context_files
from lab.stack import grafana_server
from lab.stack.binaries import StackBinaries
from lab.stack.program_pins import CHECKOUT
from lab.tiny_models import get_cache_root

IMAGE_FILES: Final = ("docker-compose.yml", "deploy/router.Dockerfile", "deploy/inject.Dockerfile")
NAMED_IMAGE: Final = re.compile(r"^\s*(?:image:|FROM) ([\w./-]+:[\w.-]+)", re.M)
TEMPO_VARIABLE: Final = "TTFT_CONTAINER_TEMPO"
# What a Python that was not packaged by Debian links to.
DEBIAN_PACKAGES: Final = (
    "ca-certificates,libssl3,libsqlite3-0,libffi8,zlib1g,libbz2-1.0,liblzma5,libreadline8,"
    "libgomp1,libnuma1"
)
BUSYBOX: Final = Path("/bin/busybox")
BUILD_BACKEND: Final = "hatchling"
# Grafana's official start: settings named GF_..__FILE are read from files.
GRAFANA_START: Final = """#!/bin/bash
for name in $(env | sed -n 's/^\\(GF_[A-Z0-9_]*\\)__FILE=.*/\\1/p'); do
  file="${name}__FILE"
  export "$name=$(< "${!file}")"
done
exec /usr/share/grafana/bin/grafana server --homepath /usr/share/grafana "$@"
"""
GRAFANA_PATHS: Final = (
    "ENV GF_PATHS_DATA=/var/lib/grafana GF_PATHS_LOGS=/tmp/logs GF_PATHS_PLUGINS=/tmp/plugins"
    " GF_PATHS_PROVISIONING=/etc/grafana/provisioning"
)


class ImageSourceError(LookupError):
    """Something that images are made of is missing; the message has the remedy."""


def list_named_images() -> set[str]:
    """All images that the compose file and the Dockerfiles name, those that they build apart."""
    found = {
        name
        for path in IMAGE_FILES
        for name in NAMED_IMAGE.findall((CHECKOUT / path).read_text("utf-8"))
    }
    return {name for name in found if not name.startswith("ttft-otel")}


def find_tempo() -> Path:
    """A Tempo 3, whose configuration grafana/tempo/tempo.yaml is. Raises ImageSourceError.

    Its releases download no closure by which Go could build them from a pin.
    """
    named = os.environ.get(TEMPO_VARIABLE)
    tempo = Path(named) if named else get_cache_root() / "containers" / "tempo"
    if not tempo.is_file():
        raise ImageSourceError(
            f"no Tempo 3: build cmd/tempo in a checkout of its v3.0.3 with CGO_ENABLED=0 "
            f"into {tempo}, or name one in {TEMPO_VARIABLE}"
        )
    return tempo


def find_grafana() -> Path:
    """Grafana's folder. Raises ImageSourceError."""
    found = grafana_server.find_grafana_home()
    if found is None:
        raise ImageSourceError(f"no Grafana; {grafana_server.GRAFANA_REMEDY}")
    return found


class ImageMaker:
    """Makes images in an engine. work: a folder for what they are made of. Raises ImageSourceError."""

    def __init__(self, engine: ContainerEngine, binaries: StackBinaries, work: Path) -> None:
        self.engine = engine
        self.binaries = binaries
        self.work = work
        if not BUSYBOX.is_file():
            raise ImageSourceError("no busybox: apt-get install busybox-static")

    def make_all(self) -> None:
        """All images that are named. Raises EngineError, ImageSourceError."""
        # What is missing is said before the first image is made.
        find_tempo()
        find_grafana()
        self.make_images(list_named_images())

    def make_images(self, names: Iterable[str]) -> None:
        """These images, of those that are named. Raises EngineError, ImageSourceError."""
        makers = {
            "otel/opentelemetry-collector-contrib": self._make_collector,
            "grafana/tempo": self._make_tempo,
            "prom/prometheus": self._make_prometheus,
            "grafana/grafana": self._make_grafana,
            "busybox": self._make_busybox,
            "python": self._make_python,
        }
        for name in sorted(names):
            makers[name.partition(":")[0]](name)

    def _make_collector(self, name: str) -> None:
        with self.open_root() as root:
            place_program(self.binaries.collector, root / "otelcol-contrib")
            self.engine.import_image(root, name, 'ENTRYPOINT ["/otelcol-contrib"]', "USER 10001")

    def _make_tempo(self, name: str) -> None:
        with self.open_root() as root:
            place_program(find_tempo(), root / "tempo")
            make_owned_folder(root / "var" / "tempo", 10001)
            self.engine.import_image(root, name, 'ENTRYPOINT ["/tempo"]', "USER 10001:10001")

    def _make_prometheus(self, name: str) -> None:
        with self.open_root() as root:
            place_busybox(root, "sh", "wget", "chown")
            place_program(self.binaries.prometheus, root / "bin" / "prometheus")
            make_owned_folder(root / "prometheus", 65534)
            (root / "tmp").mkdir(0o1777)
            self.engine.import_image(root, name, 'ENTRYPOINT ["/bin/prometheus"]', "USER nobody")

    def _make_busybox(self, name: str) -> None:
        with self.open_root() as root:
            place_busybox(root, "sh", "cp", "ls", "chmod")
            self.engine.import_image(root, name, 'CMD ["sh"]')

    def _make_grafana(self, name: str) -> None:
        with self.open_debian() as root:
            copy_tree(find_grafana(), root / "usr" / "share" / "grafana")
            place_program(BUSYBOX, root / "usr" / "bin" / "wget")
            (root / "run.sh").write_text(GRAFANA_START, "utf-8")
            (root / "run.sh").chmod(0o755)
            make_owned_folder(root / "var" / "lib" / "grafana", 472, 0)
            self.engine.import_image(
                root, name, 'ENTRYPOINT ["/run.sh"]', "USER 472", GRAFANA_PATHS
            )

    def _make_python(self, name: str) -> None:
        """This Python in /usr/local, with wheels for what the Dockerfiles install: builds reach no index."""
        if Path(sys.base_prefix) == Path("/usr"):
            raise ImageSourceError(
                "the Python of the tests must be one outside /usr, as uv installs"
            )
        with self.open_debian() as root:
            local = root / "usr" / "local"
            copy_tree(Path(sys.base_prefix), local, "site-packages", "test", "tests", "__pycache__")
            # Its shared library, if it has one.
            subprocess.run(("ldconfig", "-r", root), check=True)
            self._install_pip(local)
            download_wheels(root / "wheels")
            (root / "etc" / "pip.conf").write_text(
                "[global]\nno-index = true\nfind-links = /wheels\n", "utf-8"
            )
            self.engine.import_image(
                root, name, "ENV PATH=/usr/local/bin:/usr/bin:/bin", 'CMD ["python3"]'
            )

    def _install_pip(self, local: Path) -> None:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        site = local / "lib" / f"python{version}" / "site-packages"
        subprocess.run(
            (
                f"{sys.base_prefix}/bin/python3",
                "-m",
                "pip",
                "install",
                "-q",
                "--root-user-action=ignore",
                "--target",
                site,
                "pip",
            ),
            check=True,
        )
        for name in ("python", "python3"):
            (local / "bin" / name).unlink(missing_ok=True)
            (local / "bin" / name).symlink_to(f"python{version}")
        pip = local / "bin" / "pip"
        pip.unlink(missing_ok=True)
        pip.write_text('#!/bin/sh\nexec /usr/local/bin/python -m pip "$@"\n', "utf-8")
        pip.chmod(0o755)

    @contextmanager
    def open_root(self) -> Iterator[Path]:
        """An empty folder that becomes an image, then goes."""
        folder = Path(tempfile.mkdtemp(dir=self.work))
        folder.chmod(0o755)
        try:
            yield folder
        finally:
            shutil.rmtree(folder)

    @contextmanager
    def open_debian(self) -> Iterator[Path]:
        """The same with Debian in it."""
        with self.open_root() as root:
            subprocess.run(("tar", "-xf", prepare_debian(), "-C", root), check=True)
            yield root


def prepare_debian() -> Path:
    """An archive of a small Debian, made once, in a minute, into the cache."""
    archive = get_cache_root() / "containers" / "debian-bookworm.tar"
    if not archive.is_file():
        archive.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=archive.parent) as scratch:
            root = Path(scratch, "root")
            unfinished = Path(scratch, "archive")
            words = ("--variant=minbase", f"--include={DEBIAN_PACKAGES}", "bookworm", str(root))
            subprocess.run(("debootstrap", *words), check=True, stdout=subprocess.DEVNULL)
            for path in ("var/cache/apt", "var/lib/apt/lists"):
                shutil.rmtree(root / path, ignore_errors=True)
            subprocess.run(
                ("tar", "-cf", unfinished, "--exclude=./dev/*", "-C", root, "."), check=True
            )
            unfinished.rename(archive)
    return archive


def download_wheels(target: Path) -> None:
    """What the Dockerfiles install for this Python, from the package index. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as scratch:
        # A copy: building metadata in the checkout would leave files there.
        copy_files(CHECKOUT, list_context_files(CHECKOUT), Path(scratch))
        words = ("-m", "pip", "download", "--quiet", "--dest", str(target))
        command = (f"{sys.base_prefix}/bin/python3", *words, f"{scratch}[router]", BUILD_BACKEND)
        subprocess.run(command, check=True)


def place_program(program: Path, target: Path) -> None:
    """A copy that everybody may run."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    shutil.copyfile(program, target)
    target.chmod(0o755)


def place_busybox(root: Path, *names: str) -> None:
    """Busybox in /bin under these names, and the users that images name."""
    place_program(BUSYBOX, root / "bin" / "busybox")
    for name in names:
        (root / "bin" / name).symlink_to("busybox")
    (root / "etc").mkdir(exist_ok=True)
    (root / "etc" / "passwd").write_text(
        "root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n", "utf-8"
    )


def make_owned_folder(path: Path, user: int, group: int | None = None) -> None:
    """A folder that belongs to a user of the image."""
    path.mkdir(parents=True, exist_ok=True)
    os.chown(path, user, user if group is None else group)


def copy_tree(source: Path, target: Path, *left_out: str) -> None:
    """Copy a folder with its links, readable for everybody, without what has one of these names."""
    ignore = shutil.ignore_patterns(*left_out)
    shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True, ignore=ignore)
    subprocess.run(("chmod", "-R", "a+rX", target), check=True)
