# SPDX-License-Identifier: Apache-2.0
"""Build tiny random-weight models in the user's cache; recipes.py serves them, no hub is asked."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Raise it whenever the files made from the same Recipe change.
REVISION = 1

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
CORPUS = "the quick brown fox jumps over the lazy dog and asks what is in the picture "

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}"
    "{% if c['type'] in ('image', 'image_url') %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c['type'] in ('video', 'video_url') %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in c %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a model is made of; equal recipes share one folder.

    vision: also an image tower (Qwen2.5-VL instead of Qwen2).
    hidden, layers: width and depth of the language model; heads stay 32 wide.
    context: longest prompt in tokens.
    """

    vision: bool = True
    hidden: int = 128
    layers: int = 2
    context: int = 8192
    vision_hidden: int = 128
    vision_depth: int = 4


TEXT = Recipe(vision=False)
VISION = Recipe()
# A 4k-token prefill takes about a second on one core: queueing becomes visible.
HEAVY = Recipe(hidden=512, layers=8)


def cache_root() -> Path:
    """The folder in which the laboratory keeps all that can be made again."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "ttft-otel"


def model_dir(recipe: Recipe) -> Path:
    """Where a model of this recipe lies, built or not."""
    text = json.dumps([REVISION, asdict(recipe), CORPUS, TEMPLATE, SPECIAL], sort_keys=True)
    return cache_root() / "models" / hashlib.sha256(text.encode()).hexdigest()[:16]


def build(recipe: Recipe = VISION) -> Path:
    """Return the model's folder, making it first if it is not there (a few seconds)."""
    target = model_dir(recipe)
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=target.parent))
    try:
        vocabulary = write_tokenizer(draft, recipe)
        write_weights(draft, recipe, vocabulary)
        write_processor(draft, recipe)
        publish(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def publish(draft: Path, target: Path) -> None:
    """Rename into place; losing the race against another builder is as good as winning."""
    draft.chmod(0o755)
    try:
        draft.rename(target)
    except OSError:
        if not target.is_dir():
            raise


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write one of a model folder's JSON files."""
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def write_tokenizer(folder: Path, recipe: Recipe) -> dict[str, int]:
    """Train a byte-level BPE on one sentence; return the ids of the special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab()
    ids = {word: int(vocabulary[word]) for word in SPECIAL}
    write_json(folder / "tokenizer_config.json", tokenizer_config(recipe, ids))
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    # The slow tokenizer class looks for these two; the fast one ignores them.
    bpe = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    write_json(folder / "vocab.json", bpe["vocab"])
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in bpe["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *pairs]), encoding="utf-8")
    return ids


def tokenizer_config(recipe: Recipe, ids: dict[str, int]) -> dict[str, Any]:
    """The tokenizer's settings file, with the chat template inside for older readers."""
    added = {
        str(number): {
            "content": word,
            "special": True,
            "lstrip": False,
            "rstrip": False,
            "single_word": False,
            "normalized": False,
        }
        for word, number in ids.items()
    }
    return {
        "tokenizer_class": "Qwen2TokenizerFast",
        "processor_class": "Qwen2_5_VLProcessor" if recipe.vision else None,
        "added_tokens_decoder": added,
        "additional_special_tokens": list(SPECIAL[1:]),
        "model_max_length": recipe.context,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "unk_token": None,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }


def write_weights(folder: Path, recipe: Recipe, ids: dict[str, int]) -> None:
    """Save config and random float32 weights, the same ones at every build."""
    import torch
    from transformers import GenerationConfig

    torch.manual_seed(0)
    model = vision_model(recipe, ids) if recipe.vision else text_model(recipe, ids)
    model = model.to(torch.float32)
    # Greedy and endless: the answer has exactly max_tokens tokens unless asked otherwise.
    model.generation_config = GenerationConfig(
        do_sample=False,
        pad_token_id=ids["<|endoftext|>"],
        eos_token_id=ids["<|im_end|>"],
    )
    model.save_pretrained(folder)


def text_shape(recipe: Recipe, ids: dict[str, int]) -> dict[str, Any]:
    """Keyword arguments shared by the language part of both models."""
    heads = recipe.hidden // 32
    return {
        "vocab_size": max(ids.values()) + 1,
        "hidden_size": recipe.hidden,
        "intermediate_size": 2 * recipe.hidden,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "max_position_embeddings": recipe.context,
        "tie_word_embeddings": False,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
    }


def text_model(recipe: Recipe, ids: dict[str, int]) -> Any:
    """A Qwen2 with random weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**text_shape(recipe, ids)))


def vision_model(recipe: Recipe, ids: dict[str, int]) -> Any:
    """A Qwen2.5-VL with random weights."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tower = {
        "depth": recipe.vision_depth,
        "hidden_size": recipe.vision_hidden,
        "intermediate_size": 2 * recipe.vision_hidden,
        "num_heads": recipe.vision_hidden // 32,
        "out_hidden_size": recipe.hidden,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [recipe.vision_depth // 2 - 1, recipe.vision_depth - 1],
    }
    # Head size 32 has 16 rotary pairs: 4 for time, 6 for height, 6 for width.
    rope = {"type": "mrope", "rope_type": "default", "mrope_section": [4, 6, 6]}
    config = Qwen2_5_VLConfig(
        text_config={**text_shape(recipe, ids), "rope_scaling": rope},
        vision_config=tower,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def write_processor(folder: Path, recipe: Recipe) -> None:
    """Write how an image becomes patches; a text model has no such file."""
    if not recipe.vision:
        return
    write_json(
        folder / "preprocessor_config.json",
        {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "processor_class": "Qwen2_5_VLProcessor",
            "min_pixels": 56 * 56,
            "max_pixels": 448 * 448,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
    )
