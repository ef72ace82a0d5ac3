# SPDX-License-Identifier: Apache-2.0
"""vLLM's entry point (vllm.general_plugins): if TTFT_OTEL is off, return before importing anything.

vLLM calls it in the CLI, the API server, the engine core, every worker and the model-inspection
subprocess, and dies of whatever it raises: so it installs wrappers, starts nothing, raises nothing.
"""

import os


def register() -> None:
    """Install the hooks if TTFT_OTEL asks for them. Idempotent."""
    value = os.environ.get("TTFT_OTEL", "").strip().lower()
    if value in ("", "0", "false", "no", "off"):
        return
    if value not in ("1", "true", "yes", "on"):
        import logging

        logging.getLogger("ttft_otel").warning(
            "ttft-otel: TTFT_OTEL=%s is neither on nor off; tracing stays off. Set TTFT_OTEL=1",
            value[:32],
        )
        return
    try:
        from ttft_otel.hooks import install

        install.install()
    except Exception:
        import logging

        logging.getLogger("ttft_otel").warning(
            "ttft-otel could not install its hooks; the server runs untraced", exc_info=True
        )
