# SPDX-License-Identifier: Apache-2.0
"""Where models lie; that they load is shown on real servers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ttft_otel.lab import models, releases


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ttft-otel"


def test_folder(cache: Path) -> None:
    """Every recipe has a folder of its own, the same at every call, inside the user's cache."""
    folders = {
        models.model_dir(recipe)
        for recipe in (models.TEXT, models.VISION, models.HEAVY, replace(models.TEXT, layers=3))
    }

    assert 4 == len(folders)
    assert models.model_dir(models.TEXT) in folders
    assert {cache / "models"} == {folder.parent for folder in folders}


def test_present() -> None:
    """A model that is there is not built again."""
    folder = models.model_dir(models.TEXT)
    folder.mkdir(parents=True)

    assert folder == models.build(models.TEXT)
    assert [] == list(folder.iterdir())


def test_race(tmp_path: Path) -> None:
    """Two builders of one model do not disturb each other."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
        models.publish(tmp_path / name, tmp_path / "model")

    assert (tmp_path / "model" / "file").exists()


def test_sources(cache: Path) -> None:
    """Sources that are there are not fetched again."""
    folder = cache / "sources" / "0.24.0"
    folder.mkdir(parents=True)

    assert folder == releases.sources("0.24.0")


def test_cuda_only() -> None:
    """A release without a CPU build says which ones can be run."""
    with pytest.raises(LookupError, match=r"0\.20\.2, 0\.24\.0, 0\.29\.0, 0\.32\.0"):
        releases.environment("0.33.0")


def test_python_only(tmp_path: Path) -> None:
    """Of a wheel only folders and .py files are kept."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.py").touch()
    (tmp_path / "a.so").touch()

    assert {"a.so"} == releases.all_but_python(str(tmp_path), ["folder", "a.py", "a.so"])
