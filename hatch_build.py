# SPDX-License-Identifier: Apache-2.0
"""Hatchling's hook: puts man/, where a release has made it, into share/man of the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ManPages(BuildHookInterface):  # type: ignore[type-arg]
    """`man ttft-otel` finds them beside the environment's bin/."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it builds a wheel."""
        if version == "standard" and (Path(self.root) / "man").is_dir():
            build_data["shared_data"]["man"] = "share/man/man1"
