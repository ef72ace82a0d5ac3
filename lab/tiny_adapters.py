# SPDX-License-Identifier: Apache-2.0
"""Write a tiny LoRA adapter of random weights for a model of tiny_models.py, in PEFT's format.

tests/live names it to vLLM with --lora-modules.
"""

from __future__ import annotations

from pathlib import Path

from lab.tiny_models import ModelRecipe, write_json

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
