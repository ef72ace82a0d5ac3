# SPDX-License-Identifier: Apache-2.0
"""Where models lie; that they load is shown on real servers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lab import tiny_models


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ttft-otel"


def test_folder(cache: Path) -> None:
    """Every recipe has a folder of its own, the same at every call, inside the user's cache."""
    folders = {
        tiny_models.get_model_dir(recipe)
        for recipe in (
            tiny_models.TEXT_RECIPE,
            tiny_models.VISION_RECIPE,
            tiny_models.HEAVY_RECIPE,
            replace(tiny_models.TEXT_RECIPE, layers=3),
        )
    }

    assert 4 == len(folders)
    assert tiny_models.get_model_dir(tiny_models.TEXT_RECIPE) in folders
    assert {cache / "models"} == {folder.parent for folder in folders}


def test_present() -> None:
    """A model that is there is not built again."""
    folder = tiny_models.get_model_dir(tiny_models.TEXT_RECIPE)
    folder.mkdir(parents=True)

    assert folder == tiny_models.build_model(tiny_models.TEXT_RECIPE)
    assert [] == list(folder.iterdir())


def test_race(tmp_path: Path) -> None:
    """Two builders of one model do not disturb each other."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
        tiny_models.publish_folder(tmp_path / name, tmp_path / "model")

    assert (tmp_path / "model" / "file").exists()
