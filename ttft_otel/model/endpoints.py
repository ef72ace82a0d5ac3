# SPDX-License-Identifier: Apache-2.0
"""Paths of vLLM's HTTP API, and the operation of those whose requests are traced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

CHAT_PATH: Final = "/v1/chat/completions"
COMPLETIONS_PATH: Final = "/v1/completions"
MESSAGES_PATH: Final = "/v1/messages"
RESPONSES_PATH: Final = "/v1/responses"
RENDER_SUFFIX: Final = "/render"  # makes the tokens of a prompt, for a server that takes tokens
MODELS_PATH: Final = "/v1/models"
METRICS_PATH: Final = "/metrics"
# Ours: what waits in the engine cores' queues now, and what holds it up. Below /v1, which --api-key protects.
WAITING_PATH: Final = "/v1/ttft_otel/waiting"

# gen_ai.operation.name, of the paths whose requests are traced
OPERATION_BY_PATH: Final[Mapping[str, str]] = {
    CHAT_PATH: "chat",
    COMPLETIONS_PATH: "text_completion",
    RESPONSES_PATH: "chat",
}

KNOWN_ROUTES: Final = frozenset((*OPERATION_BY_PATH, MESSAGES_PATH))
OTHER_ROUTE: Final = "/v1/{path:path}"


def find_route(path: str) -> str:
    """The route of a request's `path`, for the names of spans: clients can send any number of paths."""
    return path if path in KNOWN_ROUTES else OTHER_ROUTE
