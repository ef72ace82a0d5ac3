# SPDX-License-Identifier: Apache-2.0
"""Why a prompt cannot be known, in one word; raised in the child, counted by local.py and engine.py."""

from __future__ import annotations


class Unreadable(Exception):
    """refused: the engine will say so; unsupported: ask the engine (--tokenize engine)."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
