# SPDX-License-Identifier: Apache-2.0
"""The structure of a JSON body is counted exactly, wherever windows and escapes fall."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from ttft_otel.router.disagg import json_structure
from ttft_otel.router.disagg.json_structure import JsonStructure, count_structure

NO_LIMIT = JsonStructure(1 << 60, 1 << 60, 1 << 60, 1 << 60)
TEXTS = ("", "a", "\\", '"', "\\\\", '\\"', "{[:", "ä\n", "\\" * 7 + '"', "漢" * 9)


def build_value(chance: random.Random, depth: int) -> Any:
    """A JSON value whose texts look like structure."""
    kind = chance.randrange(5 if depth else 3)
    if kind == 0:
        return chance.randrange(1000)
    if kind < 3:
        return "".join(chance.choices(TEXTS, k=chance.randrange(4)))
    items = [build_value(chance, depth - 1) for _ in range(chance.randrange(5))]
    return items if kind == 3 else {f"{each}{chance.choice(TEXTS)}": each for each in items if each}


def count_by_parsing(value: Any) -> tuple[int, int]:
    """Parts and strings of a parsed value."""
    if isinstance(value, str):
        return 0, 1
    if isinstance(value, list):
        counts = [count_by_parsing(each) for each in value]
        return 1 + sum(each[0] for each in counts), sum(each[1] for each in counts)
    if isinstance(value, dict):
        counts = [count_by_parsing(each) for each in value.values()]
        parts = 1 + len(value) + sum(each[0] for each in counts)
        return parts, len(value) + sum(each[1] for each in counts)
    return 0, 0


@pytest.mark.parametrize("window_bytes", [1, 2, 3, 7, 1 << 17])
def test_counts(monkeypatch: pytest.MonkeyPatch, window_bytes: int) -> None:
    """As many parts, strings and escapes as a parser finds, with any windows."""
    monkeypatch.setattr(json_structure, "_WINDOW_BYTES", window_bytes)
    chance = random.Random(13)
    for _ in range(300):
        value = build_value(chance, 4)
        data = json.dumps(value, ensure_ascii=chance.random() < 0.5).encode()
        found = count_structure(data, NO_LIMIT)
        assert (found.parts, found.quotes / 2) == count_by_parsing(value)
        assert found.escapes == data.count(b"\\")
        assert (found.outside_bytes == len(data)) == (found.quotes == 0)


def test_outside() -> None:
    """What is between strings is outside, their quotes are not."""
    assert count_structure(b' {"a": "b"} ', NO_LIMIT) == JsonStructure(6, 2, 4, 0)


def test_early_end() -> None:
    """Counting ends in the window in which a limit is exceeded."""
    data = b"[" * (1 << 20)
    found = count_structure(data, JsonStructure(1 << 60, 10, 1 << 60, 1 << 60))
    assert 10 < found.parts < len(data) / 4
