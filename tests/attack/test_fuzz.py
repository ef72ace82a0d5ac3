# SPDX-License-Identifier: Apache-2.0
"""What parses the bytes of strangers, with mutations of tests/attack/corpus, with a file for what broke it.

Each parser raises its own error or none, and what it says does not depend on where the bytes were cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as some
from router.disagg.test_request_plan import build_answer, plan_strip
from router.proxy.test_endpoint_soak import repeatable_examples
from uvicorn.server import ServerState

from ttft_otel.http.bounded_connection import BoundedConnection
from ttft_otel.http.head_checks import CallerRules, HeadLimits
from ttft_otel.model.names import keys
from ttft_otel.model.stages import PREFILL_DECODE
from ttft_otel.report.foreign.products import PRODUCTS
from ttft_otel.report.receive import otlp_decoder
from ttft_otel.report.report_types import StoredSpan
from ttft_otel.report.store.database_reader import build_stored_trace
from ttft_otel.router.disagg.request_plan import StreamSplicer, render_first_events
from ttft_otel.router.discovery import discovery as found_by
from ttft_otel.router.discovery import sources
from ttft_otel.router.routing.prefixes.kv_events import (
    BlocksStored,
    MalformedEvents,
    decode_extra_keys,
    iterate_kv_events,
)
from ttft_otel.router.upstream.instance_pool import InstancePool
from ttft_otel.tracing.context import start_context
from ttft_otel.tracing.settings import Settings

CORPUS: Final = Path(__file__).parent / "corpus"
LONG: Final = (pytest.mark.full, pytest.mark.timeout(7200))
CASES: Final = 200_000  # of each parser, with --full
EXAMPLES: Final = (
    pytest.param(150, id="some"),
    pytest.param(CASES // 10, id="many", marks=LONG),
)
MAX_BYTES: Final = 4096
TURNS: Final = 80  # of the event loop, for some requests that are pipelined
# W3C Trace Context, section 3.2, once more and in another way than in context.py.
TRACEPARENT: Final = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)
LIMITS: Final = HeadLimits(max_target=200, max_headers=20, max_header_bytes=1000)


class FakeTransport(asyncio.Transport):
    """A connection whose other end is `written`."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = False

    def write(self, data: Any) -> None:
        """Keep it."""
        self.written += bytes(data)

    def is_closing(self) -> bool:
        """Whether it was closed."""
        return self.is_closed

    def close(self) -> None:
        """Note it."""
        self.is_closed = True

    write_eof = abort = close

    def pause_reading(self) -> None:
        """All of it is here."""

    resume_reading = pause_reading


REQUESTS: Final[list[Any]] = []  # of the connection that is being fed


async def note_request(scope: Any, receive: Any, send: Any) -> None:
    """An application that notes each request."""
    body, message = b"", await receive()
    while message["type"] == "http.request":
        body += message["body"]
        if not message["more_body"]:
            break
        message = await receive()
    REQUESTS.append((scope["method"], scope["raw_path"], message["type"], body))
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@functools.cache
def load_server() -> tuple[uvicorn.Config, asyncio.Runner]:
    """Made once: each case would pay for them."""
    config = uvicorn.Config(note_request, lifespan="off", log_config=None)
    config.load()
    return config, asyncio.Runner()


def parse_requests(parts: Sequence[bytes]) -> tuple[bool, list[Any]]:
    """Whether the connection was refused, and each request's target and body, as an application sees them."""
    config, runner = load_server()
    REQUESTS.clear()

    async def feed() -> bool:
        state = ServerState()
        connection = BoundedConnection(
            config=config,
            server_state=state,
            app_state={},
            head_limits=LIMITS,
            callers=CallerRules("127.0.0.1"),
        )
        transport = FakeTransport()
        connection.connection_made(transport)
        # One after the other, so that no answer comes in between, however they were cut.
        for part in parts:
            connection.data_received(part)
        is_refused = connection.is_refused
        turns = 0
        while turns < TURNS and (state.tasks or turns < 4):
            await asyncio.sleep(0)
            turns += 1
        connection.connection_lost(None)
        while state.tasks:
            await asyncio.gather(*state.tasks)
        assert not transport.written or transport.written.startswith(b"HTTP/1.1 ")
        return is_refused

    return runner.run(feed()), list(REQUESTS)


def check_http(parts: Sequence[bytes]) -> None:
    """Heads and chunked bodies. Limits count bytes of a part: what is near them is not compared."""
    found = parse_requests(parts)
    whole = b"".join(parts)
    if len(whole) < 600 and whole.count(b":") < 10:
        assert found == parse_requests([whole])


def check_sse(parts: Sequence[bytes]) -> None:
    """A decode instance's stream behind a prefill instance's token."""
    for is_chat in (True, False):
        token, plan = build_answer(chat=is_chat), plan_strip(is_chat)
        spliced = []
        for each in (parts, [b"".join(parts)]):
            splicer = StreamSplicer(token, plan, render_first_events(token, plan))
            spliced.append(b"".join(map(splicer.splice_chunk, each)) + splicer.flush_rest())
        assert spliced[0] == spliced[1]


def check_traceparent(parts: Sequence[bytes]) -> None:
    """A trace is continued exactly if its header is one."""
    text = b"".join(parts).decode("latin-1")
    made = start_context(text, text, Settings(on=True))
    fields = text.strip().split("-", 4)
    is_good = (
        len(text) <= 128
        and TRACEPARENT.fullmatch("-".join(fields[:4])) is not None
        and (len(fields) == 4 or (fields[0] != "00" and "\n" not in fields[4]))
    )
    assert bool(made.parent_id) == is_good
    assert TRACEPARENT.fullmatch(made.format_traceparent()) and made.tracestate in (text, "")


def check_otlp(parts: Sequence[bytes]) -> None:
    """Exports in protobuf and JSON, decoded and as chunks alike."""
    data = b"".join(parts)
    for as_json in (False, True):
        try:
            batch = otlp_decoder.chunk_export(data, as_json)
        except otlp_decoder.OtlpDecodeError:
            continue
        decoded = otlp_decoder.decode_export(data, as_json)
        assert len(decoded.spans) == decoded.accepted == batch.accepted
        assert sum(chunk.span_count for chunk in batch.chunks) == batch.accepted


def check_requests(spans: Sequence[StoredSpan]) -> int:
    """What is shown of spans, whoever sent them, adds up; how many requests of other products there are."""
    told = 0
    for trace_id in {span.trace_id for span in spans}:
        own = {span.span_id: span for span in spans if span.trace_id == trace_id}
        shown = build_stored_trace(trace_id, list(own.values()))
        again = build_stored_trace(trace_id, list(own.values())[::-1])
        assert {span.span_id for span in shown.spans} >= own.keys()
        assert len(shown.requests) == len(again.requests)
        for leg in (leg for request in shown.requests for leg in request.legs if leg.foreign):
            told += 1
            assert min(leg.stages.values(), default=1) > 0 <= leg.unattributed_us
            assert sum(leg.stages.values()) + leg.unattributed_us == leg.ttft_us
    return told


def check_foreign(parts: Sequence[bytes]) -> None:
    """An export with spans of other products, as a store or Tempo gives it back."""
    with contextlib.suppress(otlp_decoder.OtlpDecodeError):
        check_requests(otlp_decoder.decode_export(b"".join(parts)).spans)


def check_kv_events(parts: Sequence[bytes]) -> None:
    """A message of an instance."""
    try:
        for event in iterate_kv_events(b"".join(parts)):
            if isinstance(event, BlocksStored):
                for raw in event.extra_keys or ():
                    decode_extra_keys(raw)
    except MalformedEvents:
        pass


class WatchAnswer:
    """An API server's answer to a watch."""

    status = 200

    def __init__(self, parts: Sequence[bytes]) -> None:
        self.parts = [each for each in parts if each]

    async def readany(self) -> bytes:
        """The next part."""
        return self.parts.pop(0) if self.parts else b""


async def follow_watch(parts: Sequence[bytes]) -> tuple[list[tuple[str, str]], str]:
    """Instances after these events, and the class of what ended the watch, which has no successor."""
    address = found_by.parse_source_address("k8s://default/app=vllm")
    source = sources.KubernetesSource(address, "http://127.0.0.1")
    pool = InstancePool({PREFILL_DECODE: ()})
    watched = found_by.WatchedSource(address, source.watch_findings)
    discovery = found_by.Discovery(pool, {}, [watched])

    answers = [WatchAnswer(parts)]

    @contextlib.asynccontextmanager
    async def open_answer(*_: object, **__: object) -> AsyncIterator[WatchAnswer]:
        if not answers:
            raise ConnectionRefusedError
        yield answers.pop()

    source._queries = SimpleNamespace(open_answer=open_answer)
    try:
        async for findings in source._follow("1"):
            discovery.apply_findings(watched, findings)
    # As Discovery.run(): it logs the class, and the instances known before stay.
    except Exception as error:  # noqa: BLE001
        end = type(error).__name__
    for each in pool:
        assert found_by.check_url(each.url) == each.url and each.leg in found_by.CONFLICTING_ROLES
    return sorted((each.url, each.leg) for each in pool), end


def check_discovery(parts: Sequence[bytes]) -> None:
    """Events of EndpointSlices: whatever they say, instances are URLs with roles, and no more than 256."""
    logger = logging.getLogger("ttft_otel")
    with patch.object(sources, "PAUSE_S", 0), patch.object(logger, "disabled", True):
        run = load_server()[1].run
        found = run(follow_watch(parts))
        assert len(found[0]) <= found_by.MAX_FOUND_INSTANCES
        assert found == run(follow_watch([b"".join(parts)]))


CHECKS: Final[Mapping[str, Callable[[Sequence[bytes]], None]]] = {
    "head": check_http,
    "chunked": check_http,
    "sse": check_sse,
    "traceparent": check_traceparent,
    "otlp": check_otlp,
    "foreign": check_foreign,
    "kv_events": check_kv_events,
    "discovery": check_discovery,
}


def read_corpus(target: str) -> list[bytes]:
    """The files of this parser."""
    return [path.read_bytes() for path in sorted((CORPUS / target).iterdir())]


@some.composite
def mutate(draw: some.DrawFn, target: str) -> list[bytes]:
    """A file of the corpus with some changes, cut into parts."""
    seeds = read_corpus(target)
    data = bytearray(draw(some.sampled_from(seeds)))
    for _ in range(draw(some.integers(0, 4))):
        at = draw(some.integers(0, len(data)))
        end = at + draw(some.integers(0, 12))
        change = draw(some.sampled_from(["put", "cut", "flip", "repeat", "join"]))
        if change == "put":
            data[at:end] = draw(some.binary(max_size=8))
        elif change == "cut":
            del data[at:end]
        elif change == "flip" and at < len(data):
            data[at] ^= 1 << draw(some.integers(0, 7))
        elif change == "repeat":
            data[at:at] = data[at:end] * draw(some.sampled_from([1, 2, 30, 300]))
        elif change == "join":
            other = draw(some.sampled_from(seeds))
            data[at:] = other[draw(some.integers(0, len(other))) :]
        del data[MAX_BYTES:]
    cuts = sorted(draw(some.lists(some.integers(0, len(data)), max_size=4)))
    return [bytes(data[a:b]) for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


@pytest.mark.parametrize("number", EXAMPLES)
@pytest.mark.parametrize("target", CHECKS)
def test_mutations(target: str, number: int) -> None:
    """Whatever becomes of the files."""

    @repeatable_examples(number, 1)
    @given(mutate(target))
    def check(parts: list[bytes]) -> None:
        CHECKS[target](parts)

    check()


@pytest.mark.parametrize("target", [pytest.param(each, marks=LONG) for each in CHECKS])
def test_new_code_is_sought(target: str, tmp_path: Path) -> None:
    """Atheris keeps inputs that reach code which no other one has reached, and mutates these."""
    if importlib.util.find_spec("atheris") is None:
        pytest.skip(
            "needs Atheris, which scripts/install brings where there is one: Linux on x86-64"
        )
    found, seen = tmp_path / "found", tmp_path / "seen"
    found.mkdir()
    shutil.copytree(CORPUS / target, seen)
    words = (
        f"-runs={CASES}",
        f"-max_len={MAX_BYTES}",
        "-timeout=30",
        f"-artifact_prefix={tmp_path}/",
    )
    done = subprocess.run(
        (sys.executable, "-m", "attack.coverage_fuzz", target, *words, found, seen),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"Done {CASES} runs" in done.stderr


@pytest.mark.parametrize("target", CHECKS)
def test_corpus(target: str) -> None:
    """Each file as it is, cut after each of its first bytes."""
    files = read_corpus(target)
    assert len(files) >= 4
    for data in files:
        for at in range(min(len(data), 64)):
            CHECKS[target]([data[:at], data[at:]])


LENGTHS: Final = some.one_of(
    some.floats(-1, 10), some.floats(), some.integers(-5, 300), some.integers(), some.booleans(),
    some.sampled_from(["16.69", "7e5", "-1", "", "nan", "9" * 40]), some.text(max_size=4),
)  # fmt: skip
TIMES: Final = some.one_of(
    some.integers(0, 3000).map(lambda ms: ms * 10**6), some.integers(0, 2**64 - 1)
)


@some.composite
def draw_foreign(draw: some.DrawFn) -> list[StoredSpan]:
    """A trace of spans with the names of other products, and anything for times, parents and values."""
    rows = [(each.scope, row) for each in PRODUCTS for row in each.rows]
    named = [(scope, name) for scope, row in rows if row.form == "span" for name in row.names]
    named += [
        ("vllm", "llm_request"), ("sglang", "Req 1"), ("sglang", "prefill Req 1"), ("trt", "x"),
        ("sglang", "decode Req 1"), ("", "engine.generate"), ("dynamo", "http-request"),
        ("ttft_otel", "ttft"), ("ttft_otel", "encode"), ("other", "x"),
    ]  # fmt: skip
    lengths = sorted({name for _, row in rows if row.form != "span" for name in row.names})
    others = [keys.TOTAL_US, keys.ROLE, "disagg_role", "gen_ai.request.id", "model"]
    ids = [f"{number:016x}" for number in range(1, 9)]
    spans = []
    for span_id in draw(some.lists(some.sampled_from(ids), min_size=1, max_size=8, unique=True)):
        scope, name = draw(some.sampled_from(named))
        parent = draw(some.sampled_from(["", *ids]))
        begin, end = draw(TIMES), draw(TIMES)
        given_ = draw(
            some.dictionaries(some.sampled_from([*lengths, *others]), LENGTHS, max_size=8)
        )
        if draw(some.integers(0, 3)):  # most have a TTFT, or hardly any would be a request
            right = some.floats(0.001, 3)
            given_ |= {"gen_ai.latency.time_to_first_token": draw(right), "ttft_ms": draw(right)}
        spans.append(
            StoredSpan(
                "a" * 32, span_id, parent, name, 2, begin, end, scope=scope, attributes=given_
            )
        )
    return spans


@pytest.mark.parametrize("number", EXAMPLES)
def test_foreign_spans(number: int) -> None:
    """Whatever other products' spans hold, nothing is raised, and their requests' sums close."""
    told = 0

    @repeatable_examples(number, 1)
    @given(draw_foreign())
    def check(spans: list[StoredSpan]) -> None:
        nonlocal told
        told += check_requests(spans)

    check()
    assert told > number / 4, "hardly any of them was a request"


@repeatable_examples(150, 1)
@given(some.lists(some.binary(min_size=1, max_size=40), max_size=6), some.data())
def test_chunks_are_their_body(chunks: list[bytes], data: some.DataObject) -> None:
    """The control: a right body in chunks arrives, wherever it is cut."""
    head = b"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    encoded = b"".join(b"%x;e=1\r\n%b\r\n" % (len(each), each) for each in chunks)
    whole = head + encoded + b"0\r\n\r\n"
    at = data.draw(some.integers(0, len(whole)))
    is_refused, requests = parse_requests([whole[:at], whole[at:]])
    assert not is_refused
    assert requests == [("POST", b"/v1/x", "http.request", b"".join(chunks))]
