# SPDX-License-Identifier: Apache-2.0
"""Write every dashboard to grafana/dashboards, from the repository's root: `python -m grafana.build`."""

from __future__ import annotations

import sys
from pathlib import Path

from grafana.build.all_dashboards import render_dashboards

DASHBOARDS_FOLDER = Path(__file__).parents[1] / "dashboards"

# The uid is the file's name too: a uid that changes leaves
# the old file behind, to be deleted by hand.
for uid, text in render_dashboards().items():
    (DASHBOARDS_FOLDER / f"{uid}.json").write_text(text, "utf-8")
    sys.stdout.write(f"{uid}.json\n")
