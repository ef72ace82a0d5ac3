# SPDX-License-Identifier: Apache-2.0
"""Write the table of instances' faults into its report: run it after an outcome has changed.

The run takes about 20 s; tests/attack/upstream_matrix.py makes it, and tests/attack/test_upstream_faults.py
fails when the page is not what it gives.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "benchmarks" / "results" / "upstream-faults.md"
TABLE = re.compile(r"(<!-- faults -->\n).*?(<!-- end of faults -->)", re.DOTALL)
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

from attack import upstream_matrix  # noqa: E402 - found by the line above


def render_page(
    text: str, outcomes: Mapping[upstream_matrix.FaultCell, upstream_matrix.FaultOutcome]
) -> str:
    """Replace the table in the page's text."""
    table = upstream_matrix.render_table(outcomes)
    return TABLE.sub(lambda found: found[1] + table + found[2], text)


def main() -> None:
    """Run all cells and rewrite the page."""
    outcomes = asyncio.run(upstream_matrix.run_cells(upstream_matrix.list_cells()))
    PAGE.write_text(render_page(PAGE.read_text("utf-8"), outcomes), "utf-8")


if __name__ == "__main__":
    main()
