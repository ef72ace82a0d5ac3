# SPDX-License-Identifier: Apache-2.0
"""A small tokenizer in a folder, and the real tokenizer child process; no model, no network."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ttft_otel.router.routing.prompts.prompt_parts import (
    LENGTH_BYTES,
    Prompt,
    TokenizeQuestion,
    answer_decoder,
    frame_message,
)
from ttft_otel.router.routing.prompts.prompt_reader import CHILD_MODULE

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}"
    "{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}{{ bos_token }}{% else %}{{ c['text'] }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ENDLESS_TEMPLATE = (  # runs for hours if the first message has the role "endless"
    "{% if messages[0].role == 'endless' %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}{% endif %}"
)
CORPUS = "the quick brown fox jumps over the lazy dog, said Hello and don't user assistant system "


IMAGE_PROCESSOR_CONFIG = {  # a placeholder for each 28 x 28 pixels
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": 3136, "longest_edge": 200704},
    "patch_size": 14,
    "merge_size": 2,
}


def start_child_process(
    python: str = sys.executable, folder: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start tokenizer_child.py by the interpreter `python`, in `folder`.

    `python -m` looks for modules in its folder first: in the checkout it finds the checkout's.
    """
    command = [python, "-m", CHILD_MODULE]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=folder)


@dataclass(slots=True)
class TokenizerChild:
    """The process of tokenizer_child.py, asked synchronously with its frames."""

    process: subprocess.Popen[bytes] = field(default_factory=start_child_process)

    def read_prompt(
        self,
        source: str,
        path: str = "",
        size: int = 4,
        adapter: str = "",
        limit: int = 100,
        **body: Any,
    ) -> Prompt:
        """Ask for the prompt of `body`; without a `path`, load the tokenizer `source`.

        size: tokens per block. limit: longest prompt of the model.
        """
        request = TokenizeQuestion(source, path, json.dumps(body).encode(), size, adapter, limit)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(frame_message(request))
        self.process.stdin.flush()
        head = self.process.stdout.read(LENGTH_BYTES)
        return answer_decoder.decode(self.process.stdout.read(int.from_bytes(head, "big")))

    def close(self) -> int:
        """Close its input, on which it exits, and return its exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        with self.process:
            return self.process.wait(timeout=10)


class PlainTokenizer:
    """The part of transformers' tokenizer interface that TextEncoder needs, without transformers."""

    def __init__(self, folder: str) -> None:
        self.backend_tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
        self.added_tokens_decoder = self.backend_tokenizer.get_added_tokens_decoder()

    def __call__(self, text: str, add_special_tokens: bool, **_: Any) -> dict[str, list[int]]:
        """Token ids of `text`."""
        encoded = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": encoded.ids}


def build_tokenizer(folder: Path, model_type: str = "qwen2", template: str = CHAT_TEMPLATE) -> str:
    """Write a byte-level BPE tokenizer with a chat template into `folder`; returns its path."""
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    special = ["<|begin|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([CORPUS * 10], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", pair="<|begin|> $A $B", special_tokens=[("<|begin|>", 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": "<|im_end|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {"model_type": model_type, "image_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(IMAGE_PROCESSOR_CONFIG))
    (folder / "chat_template.jinja").write_text(template)
    return str(folder)
