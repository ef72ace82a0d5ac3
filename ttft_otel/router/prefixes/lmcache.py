# SPDX-License-Identifier: Apache-2.0
"""Cached prefixes as LMCache's controller knows them (HTTP); the source behind --prefix-index lmcache."""

from __future__ import annotations

from collections.abc import Sequence

from ttft_otel.router.policies.index import History
from ttft_otel.router.prefixes.history import Sent


class LMCache(Sent):
    """Instances that the controller does not know, or does not tell of, are known by what they were sent."""

    def __init__(self, size: int, most: int, url: str, instances: Sequence[str]) -> None:
        super().__init__(History(size, most))
        self.url, self.instances = url.rstrip("/"), tuple(instances)
