# SPDX-License-Identifier: Apache-2.0
"""Inject known delays into vLLM, for tests only; controlled by the file of lab/injection.py.

Each place is one function deeper in vLLM than the functions that ttft-otel wraps, so what is slept
here is a truth that does not depend on the code under test.
"""

from __future__ import annotations

import os


def register() -> None:
    """Entry point of `vllm.general_plugins`, called in every vLLM process."""
    # Imported here: reading the entry point must cost a server nothing while it is not steered.
    from . import active, encodings, forced, importing, places, switch

    if os.environ.get("TTFT_LAB_CONTROL"):
        importing.install(places.build_patches())
        importing.install(encodings.build_patches())
        importing.install(active.build_patches())
        switch.start()
    if os.environ.get("TTFT_LAB_ASYNC") == "1":
        importing.install(forced.build_patches())
