# SPDX-License-Identifier: Apache-2.0
"""A request's prompt as the engine will see it, for whoever chooses an instance: token ids, blocks.

prompt.py what is told, local.py asks a child process (worker.py, frames.py, child.py) that holds
tokenizers, engine.py asks an instance; in the child model.py is one model's tokenizer, chat.py its
chats, format.py what its template wants, encode.py text to ids, media.py placeholders.
"""

from __future__ import annotations

from typing import Literal

from ttft_otel.router.fleet import Fleet
from ttft_otel.router.prompts.engine import Engine
from ttft_otel.router.prompts.local import Local
from ttft_otel.router.prompts.prompt import Prompt, Reader

__all__ = ["Prompt", "Reader", "reader"]


def reader(
    tokenizer: str | None, mode: Literal["local", "engine"], fleet: Fleet, key: str = ""
) -> Reader:
    """One that tokenizes with `tokenizer`, or with what each model's instance names.

    engine: it asks the instances, with `key` where they want one, and tokenizes where they refuse.
    """
    local = Local(tokenizer, fleet, key)
    return local if mode == "local" else Engine(local, fleet, key)
