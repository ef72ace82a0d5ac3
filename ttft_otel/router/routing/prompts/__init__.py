# SPDX-License-Identifier: Apache-2.0
"""Read a request's prompt as the engine will see it: token ids and block keys, for routing.

prompt_reader.py is the protocol. local_reader.py tokenizes in a child process (tokenizer_worker.py,
child_frames.py, tokenizer_child.py); engine_reader.py asks an instance. The child reads prompts by means of
transformers, and remembers tokenized prefixes; chat_messages.py changes chats before the template gets them,
as vLLM does, and placeholders.py expands media placeholders.
"""

from __future__ import annotations

from typing import Literal

from ttft_otel.router.routing.prompts.engine_reader import EnginePromptReader
from ttft_otel.router.routing.prompts.local_reader import LocalPromptReader
from ttft_otel.router.routing.prompts.prompt_reader import Prompt, PromptReader
from ttft_otel.router.upstream.instance_pool import InstancePool

__all__ = ["Prompt", "PromptReader", "build_reader"]


def build_reader(
    tokenizer: str | None, place: Literal["local", "engine"], pool: InstancePool, api_key: str = ""
) -> PromptReader:
    """Create the prompt reader of --tokenize.

    Args:
        tokenizer: folder or hub name for all models; None to use the one that /v1/models names for each.
        place: "engine" asks the instances, and tokenizes locally where they refuse.
        api_key: sent to instances.
    """
    # Also for "engine": it reads what instances refuse to render.
    local = LocalPromptReader(tokenizer, pool, api_key)
    return local if place == "local" else EnginePromptReader(local, pool, api_key)
