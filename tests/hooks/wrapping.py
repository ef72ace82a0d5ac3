# SPDX-License-Identifier: Apache-2.0
"""Put real hooks around methods of fake classes, by the names of their targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ttft_otel.hooks import wrap
from ttft_otel.hooks.targets import TARGETS_BY_NAME


def wrap_methods(
    hooks: Mapping[str, Any], owner: type, method_by_target: Mapping[str, str]
) -> None:
    """Wrap the methods of the class `owner` with the hooks of these targets."""
    for target, method in method_by_target.items():
        wrap.patch_attribute(TARGETS_BY_NAME[target], owner, method, hooks[target])
