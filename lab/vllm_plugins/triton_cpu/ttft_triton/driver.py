# SPDX-License-Identifier: Apache-2.0
"""The driver half of the backend: says that a CPU is there; Triton loads it by entry point."""

from __future__ import annotations

from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class InterpretedDriver(DriverBase):  # type: ignore[misc]
    """Concrete and active, with the CPU as its device."""

    @classmethod
    def is_active(cls) -> bool:
        """Always: the interpreter needs no device."""
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Only a compiler would ask."""
        raise NotImplementedError("nothing is compiled; set TRITON_INTERPRET=1")

    def get_current_target(self) -> GPUTarget:
        """A target that only our own backend takes."""
        return GPUTarget("cpu", 0, 0)

    def get_active_torch_device(self) -> torch.device:
        """Tensors live in host memory."""
        return torch.device("cpu")

    def get_current_device(self) -> int:
        """There is one."""
        return 0

    def get_benchmarker(self) -> Any:
        """Only an autotuner would ask."""
        raise NotImplementedError("nothing is tuned in the interpreter")
