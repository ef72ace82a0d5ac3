# SPDX-License-Identifier: Apache-2.0
"""Keep async scheduling on where vLLM's CPU platform switches it off; importing.py patches it in."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from .importing import Patch


def build_patches() -> dict[str, Patch]:
    """The one module that switches it off."""
    return {"vllm.platforms.cpu": patch_platform}


def patch_platform(module: ModuleType) -> None:
    """Let the platform check the configuration, then put back what the configuration had chosen."""
    platform: Any = module.CpuPlatform
    original = platform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, config: Any) -> None:
        wanted = config.scheduler_config.async_scheduling
        original(cls, config)
        config.scheduler_config.async_scheduling = wanted

    platform.check_and_update_config = classmethod(check_and_update_config)
