# SPDX-License-Identifier: Apache-2.0
"""Write the table of instances' faults into its report: run it after an outcome has changed.

The run takes about 20 s; tests/attack/test_upstream_faults.py makes it, and fails when
the page is not what it gives.
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

from attack import test_upstream_faults  # noqa: E402 - found by the line above


def render_page(
    text: str, outcomes: Mapping[test_upstream_faults.FaultCell, test_upstream_faults.FaultOutcome]
) -> str:
    """Replace the table in the page's text."""
    table = test_upstream_faults.render_table(outcomes)
    return TABLE.sub(lambda found: found[1] + table + found[2], text)


def main() -> None:
    """Run all cells and rewrite the page."""
    outcomes = asyncio.run(test_upstream_faults.run_cells(test_upstream_faults.list_cells()))
    PAGE.write_text(render_page(PAGE.read_text("utf-8"), outcomes), "utf-8")


if __name__ == "__main__":
    main()
