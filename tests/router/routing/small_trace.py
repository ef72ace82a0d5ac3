# SPDX-License-Identifier: Apache-2.0
"""A routing benchmark's command on a trace of forty requests, for the tests of these benchmarks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def run_benchmark(
    folder: Path, module: str, case: dict[str, Any], *flags: str, check: bool = True
) -> Any:
    """The JSON that the benchmark `module` writes for `case`. check: whether it has to end with 0."""
    rows: list[dict[str, Any]] = [
        {"timestamp": 100 * number, "input_length": 2000, "output_length": 1, "hash_ids": [number]}
        for number in range(40)
    ]
    (folder / "conversation_trace.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "cases.json").write_text(json.dumps({"cases": [case]}))
    subprocess.run(
        [
            *(sys.executable, "-m", f"benchmarks.routing.{module}", "--traces", folder),
            *("--list", folder / "cases.json", "--seeds", "1", *flags),
            *("--json", folder / "out.json"),
        ],
        cwd=ROOT,
        check=check,
        capture_output=True,
    )
    return json.loads((folder / "out.json").read_text("utf-8"))
