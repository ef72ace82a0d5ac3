# SPDX-License-Identifier: Apache-2.0
"""The command scripts/release: makes and checks all files of a release, and publishes none.

Each step has a name, says what it found, and stops the release where something is wrong.
.github/workflows/release.yml runs it for a tag, and publishes what lies in the folder then.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import click

from lab import release_files
from lab.kube_tools import run_helm
from lab.progress_screen import ProgressScreen, open_screen
from lab.release_files import ROOT, ReleaseError
from lab.uv_command import UvError, run_uv
from ttft_otel.commands.main import SUBCOMMANDS

# Without `tokenize`, whose transformers is large and no command's help needs.
EXTRAS: Final = "router,serve,bench,explain,mcp"
SBOM_EXTRAS: Final = "router,serve"
# Man pages of all commands; click-man knows only those that a group has imported.
WRITE_MAN_PAGES: Final = """
import sys
from click import Context
from click_man.core import write_man_pages
from ttft_otel.commands.main import main
main.commands = {name: main.get_command(Context(main), name) for name in main.list_commands(None)}
write_man_pages("ttft-otel", main, version=sys.argv[1], target_dir=sys.argv[2], date=sys.argv[3])
"""
PAGE_TIMEOUT_S: Final = 60.0
COMMAND_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class ReleaseStep:
    """What a step found; `warning`: something that a release in earnest refuses."""

    name: str
    detail: str
    seconds: float
    warning: bool = False


@dataclass(slots=True)
class ReleaseMaker:
    """Makes a release of `root` in the folder `out`. final: it will be published."""

    root: Path
    out: Path
    final: bool
    show: ProgressScreen
    scratch: Path
    version: str = ""
    epoch: int = 0
    steps: list[ReleaseStep] = field(default_factory=list)
    warning: str = ""

    def make_all(self) -> None:
        """All steps. Raises ReleaseError, UvError."""
        for name, run in (
            ("versions", self.check_versions),
            ("man pages", self.write_man_pages),
            ("wheel and sdist", self.build_package),
            ("metadata", self.check_metadata),
            ("chart", self.package_chart),
            ("images", self.write_context),
            ("bill of materials", self.write_bill),
            ("installed wheel", self.try_wheel),
            ("checksums", self.write_checksums),
        ):
            self.run_step(name, run)

    def run_step(self, name: str, run: Callable[[], str]) -> None:
        """Run a step and keep what it says. Raises ReleaseError."""
        self.show.begin_step(name)
        begun = time.monotonic()
        try:
            detail = run()
        except (ReleaseError, UvError, subprocess.TimeoutExpired) as error:
            raise ReleaseError(f"{name}: {error}") from error
        warned, self.warning = self.warning, ""
        if warned and self.final:
            raise ReleaseError(f"{name}: {warned}")
        seconds = round(time.monotonic() - begun, 1)
        self.steps.append(
            ReleaseStep(name, "; ".join(filter(None, (detail, warned))), seconds, bool(warned))
        )
        self.show.print_line(f"          {self.steps[-1].detail}", "yellow" if warned else "")

    @property
    def source(self) -> Path:
        """The copy of the checkout that is built."""
        return self.scratch / "source"

    @property
    def wheel(self) -> Path:
        """The wheel."""
        return self.out / "dist" / f"ttft_otel-{self.version}-py3-none-any.whl"

    def check_versions(self) -> str:
        """One version everywhere, and a section of the changelog."""
        self.version = release_files.read_version(self.root)
        if others := list(release_files.find_other_versions(self.root, self.version)):
            raise ReleaseError("\n".join(others))
        notes = release_files.read_changes(self.root, self.version, self.final)
        if self.final:
            release_files.check_final(self.root, self.version)
        (self.out / "notes.md").write_text(notes, "utf-8")
        self.epoch = int(release_files.run_git(self.root, "log", "-1", "--format=%ct"))
        paths = release_files.list_tracked_files(self.root)
        release_files.copy_files(self.root, paths, self.source)
        return f"{self.version}, {len(notes.splitlines())} lines of changes"

    def write_man_pages(self) -> str:
        """A page for each command, into the copy."""
        target = self.source / "man"
        target.mkdir()
        day = time.strftime("%Y-%m-%d", time.gmtime(self.epoch))
        run_uv(
            *(
                "tool",
                "run",
                "--quiet",
                "--from",
                "click-man",
                "--with",
                f"{self.source}[{EXTRAS}]",
            ),
            *("python", "-c", WRITE_MAN_PAGES, self.version, target, day),
        )
        return f"{len(list(target.iterdir()))} pages"

    def build_package(self) -> str:
        """Sdist and wheel, twice: from two copies, the second wheel from the sdist."""
        again = self.scratch / "again"
        shutil.copytree(
            self.source, self.scratch / "copy", symlinks=True, copy_function=shutil.copy
        )
        env = {**os.environ, "SOURCE_DATE_EPOCH": str(self.epoch)}
        dist = self.out / "dist"
        run_uv("build", "--quiet", "--sdist", "--wheel", "--out-dir", dist, self.source, env=env)
        run_uv("build", "--quiet", "--out-dir", again, self.scratch / "copy", env=env)
        built = sorted(each for each in dist.iterdir() if each.suffix in (".whl", ".gz"))
        (dist / ".gitignore").unlink(missing_ok=True)  # of uv's
        for path in built:
            if path.read_bytes() != (again / path.name).read_bytes():
                raise ReleaseError(f"{path.name}: built twice, its bytes differ")
        if [path.name for path in built] != [self.wheel.name, f"ttft_otel-{self.version}.tar.gz"]:
            raise ReleaseError(f"pyproject.toml: builds {[path.name for path in built]}")
        return ", ".join(f"{path.name} {path.stat().st_size} bytes" for path in built)

    def check_metadata(self) -> str:
        """What the package index refuses or shows wrongly."""
        files = sorted((self.out / "dist").iterdir())
        run_uv("tool", "run", "--quiet", "twine", "check", "--strict", *files)
        return "twine has no complaint"

    def package_chart(self) -> str:
        """The chart as an archive that helm reads."""
        chart = self.source / release_files.CHART
        folder = self.out / "chart"
        packed = list[bytes]()
        for target in (self.scratch / "chart", folder):
            for words in (
                ("lint", "--strict", str(chart)),
                ("package", str(chart), "--destination", str(target)),
            ):
                self.call_helm(*words)
            (archive,) = target.iterdir()
            release_files.repack_archive(archive, self.epoch)
            packed.append(archive.read_bytes())
        if packed[0] != packed[1]:
            raise ReleaseError(f"{archive.name}: packed twice, its bytes differ")
        trial = str(chart / "examples" / "trial" / "values.yaml")
        objects = self.call_helm("template", "ttft", str(archive), "-f", trial).count("\nkind: ")
        return f"{archive.name} {len(packed[0])} bytes, {objects} objects"

    def call_helm(self, *words: str) -> str:
        """Run helm. Raises ReleaseError."""
        try:
            done = run_helm(*words)
        except FileNotFoundError as error:
            raise ReleaseError(str(error)) from error
        if done.returncode:
            raise ReleaseError(f"helm {words[0]}: {(done.stderr or done.stdout).strip()}")
        return done.stdout

    def write_context(self) -> str:
        """The context of deploy/*.Dockerfile, which builds the same package."""
        paths = release_files.list_context_files(self.root)
        context = self.out / f"ttft-otel-{self.version}-images.tar.gz"
        release_files.write_archive(
            release_files.read_files(self.source, paths), context, self.epoch
        )
        folder = self.scratch / "context"
        release_files.copy_files(self.source, paths, folder)
        run_uv("build", "--quiet", "--wheel", "--out-dir", self.scratch / "image", folder)
        (inside,) = (self.scratch / "image").glob("*.whl")
        if list_package_files(inside) != list_package_files(self.wheel):
            raise ReleaseError(".dockerignore: the images' package has not the wheel's files")
        files = sorted(each.name for each in (self.source / "deploy").glob("*.Dockerfile"))
        return f"{context.name} {context.stat().st_size} bytes, for {', '.join(files)}"

    def write_bill(self) -> str:
        """The software bill of materials, and what is known of advisories."""
        target = self.out / f"ttft-otel-{self.version}.cdx.json"
        done = subprocess.run(
            (self.root / "scripts" / "sbom", SBOM_EXTRAS, target, self.wheel),
            capture_output=True,
            text=True,
        )
        said = (done.stdout.strip() or done.stderr.strip()).splitlines() or ["it said nothing"]
        if done.returncode == 2 or not target.is_file():
            raise ReleaseError(said[-1])
        bill = json.loads(target.read_text("utf-8"))
        # The version is not in pyproject.toml, from which the tool takes what it says of the package.
        bill["metadata"]["component"]["version"] = self.version
        target.write_text(json.dumps(bill, indent=2) + "\n", "utf-8")
        if done.returncode:
            self.warning = "; ".join(said)
        return f"CycloneDX {bill['specVersion']}, {len(bill['components'])} components"

    def try_wheel(self) -> str:
        """The wheel alone in an empty environment: all help, and what works without vLLM."""
        environment = self.scratch / "environment"
        run_uv("venv", "--quiet", "--python", sys.executable, environment)
        run_uv("pip", "install", "--quiet", "--python", environment, f"{self.wheel}[{EXTRAS}]")
        trial = WheelTrial(environment, self.scratch / "trial")
        if (told := trial.run("--version").split()[-1]) != self.version:
            raise ReleaseError(f"ttft-otel --version says {told}")
        for name in SUBCOMMANDS:
            trial.run(name, "--help")
        trial.run("demo", "--recorded", "--db", "spans.db")
        trial.run("report", "--db", "spans.db")
        trial.run("explain", "--db", "spans.db")
        trial.run("stack", "init", "stack")
        trial.run("doctor", codes=(0, 1))  # nothing listens, as it says
        size = trial.read_page()
        pages = len(list((environment / "share" / "man" / "man1").iterdir()))
        return f"{len(SUBCOMMANDS)} commands, a page of {size} bytes, {pages} man pages"

    def write_checksums(self) -> str:
        """SHA256SUMS of all that is published."""
        files = sorted(each for each in self.out.rglob("*") if each.is_file())
        lines = [
            f"{release_files.compute_digest(each)}  {each.relative_to(self.out).as_posix()}\n"
            for each in files
        ]
        (self.out / "SHA256SUMS").write_text("".join(lines), "utf-8")
        return f"{len(files)} files"

    def describe(self) -> dict[str, object]:
        """What --json prints."""
        sums = (self.out / "SHA256SUMS").read_text("utf-8").splitlines()
        files = [line.split("  ", 1) for line in sums]
        return {
            "version": self.version,
            "final": self.final,
            "commit": release_files.run_git(self.root, "rev-parse", "HEAD").strip(),
            "source_date_epoch": self.epoch,
            "files": [
                {"path": path, "bytes": (self.out / path).stat().st_size, "sha256": digest}
                for digest, path in files
            ],
            "steps": [asdict(each) for each in self.steps],
        }


@dataclass(frozen=True, slots=True)
class WheelTrial:
    """Runs ttft-otel of `environment` in `folder`, where nothing of the checkout is."""

    environment: Path
    folder: Path

    def list_variables(self) -> dict[str, str]:
        """The environment of its commands: none of this process's Python or ttft-otel settings."""
        self.folder.mkdir(exist_ok=True)
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "TTFT_", "OTEL_"))
        }
        return {**kept, "HOME": str(self.folder), "XDG_DATA_HOME": str(self.folder / "data")}

    def run(self, *words: str, codes: tuple[int, ...] = (0,)) -> str:
        """What a command prints. Raises ReleaseError where it does not end with one of `codes`."""
        done = subprocess.run(
            (self.environment / "bin" / "ttft-otel", *words),
            capture_output=True,
            text=True,
            cwd=self.folder,
            env=self.list_variables(),
            timeout=COMMAND_TIMEOUT_S,
        )
        if done.returncode not in codes or "Traceback" in done.stderr:
            text = (done.stderr or done.stdout).strip()[-2000:]
            raise ReleaseError(f"ttft-otel {' '.join(words)} ended with {done.returncode}: {text}")
        return done.stdout

    def read_page(self) -> int:
        """Size of the page that `demo --recorded` serves. Raises ReleaseError."""
        with subprocess.Popen(
            (self.environment / "bin" / "ttft-otel", "demo", "--recorded"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
            env=self.list_variables() | {"PYTHONUNBUFFERED": "1"},
        ) as process:
            assert process.stdout is not None
            said = list[str]()
            try:
                for line in process.stdout:
                    said.append(line)
                    if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                        with urllib.request.urlopen(found[0], timeout=PAGE_TIMEOUT_S) as answer:
                            body: bytes = answer.read()
                        if b"</html>" in body:
                            return len(body)
                        break
            finally:
                process.terminate()
        raise ReleaseError(f"ttft-otel demo --recorded shows no page: {''.join(said)[-2000:]}")


def list_package_files(wheel: Path) -> dict[str, int]:
    """Checksums of the package's files in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {
            each.filename: each.CRC
            for each in archive.infolist()
            if each.filename.startswith("ttft_otel/")
        }


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="""\b
Examples:
  scripts/release                     make and check all files, in out/release
  scripts/release --json              the same; names, sizes and digests on standard output
  scripts/release --final             for a commit with its tag, as the workflow does

Exit code: 0 all is made and sound, 1 something is not, as the message says, 2 a wrong option.
""",
)
@click.option(
    "--dry-run/--final",
    "rehearsal",
    default=True,
    help="Rehearse, which is the default; or be strict: a tagged commit without changes, a dated section "
    "of the changelog, no known advisory. Neither publishes anything.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=ROOT / "out" / "release",
    help="Folder for the files; what is in it is removed.  [default: out/release]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def run_release(rehearsal: bool, out: Path, as_json: bool) -> None:
    """Make the files of a release, and check them: wheel, sdist, chart, images' context, bill of materials.

    The same commit gives the same bytes, but for the bill, which tells the versions of its day.
    """
    if out.exists() and any(out.iterdir()) and not (out / "notes.md").is_file():
        raise click.ClickException(f"{out} has other files; name an empty folder with --out")
    shutil.rmtree(out, ignore_errors=True)
    for name in ("dist", "chart"):
        (out / name).mkdir(parents=True)
    with (
        tempfile.TemporaryDirectory(prefix="ttft-release-") as scratch,
        open_screen(as_json) as show,
    ):
        maker = ReleaseMaker(ROOT, out.resolve(), not rehearsal, show, Path(scratch))
        try:
            maker.make_all()
        except ReleaseError as error:
            raise click.ClickException(str(error)) from error
        found = maker.describe()
    (out / "release.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    if as_json:
        click.echo(json.dumps(found, indent=1))
    else:
        click.echo(f"{maker.version} lies in {out}; nothing is published.")


if __name__ == "__main__":
    run_release()
