# SPDX-License-Identifier: Apache-2.0
"""Where models lie; that they load is shown on real servers."""

from __future__ import annotations

from pathlib import Path

from lab import tiny_models


def test_race(tmp_path: Path) -> None:
    """Two builders of one model do not disturb each other."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
        tiny_models.publish_folder(tmp_path / name, tmp_path / "model")

    assert (tmp_path / "model" / "file").exists()
