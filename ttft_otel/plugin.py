# SPDX-License-Identifier: Apache-2.0
"""The vLLM plugin (entry point group vllm.general_plugins).

vLLM calls register() in the CLI, the API server, the engine core, every worker and the
model-inspection subprocess, and terminates on any exception: so it only installs wrappers, starts
nothing, and raises nothing. While TTFT_OTEL is off it returns before importing anything but `os`.
"""

import os


def register() -> None:
    """Install the hooks if TTFT_OTEL asks for them. Idempotent."""
    # The words of settings.py once more: importing it would cost every server that is off.
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
    # vLLM calls this without a guard: what is raised here would end its process.
    try:
        from ttft_otel.hooks import install

        install.install_all()
    except Exception:
        import logging

        logging.getLogger("ttft_otel").warning(
            "ttft-otel: could not install its hooks; the server runs without tracing", exc_info=True
        )
