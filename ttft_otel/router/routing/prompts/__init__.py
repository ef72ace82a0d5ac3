# SPDX-License-Identifier: Apache-2.0
"""Read a request's prompt as the engine will see it: token ids and block keys, for routing.

local_reader.py tokenizes in a child process (tokenizer_worker.py, tokenizer_child.py);
engine_reader.py asks an instance. The child reads prompts by means of
transformers, and remembers tokenized prefixes; chat_messages.py changes chats before the template gets them,
as vLLM does, and placeholders.py expands media placeholders.
"""

from __future__ import annotations

from typing import Literal

from ttft_otel.router.routing.prompts.engine_reader import EnginePromptReader
from ttft_otel.router.routing.prompts.local_reader import LocalPromptReader, Prompt
from ttft_otel.router.upstream.instance_pool import InstancePool

__all__ = ["LocalPromptReader", "Prompt", "build_reader"]


def build_reader(
    tokenizer: str | None, place: Literal["local", "engine"], pool: InstancePool
) -> LocalPromptReader:
    """Create the prompt reader of --tokenize.

    Args:
        tokenizer: folder or hub name for all models; None to use the one that /v1/models names for each.
        place: "engine" asks the instances, and tokenizes locally where they refuse.
    """
    kind = LocalPromptReader if place == "local" else EnginePromptReader
    return kind(tokenizer, pool)
