# SPDX-License-Identifier: Apache-2.0
"""Options that all simulations over recorded traces have: where the traces are, and the list of cases.

simulate.py, worker_sharing.py and replica_routing.py add their own and read them.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Final

CASES_FILE: Final = Path(__file__).parent / "cases.json"


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with --traces and --list. description: the module's docstring."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    traces = os.environ.get("TTFT_OTEL_TRACES")
    parser.add_argument("--traces", type=Path, default=Path(traces) if traces else None)
    parser.add_argument("--list", type=Path, default=CASES_FILE, help="the cases")
    return parser


def parse_options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The command line's options; ends with the remedy where no folder of traces is named."""
    options = parser.parse_args()
    if options.traces is None:
        parser.error("name the folder of the traces: --traces DIR, or TTFT_OTEL_TRACES")
    return options
