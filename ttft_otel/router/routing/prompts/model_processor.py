# SPDX-License-Identifier: Apache-2.0
"""Load a model's processor in the child without what needs torch; model_tokenizer.py has it count.

Never imported by the router.
"""

from __future__ import annotations

import inspect
from typing import Any


def load_processor(source: str, tokenizer: Any, config: dict[str, Any]) -> tuple[Any, str | None]:
    """The processor of a model, for counting placeholders, and its chat template; None for text models.

    source: folder or hub name. tokenizer, config: of the same model.
    """
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    # By name: AutoProcessor would load all parts, also those that need torch.
    class_name = PROCESSOR_MAPPING_NAMES.get(str(config.get("model_type")))
    processor_class = getattr(transformers, class_name, None) if class_name else None
    if processor_class is None or not hasattr(processor_class, "get_processor_dict"):
        return None, None
    try:
        settings, _ = processor_class.get_processor_dict(source)
    except OSError:
        settings = {}
    template = settings.pop("chat_template", None)
    return _build_light_processor(processor_class, source, tokenizer, settings), template


def _build_light_processor(
    processor_class: Any, source: str, tokenizer: Any, settings: dict[str, Any]
) -> Any:
    """The processor without the parts that need torch: it only counts tokens. None if that fails."""
    import transformers

    # transformers refuses parts that are None or of another class than the processor names.
    unchecked = {"check_argument_for_proper_class": lambda *_: None}
    accepted = inspect.signature(processor_class.__init__).parameters
    parts: dict[str, Any] = dict.fromkeys(processor_class.get_attributes())
    arguments = {
        key: value for key, value in settings.items() if key in accepted and key not in parts
    }
    try:
        parts["tokenizer"] = tokenizer
        if "image_processor" in parts:
            parts["image_processor"] = transformers.AutoImageProcessor.from_pretrained(
                source, trust_remote_code=False
            )
        return type(processor_class.__name__, (processor_class,), unchecked)(**parts, **arguments)
    except Exception:  # noqa: BLE001 - any error of a processor: counts are estimated then
        return None
