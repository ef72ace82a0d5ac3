# SPDX-License-Identifier: Apache-2.0
"""The scripts that README and CI name, and the releases that one of them makes.

Scripts are there, sound, and (marked full) do what they say. A release has one version everywhere, the same
bytes twice, files as told; workflows call scripts alone.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
import uuid
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import file_schedule
import jsonschema
import pytest
import tomllib
import yaml

from lab import release_files, uv_command
from lab.release import ReleaseMaker
from lab.release_files import ReleaseError

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(path for path in (ROOT / "scripts").iterdir() if path.suffix != ".txt")
SHELL = [*SCRIPTS, ROOT / ".ci" / "run"]
DEMO = (sys.executable, "-m", "lab.demo")
# Every process that a test starts inherits this variable, however deep and however detached.
MARK = "TTFT_OTEL_TEST_RUN"
GONE_S = 20.0


def test_scheduled_files() -> None:
    """Every file that the schedule names is there: one that was renamed would begin last."""
    named = (*itertools.chain(*file_schedule.SHARING_FILES), *file_schedule.LONG_FILES)
    assert [path for path in named if not (ROOT / path).is_file()] == []


def test_shell() -> None:
    """Each can be executed, has a license, says what it is for, and stops at the first error."""
    for path in SHELL:
        text = path.read_text("utf-8")
        assert os.access(path, os.X_OK), path
        assert text.startswith("#!/usr/bin/env bash\n# SPDX-License-Identifier: Apache-2.0\n# ")
        assert "set -euo pipefail" in text or path.name == "run", path
        assert subprocess.run(["bash", "-n", path], check=False).returncode == 0


def test_readme() -> None:
    """Every script that the README names is there, and so are the two that everybody needs."""
    named = set(re.findall(r"scripts/(\w+)", (ROOT / "README.md").read_text("utf-8")))

    assert {"demo", "test", *named} <= {path.name for path in SCRIPTS}


def test_ci() -> None:
    """CI calls scripts/test and nothing else."""
    lines = (ROOT / ".ci" / "run").read_text("utf-8").splitlines()
    commands = [line for line in lines if line and not line.startswith("#")]

    assert len(commands) == 1
    assert "scripts/test" in commands[0]


BUG = {"id": "CVE-1", "fix_versions": ["2"], "aliases": [], "description": ""}
AIOHTTP = {"name": "aiohttp", "version": "1"}
OWN = {"name": "ttft-otel", "skip_reason": "not found"}
# Does what scripts/sbom asks of uv, with what the test wants said.
FAKE_UV = """#!/usr/bin/env bash
case "$1 $2" in
  "venv "*) mkdir -p "${!#}/lib/python3.1/site-packages" ;;
  "pip "*) exit "$FAKE_INSTALL" ;;
esac
case "$*" in *pip-audit*) [ -z "$FAKE_REPORT" ] || printf %s "$FAKE_REPORT" >"${!#}" ;; esac
"""


@pytest.mark.parametrize(
    ("asked", "installed", "code", "words"),
    [
        ([AIOHTTP | {"vulns": []}, OWN], 0, 0, "1 of 1 packages audited, 0 advisories"),
        ([AIOHTTP | {"vulns": [BUG]}, OWN], 0, 1, "aiohttp 1: CVE-1, mended in 2"),
        ([AIOHTTP | {"skip_reason": "not found"}, OWN], 0, 3, "0 of 1 packages audited"),
        (None, 0, 3, "not audited, pip-audit has no data here"),
        ([], 1, 2, "is the package index reached?"),
    ],
)
def test_what_sbom_says_of_advisories(
    asked: list[object] | None, installed: int, code: int, words: str, tmp_path: Path
) -> None:
    """pip-audit ends well, with "none found", where it could ask about nothing: scripts/sbom does not."""
    program = tmp_path / "uv"
    program.write_text(FAKE_UV)
    program.chmod(0o755)
    done = subprocess.run(
        (ROOT / "scripts" / "sbom", "router", tmp_path / "sbom.json"),
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "FAKE_INSTALL": str(installed),
            "FAKE_REPORT": "" if asked is None else json.dumps({"dependencies": asked}),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    assert words in done.stdout + done.stderr


@pytest.mark.full
def test_sbom(tmp_path: Path) -> None:
    """It has all that the extras name and what these need, each with its version, in one graph."""
    target = tmp_path / "sbom.json"
    done = subprocess.run(
        (ROOT / "scripts" / "sbom", "router,serve", target), capture_output=True, text=True
    )
    if done.returncode == 2:
        pytest.skip(done.stderr)
    assert done.returncode in (0, 3), done.stdout
    bill = json.loads(target.read_text("utf-8"))
    assert (bill["bomFormat"], bill["metadata"]["component"]["name"]) == ("CycloneDX", "ttft-otel")
    parts = {each["bom-ref"]: each for each in bill["components"]}
    names = {ref: re.sub(r"[-_.]+", "-", each["name"]).lower() for ref, each in parts.items()}
    for ref, each in parts.items():
        assert each["purl"] == f"pkg:pypi/{names[ref]}@{each['version']}"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = {
        re.split(r"[\[>=; ]", each)[0]
        for each in (*project["dependencies"], *extras["router"], *extras["serve"])
    }
    assert wanted <= set(names.values())
    needs = {each["ref"]: each.get("dependsOn", []) for each in bill["dependencies"]}
    reached, waiting = set[str](), [bill["metadata"]["component"]["bom-ref"]]
    while waiting:
        ref = waiting.pop()
        if ref not in reached:
            reached.add(ref)
            waiting += needs[ref]
    assert parts.keys() <= reached


@pytest.mark.parametrize("module", ["demo", "compat"])
def test_help(module: str) -> None:
    """--help answers at once, with examples."""
    command = (sys.executable, "-m", f"lab.{module}", "--help")
    reported = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60
    ).stdout

    assert f"scripts/{module}" in reported
    assert "Examples:" in reported
    assert "Exit code" in reported


@pytest.fixture
def marked_environment() -> Iterator[dict[str, str]]:
    """An environment by which a test's processes are found; whatever is left fails the test."""
    run = uuid.uuid4().hex
    yield {**os.environ, MARK: run}
    deadline = time.monotonic() + GONE_S
    while (left := find_marked(run)) and time.monotonic() < deadline:
        time.sleep(0.5)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert left == {}


def find_marked(run: str) -> dict[int, str]:
    """Processes that carry the mark: pid -> command line."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if (
                entry.name.isdigit()
                and f"{MARK}={run}".encode() in (entry / "environ").read_bytes()
            ):
                line = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
                if line:  # a zombie has none
                    found[int(entry.name)] = line
    return found


@pytest.mark.full
@pytest.mark.live
@pytest.mark.timeout(900)
def test_demo(tmp_path: Path, marked_environment: dict[str, str]) -> None:
    """The demo closes every request, writes a report of the published shape, and leaves nothing."""
    done = subprocess.run(
        [*DEMO, "--json", "--out", tmp_path],
        env=marked_environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]

    # What users have, not what a CPU adds to each step: prompts that wait behind long ones.
    assert re.search("Where the time went: prefill.(queue|compute) ", done.stderr), done.stderr

    report = json.loads((tmp_path / "report.json").read_text("utf-8"))
    schema = json.loads((ROOT / "tests" / "golden" / "report.schema.json").read_text("utf-8"))
    jsonschema.validate(report, schema)
    assert json.loads(done.stdout) == report
    assert len(report["requests"]) >= 24
    for row in report["requests"]:
        assert row["closed"]
        total = sum(round(ms * 1000) for ms in row["stages"].values())
        assert total + round(row["unattributed_ms"] * 1000) == round(row["ttft_ms"] * 1000)
        legs = [*row["legs"].values(), *row["encode_all"]]
        assert not any(leg["unattributed_ms"] for leg in legs)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("report.json", "report.html", "spans.db", "logs")
    }


@pytest.mark.full
@pytest.mark.live
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(
    tmp_path: Path,
    marked_environment: dict[str, str],
    number: signal.Signals,
    eventually: Callable[..., None],
) -> None:
    """Ctrl-C (or SIGTERM) while servers start ends all of them."""
    with subprocess.Popen(
        [*DEMO, "--out", tmp_path],
        env=marked_environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        try:
            eventually(lambda: "vllm" in str(find_marked(marked_environment[MARK])), 120)
            time.sleep(5)  # well into vLLM's imports, with children of its own
            process.send_signal(number)
            process.communicate(timeout=60)
        finally:
            process.kill()

    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
CHART = f"{release_files.CHART}/Chart.yaml"
UPGRADING = f"{release_files.CHART}/UPGRADING.md"
VERSION = release_files.read_version(ROOT)
NEEDED = (
    *("pyproject.toml", ".dockerignore", "docker-compose.yml", "hatch_build.py"),
    *(release_files.VERSION_FILE, CHART, UPGRADING),
    *("deploy/router.Dockerfile", "deploy/inject.Dockerfile", "deploy/inject/build_folder"),
)
AUTHOR = ("-c", "user.name=Nobody", "-c", "user.email=nobody@example.org")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A small checkout with what tells a version."""
    folder = tmp_path / "checkout"
    release_files.copy_files(ROOT, NEEDED, folder)
    text = f"# Changelog\n\n## [Unreleased]\n\nTo become {VERSION}. It has:\n\n### Tracing\n"
    (folder / "CHANGELOG.md").write_text(text, "utf-8")
    (folder / CHART).write_text(f'version: 0.7.0\nappVersion: "{VERSION}"\n', "utf-8")
    (folder / UPGRADING).write_text("# Upgrading\n\n## 0.7.0\n", "utf-8")
    release_files.run_git(folder, "init", "--quiet")
    return folder


def edit(path: Path, old: str, new: str) -> None:
    """Replace `old`, which is there."""
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new), "utf-8")


def commit(checkout: Path) -> None:
    """Commit all."""
    release_files.run_git(checkout, "add", "--all")
    release_files.run_git(checkout, *AUTHOR, "commit", "--quiet", "--message", "all")


def test_one_version(checkout: Path) -> None:
    """No file tells another version, in the real checkout as in the small one."""
    assert list(release_files.find_other_versions(ROOT, VERSION)) == []
    assert list(release_files.find_other_versions(checkout, VERSION)) == []
    assert release_files.read_changes(ROOT, VERSION, final=False)


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("pyproject.toml", 'dynamic = ["version"]', f'version = "{VERSION}"'),
        (CHART, f'appVersion: "{VERSION}"', 'appVersion: "0.0.9"'),
        (UPGRADING, "## 0.7.0", "## 0.0.9"),
        ("docker-compose.yml", "ttft-otel-router:local", "ttft-otel-router:0.0.9"),
    ],
)
def test_other_version(checkout: Path, path: str, old: str, new: str) -> None:
    """A file that tells another version is named, and it alone."""
    edit(checkout / path, old, new)

    (said,) = release_files.find_other_versions(checkout, VERSION)

    assert said.startswith(f"{path}: ")


def test_raised_version(checkout: Path) -> None:
    """Whoever raises the version alone is told of chart and changelog."""
    edit(checkout / release_files.VERSION_FILE, f'"{VERSION}"', '"77.1.0"')
    version = release_files.read_version(checkout)

    (said,) = release_files.find_other_versions(checkout, version)
    with pytest.raises(ReleaseError, match="CHANGELOG.md"):
        release_files.read_changes(checkout, version, final=False)

    assert said.startswith(CHART)
    assert 'write "77.1.0"' in said


def test_changes(checkout: Path) -> None:
    """In earnest the section has the version and a day that has come."""
    path = checkout / "CHANGELOG.md"
    with pytest.raises(ReleaseError, match="no section"):
        release_files.read_changes(checkout, VERSION, final=True)
    edit(path, "## [Unreleased]", f"## [{VERSION}] - 2999-01-01")
    with pytest.raises(ReleaseError, match="no day of release"):
        release_files.read_changes(checkout, VERSION, final=True)
    edit(path, "2999-01-01", "2026-01-31")

    assert "### Tracing\n" in release_files.read_changes(checkout, VERSION, final=True)


def test_tag(checkout: Path) -> None:
    """In earnest it is a commit with the version's tag, and nothing beside it."""
    commit(checkout)
    with pytest.raises(ReleaseError, match=f"no tag v{VERSION}"):
        release_files.check_final(checkout, VERSION)
    release_files.run_git(checkout, "tag", f"v{VERSION}")
    release_files.check_final(checkout, VERSION)
    (checkout / "leftover").touch()
    with pytest.raises(ReleaseError, match="leftover: is not committed"):
        release_files.check_final(checkout, VERSION)


def test_context(checkout: Path) -> None:
    """The images' context has what Dockerfiles use; what .dockerignore keeps from one is an error."""
    found = release_files.list_context_files(checkout)
    assert {"pyproject.toml", "hatch_build.py", "ttft_otel/__init__.py"} <= set(found)
    assert CHART not in found
    edit(checkout / ".dockerignore", "!deploy/inject\n", "")
    with pytest.raises(ReleaseError, match=r"inject\.Dockerfile: needs deploy/inject/build_folder"):
        release_files.list_context_files(checkout)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflow(path: Path) -> None:
    """It runs nothing but our scripts; what others wrote is named by commit; one job may publish."""
    workflow = yaml.safe_load(path.read_text("utf-8"))
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    commands = [step["run"] for step in steps if "run" in step]

    assert commands
    for command in commands:
        assert (ROOT / command.split()[0]).is_file()
        assert command.startswith("scripts/")
    assert all(re.search(r"@[0-9a-f]{40}$", step["uses"]) for step in steps if "uses" in step)
    assert workflow["permissions"] == {"contents": "read"}
    rights = [job["permissions"] for job in workflow["jobs"].values() if "permissions" in job]
    assert rights == ([{"id-token": "write"}] if path.stem == "release" else [])


@pytest.mark.full
def test_workflow_schema(tmp_path: Path) -> None:
    """Workflows are valid by the forge's schema, which finds what it does not know."""
    check = (
        "tool",
        "run",
        "--quiet",
        "check-jsonschema",
        "--builtin-schema",
        "vendor.github-workflows",
    )
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(WORKFLOWS[0].read_text("utf-8").replace("runs-on:", "runs_on:"), "utf-8")
    try:
        uv_command.run_uv(*check, *WORKFLOWS)
    except uv_command.UvMissingError as error:
        pytest.skip(str(error))
    with pytest.raises(uv_command.UvError, match="runs_on"):
        uv_command.run_uv(*check, wrong)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_release(tmp_path: Path) -> None:
    """A rehearsal makes all files; digests, bytes and what is in them are as told."""
    out = tmp_path / "out"
    done = subprocess.run(
        (sys.executable, "-m", "lab.release", "--json", "--out", out),
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    if "no package index here" in done.stderr:
        pytest.skip(done.stderr[-400:])
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    version = told["version"]
    assert json.loads((out / "release.json").read_text("utf-8")) == told

    files = {each["path"]: each for each in told["files"]}
    assert set(files) == {
        *(f"dist/ttft_otel-{version}-py3-none-any.whl", f"dist/ttft_otel-{version}.tar.gz"),
        *(f"chart/ttft-otel-{version}.tgz", f"ttft-otel-{version}-images.tar.gz"),
        *(f"ttft-otel-{version}.cdx.json", "notes.md"),
    }
    assert (
        subprocess.run(("sha256sum", "--check", "--quiet", "SHA256SUMS"), cwd=out).returncode == 0
    )
    assert all((out / path).stat().st_size == each["bytes"] for path, each in files.items())
    # No time of this run: all members of all archives have the commit's.
    for path in files:
        if path.endswith("gz"):
            with tarfile.open(out / path) as archive:
                times = {each.mtime for each in archive}
            assert times == {told["source_date_epoch"]}, path
    with zipfile.ZipFile(out / f"dist/ttft_otel-{version}-py3-none-any.whl") as archive:
        pages = [each for each in archive.namelist() if "/share/man/man1/ttft-otel" in each]
        (page,) = (archive.read(each) for each in pages if each.endswith("ttft-otel-report.1"))
    assert len(pages) > 12
    assert b'.TH "TTFT-OTEL REPORT" "1"' in page
    bill = json.loads((out / f"ttft-otel-{version}.cdx.json").read_text("utf-8"))
    component = bill["metadata"]["component"]
    assert (component["name"], component["version"]) == ("ttft-otel", version)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_unlike_bytes(tmp_path: Path, checkout: Path) -> None:
    """A package whose bytes depend on anything but its files is refused."""
    out = tmp_path / "out"
    (out / "dist").mkdir(parents=True)
    hook = "\n        (Path(self.root) / 'ttft_otel' / 'made.py').write_text(f'{id(self)}{self.root}')\n"
    source = checkout.parent / "source"
    files = release_files.list_tracked_files(ROOT)
    release_files.copy_files(
        ROOT, [each for each in files if not each.startswith("tests/")], source
    )
    (source / "hatch_build.py").write_text((ROOT / "hatch_build.py").read_text("utf-8") + hook)
    maker = ReleaseMaker(ROOT, out, False, None, tmp_path, version=VERSION, epoch=1_700_000_000)
    assert maker.source == source
    try:
        with pytest.raises(ReleaseError, match="built twice, its bytes differ"):
            maker.build_package()
    except uv_command.UvMissingError as error:
        pytest.skip(str(error))
