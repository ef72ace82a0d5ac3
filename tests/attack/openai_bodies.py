# SPDX-License-Identifier: Apache-2.0
"""Make bodies of OpenAI's requests, honest and hostile, by chance; test_json_bodies.py sends them.

Objects are lists of pairs here, so that a name can come twice, and are written by hand, so that the
same value has many spellings: spaces, escapes, numbers that JSON does not have, broken ends.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from typing import Any

Maker = Callable[[random.Random], Any]


class Pairs(list[tuple[str, Any]]):
    """A JSON object."""


class Literal(str):
    """JSON as it stands."""


def choose(*values: Any) -> Maker:
    """One of these values."""
    return lambda chance: chance.choice(values)


def repeat(make: Maker, most: int) -> Maker:
    """A list of up to so many."""
    return lambda chance: [make(chance) for _ in range(chance.randrange(most + 1))]


def compose(**makers: Maker) -> Maker:
    """An object with all of these."""
    return lambda chance: Pairs((name, make(chance)) for name, make in makers.items())


TEXT = choose("", "word", 'a "quote" \\ and {"kv_transfer_params": 1}', "ä漢\n\u2028", "x" * 5000)
PART = choose(
    Pairs([("type", "text"), ("text", "see")]),
    Pairs([("type", "image_url"), ("image_url", Pairs([("url", "data:image/png;base64,AAAA")]))]),
)
MESSAGE = compose(
    role=choose("user", "assistant", "system", "tool"),
    content=lambda chance: TEXT(chance) if chance.random() < 0.6 else repeat(PART, 3)(chance),
)
TOOL = choose(
    Pairs(
        [
            ("type", "function"),
            ("function", Pairs([("name", "f"), ("parameters", Pairs([("type", "object")]))])),
        ]
    )
)
SAMPLING: Mapping[str, Maker] = {
    "stream": choose(True, False),
    "temperature": choose(0, 0.7, 2, Literal("1e-5"), Literal("NaN"), Literal("-0")),
    "top_p": choose(0.1, 1),
    "n": choose(1, 2, 0, Literal("9" * 400)),
    "max_tokens": choose(1, 16, 0, -1, Literal("1e3"), None),
    "seed": choose(1, -1, (1 << 63) - 1, 1 << 64),
    "stop": choose(None, "end", ["a", "b"], []),
    "logit_bias": choose(None, Pairs([("5", 1.5)])),
    "user": TEXT,
    "vllm_xargs": choose(
        Pairs([("a", 1)]),
        Pairs([("a", ["b"]), ("kv_transfer_params", "c")]),
        Pairs([("ec_transfer_params", 3)]),
        None,
    ),
    "kv_transfer_params": choose(None, Pairs([("do_remote_prefill", True)]), Pairs([])),
    "unknown": choose(1, Pairs([("kv_transfer_params", 1)]), [[]]),
}
FIELDS: Mapping[str, Mapping[str, Maker]] = {
    "/v1/chat/completions": {
        **SAMPLING,
        "messages": repeat(MESSAGE, 4),
        "tools": repeat(TOOL, 2),
        "tool_choice": choose("auto", "none"),
        "max_completion_tokens": choose(1, 100),
        "ec_transfer_params": choose(None, Pairs([("a", Pairs([]))])),
        "mm_processor_kwargs": choose(None, Pairs([("num_crops", 4)])),
    },
    "/v1/completions": {
        **SAMPLING,
        "prompt": choose("a", ["a", "b"], [1, 2, 3], [[1], [2]], "", []),
        "echo": choose(True, False),
        "suffix": choose(None, "z"),
    },
    "/v1/responses": {
        **SAMPLING,
        "input": choose("a", [Pairs([("role", "user"), ("content", "b")])], [], "漢" * 1000),
        "background": choose(False, True, None),
        "store": choose(False),
        "instructions": TEXT,
    },
    "/v1/embeddings": {
        "input": choose("a", ["a", "b"], [1, 2], [[1], [2]], ""),
        "encoding_format": choose("float", "base64"),
        "dimensions": choose(None, 8, -1),
        "user": TEXT,
        "kv_transfer_params": SAMPLING["kv_transfer_params"],
    },
}
NEEDED = {"messages", "prompt", "input"}


def make_nested(chance: random.Random) -> Literal:
    """Lists or objects in one another, up to and beyond what parsers follow."""
    depth = chance.choice((3, 50, 400, 700, 3000))
    before, after = chance.choice((("[", "]"), ('{"a":', "}")))
    return Literal(before * depth + "1" + after * depth)


# Long lists stay short of what vLLM's models take seconds for: each wrong element is an error of its own
# in each form that an element can have. What they cost the router is in hostile_requests.py.
HOSTILE_VALUES: tuple[Maker, ...] = (
    choose(None, True, 0, -1, 1.5, "", "a", [], Pairs([])),
    choose(Literal("NaN"), Literal("-Infinity"), Literal("1e999"), Literal("00"), Literal("nul")),
    choose(Literal('"\\ud800"'), Literal('"\\u0000"'), Literal('"\\x"'), Literal('"a\nb"')),
    make_nested,
    lambda chance: "y" * chance.choice((1000, 70_000, 300_000)),
    lambda chance: Literal(json.dumps([chance.randrange(10)] * chance.choice((10, 400)))),
    lambda chance: Literal(json.dumps({f"k{n}": n for n in range(chance.choice((10, 300)))})),
)


def make_body(chance: random.Random) -> tuple[str, bytes]:
    """A path and a body for it."""
    path = chance.choice(list(FIELDS))
    makers = FIELDS[path]
    names = [each for each in makers if each in NEEDED or chance.random() < 0.25]
    pairs = Pairs((name, makers[name](chance)) for name in names)
    pairs.append(("model", "tiny" if chance.random() < 0.95 else chance.choice(["other", None, 5])))
    chance.shuffle(pairs)
    if chance.random() < 0.5:
        place = chance.randrange(len(pairs))
        pairs[place] = (pairs[place][0], chance.choice(HOSTILE_VALUES)(chance))
    if chance.random() < 0.25:  # a name twice: the last one counts
        name = chance.choice(list(makers))
        pairs.insert(chance.randrange(len(pairs) + 1), (name, makers[name](chance)))
    return path, _break_bytes(chance, write_json(chance, pairs).encode("utf-8", "surrogatepass"))


def write_json(chance: random.Random, value: Any) -> str:
    """`value` in one of its spellings."""
    space = chance.choice(("", "", "", " ", "\n\t"))
    if isinstance(value, Literal):
        return str(value)
    if isinstance(value, Pairs):
        inner = f",{space}".join(
            f"{_write_text(chance, name)}{space}:{write_json(chance, each)}" for name, each in value
        )
        return f"{{{space}{inner}}}"
    if isinstance(value, list):
        return f"[{f',{space}'.join(write_json(chance, each) for each in value)}{space}]"
    if isinstance(value, str):
        return _write_text(chance, value)
    return json.dumps(value)


def _write_text(chance: random.Random, text: str) -> str:
    written = json.dumps(text, ensure_ascii=chance.random() < 0.5)
    if text and text[0].isalpha() and text[0].isascii() and chance.random() < 0.05:
        return f'"\\u{ord(text[0]):04x}{written[2:]}'
    return written


def _break_bytes(chance: random.Random, data: bytes) -> bytes:
    """Now and then something that is not JSON, or in an encoding that only Python's parser reads."""
    kind = chance.randrange(60)
    if kind == 0:
        return data[: chance.randrange(len(data))]
    if kind == 1:
        place = chance.randrange(len(data))
        return data[:place] + bytes([chance.randrange(256)]) + data[place + 1 :]
    if kind == 2:
        return data + chance.choice((b"x", b"}", b" \n", b"\0", data))
    if kind == 3:
        return b"\xef\xbb\xbf" + data
    if kind == 4:
        return data.decode("utf-8", "replace").encode(chance.choice(("utf-16", "utf-32")))
    return data
