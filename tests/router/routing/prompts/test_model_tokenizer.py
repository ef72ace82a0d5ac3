# SPDX-License-Identifier: Apache-2.0
"""Prompts as templates and tokenizers see them: the pure parts, and a real tokenizer made here."""

from __future__ import annotations

import base64
import functools
import json
import random
from array import array
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router import small_tokenizer
from ttft_otel.router.errors import UnreadablePrompt
from ttft_otel.router.routing.policies.block_index import compute_block_keys, encode_extra_keys
from ttft_otel.router.routing.prompts import prompt_parts
from ttft_otel.router.routing.prompts.prompt_parts import (
    MediaItem,
    PlaceholderCounter,
    PlaceholderSpan,
    Prompt,
    compute_prompt_keys,
    expand_placeholders,
    read_dimensions,
)
from ttft_otel.router.routing.prompts.tokenizer_child import (
    ENTRY_OVERHEAD_BYTES,
    MIN_PIECE_CHARS,
    TextEncoder,
)

PromptReading = Callable[..., Prompt]
PROMPT_TEXTS = st.lists(
    st.sampled_from(["<|im_start|>", "<|im_end|>", " ", "\n", "é", "e\u0301", "Hello", "x", "😀"]),
    max_size=60,
).map("".join)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer with a chat template, no model."""
    return small_tokenizer.build_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def plain_tokenizer(folder: str) -> small_tokenizer.PlainTokenizer:
    """The same, loaded here."""
    return small_tokenizer.PlainTokenizer(folder)


@pytest.fixture(scope="module")
def tokenizer_child() -> Iterator[small_tokenizer.TokenizerChild]:
    """A process that holds tokenizers."""
    found = small_tokenizer.TokenizerChild()
    yield found
    assert found.close() == 0


@pytest.fixture(scope="module")
def read_prompt(tokenizer_child: small_tokenizer.TokenizerChild, folder: str) -> PromptReading:
    """Reads a body's prompt."""
    assert tokenizer_child.read_prompt(folder).detail == ""
    return functools.partial(tokenizer_child.read_prompt, folder)


def convert_messages(
    conversation: list[dict[str, Any]], wrap: bool = False
) -> list[dict[str, Any]]:
    """What the template gets."""
    messages, _ = prompt_parts.convert_messages(
        conversation, wrap, lambda modality: f"<{modality}>"
    )
    return messages


TEXT_PART = {"type": "text", "text": "a"}
LINK_PART = {"type": "image_url", "image_url": "u"}
USER_CASES: list[tuple[Any, bool, Any]] = [
    ("a", False, "a"),
    ("a", True, [TEXT_PART]),
    (None, False, ""),
    (["a", {"type": "text", "text": "b"}], False, "a\nb"),
    ([{"type": "text", "text": ""}, "b"], False, "b"),
    ([{**TEXT_PART, "cache": 1}], True, [{**TEXT_PART, "cache": 1}]),
    (["a", {"type": "image_url", "image_url": {"url": "u"}}], False, "<image>\na"),
    (["a", LINK_PART], True, [TEXT_PART, {"type": "image"}]),
    (["<image> a", LINK_PART], False, "<image> a"),
]
MESSAGE_CASES: list[tuple[dict[str, Any], bool, dict[str, Any]]] = [
    *(
        ({"role": "user", "content": content}, wrap, {"role": "user", "content": wanted})
        for content, wrap, wanted in USER_CASES
    ),
    ({"role": "user"}, False, {"content": ""}),
    ({"role": "user", "content": "a", "name": "n", "other": 1}, False, {"name": "n"}),
    (
        {"role": "assistant", "content": "a", "reasoning_content": "r"},
        False,
        {"reasoning": "r", "reasoning_content": "r"},
    ),
    (
        {"role": "tool", "tool_call_id": "c", "content": ["a", "b"]},
        True,
        {"tool_call_id": "c", "content": "a\nb"},
    ),
    ({"role": "assistant", "content": "a", "tool_calls": []}, False, {"content": "a"}),
]


@pytest.mark.parametrize(("given", "wrap", "wanted"), MESSAGE_CASES)
def test_messages(given: dict[str, Any], wrap: bool, wanted: dict[str, Any]) -> None:
    """Messages reach the template as vLLM's parser leaves them."""
    (found,) = convert_messages([given], wrap)

    assert {key: found.get(key) for key in wanted} == wanted
    assert "other" not in found
    assert found.get("tool_calls") is None


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [('{"a": 1}', {"a": 1}), ("", {}), ("[]", {}), ("{bad", {}), ({"b": 2}, {"b": 2})],
)
def test_arguments(arguments: Any, wanted: dict[str, Any]) -> None:
    """A tool call's arguments are an object whatever was sent, its keys in OpenAI's order."""
    call = {"type": "function", "id": "c", "function": {"name": "f", "arguments": arguments}}
    (found,) = convert_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])

    assert found["tool_calls"][0]["function"]["arguments"] == wanted
    assert list(found["tool_calls"][0]) == ["id", "function", "type"]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "image_embeds"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": "u", "cache": 1}]},
        {"role": "developer", "content": "a"},
        {"role": "system", "content": "x-anthropic-billing-header: 1\nb"},
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f"}}]},
    ],
)
def test_left_to_the_engine(message: dict[str, Any]) -> None:
    """What vLLM changes in a way of its own, and prompts whose length only it knows, are not guessed."""
    with pytest.raises(UnreadablePrompt, match="unsupported"):
        convert_messages([message])


def test_tools() -> None:
    """Tools have their known keys, in the order of vLLM's types, and what was not given is null."""
    given = {"function": {"parameters": {}, "name": "f", "x": 1}, "type": "function", "y": 2}

    (found,) = prompt_parts.convert_tools({"tools": [given]}) or []

    assert json.dumps(found) == (
        '{"type": "function", "function": {"name": "f", "description": null, "parameters": {}}}'
    )
    assert prompt_parts.convert_tools({}) is None
    with pytest.raises(UnreadablePrompt, match="unsupported"):
        prompt_parts.convert_tools({"tools": [{"function": {"name": "f", "strict": True}}]})


def test_variables() -> None:
    """The request's own fields win over its chat_template_kwargs; what is unset is not there."""
    found = prompt_parts.collect_template_variables(
        {
            "chat_template_kwargs": {"add_generation_prompt": False, "a": 1},
            "reasoning_effort": "low",
        }
    )

    assert found == {
        "add_generation_prompt": True,
        "continue_final_message": False,
        "a": 1,
        "reasoning_effort": "low",
        "enable_thinking": True,
    }


FORMAT_BY_TEMPLATE = {
    "{% for m in messages %}{{ m.content }}{% endfor %}": False,
    "{% for m in messages %}{% for c in m['content'] %}{{ c.text }}{% endfor %}{% endfor %}": True,
    "{% for m in messages %}{{ m | tojson }}{% for c in m.content %}{{ c.text }}{% endfor %}"
    "{% endfor %}": True,
    "{% for m in messages %}{{ '<s>' + m.content }}{% endfor %}": False,
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}": False,
    "{% for m in": False,
    "{% set a = messages %}{% set messages = a %}{% for m in a %}{{ m.content }}{% endfor %}": False,
}


@pytest.mark.parametrize(("template", "wanted"), FORMAT_BY_TEMPLATE.items())
def test_format(template: str, wanted: bool) -> None:
    """A template that goes through the parts of a content gets parts, any other one text."""
    assert prompt_parts.iterates_parts(template) is wanted


def test_cache(plain_tokenizer: small_tokenizer.PlainTokenizer) -> None:
    """The cache stays within its bytes; the longest unused piece goes first."""
    encoder = TextEncoder(plain_tokenizer, cache_bytes=3 * (ENTRY_OVERHEAD_BYTES + 4))
    for text in ("a", "b", "c", "a", "d", "x" * 10_000):
        encoder.encode_text(text, False)

    assert encoder.used_bytes == 3 * (ENTRY_OVERHEAD_BYTES + 4)
    assert [encoder.encode_text(each, False)[1] for each in "acdb"] == [1, 1, 1, 0]


@settings(max_examples=60, deadline=None)
@given(st.lists(PROMPT_TEXTS, max_size=5))
def test_pieces(plain_tokenizer: small_tokenizer.PlainTokenizer, parts: list[str]) -> None:
    """Texts cut at special tokens have the ids of the whole, beginnings from memory or not."""
    encoder = TextEncoder(plain_tokenizer, "<|im_end|>")
    text = "<|im_end|>\n".join(part * 99 for part in parts)

    found, _ = encoder.encode_text(text, False)
    again, kept = encoder.encode_text(text, False)

    assert encoder.cut_tokens == ("<|im_end|>",)
    assert found.tolist() == plain_tokenizer(text, False)["input_ids"]
    assert again == found
    assert kept == len(found)


class ContextualTokenizer(small_tokenizer.PlainTokenizer):
    """A tokenizer whose tokens depend on what came before, and which is not what is behind it."""

    def __call__(self, text: str, *args: Any, **more: Any) -> dict[str, list[int]]:
        """The number of characters, once each."""
        return {"input_ids": [len(text)] * len(text)}


def test_odd(folder: str) -> None:
    """Such a tokenizer's texts are never cut, and it is asked itself."""
    encoder = TextEncoder(ContextualTokenizer(folder), "<|im_end|>")
    text = "<|im_end|>" * MIN_PIECE_CHARS

    assert encoder.cut_tokens == ()
    assert encoder.encode_text(text, False)[0].tolist() == [len(text)] * len(text)


def test_beginning(read_prompt: PromptReading) -> None:
    """A conversation's next round finds its earlier rounds tokenized."""
    rounds = [
        {"role": role, "content": role * MIN_PIECE_CHARS}
        for _ in range(3)
        for role in ("user", "assistant")
    ]
    read_prompt("chat", messages=rounds, limit=100_000)
    more = read_prompt(
        "chat", messages=[*rounds, {"role": "user", "content": "and?"}], limit=100_000
    )

    assert more.tokens > more.cached_tokens > 0.9 * more.tokens


def test_chat(read_prompt: PromptReading, plain_tokenizer: small_tokenizer.PlainTokenizer) -> None:
    """A chat is rendered by the model's template and numbered in blocks."""
    told = read_prompt("chat", messages=HELLO)
    text = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"

    assert told.token_ids.tolist() == plain_tokenizer(text, False)["input_ids"]
    assert told.tokens == len(told.token_ids.tolist())
    assert told.block_keys == compute_block_keys(told.token_ids.tolist(), 4)


@pytest.mark.parametrize(("body", "cut"), [({}, 0), ({"add_special_tokens": False}, 1)])
def test_completion(
    read_prompt: PromptReading, folder: str, body: dict[str, Any], cut: int
) -> None:
    """A completion's prompt has special tokens as the request says."""
    text = "the quick brown fox " * 40
    whole = small_tokenizer.PlainTokenizer(folder)(text, True)["input_ids"]

    assert whole[0] == 0
    assert read_prompt("completion", prompt=text, **body).token_ids.tolist() == whole[cut:]


def test_several(read_prompt: PromptReading) -> None:
    """Prompts that come as token ids are taken as they are; of several all are counted."""
    one = read_prompt("completion", prompt=[1, 2, 3, 4, 5])
    two = read_prompt("completion", prompt=[[1, 2, 3, 4, 5], [6, 7]])

    assert (one.token_ids.tolist(), one.tokens) == ([1, 2, 3, 4, 5], 5)
    assert (two.token_ids.tolist(), two.tokens, two.block_keys) == ([], 7, one.block_keys)


def test_salt(read_prompt: PromptReading) -> None:
    """A cache salt and an adapter have blocks of their own, numbered as KV events number them."""
    found = [1, 2, 3, 4, 5, 6, 7, 8]
    plain = read_prompt("completion", prompt=found).block_keys
    salted = read_prompt("completion", prompt=found, cache_salt="s").block_keys
    lora = read_prompt("completion", adapter="a", prompt=found, cache_salt="s").block_keys

    assert plain == compute_block_keys(found, 4)
    assert salted == compute_block_keys(found, 4, {0: encode_extra_keys(["s"])})
    assert lora == compute_block_keys(
        found, 4, {0: encode_extra_keys(["a", "s"]), 1: encode_extra_keys(["a"])}
    )


def draw_data_url(width: int, height: int, kind: str = "PNG") -> str:
    """A picture as a data: URL."""
    from PIL import Image

    out = BytesIO()
    Image.new("RGB", (width, height)).save(out, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(out.getvalue()).decode()}"


def test_dimensions() -> None:
    """A picture's height and width come from its header; nothing is fetched, and what is none has no size."""
    for kind in ("PNG", "JPEG", "GIF", "WEBP", "BMP"):
        assert read_dimensions(draw_data_url(30, 20, kind)) == (20, 30)
    for url in ("", "http://h/a.png", "data:image/png;base64,xx", "data:,"):
        assert read_dimensions(url) is None


def test_expand() -> None:
    """Placeholders are repeated where they stand, in order; blocks carry the items in them.

    Items without a placeholder in the prompt are not inserted anywhere.
    """
    for unfit in ([(None, 1, "a")], [(9, 1, "a"), (9, 1, "b")]):
        assert expand_placeholders(array("I", [1, 9, 2]), unfit) is None
    expanded = expand_placeholders(array("I", [1, 9, 2, 9, 3, 4]), [(9, 3, "a"), (9, 2, "b")])
    extra_keys = ([("a", 1)], [("a", -2), ("b", 2)], [("b", -1)])

    assert expanded is not None
    ids, spans = expanded
    assert ids.tolist() == [1, 9, 9, 9, 2, 9, 9, 3, 4]
    assert spans == [PlaceholderSpan(1, 3, "a"), PlaceholderSpan(5, 2, "b")]
    assert compute_prompt_keys(ids, 3, spans) == compute_block_keys(
        ids, 3, dict(enumerate(map(encode_extra_keys, extra_keys)))
    )


class CountingProcessor:
    """Counts one placeholder for 100 pixels, and how often it was asked."""

    call_count = 0

    def _get_num_multimodal_tokens(self, image_sizes: list[tuple[int, int]]) -> Any:
        self.call_count += 1
        ((height, width),) = image_sizes
        return type("Counted", (), {"num_image_tokens": [height * width // 100]})


def test_count() -> None:
    """A picture is measured once; what cannot be measured is taken for the mean of the others."""
    processor = CountingProcessor()
    counter = PlaceholderCounter(processor, {"image_token_id": 7})
    picture, web = (
        MediaItem("image", draw_data_url(30, 20), None),
        MediaItem("image", "http://h/a.png", None),
    )

    guess, _ = counter.count_item(web)
    first, second = counter.count_item(picture), counter.count_item(picture)
    other, _ = counter.count_item(MediaItem("image", draw_data_url(30, 40), None))

    assert (guess, first[0], other, processor.call_count) == (576, 6, 12, 2)
    assert first == second
    assert counter.count_item(web)[0] == 9
    assert counter.count_item(MediaItem("image", None, "mine"))[1] == "mine"
    assert counter.find_token_id("image") == 7
    assert counter.find_token_id("audio") is None


def test_media(tokenizer_child: small_tokenizer.TokenizerChild, tmp_path: Path) -> None:
    """A picture's placeholders count as prompt, and two pictures make two prompts."""
    vision = small_tokenizer.build_tokenizer(tmp_path, model_type="qwen2_5_vl")
    tokenizer_child.read_prompt(vision)
    shot = [draw_data_url(84, 56), draw_data_url(280, 140), draw_data_url(140, 280)]
    parts = [[{"type": "image_url", "image_url": {"url": each}}] for each in shot]
    told = [
        tokenizer_child.read_prompt(vision, "chat", messages=[{"role": "user", "content": each}])
        for each in parts
    ]
    bare = tokenizer_child.read_prompt(vision, "chat", messages=[{"role": "user", "content": ""}])
    several = [{"role": "user", "content": parts[at]} for at in (0, 1, 0)]

    assert tokenizer_child.read_prompt(vision, "chat", messages=several).item_tokens == (6, 50, 6)
    assert [each.item_tokens for each in told] == [(6,), (50,), (50,)]
    assert [each.tokens - sum(each.item_tokens) for each in told] == [bare.tokens] * 3
    assert told[1].token_ids.tolist() == told[2].token_ids.tolist()
    assert told[1].block_keys != told[2].block_keys


HELLO = [{"role": "user", "content": "Hello"}]
BAD_REQUESTS: list[tuple[str, dict[str, Any], str]] = [
    ("completion", {}, "unsupported"),
    ("completion", {"prompt": []}, "refused"),
    ("completion", {"prompt": [-1]}, "malformed"),
    ("completion", {"prompt": "x", "prompt_embeds": "y"}, "unsupported"),
    ("completion", {"prompt": "\ud800"}, "malformed"),
    ("completion", {"prompt": "x", "truncate_prompt_tokens": 5}, "unsupported"),
    # Longer than any prompt of the model: to tokenize it would cost the others' time.
    ("completion", {"prompt": "x" * 1601}, "refused"),
    ("completion", {"prompt": ["x", "x" * 1601]}, "refused"),
    ("completion", {"prompt": ["x" * 1600] * 3000}, "unsupported"),
    ("chat", {"messages": []}, "malformed"),
    # Templates in the request are not run; vLLM refuses them by default as well.
    ("chat", {"messages": HELLO, "chat_template": "{{ 1 }}"}, "refused"),
    ("chat", {"messages": HELLO, "chat_template_kwargs": {"chat_template": "1"}}, "refused"),
    ("chat", {"messages": HELLO, "tools": []}, "refused"),
    (
        "chat",
        {
            "messages": HELLO,
            "continue_final_message": True,
            "add_generation_prompt": True,
        },
        "refused",
    ),
]


@pytest.mark.parametrize(("path", "body", "error"), BAD_REQUESTS)
def test_refused(read_prompt: PromptReading, path: str, body: dict[str, Any], error: str) -> None:
    """What the engine will refuse has no prompt."""
    assert read_prompt(path, **body).error == error


def test_long_unknown(read_prompt: PromptReading) -> None:
    """Where nobody has said how long prompts may be there is a bound all the same."""
    assert read_prompt("completion", limit=0, prompt="x " * 1600).error == ""
    assert read_prompt("completion", limit=0, prompt="x" * 5_000_000).error == "unsupported"


def test_foreign_code(tokenizer_child: small_tokenizer.TokenizerChild, tmp_path: Path) -> None:
    """A tokenizer that needs the model's own code is not loaded, and the user is not prompted."""
    small_tokenizer.build_tokenizer(tmp_path)
    (tmp_path / "own.py").write_text("raise SystemExit(3)")
    settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "tokenizer.json").unlink()

    told = tokenizer_child.read_prompt(str(tmp_path))

    assert told.error == "load"
    assert "--tokenize engine" in told.detail and "\n" not in told.detail
    unread = tokenizer_child.read_prompt(str(tmp_path), "completion", prompt="a")
    assert unread.error == "load"


def test_own(tokenizer_child: small_tokenizer.TokenizerChild, tmp_path: Path) -> None:
    """A model whose chats vLLM renders without a template is left to the engine."""
    own = small_tokenizer.build_tokenizer(tmp_path, model_type="gpt_oss")
    tokenizer_child.read_prompt(own)

    assert tokenizer_child.read_prompt(own, "chat", messages=HELLO).error == "unsupported"
    assert tokenizer_child.read_prompt(own, "completion", prompt="a").tokens == 2


def test_random_messages(read_prompt: PromptReading) -> None:
    """Malformed messages get an answer, and leave nothing behind."""
    rng = random.Random(3)
    values: list[Any] = [None, 1, "", "a", [], {}, [1], [{}], [{"type": 1}], {"a": 1}]
    wanted = read_prompt("chat", messages=HELLO)
    for _ in range(200):
        body = {key: rng.choice(values) for key in ("messages", "tools", "chat_template_kwargs")}

        assert read_prompt("chat", **body).error in ("malformed", "refused", "unsupported")
    assert read_prompt("chat", messages=HELLO).ids == wanted.ids
