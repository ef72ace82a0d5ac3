# SPDX-License-Identifier: Apache-2.0
"""What benchmarks/agreement.py refuses before it starts anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

AGREEMENT = Path(__file__).parents[2] / "benchmarks" / "agreement.py"


def test_tokenizer() -> None:
    """Without --tokenizer the remedy is said, instead of a peer that looks for a tokenizer "None"."""
    command = [sys.executable, str(AGREEMENT), "--url", "http://127.0.0.1:1", "--model", "m"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)

    assert done.returncode == 2
    assert "needs --tokenizer" in done.stderr
