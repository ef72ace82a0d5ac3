# SPDX-License-Identifier: Apache-2.0
"""What an instance's /metrics and /version pages say of its KV cache and its release; pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

# A gauge of value 1 whose labels are the fields of vLLM's cache configuration.
_CACHE_INFO_PATTERN: Final = re.compile(rb"^vllm:cache_config_info\{(.*)\} ", re.MULTILINE)
_VERSION_PATTERN: Final = re.compile(rb'"version":\s*"(\d+)\.(\d+)')
# Escaped quotes are not understood: the values that are read here have none.
# \b: a long word is looked through once, not once from each of its letters.
_LABEL_PATTERN: Final = re.compile(rb'\b(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class InstanceCapabilities:
    """block_size: tokens of one KV block, 0 if unknown. prefix_caching: whether prefixes are kept.

    version: the release's first two numbers.
    """

    block_size: int = 0
    prefix_caching: bool = False
    version: tuple[int, int] = (0, 0)


def parse_capabilities(metrics_page: bytes, version_body: bytes) -> InstanceCapabilities:
    """Parse an instance's capabilities; zeros where they are missing.

    metrics_page: body of /metrics, with the labels of vllm:cache_config_info. version_body: of /version.
    """
    line = _CACHE_INFO_PATTERN.search(metrics_page)
    release = _VERSION_PATTERN.search(version_body)
    labels = dict(_LABEL_PATTERN.findall(line[1])) if line else {}
    size = labels.get(b"block_size", b"")
    # Labels hold Python's str() of a field: "True" below, and "None" where it is not set.
    block = int(size) if size.isdigit() else 0
    return InstanceCapabilities(
        block,
        labels.get(b"enable_prefix_caching") == b"True",
        (int(release[1]), int(release[2])) if release else (0, 0),
    )
