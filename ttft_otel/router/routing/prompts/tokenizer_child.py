# SPDX-License-Identifier: Apache-2.0
"""The child process that turns request bodies into prompts, with a model's tokenizer, template and processor.

prompt_reader.py starts it, asks on stdin and reads answers on stdout; it exits at the end of its input.
transformers renders, tokenizes and counts in the same way as in vLLM, so that token ids are equal to the
engine's; it is imported when the first tokenizer is loaded, without the modules that are blocked before.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from hashlib import blake2b
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from ttft_otel.router.errors import UnreadablePrompt
from ttft_otel.router.routing.prompts import prompt_parts
from ttft_otel.router.routing.prompts.prompt_parts import (
    LENGTH_BYTES,
    NO_TOKENIZER,
    Prompt,
    TokenizeQuestion,
    compute_prompt_keys,
    frame_message,
    question_decoder,
)

MAX_PROMPT_CHARS: Final = 1 << 22  # longer texts take longer to tokenize than a request waits
# A text with more characters per token of the model's limit is too long, without tokenizing it.
MAX_CHARS_PER_TOKEN: Final = 16
# Model types whose chats vLLM renders by its own code, not by a template.
_ENGINE_ONLY_MODELS: Final = (
    "deepseek_v32",
    "deepseek_v4",
    "gpt_oss",
    "inkling",
    "kimi_k3",
    "kimi_audio",
)
# Of apply_chat_template(), which takes the variables of the template beside them.
_RESERVED_NAMES: Final = ("chat_template", "tokenize", "tools", "conversation", "self")
MIN_PIECE_CHARS: Final = 2048  # minimum characters per piece
MAX_CACHE_BYTES: Final = 64 << 20  # bytes of cached token ids
ENTRY_OVERHEAD_BYTES: Final = 200  # bytes per cached piece besides its ids
MAX_CUT_TOKENS: Final = 4  # special tokens tried as cuts
# Texts whose tokens depend on their neighbours in some tokenizers.
_PROBE_TEXTS: Final = ("", " ", "a", " a", "\n", "\n\nB", "  x", "é", "\u0301", "7", "'s", "😀")


class ModelTokenizer:
    """Loads the tokenizer of `source`, a folder or hub name. Raises whatever transformers raises.

    With NO_TOKENIZER it only reads prompts that are token ids already, and transformers is not needed.
    """

    def __init__(self, source: str) -> None:
        self._encoder: TextEncoder | None = None
        if source == NO_TOKENIZER:
            return
        import jinja2  # noqa: F401 - missing, it is to be named now and not at the first chat
        import transformers

        # Else transformers would take the path for a name of the hub.
        if Path(source).is_absolute() and not Path(source).is_dir():
            raise OSError("no such folder on the router's machine")
        # Nobody would read its warnings: the child's stderr is /dev/null.
        transformers.utils.logging.set_verbosity_error()
        config, _ = transformers.PretrainedConfig.get_config_dict(source)
        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
            source, trust_remote_code=False
        )
        tekken = transformers.utils.cached_file(
            source, "tekken.json", _raise_exceptions_for_missing_entries=False
        )
        is_engine_only = str(config.get("model_type")).startswith(_ENGINE_ONLY_MODELS)
        # vLLM also renders chats of Mistral's tekken tokenizers by code of Mistral's.
        self._needs_engine = is_engine_only or tekken is not None
        processor, self._template = prompt_parts.load_processor(source, self._tokenizer, config)
        self._counter = prompt_parts.PlaceholderCounter(processor, config)
        self._encoder = TextEncoder(self._tokenizer, self._find_template(None) or "")

    def read_body(self, question: TokenizeQuestion) -> Prompt:
        """The prompt of the body in `question`. Raises UnreadablePrompt, or KeyError and the like."""
        try:
            body = msgspec.json.decode(question.body)
        except msgspec.DecodeError:  # json accepts more (NaN, for instance), and vLLM uses it
            body = json.loads(question.body)
        if not isinstance(body, dict):
            raise UnreadablePrompt("refused")
        # The engine's own business: the router has no need of prompts that were cut.
        if body.get("truncate_prompt_tokens") is not None:
            raise UnreadablePrompt("unsupported")
        read = self._read_chat if question.path == "chat" else self._read_completion
        return read(body, question)

    def _read_chat(self, body: dict[str, Any], question: TokenizeQuestion) -> Prompt:
        text, items = self._render_chat(body)
        ids, cached = self._tokenize_prompt(text, body, question.max_prompt_tokens, False)
        counted_items = [
            (self._counter.find_token_id(item.modality), *self._counter.count_item(item))
            for item in items
        ]
        item_tokens = tuple(count for _, count, _ in counted_items)
        expanded = prompt_parts.expand_placeholders(ids, counted_items)
        if expanded is None:  # placeholders not found: the length is known, block keys are not
            tokens = len(ids) + sum(item_tokens) - len(items)
            return Prompt(tokens=tokens, item_tokens=item_tokens)
        ids, spans = expanded
        salt = body.get("cache_salt") or ""
        return Prompt(
            tokens=len(ids),
            ids=ids.tobytes(),
            block_keys=compute_prompt_keys(ids, question.block_size, spans, question.adapter, salt),
            item_tokens=item_tokens,
            cached_tokens=cached,
        )

    def _read_completion(self, body: dict[str, Any], question: TokenizeQuestion) -> Prompt:
        prompt = body.get("prompt")
        if prompt is None or body.get("prompt_embeds") is not None:
            raise UnreadablePrompt("unsupported")
        is_list = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
        prompts = prompt if is_list else [prompt]
        if sum(map(len, prompts)) > MAX_PROMPT_CHARS:
            raise UnreadablePrompt("unsupported")
        tokenized = [
            self._tokenize_prompt(each, body, question.max_prompt_tokens, True) for each in prompts
        ]
        ids, cached = tokenized[0]
        salt = body.get("cache_salt") or ""
        return Prompt(
            # Each prompt is a request in the engine: count all tokens, but match the first one's blocks.
            tokens=sum(len(each) for each, _ in tokenized),
            ids=ids.tobytes() if len(tokenized) == 1 else b"",
            block_keys=compute_prompt_keys(ids, question.block_size, (), question.adapter, salt),
            cached_tokens=cached,
        )

    def _render_chat(self, body: dict[str, Any]) -> tuple[str, list[prompt_parts.MediaItem]]:
        if self._encoder is None:
            raise UnreadablePrompt("load")
        if self._needs_engine:
            raise UnreadablePrompt("unsupported")
        tools = prompt_parts.convert_tools(body)
        variables = prompt_parts.collect_template_variables(body)
        template = self._find_template(tools)
        # Templates of clients are untrusted; vLLM refuses them by default.
        is_own = body.get("chat_template") is not None or "chat_template" in variables
        if template is None or is_own:
            raise UnreadablePrompt("refused")
        conversation, items = prompt_parts.convert_messages(
            body["messages"],
            prompt_parts.iterates_parts(template),
            self._counter.get_placeholder_text,
        )
        text = self._tokenizer.apply_chat_template(
            conversation=conversation,
            tools=variables.get("tools", tools),
            chat_template=template,
            tokenize=False,
            **{name: value for name, value in variables.items() if name not in _RESERVED_NAMES},
        )
        return text, items

    def _find_template(self, tools: list[dict[str, Any]] | None) -> str | None:
        """The chat template: the processor's if there are no tools, else the tokenizer's."""
        if tools is None and self._template is not None:
            return self._template
        try:
            return str(self._tokenizer.get_chat_template(None, tools=tools))
        except ValueError:
            return None

    def _tokenize_prompt(
        self, prompt: str | list[int], body: dict[str, Any], max_tokens: int, add_special: bool
    ) -> tuple[array[int], int]:
        """Token ids, and how many came from the cache.

        add_special: add the special tokens at both ends, unless the request says otherwise.
        """
        add_special = body.get("add_special_tokens", add_special)
        cached = 0
        if not isinstance(prompt, str):
            ids = array("I", prompt)
        elif self._encoder is None:
            raise UnreadablePrompt("load")
        else:
            if len(prompt) > MAX_PROMPT_CHARS:
                raise UnreadablePrompt("unsupported")
            # It exceeds the model's limit however it is tokenized.
            if 0 < max_tokens * MAX_CHARS_PER_TOKEN < len(prompt):
                raise UnreadablePrompt("refused")
            ids, cached = self._encoder.encode_text(prompt, add_special)
        if not len(ids):
            raise UnreadablePrompt("refused")
        return ids, cached


class TextEncoder:
    """Tokenizes with one transformers tokenizer.

    Args:
        tokenizer: of transformers.
        template: only special tokens that it contains are considered as cuts.
        cache_bytes: limit of the cache, from which the least recently used pieces are evicted.
    """

    def __init__(
        self, tokenizer: Any, template: str = "", cache_bytes: int = MAX_CACHE_BYTES
    ) -> None:
        self._tokenizer = tokenizer
        self._fast_backend: Any = self._find_fast_backend()
        self._ids_by_digest: OrderedDict[bytes, array[int]] = OrderedDict()
        self._max_bytes = cache_bytes
        self.used_bytes = 0
        candidates = [token for token in _find_cut_tokens(tokenizer) if token in template]
        #: Special tokens after which a text can be cut without changing its tokens.
        self.cut_tokens = tuple(filter(self._is_safe_cut, candidates[:MAX_CUT_TOKENS]))

    def encode_text(self, text: str, add_special: bool) -> tuple[array[int], int]:
        """Token ids of `text`, and how many came from the cache.

        add_special: add special tokens at the ends; such a text is not cut.
        """
        # Special tokens stand at the ends of the whole text, not of its pieces.
        if add_special:
            return self._encode_piece(text, True)
        ids, cached_count = array("I"), 0
        for piece in self._split_pieces(text):
            piece_ids, piece_cached = self._encode_piece(piece, False)
            ids += piece_ids
            cached_count += piece_cached
        return ids, cached_count

    def _encode_piece(self, text: str, add_special: bool) -> tuple[array[int], int]:
        # A keyed digest, so that a text has two entries: with special tokens and without.
        key = blake2b(text.encode(), digest_size=16, key=b"+" if add_special else b"").digest()
        ids = self._ids_by_digest.get(key)
        if ids is not None:
            self._ids_by_digest.move_to_end(key)
            return ids, len(ids)
        ids = self._tokenize_fast(text, add_special)
        # A piece that is larger than the cache would push out everything and then itself.
        if _count_entry_bytes(ids) <= self._max_bytes:
            self._ids_by_digest[key] = ids
            self.used_bytes += _count_entry_bytes(ids)
        while self.used_bytes > self._max_bytes:
            self.used_bytes -= _count_entry_bytes(self._ids_by_digest.popitem(last=False)[1])
        return ids, 0

    def _tokenize_fast(self, text: str, add_special: bool) -> array[int]:
        if self._fast_backend is None:
            return self._tokenize_slowly(text, add_special)
        # The batch form only: it computes no offsets, which nobody needs here.
        (encoding,) = self._fast_backend.encode_batch_fast([text], add_special_tokens=add_special)
        return array("I", encoding.ids)

    def _tokenize_slowly(self, text: str, add_special: bool) -> array[int]:
        encoding = self._tokenizer(
            text,
            add_special_tokens=add_special,
            return_attention_mask=False,
            return_token_type_ids=False,
        )
        return array("I", encoding["input_ids"])

    def _find_fast_backend(self) -> Any:
        """The Rust tokenizer behind it, twice as fast; None if there is none or its ids differ."""
        backend: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        if not hasattr(backend, "encode_batch_fast"):
            return None
        for text, add_special in product(_PROBE_TEXTS, (True, False)):
            slow = self._tokenize_slowly(text, add_special)
            (found,) = backend.encode_batch_fast([text], add_special_tokens=add_special)
            if array("I", found.ids) != slow:
                return None
        return backend

    def _split_pieces(self, text: str) -> Iterator[str]:
        """Split `text`; a cut depends only on the text before it, so equal prefixes have equal pieces."""
        start = 0
        while self.cut_tokens and len(text) - start > MIN_PIECE_CHARS:
            ends = [
                found_at + len(token)
                for token in self.cut_tokens
                if (found_at := text.find(token, start + MIN_PIECE_CHARS)) >= 0
            ]
            if not ends or min(ends) >= len(text):
                break
            yield text[start : min(ends)]
            start = min(ends)
        yield text[start:]

    def _is_safe_cut(self, token: str) -> bool:
        """Whether cutting after `token` leaves the ids of all probe texts unchanged."""

        def encode(text: str) -> array[int]:
            return self._tokenize_fast(text, False)

        return all(
            encode(left + token + right) == encode(left + token) + encode(right)
            for left, right in product(_PROBE_TEXTS, _PROBE_TEXTS)
        )


def _count_entry_bytes(ids: array[int]) -> int:
    return ENTRY_OVERHEAD_BYTES + ids.itemsize * len(ids)


def _find_cut_tokens(tokenizer: Any) -> list[str]:
    """Special tokens that absorb no whitespace around them and do not overlap with another token."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    all_tokens = {str(each) for each in added}
    return [
        str(each)
        for each in added
        if each.special
        and not (each.normalized or each.lstrip or each.rstrip or each.single_word)
        and not any(_do_overlap(str(each), other) for other in all_tokens - {str(each)})
    ]


def _do_overlap(first: str, second: str) -> bool:
    return (
        first in second
        or second in first
        or any(
            first.endswith(second[:size]) or second.endswith(first[:size])
            for size in range(1, min(len(first), len(second)))
        )
    )


# transformers imports these if present; nothing here needs them, and they take seconds and hundreds of MB.
BLOCKED_MODULES: Final = ("torch", "torchvision", "torchaudio", "tensorflow", "flax", "jax")
# Modules that the extra `tokenize` brings, and that code of ours imports.
TOKENIZE_EXTRA_MODULES: Final = ("jinja2", "transformers")
# Seconds per prompt, after which SIGALRM ends the process; the router kills it sooner, if it still runs.
PROMPT_TIMEOUT_S: Final = 10
# A template that builds huge strings must not exhaust the memory of the machine.
MAX_ADDRESS_SPACE_BYTES: Final = 8 << 30


def main() -> None:
    """Prepare the process, then serve questions until end of input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the router
    resource.setrlimit(
        resource.RLIMIT_AS, (MAX_ADDRESS_SPACE_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1])
    )
    for name in BLOCKED_MODULES:
        # With None both find_spec() and import say that there is no such module.
        sys.modules[name] = None  # type: ignore[assignment]
    # Copies first: 0 and 1 are given to /dev/null below.
    pipes = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)  # libraries must neither print into the answers nor read the questions
    serve_questions(*pipes)


def serve_questions(questions: BinaryIO, answers: BinaryIO) -> None:
    models: dict[str, Any] = {}
    while len(length_bytes := questions.read(LENGTH_BYTES)) == LENGTH_BYTES:
        question = question_decoder.decode(questions.read(int.from_bytes(length_bytes, "big")))
        answers.write(frame_message(answer_question(question, models)))
        answers.flush()


def answer_question(question: TokenizeQuestion, models: dict[str, Any]) -> Prompt:
    """Answer one question; errors become an answer with `error`.

    models: loaded tokenizers by source; a load adds to it.
    """
    try:
        if not question.path:
            return _load_tokenizer(question, models)
        # Its default action ends the process, also in the middle of a regular expression in C.
        signal.alarm(PROMPT_TIMEOUT_S)
        if question.source not in models:
            return Prompt("load")  # only an earlier child had loaded it
        answer: Prompt = models[question.source].read_body(question)
        return answer
    except UnreadablePrompt as error:
        return Prompt(error.reason)
    except Exception:  # noqa: BLE001 - malformed requests; the engine reports what is wrong
        return Prompt("malformed")
    finally:
        signal.alarm(0)


def _load_tokenizer(question: TokenizeQuestion, models: dict[str, Any]) -> Prompt:
    try:
        models[question.source] = ModelTokenizer(question.source)
    except Exception as error:  # noqa: BLE001 - any error of any library
        if isinstance(error, ModuleNotFoundError) and error.name in TOKENIZE_EXTRA_MODULES:
            missing = f"{error.name} is not installed"
            remedy = "pip install 'ttft-otel[router,tokenize]' or use --tokenize engine"
            return Prompt("load", f"{missing}; {remedy}")
        # Only the first line is reported: errors of the hub have many.
        lines = str(error).strip().splitlines() or [type(error).__name__]
        detail = f"cannot load the tokenizer of {question.source!r}: {lines[0][:300]}"
        remedy = "give its folder with --tokenizer DIR or use --tokenize engine"
        return Prompt("load", f"{detail}; {remedy}")
    return Prompt()


if __name__ == "__main__":
    main()
