# SPDX-License-Identifier: Apache-2.0
"""Stands in for transformers in a tokenizer's child process, and is imported in a tenth of its time.

It reads folders of small_tokenizer.py and has what tokenizer_child.py asks of transformers. Tests of the
process put it on PYTHONPATH; that the real one gives the same is shown by test_model_tokenizer.py and
test_prompt_processes.py::test_local.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from router.small_tokenizer import PlainTokenizer


def compile_template(chat_template: str) -> Any:
    """The template in an environment like that of transformers."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(chat_template)


class PreTrainedTokenizerBase(PlainTokenizer):
    """A tokenizer with its chat template."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.chat_template = (Path(folder) / "chat_template.jinja").read_text()

    def get_chat_template(self, chat_template: str | None, tools: Any = None) -> str:
        """`chat_template`, or the tokenizer's own."""
        return chat_template or self.chat_template

    def apply_chat_template(
        self, conversation: Any, tools: Any, chat_template: str, tokenize: bool, **variables: Any
    ) -> str:
        """The text of a conversation."""
        return compile_template(chat_template).render(
            messages=conversation, tools=tools, bos_token="<|begin|>", **variables
        )


# The config of a folder, and no arguments left over.
PretrainedConfig = SimpleNamespace(
    get_config_dict=lambda source: (json.loads((Path(source) / "config.json").read_text()), {})
)
AutoTokenizer = SimpleNamespace(from_pretrained=lambda source, **_: PreTrainedTokenizerBase(source))


def add_module(name: str, **contents: Any) -> ModuleType:
    """Make a module of this package with these `contents`."""
    module = ModuleType(f"{__name__}.{name}")
    vars(module).update(contents)
    sys.modules[module.__name__] = module
    return module


add_module("utils.chat_template_utils", _compile_jinja_template=compile_template)
add_module("models")
add_module("models.auto")
add_module("models.auto.processing_auto", PROCESSOR_MAPPING_NAMES={})
logging = SimpleNamespace(set_verbosity_error=lambda: None)
utils = add_module("utils", logging=logging, cached_file=lambda *_, **__: None)
