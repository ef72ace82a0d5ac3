# SPDX-License-Identifier: Apache-2.0
"""The compiler half of the backend; Triton loads it by entry point and never asks it to compile."""

from __future__ import annotations

from typing import Any

from triton.backends.compiler import BaseBackend


class InterpretedBackend(BaseBackend):  # type: ignore[misc]
    """Concrete, so that Triton accepts it; with the interpreter on, none of it is called."""

    @staticmethod
    def supports_target(target: Any) -> bool:
        """Only the CPU."""
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        """A constant: there is no compiled code to tell apart."""
        return "ttft-triton"

    def parse_options(self, options: dict[str, Any]) -> object:
        """Give the options back as they came."""
        return options

    def add_stages(self, stages: dict[str, Any], options: object) -> None:
        """No stages: nothing is compiled."""

    def load_dialects(self, context: Any) -> None:
        """No dialects."""

    def get_module_map(self) -> dict[str, Any]:
        """No device libraries."""
        return {}
