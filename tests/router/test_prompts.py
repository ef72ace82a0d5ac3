# SPDX-License-Identifier: Apache-2.0
"""Prompts as templates and tokenizers see them: the pure parts, and a real tokenizer made here."""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import random
import signal
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.router import tokens
from tests.router.tokens import ids
from ttft_otel.router.policies.blocks import extra, numbers
from ttft_otel.router.prompts import chat, format
from ttft_otel.router.prompts.chat import Chat, Item
from ttft_otel.router.prompts.encode import EACH, PIECE, Encoder, Kept
from ttft_otel.router.prompts.frames import Told
from ttft_otel.router.prompts.media import Counter, Span, dimensions, expand, extras
from ttft_otel.router.prompts.reason import Unreadable
from ttft_otel.router.prompts.worker import MODULE

Read = Callable[..., Told]
TEXTS = st.lists(
    st.sampled_from(["<|im_start|>", "<|im_end|>", " ", "\n", "é", "e\u0301", "Hello", "x", "😀"]),
    max_size=60,
).map("".join)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer with a chat template, no model."""
    return tokens.build(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def plain(folder: str) -> tokens.Plain:
    """The same, loaded here."""
    return tokens.Plain(folder)


@pytest.fixture(scope="module")
def child() -> Iterator[tokens.Child]:
    """A process that holds tokenizers."""
    found = tokens.Child()
    yield found
    assert found.close() == 0


@pytest.fixture(scope="module")
def read(child: tokens.Child, folder: str) -> Read:
    """Reads a body's prompt."""
    assert child.ask(folder).detail == ""
    return functools.partial(child.ask, folder)


def messages(given: list[dict[str, Any]], wrap: bool = False) -> list[dict[str, Any]]:
    """What the template gets."""
    found = Chat(wrap, lambda modality: f"<{modality}>")
    found.add(given)
    return found.messages


CASES: list[tuple[dict[str, Any], bool, dict[str, Any]]] = [
    ({"role": "user", "content": "a"}, False, {"role": "user", "content": "a"}),
    ({"role": "user", "content": "a"}, True, {"content": [{"type": "text", "text": "a"}]}),
    ({"role": "user"}, False, {"content": ""}),
    ({"role": "user", "content": ["a", {"type": "text", "text": "b"}]}, False, {"content": "a\nb"}),
    (
        {"role": "user", "content": [{"type": "text", "text": ""}, "b"]},
        False,
        {"content": "b"},
    ),
    (
        {"role": "user", "content": [{"type": "text", "text": "a", "cache": 1}]},
        True,
        {"content": [{"type": "text", "text": "a", "cache": 1}]},
    ),
    (
        {"role": "user", "content": ["a", {"type": "image_url", "image_url": {"url": "u"}}]},
        False,
        {"content": "<image>\na"},
    ),
    (
        {"role": "user", "content": ["a", {"image_url": "u"}]},
        True,
        {"content": [{"type": "text", "text": "a"}, {"type": "image"}]},
    ),
    (
        {"role": "user", "content": ["<image> a", {"image_url": "u"}]},
        False,
        {"content": "<image> a"},
    ),
    ({"role": "user", "content": "a", "name": "n", "other": 1}, False, {"name": "n"}),
    ({"role": "system", "content": "x-anthropic-billing-header: 1\nb"}, False, {"content": "b"}),
    ({"role": "system", "content": "x-anthropic-billing-header: 1"}, True, {"content": []}),
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
    ({"role": "developer", "content": "a"}, False, {"role": "developer", "tools": None}),
    ({"role": "assistant", "content": "a", "tool_calls": []}, False, {"content": "a"}),
]


@pytest.mark.parametrize(("given", "wrap", "wanted"), CASES)
def test_messages(given: dict[str, Any], wrap: bool, wanted: dict[str, Any]) -> None:
    """Messages reach the template as vLLM's parser leaves them."""
    (found,) = messages([given], wrap)

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
    (found,) = messages([{"role": "assistant", "content": None, "tool_calls": [call]}])

    assert found["tool_calls"][0]["function"]["arguments"] == wanted
    assert list(found["tool_calls"][0]) == ["id", "function", "type"]


@pytest.mark.parametrize(
    "part", [{"type": "prompt_embeds", "data": "x"}, {"type": "image_embeds"}, {"type": "nothing"}]
)
def test_embeddings(part: dict[str, Any]) -> None:
    """A prompt whose length only the engine knows is not guessed."""
    with pytest.raises(Unreadable, match="unsupported"):
        messages([{"role": "user", "content": [part]}])


def test_tools() -> None:
    """Tools have their known keys, in the order of vLLM's types, and what was not given is null."""
    given = {"function": {"parameters": {}, "name": "f", "x": 1}, "type": "function", "y": 2}

    (found,) = chat.tools({"tools": [given]}) or []

    assert json.dumps(found) == (
        '{"type": "function", "function": {"name": "f", "description": null, "parameters": {}}}'
    )
    assert chat.tools({}) is None


def test_variables() -> None:
    """The request's own fields win over its chat_template_kwargs; what is unset is not there."""
    found = chat.variables(
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


def test_developer() -> None:
    """Where the template knows no developer, all system messages become one at the beginning."""
    given = [
        {"role": "user", "content": "u"},
        {"role": "developer", "content": [{"type": "text", "text": "d"}], "tools": None},
        {"role": "system", "content": "s"},
    ]

    assert chat.undeveloped(given) == [
        {"role": "system", "content": "d\n\ns"},
        {"role": "user", "content": "u"},
    ]


FORMATS = {
    "{% for m in messages %}{{ m.content }}{% endfor %}": False,
    "{% for m in messages %}{% for c in m['content'] %}{{ c }}{% endfor %}{% endfor %}": True,
    "{% for m in messages[1:] %}{% for c in m.content %}{% endfor %}{% endfor %}": True,
    "{% set x = messages %}{% for m in x %}{% for c in m.content %}{% endfor %}{% endfor %}": True,
    "{% macro f(t) %}{% for c in t %}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ f(m.content) }}{% endfor %}": True,
    "{% macro f(t) %}{% for c in t %}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ f(m.role) }}{% endfor %}": False,
    "{% for m in messages %}{% set content = m.content %}{% for c in content %}{% endfor %}"
    "{% endfor %}": True,
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}": False,
    "{% for m in": False,
    "{% set a = messages %}{% set messages = a %}{% for m in a %}{{ m.content }}{% endfor %}": False,
}


@pytest.mark.parametrize(("template", "wanted"), FORMATS.items())
def test_format(template: str, wanted: bool) -> None:
    """A template that goes through the parts of a content gets parts, any other one text."""
    assert format.wraps(template) is wanted


def test_reads() -> None:
    """A template's own variables are no one's to give."""
    assert format.reads("{% set a = b %}{{ a }}{{ c.d }}") == {"b", "c"}


def test_kept() -> None:
    """What is kept stays within its room; the longest unused goes first."""
    kept = Kept(3 * (EACH + 40))
    for key in (b"1", b"2", b"3"):
        kept.put(key, array("I", range(10)))
    kept.get(b"1")
    kept.put(b"4", array("I", range(10)))
    kept.put(b"5", array("I", range(10_000)))

    assert [bool(kept.get(key)) for key in (b"1", b"2", b"3", b"4", b"5")] == [1, 0, 1, 1, 0]
    assert kept.used == 3 * (EACH + 40)


@settings(max_examples=60, deadline=None)
@given(st.lists(TEXTS, max_size=5))
def test_pieces(plain: tokens.Plain, parts: list[str]) -> None:
    """Texts cut at special tokens have the ids of the whole, beginnings from memory or not."""
    encoder = Encoder(plain, "<|im_end|>")
    text = "<|im_end|>\n".join(part * 99 for part in parts)

    found, _ = encoder.encode(text, False)
    again, kept = encoder.encode(text, False)

    assert encoder.cuts == ("<|im_end|>",)
    assert found.tolist() == plain(text, False)["input_ids"]
    assert again == found
    assert kept == len(found)


class Odd(tokens.Plain):
    """A tokenizer whose tokens depend on what came before, and which is not what is behind it."""

    def __call__(self, text: str, *args: Any, **more: Any) -> dict[str, list[int]]:
        """The number of characters, once each."""
        return {"input_ids": [len(text)] * len(text)}


def test_odd(folder: str) -> None:
    """Such a tokenizer's texts are never cut, and it is asked itself."""
    encoder = Encoder(Odd(folder), "<|im_end|>")
    text = "<|im_end|>" * PIECE

    assert encoder.cuts == ()
    assert encoder.encode(text, False)[0].tolist() == [len(text)] * len(text)


def test_beginning(read: Read) -> None:
    """A conversation's next round finds its earlier rounds tokenized."""
    rounds = [
        {"role": role, "content": role * PIECE} for _ in range(3) for role in ("user", "assistant")
    ]
    read("chat", messages=rounds, limit=100_000)
    more = read("chat", messages=[*rounds, {"role": "user", "content": "and?"}], limit=100_000)

    assert more.tokens > more.cached > 0.9 * more.tokens


def test_chat(read: Read, plain: tokens.Plain) -> None:
    """A chat is rendered by the model's template and numbered in blocks."""
    told = read("chat", messages=[{"role": "user", "content": "Hello"}])
    text = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"

    assert ids(told) == plain(text, False)["input_ids"]
    assert told.tokens == len(ids(told))
    assert told.blocks == numbers(ids(told), 4)


COMPLETIONS: list[tuple[dict[str, Any], Callable[[list[int]], list[int]]]] = [
    ({}, lambda found: found),
    ({"truncate_prompt_tokens": 5, "truncation_side": "left"}, lambda found: found[-5:]),
    ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, lambda found: found[:5]),
    ({"truncate_prompt_tokens": 5}, lambda found: [found[0], *found[-4:]]),
    ({"truncate_prompt_tokens": -1}, lambda found: [found[0], *found[-98:]]),
    ({"truncate_prompt_tokens": -1, "max_tokens": 0}, lambda found: [found[0], *found[-99:]]),
    ({"add_special_tokens": False}, lambda found: found[1:]),
]


@pytest.mark.parametrize(("body", "wanted"), COMPLETIONS)
def test_completion(
    read: Read, folder: str, body: dict[str, Any], wanted: Callable[[list[int]], list[int]]
) -> None:
    """A completion's prompt has special tokens, and is truncated, as the request says."""
    text = "the quick brown fox " * 40
    whole = tokens.Plain(folder)(text, True)["input_ids"]

    assert whole[0] == 0
    assert ids(read("completion", prompt=text, **body)) == wanted(whole)
    assert ids(read("completion", prompt=text + "x"))[:-1] == whole, "a truncation has stayed"


def test_several(read: Read) -> None:
    """Prompts that come as token ids are taken as they are; of several all are counted."""
    one = read("completion", prompt=[1, 2, 3, 4, 5])
    two = read("completion", prompt=[[1, 2, 3, 4, 5], [6, 7]])

    assert (ids(one), one.tokens) == ([1, 2, 3, 4, 5], 5)
    assert (ids(two), two.tokens, two.blocks) == ([], 7, one.blocks)


def test_salt(read: Read) -> None:
    """A cache salt and an adapter have blocks of their own, numbered as KV events number them."""
    found = [1, 2, 3, 4, 5, 6, 7, 8]
    plain = read("completion", prompt=found).blocks
    salted = read("completion", prompt=found, cache_salt="s").blocks
    lora = read("completion", adapter="a", prompt=found, cache_salt="s").blocks

    assert plain == numbers(found, 4)
    assert salted == numbers(found, 4, {0: extra(["s"])})
    assert lora == numbers(found, 4, {0: extra(["a", "s"]), 1: extra(["a"])})


def url(width: int, height: int, kind: str = "PNG", orientation: int = 0) -> str:
    """A picture as a data: URL."""
    from PIL import Image

    out, more = BytesIO(), {}
    if orientation:
        exif = Image.Exif()
        exif[0x0112] = orientation
        more = {"exif": exif.tobytes()}
    Image.new("RGB", (width, height)).save(out, kind, **more)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(out.getvalue()).decode()}"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP"])
def test_dimensions(kind: str) -> None:
    """A picture's height and width come from its header."""
    assert dimensions(url(30, 20, kind)) == (20, 30)


@pytest.mark.parametrize(("orientation", "wanted"), [(1, (20, 30)), (3, (20, 30)), (6, (30, 20))])
def test_turned(orientation: int, wanted: tuple[int, int]) -> None:
    """A picture that was taken upright is upright for the model too."""
    assert dimensions(url(30, 20, "JPEG", orientation)) == wanted


@pytest.mark.parametrize("url", ["", "http://h/a.png", "data:image/png;base64,xx", "data:,"])
def test_unknown_size(url: str) -> None:
    """Nothing is fetched, and what is no picture has no size."""
    assert dimensions(url) is None


def test_expand() -> None:
    """Placeholders are repeated where they stand, in order; blocks carry the items in them."""
    expanded = expand(array("I", [1, 9, 2, 9, 3]), [(9, 3, "a"), (9, 2, "b")])

    assert expanded is not None
    assert expanded[0].tolist() == [1, 9, 9, 9, 2, 9, 9, 3]
    assert expanded[1] == [Span(1, 3, "a"), Span(5, 2, "b")]
    assert extras(expanded[1], 3) == {
        0: extra([("a", 1)]),
        1: extra([("a", -2), ("b", 2)]),
        2: extra([("b", -1)]),
    }


@pytest.mark.parametrize("items", [[(None, 1, "a")], [(9, 1, "a"), (9, 1, "b")]])
def test_unfit(items: list[tuple[int | None, int, str]]) -> None:
    """Items that have no place in the prompt are not put anywhere."""
    assert expand(array("I", [1, 9, 2]), items) is None


class Processor:
    """Counts one placeholder for 100 pixels, and how often it was asked."""

    asked = 0

    def _get_num_multimodal_tokens(self, image_sizes: list[tuple[int, int]]) -> Any:
        self.asked += 1
        ((height, width),) = image_sizes
        return type("Counted", (), {"num_image_tokens": [height * width // 100]})


def test_count() -> None:
    """A picture is measured once; what cannot be measured is taken for the mean of the others."""
    processor = Processor()
    counter = Counter(processor, {"image_token_id": 7})
    picture, web = Item("image", url(30, 20), None), Item("image", "http://h/a.png", None)

    guess, _ = counter.count(web)
    first, second = counter.count(picture), counter.count(picture)
    other, _ = counter.count(Item("image", url(30, 40), None))

    assert (guess, first[0], other, processor.asked) == (576, 6, 12, 2)
    assert first == second
    assert counter.count(web)[0] == 9
    assert counter.count(Item("image", None, "mine"))[1] == "mine"
    assert counter.token("image") == 7
    assert counter.token("audio") is None


def test_media(child: tokens.Child, tmp_path: Path) -> None:
    """A picture's placeholders count as prompt, and two pictures make two prompts."""
    vision = tokens.build(tmp_path, model_type="qwen2_5_vl")
    child.ask(vision)
    shot = [url(84, 56), url(280, 140), url(140, 280)]
    parts = [[{"type": "image_url", "image_url": {"url": each}}] for each in shot]
    told = [
        child.ask(vision, "chat", messages=[{"role": "user", "content": each}]) for each in parts
    ]
    bare = child.ask(vision, "chat", messages=[{"role": "user", "content": ""}])
    several = [{"role": "user", "content": parts[at]} for at in (0, 1, 0)]

    assert child.ask(vision, "chat", messages=several).items == (6, 50, 6)
    assert [each.items for each in told] == [(6,), (50,), (50,)]
    assert [each.tokens - sum(each.items) for each in told] == [bare.tokens] * 3
    assert ids(told[1]) == ids(told[2])
    assert told[1].blocks != told[2].blocks


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("completion", {}, "unsupported"),
    ("completion", {"prompt": []}, "refused"),
    ("completion", {"prompt": [-1]}, "malformed"),
    ("completion", {"prompt": "x", "prompt_embeds": "y"}, "unsupported"),
    ("completion", {"prompt": "\ud800"}, "malformed"),
    ("chat", {"messages": []}, "malformed"),
    ("chat", {"messages": [{"role": "user", "content": "a"}], "tools": []}, "refused"),
    (
        "chat",
        {
            "messages": [{"role": "user", "content": "a"}],
            "continue_final_message": True,
            "add_generation_prompt": True,
        },
        "refused",
    ),
]


@pytest.mark.parametrize(("path", "body", "error"), BAD)
def test_refused(read: Read, path: str, body: dict[str, Any], error: str) -> None:
    """What the engine will refuse has no prompt."""
    assert read(path, **body).error == error


@pytest.mark.parametrize(
    "given",
    [{"chat_template": "{{ 1 }}"}, {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}],
)
def test_template(read: Read, given: dict[str, Any]) -> None:
    """A client's program is not run here, and vLLM refuses it too."""
    assert read("chat", messages=[{"role": "user", "content": "a"}], **given).error == "refused"


LONG: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "x" * 1601}, "refused"),
    ({"prompt": ["x", "x" * 1601]}, "refused"),
    ({"prompt": "x" * 1601, "truncate_prompt_tokens": 5}, "unsupported"),
    ({"prompt": ["x" * 1600] * 3000}, "unsupported"),
]


@pytest.mark.parametrize(("body", "error"), LONG)
def test_long(read: Read, body: dict[str, Any], error: str) -> None:
    """What is longer than any prompt of the model is not tokenized: that would cost the others' time."""
    assert read("completion", **body).error == error


def test_long_unknown(read: Read) -> None:
    """Where nobody has said how long prompts may be there is a bound all the same."""
    assert read("completion", limit=0, prompt="x " * 1600).error == ""
    assert read("completion", limit=0, prompt="x" * 5_000_000).error == "unsupported"


def test_foreign_code(child: tokens.Child, tmp_path: Path) -> None:
    """A tokenizer that is code of the model's own is not run, and nobody is asked about it."""
    tokens.build(tmp_path)
    (tmp_path / "own.py").write_text("raise SystemExit(3)")
    settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "tokenizer.json").unlink()

    told = child.ask(str(tmp_path))

    assert told.error == "load"
    assert "--tokenize engine" in told.detail


def test_orphan(tmp_path: Path) -> None:
    """A process that nobody can kill any more ends itself, whatever keeps it busy."""
    hurried = f"import {MODULE} as child; child.PATIENCE = 1; child.main()"
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", hurried], stdin=pipe, stdout=pipe)
    child = tokens.Child(process)
    folder = tokens.build(tmp_path, template=tokens.ENDLESS)
    assert child.ask(folder).error == ""

    with contextlib.suppress(EOFError, msgspec.DecodeError):
        child.ask(folder, "chat", messages=[{"role": "endless", "content": "a"}])

    assert child.close() == -signal.SIGALRM


def test_own(child: tokens.Child, tmp_path: Path) -> None:
    """A model whose chats vLLM renders without a template is left to the engine."""
    own = tokens.build(tmp_path, model_type="gpt_oss")
    child.ask(own)

    assert (
        child.ask(own, "chat", messages=[{"role": "user", "content": "a"}]).error == "unsupported"
    )
    assert child.ask(own, "completion", prompt="a").tokens == 2


def test_random_messages(read: Read) -> None:
    """Malformed messages get an answer, and leave nothing behind."""
    rng = random.Random(3)
    values: list[Any] = [None, 1, "", "a", [], {}, [1], [{}], [{"type": 1}], {"a": 1}]
    wanted = read("chat", messages=[{"role": "user", "content": "Hello"}])
    for _ in range(200):
        body = {key: rng.choice(values) for key in ("messages", "tools", "chat_template_kwargs")}

        assert read("chat", **body).error in ("malformed", "refused", "unsupported")
    assert read("chat", messages=[{"role": "user", "content": "Hello"}]).ids == wanted.ids


@pytest.mark.parametrize("source", ["/nowhere/at/all", "", "."])
def test_no_tokenizer(child: tokens.Child, source: str) -> None:
    """What cannot be loaded is said in one line, with the remedy, and asks no network."""
    told = child.ask(source)

    assert told.error == "load"
    assert "--tokenizer DIR" in told.detail
    assert "\n" not in told.detail
    assert child.ask(source, "completion", prompt="a").error == "load"
