# SPDX-License-Identifier: Apache-2.0
"""The plugin of an injected ttft-otel: vLLM finds it on PYTHONPATH, and it loads the one for this Python.

Folders on PYTHONPATH come before site-packages and would hide vLLM's own packages. So there is nothing
but this module beside the folders `python3.X`, and one of these goes to the end of the import path.
"""

import logging
import os
import sys

OFF_WORDS = ("", "0", "false", "no", "off")  # settings.py cannot be imported yet


def register() -> None:
    """Load ttft-otel for this Python and install its hooks. Raises nothing, and is idempotent.

    Where vLLM's environment has a ttft-otel of its own, that one is used.
    """
    if os.environ.get("TTFT_OTEL", "").strip().lower() in OFF_WORDS:
        return
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), version)
    if not os.path.isdir(folder):
        _say_off(f"{folder} is missing; inject an image that has {version}")
        return
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        from ttft_otel import plugin

        plugin.register()
    except Exception as error:
        # A folder that was copied in part, or for another platform: the server has to start.
        logging.getLogger("ttft_otel").debug("ttft-otel: injected, not loaded", exc_info=True)
        _say_off(f"{folder} cannot be loaded ({error}); inject it again")


def _say_off(reason: str) -> None:
    logging.getLogger("ttft_otel").warning("ttft-otel: %s. The server runs without tracing", reason)
