# SPDX-License-Identifier: Apache-2.0
"""A release: one version everywhere, the same bytes twice, files as told; workflows call scripts alone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

from lab import release_files, uv_command
from lab.release import ReleaseMaker
from lab.release_files import ReleaseError

ROOT = Path(__file__).parents[1]
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
