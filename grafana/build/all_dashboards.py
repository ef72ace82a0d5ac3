# SPDX-License-Identifier: Apache-2.0
"""All dashboards by uid, and their JSON, which __main__.py writes and tests compare."""

from __future__ import annotations

import itertools
import json

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from grafana.build import health_dashboard, ttft_dashboard


def build_dashboards() -> dict[str, Dashboard]:
    """Every dashboard by its uid, which is also its file's name."""
    built = [
        board.build()
        for board in (
            ttft_dashboard.build_ttft_dashboard(),
            health_dashboard.build_health_dashboard(),
        )
    ]
    for board in built:
        _number_panels(board)
    return {board.uid or "": board for board in built}


def _number_panels(board: Dashboard) -> None:
    """Give every panel an id, folded ones included: links and tests need one."""
    # One count for both levels: an id must be unique in its dashboard, not in its row.
    ids = itertools.count(1)
    for panel in board.panels or []:
        panel.id_val = next(ids)
        for folded in getattr(panel, "panels", None) or []:
            folded.id_val = next(ids)


def render_dashboards() -> dict[str, str]:
    """Every dashboard's JSON, stable: the same code gives the same bytes."""
    return {
        # Sorted keys and one value a line: a change of the code shows
        # as a small diff of the committed file.
        uid: json.dumps(board, cls=JSONEncoder, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
        for uid, board in build_dashboards().items()
    }
