# SPDX-License-Identifier: Apache-2.0
"""All dashboards by uid, and their text; __main__.py writes it, the tests compare it."""

from __future__ import annotations

import itertools
import json

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from grafana.build import health, ttft


def boards() -> dict[str, Dashboard]:
    """Every dashboard by its uid, which is also its file's name."""
    built = [board.build() for board in (ttft.board(), health.board())]
    for board in built:
        _number(board)
    return {board.uid or "": board for board in built}


def _number(board: Dashboard) -> None:
    """Give every panel an id, folded ones included: links and tests need one."""
    ids = itertools.count(1)
    for panel in board.panels or []:
        panel.id_val = next(ids)
        for folded in getattr(panel, "panels", None) or []:
            folded.id_val = next(ids)


def render() -> dict[str, str]:
    """Every dashboard's JSON, stable: the same code gives the same bytes."""
    return {
        uid: json.dumps(board, cls=JSONEncoder, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
        for uid, board in boards().items()
    }
