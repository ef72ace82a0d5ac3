# SPDX-License-Identifier: Apache-2.0
"""JSON bodies of every kind, judged by vLLM's own models: what it accepts passes as it is.

Its verdicts on the first bodies stand here; with --full its models judge these anew, and many more. They run
in a process of its own, as importing vLLM takes seconds and leaves much behind; no server runs. On standard
input: a line with the path and the number of bytes, then the body. On standard output a line: "yes", or why
not.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from router import fake_instances, raw_http
from router.fake_instances import FakeInstance, InstancePlan, RunningRouter

from ttft_otel.router.disagg.request_body import MAX_LENIENT_JSON_BYTES

ACCEPTED = "yes"
_READY = "ready"  # vLLM writes lines of its own while it is imported


def _build_validators() -> Mapping[str, Callable[[Any], Any]]:
    from pydantic import TypeAdapter
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.pooling.embed.protocol import EmbeddingRequest

    return {
        "/v1/chat/completions": ChatCompletionRequest.model_validate,
        "/v1/completions": CompletionRequest.model_validate,
        "/v1/responses": ResponsesRequest.model_validate,
        "/v1/embeddings": TypeAdapter(EmbeddingRequest).validate_python,
    }


def judge_bodies() -> None:
    """Answer until standard input ends."""
    validators = _build_validators()
    sys.stdout.write(f"{_READY}\n")
    sys.stdout.flush()
    while line := sys.stdin.buffer.readline():
        path, size = line.split()
        data = sys.stdin.buffer.read(int(size))
        try:
            fields = json.loads(data)  # as starlette does for FastAPI
            if not isinstance(fields, dict):
                raise TypeError("no object")
            validators[path.decode()](fields)
            verdict = ACCEPTED
        except Exception as error:  # noqa: BLE001  its validators raise anything, RecursionError too
            verdict = type(error).__name__
        sys.stdout.write(f"{verdict}\n")
        sys.stdout.flush()


class VllmOracle:
    """The process, seen from the test."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        while (line := self._read_line()) != _READY:
            assert line is not None

    def accepts(self, path: str, data: bytes) -> bool:
        """Whether vLLM's model of this path takes `data` for a request."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"%b %d\n%b" % (path.encode(), len(data), data))
        self._process.stdin.flush()
        return self._read_line() == ACCEPTED

    def _read_line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "vLLM's process has ended"
        return line.decode().strip()


@contextlib.contextmanager
def run_oracle() -> Iterator[VllmOracle]:
    """Run it; vLLM must be installed."""
    own = {"PYTHONPATH": os.pathsep.join(sys.path), "TTFT_OTEL": "0"}
    with subprocess.Popen(
        (sys.executable, "-m", "attack.test_json_bodies"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **own, "VLLM_LOGGING_LEVEL": "ERROR"},
    ) as process:
        try:
            yield VllmOracle(process)
        finally:
            process.kill()


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
# in each form that an element can have. What they cost the router is in test_stalls.py.
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


OWN_PARAMS = ("kv_transfer_params", "ec_transfer_params")
MODEL = "tiny"


@pytest.fixture(scope="module")
def oracle() -> Iterator[VllmOracle]:
    """vLLM's models, which take seconds to import."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    with run_oracle() as running:
        yield running


def read_json(data: bytes) -> Any:
    """As vLLM reads it; None if it does not."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def list_own_params(fields: Any) -> list[dict[str, Any]]:
    """The objects in which vLLM looks for transfer parameters and that have some."""
    holders = [fields, fields.get("vllm_xargs")] if isinstance(fields, dict) else []
    return [
        each
        for each in holders
        if isinstance(each, dict) and any(name in each for name in OWN_PARAMS)
    ]


def strip_own_params(fields: Any) -> str:
    """What must be left of a body, as text: numbers that are none are not equal to themselves."""
    for holder in list_own_params(fields):
        for name in OWN_PARAMS:
            holder.pop(name, None)
    return json.dumps(fields)


def is_refused_by_us(data: bytes, fields: Any) -> bool:
    """Whether a documented limit of the router, or a model that nobody has, is a reason to refuse."""
    model = fields.get("model") if isinstance(fields, dict) else None
    if isinstance(model, str) and model and model != MODEL:
        return True
    return len(data) > MAX_LENIENT_JSON_BYTES  # then it must be JSON that every parser reads


async def judge_body(
    router: RunningRouter, one: FakeInstance, path: str, data: bytes, accepted: bool
) -> str:
    """Send one body and compare with what vLLM says of it; what became of it."""
    one.received.clear()
    request = raw_http.encode_request(body=data, path=path)
    answer = await raw_http.send_bytes(router.url, request, timeout_s=60)
    status = raw_http.parse_status(answer)
    fields = read_json(data)
    if status != 200:
        assert status in (400, 404), (status, data[:500])
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == status
        assert not one.received
        assert not accepted or is_refused_by_us(data, fields), (status, answer, data[:500])
        return f"refused, {'accepted' if accepted else 'refused'} by vLLM"
    (forwarded,) = one.received
    if fields is None:  # the router's parser lets some pass that Python's does not read
        assert read_json(forwarded.body) is None, data[:500]
        return "unreadable"
    own_params = list_own_params(fields)
    assert not list_own_params(read_json(forwarded.body)), data[:500]
    if own_params:
        assert json.dumps(read_json(forwarded.body)) == strip_own_params(fields), data[:500]
        return "stripped"
    assert forwarded.body == data, data[:500]
    return f"unchanged, {'accepted' if accepted else 'refused'} by vLLM"


SEED, FEW, MANY = 300, 300, 20_000
# A bit for each of the first bodies, the first one lowest: whether vLLM accepts it.
RECORDED = 0xA814F2D9B895394515280A0314FBB236E56AFB941C142621B3BB19EBBFAA3CCB9A4E1D7F31D


async def check_bodies(number: int, accepts: Callable[[int, str, bytes], bool]) -> None:
    """Each is passed byte for byte, or stripped of transfer parameters and nothing else, or refused."""
    chance = random.Random(SEED)
    outcomes: Counter[str] = Counter()
    plan = InstancePlan(stages_ms={})
    async with fake_instances.run_routed_instances([plan]) as (router, one):
        for at in range(number):
            path, data = make_body(chance)
            outcomes[await judge_body(router, one, path, data, accepts(at, path, data))] += 1
    # The generator meets all of these: else the comparison would say little.
    assert outcomes["unchanged, accepted by vLLM"] > number / 10, outcomes
    assert outcomes["unchanged, refused by vLLM"] > number / 50, outcomes
    assert outcomes["refused, refused by vLLM"] > number / 50, outcomes
    assert outcomes["stripped"] > number / 50, outcomes


async def test_bodies() -> None:
    """The first ones, by the verdicts that were recorded."""
    await check_bodies(FEW // 2, lambda at, *_: bool(RECORDED >> at & 1))


@pytest.mark.full
@pytest.mark.timeout(3600)
async def test_bodies_and_vllm(oracle: VllmOracle) -> None:
    """Many, by vLLM's models, whose verdicts on the first ones are those that were recorded."""
    verdicts: list[bool] = []

    def ask_oracle(_: int, path: str, data: bytes) -> bool:
        verdicts.append(oracle.accepts(path, data))
        return verdicts[-1]

    await check_bodies(MANY, ask_oracle)
    recorded = sum(accepted << at for at, accepted in enumerate(verdicts[:FEW]))
    assert recorded == RECORDED, hex(recorded)


if __name__ == "__main__":
    judge_bodies()
