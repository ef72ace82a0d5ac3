# SPDX-License-Identifier: Apache-2.0
"""A small tokenizer in a folder, and the real child process asked in turn; no model, no network."""

from __future__ import annotations

import json
import subprocess
import sys
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ttft_otel.router.prompts.frames import HEAD, Ask, Told, frame, told
from ttft_otel.router.prompts.worker import MODULE

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}"
    "{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}{{ bos_token }}{% else %}{{ c['text'] }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ENDLESS = (  # with a role of its own
    "{% if messages[0].role == 'endless' %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}{% endif %}"
)
CORPUS = "the quick brown fox jumps over the lazy dog, said Hello and don't user assistant system "


PICTURES = {  # a placeholder for each 28 x 28 pixels
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": 3136, "longest_edge": 200704},
    "patch_size": 14,
    "merge_size": 2,
}


@dataclass(slots=True)
class Child:
    """The process of child.py, asked as worker.py asks it."""

    process: subprocess.Popen[bytes] = field(
        default_factory=lambda: subprocess.Popen(
            [sys.executable, "-m", MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
    )

    def ask(
        self,
        source: str,
        path: str = "",
        size: int = 4,
        adapter: str = "",
        limit: int = 100,
        **body: Any,
    ) -> Told:
        """The prompt of a body; without a path the tokenizer is loaded."""
        ask = Ask(1, source, path, json.dumps(body).encode(), size, adapter, limit)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(frame(ask))
        self.process.stdin.flush()
        head = self.process.stdout.read(HEAD)
        return told.decode(self.process.stdout.read(int.from_bytes(head, "big")))

    def close(self) -> int:
        """It ends when nobody asks any more; its exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        with self.process:
            return self.process.wait(timeout=10)


class Plain:
    """transformers' interface to a tokenizer, as far as encode.py needs it, without transformers."""

    def __init__(self, folder: str) -> None:
        self.backend_tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
        self.added_tokens_decoder = self.backend_tokenizer.get_added_tokens_decoder()

    def __call__(
        self, text: str, add_special_tokens: bool, max_length: int | None = None, **_: Any
    ) -> dict[str, list[int]]:
        """Token ids, the last ones of a text that is too long."""
        if max_length:
            self.backend_tokenizer.enable_truncation(max_length, direction="left")
        encoded = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": encoded.ids}


def ids(told: Told) -> list[int]:
    """An answer's token ids."""
    found = array("I")
    found.frombytes(told.ids)
    return found.tolist()


def build(folder: Path, model_type: str = "qwen2", template: str = TEMPLATE) -> str:
    """Byte-level BPE with a beginning-of-text token, and a chat template."""
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
    (folder / "preprocessor_config.json").write_text(json.dumps(PICTURES))
    (folder / "chat_template.jinja").write_text(template)
    return str(folder)
