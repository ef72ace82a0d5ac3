# SPDX-License-Identifier: Apache-2.0
"""Where models lie; that they load is shown on real servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab import tiny_models


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ttft-otel"


def test_race(tmp_path: Path) -> None:
    """Two builders of one model do not disturb each other."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
        tiny_models.publish_folder(tmp_path / name, tmp_path / "model")

    assert (tmp_path / "model" / "file").exists()
