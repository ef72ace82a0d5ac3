# SPDX-License-Identifier: Apache-2.0
"""Build tiny models with random weights in the user's cache; nothing is downloaded."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Raise it whenever the files made from the same ModelRecipe change.
MODEL_REVISION = 1

# Qwen2-VL's, by which vLLM's processor finds where an image's embeddings go.
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# The words of our prompts: each becomes one or two tokens.
TOKENIZER_CORPUS = "the quick brown fox jumps over the lazy dog and asks what is in the picture "

# Takes strings and lists of parts; vLLM chooses the form by how a template reads `content`.
CHAT_TEMPLATE = (
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
class ModelRecipe:
    """Parameters of a model; equal recipes share one folder.

    vision: also an image tower (Qwen2.5-VL instead of Qwen2).
    hidden, layers: width and depth of the language model; heads stay 32 wide.
    context: longest prompt in tokens.
    experts: in each layer of a text model (Qwen3-MoE), of which a token takes two; 0: it has none.
    """

    vision: bool = True
    hidden: int = 128
    layers: int = 2
    context: int = 8192
    vision_hidden: int = 128
    vision_depth: int = 4
    experts: int = 0


TEXT_RECIPE = ModelRecipe(vision=False)
VISION_RECIPE = ModelRecipe()
EXPERTS_RECIPE = ModelRecipe(vision=False, experts=4)


def get_cache_root() -> Path:
    """The laboratory's cache folder: models, environments, logs; everything in it can be rebuilt."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "ttft-otel"


def get_model_dir(recipe: ModelRecipe) -> Path:
    """The folder of the model of `recipe`, which may not exist yet."""
    # All that the files depend on: a changed recipe or template is another folder.
    text = json.dumps(
        [MODEL_REVISION, asdict(recipe), TOKENIZER_CORPUS, CHAT_TEMPLATE, SPECIAL_TOKENS],
        sort_keys=True,
    )
    return get_cache_root() / "models" / hashlib.sha256(text.encode()).hexdigest()[:16]


def build_model(recipe: ModelRecipe = VISION_RECIPE) -> Path:
    """Return the folder of the model of `recipe`; build it first if needed (a few seconds)."""
    target = get_model_dir(recipe)
    if target.is_dir():
        return target
    with open_draft(target) as draft:
        vocabulary = write_tokenizer(draft, recipe)
        write_weights(draft, recipe, vocabulary)
        write_processor(draft, recipe)
        publish_folder(draft, target)
    return target


@contextlib.contextmanager
def open_draft(target: Path) -> Iterator[Path]:
    """An empty folder beside `target`, for publish_folder; what is left of it is removed afterwards.

    On the same file system, because a rename is atomic only there: whoever finds `target` finds all of it.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=target.parent))
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def publish_folder(draft: Path, target: Path) -> None:
    """Rename `draft` to `target`; if another process has created it meanwhile, keep that one."""
    draft.chmod(0o755)
    try:
        # Renaming onto a folder that is not empty fails: the one that is there stays.
        draft.rename(target)
    except OSError:
        if not target.is_dir():
            raise


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write one of a model folder's JSON files."""
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def write_tokenizer(folder: Path, recipe: ModelRecipe) -> dict[str, int]:
    """Train a byte-level BPE on one sentence; return the ids of the special tokens."""
    # Imported where it is used: callers that only want a path need no tokenizers.
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        # 256 bytes, the corpus's merges, and room to spare: embeddings stay small.
        vocab_size=384,
        show_progress=False,
        # All bytes, so that any text can be encoded, whatever it was trained on.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([TOKENIZER_CORPUS], trainer)
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab()
    ids = {word: int(vocabulary[word]) for word in SPECIAL_TOKENS}
    write_json(folder / "tokenizer_config.json", build_tokenizer_config(recipe, ids))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    # The slow tokenizer class looks for these two; the fast one ignores them.
    bpe = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    write_json(folder / "vocab.json", bpe["vocab"])
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in bpe["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *pairs]), encoding="utf-8")
    return ids


def build_tokenizer_config(recipe: ModelRecipe, ids: dict[str, int]) -> dict[str, Any]:
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
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "model_max_length": recipe.context,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "unk_token": None,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def write_weights(folder: Path, recipe: ModelRecipe, ids: dict[str, int]) -> None:
    """Save config and random float32 weights, the same ones at every build."""
    import torch
    from transformers import GenerationConfig

    # The same weights everywhere: answers, and block hashes of prompts, can be compared.
    torch.manual_seed(0)
    model = build_vision_model(recipe, ids) if recipe.vision else build_text_model(recipe, ids)
    model = model.to(torch.float32)
    # Greedy and endless: the answer has exactly max_tokens tokens unless asked otherwise.
    model.generation_config = GenerationConfig(
        do_sample=False,
        pad_token_id=ids["<|endoftext|>"],
        eos_token_id=ids["<|im_end|>"],
    )
    model.save_pretrained(folder)


def build_text_config(recipe: ModelRecipe, ids: dict[str, int]) -> dict[str, Any]:
    """Keyword arguments shared by the language part of both models."""
    # The least head size that vLLM's attention on CPUs takes.
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


def build_text_model(recipe: ModelRecipe, ids: dict[str, int]) -> Any:
    """A Qwen2, or a Qwen3-MoE, with random weights."""
    import transformers

    fields = build_text_config(recipe, ids)
    if not recipe.experts:
        return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**fields))
    fields |= {"num_experts": recipe.experts, "num_experts_per_tok": 2, "head_dim": 32}
    fields["moe_intermediate_size"] = recipe.hidden
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**fields))


def build_vision_model(recipe: ModelRecipe, ids: dict[str, int]) -> Any:
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
        # In pixels: 8 patches of 14. Only the layers below see the whole image.
        "window_size": 112,
        "fullatt_block_indexes": [recipe.vision_depth // 2 - 1, recipe.vision_depth - 1],
    }
    # Head size 32 has 16 rotary pairs: 4 for time, 6 for height, 6 for width.
    rope = {"type": "mrope", "rope_type": "default", "mrope_section": [4, 6, 6]}
    config = Qwen2_5_VLConfig(
        text_config={**build_text_config(recipe, ids), "rope_scaling": rope},
        vision_config=tower,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def write_processor(folder: Path, recipe: ModelRecipe) -> None:
    """Write how an image becomes patches; a text model has no such file."""
    if not recipe.vision:
        return
    write_json(
        folder / "preprocessor_config.json",
        {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "processor_class": "Qwen2_5_VLProcessor",
            "min_pixels": 56 * 56,
            # At most 448 x 448: 256 tokens an image, so that several fit into a prompt.
            "max_pixels": 448 * 448,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
    )


RANK = 4
TARGET_MODULES = ("q_proj", "o_proj")  # square: hidden x hidden


def write_adapter(folder: Path, recipe: ModelRecipe) -> Path:
    """Write the adapter for the text model of `recipe` into `folder`; the same weights every time."""
    # Only here: it takes seconds to import.
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    write_json(
        folder / "adapter_config.json",
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": RANK,
            # alpha / r scales the adapter: by 2.
            "lora_alpha": 2 * RANK,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": list(TARGET_MODULES),
        },
    )
    # Another seed than the model's: equal numbers would hide a mix-up of the two.
    torch.manual_seed(1)
    weights = {}
    for layer in range(recipe.layers):
        for module in TARGET_MODULES:
            # PEFT's names of weights, by which vLLM finds the layer.
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = torch.randn(RANK, recipe.hidden)
            weights[f"{name}.lora_B.weight"] = torch.randn(recipe.hidden, RANK)
    save_file(weights, str(folder / "adapter_model.safetensors"))
    return folder


def write_eagle_head(folder: Path, recipe: ModelRecipe) -> Path:
    """Write a drafter of one layer (EAGLE) for the text model of `recipe` into `folder`; random weights."""
    # Only here: it takes seconds to import.
    import torch
    from safetensors.torch import save_file

    target = json.loads((build_model(recipe) / "config.json").read_text("utf-8"))
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    own = {name: target[name] for name in (*names, "vocab_size", "max_position_embeddings")}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": 32}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", {**config, **own, "num_hidden_layers": 1})
    torch.manual_seed(2)
    hidden, wide = own["hidden_size"], own["intermediate_size"]
    keys = 32 * own["num_key_value_heads"]
    shapes = {"self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (keys, hidden)}
    shapes |= {"self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, hidden)}
    shapes |= {"mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden)}
    shapes["mlp.down_proj"] = (hidden, wide)
    weights = {f"layers.0.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    weights["layers.0.post_attention_layernorm.weight"] = torch.ones(hidden)
    weights["fc.weight"] = torch.randn(hidden, 2 * hidden)
    save_file(weights, str(folder / "model.safetensors"))
    return folder


AUDIO_TOKENS = ("<|audio_start|>", "<|audio_pad|>", "<|audio_end|>")


def write_speech_model(folder: Path) -> Path:
    """Write a Qwen3-ASR for /v1/realtime into `folder`, without weights: --load-format dummy makes them."""
    # Only here: callers that want a path need no tokenizers.
    from tokenizers import AddedToken, Tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    text = build_model(TEXT_RECIPE)
    shutil.copy(text / "chat_template.jinja", folder / "chat_template.jinja")
    settings = json.loads((text / "tokenizer_config.json").read_text(encoding="utf-8"))
    names = ("audio_bos_token", "audio_token", "audio_eos_token")
    settings["extra_special_tokens"] = dict(zip(names, AUDIO_TOKENS, strict=True))
    write_json(folder / "tokenizer_config.json", settings)
    tokenizer = Tokenizer.from_file(str(text / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in AUDIO_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = tokenizer.get_vocab()
    language = {
        **build_text_config(TEXT_RECIPE, ids),
        "head_dim": 32,
        "model_type": "qwen3_asr_text",
        "rope_scaling": {"rope_type": "default", "mrope_section": [4, 6, 6]},
    }
    audio = {
        "d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 128,
        "output_dim": TEXT_RECIPE.hidden, "downsample_hidden_size": 32, "n_window": 50,
        "n_window_infer": 800, "model_type": "qwen3_asr_audio_encoder",
    }  # fmt: skip
    thinker: dict[str, Any] = {"model_type": "qwen3_asr_thinker", "audio_config": audio}
    start, pad, _ = AUDIO_TOKENS
    thinker |= {"text_config": language, "audio_start_token_id": ids[start]}
    thinker["audio_token_id"] = ids[pad]
    config = {"architectures": ["Qwen3ASRRealtimeGeneration"], "model_type": "qwen3_asr"}
    write_json(folder / "config.json", {**config, "dtype": "float32", "thinker_config": thinker})
    processor = {
        "feature_extractor_type": "WhisperFeatureExtractor", "processor_class": "Qwen3ASRProcessor",
        "feature_size": 128, "sampling_rate": 16000, "hop_length": 160, "chunk_length": 30,
        "n_fft": 400, "padding_value": 0.0, "return_attention_mask": True,
    }  # fmt: skip
    write_json(folder / "preprocessor_config.json", processor)
    return folder
