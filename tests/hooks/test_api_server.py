# SPDX-License-Identifier: Apache-2.0
"""The API server's hooks: whose marks they are, whatever vLLM does around them.

At the end: what is known at a request's end, tokens, finish reasons, time per token; right, or not there.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tracing_fakes import MemorySender

from hooks.process import DIRECT, PATCHER
from hooks.server import DECODE_US, EGRESS_US, STAGES_US, FakeClient, ServerPlan
from lab import vllm_releases
from ttft_otel.hooks import api_server, vllm_fields
from ttft_otel.model import endpoints
from ttft_otel.model.names import env_names, header_names, keys, span_names
from ttft_otel.tracing import carrier, clock, handoff, recorder, settings
from ttft_otel.tracing.request_trace import identity
from ttft_otel.tracing.settings import Settings


@pytest.mark.parametrize("drafts", [False, True])
def test_parts(client: FakeClient, drafts: bool) -> None:
    """Tokenizer and processor are parts of preprocess; the way back has parts of its own."""
    client.run(ServerPlan(drafts=drafts))
    ttft = client.get_ttft()
    parts = {piece.name: piece.end - piece.start for piece in ttft.pieces if piece.kind == "part"}

    assert parts == {
        "tokenize": 100,
        "multimodal": 50,
        **({"draft": 20, "collect": 20} if drafts else {"collect": 44}),
        "transport": 46,
        "detokenize": 4,
    }


def test_siblings(client: FakeClient) -> None:
    """The first output of several engine requests ends the TTFT; the others are siblings, never summed."""
    client.run(ServerPlan(count=3))
    ttft = client.get_ttft()
    kinds = [piece.kind for piece in ttft.pieces]

    assert kinds.count("sibling") == 2
    assert {piece.name for piece in ttft.pieces if piece.kind == "sibling"} == {span_names.SIBLING}
    assert {**ttft.stages} == {**STAGES_US, "egress": 5}


def test_trace_headers(client: FakeClient) -> None:
    """What leaves for the engine carries the server span as parent, the caller's state, our key."""
    trace = "0af7651916cd43dd8448eb211c80319c"
    parent = f"00-{trace}-b7ad6b7169203331-01"
    client.run(ServerPlan(dies=True), traceparent=parent, tracestate="vendor=1")  # it stays there
    (request,) = client.server.processors.requests.values()
    headers = request.trace_headers

    assert headers[header_names.CARRIER_KEY] == "1"
    assert headers[header_names.TRACESTATE] == "vendor=1"
    version, trace_id, span_id, flags = headers[header_names.TRACEPARENT].split("-")
    assert (version, trace_id, flags) == ("00", trace, "01")
    assert span_id != "b7ad6b7169203331"


@pytest.mark.parametrize("has_engine", [True, False])
def test_render(client: FakeClient, monkeypatch: pytest.MonkeyPatch, has_engine: bool) -> None:
    """A render server's time is that of a leg, and never the client's TTFT; it needs no engine for it."""
    monkeypatch.setattr(identity, "can_see_outputs", lambda: has_engine)
    client.run(ServerPlan(stream=False, renders=True), "/v1/chat/completions/render")
    (record,) = {each.span_id: each for each in client.records.kept}.values()

    assert (record.role, record.outermost) == ("render", False)
    assert {**client.get_ttft().stages} == {"receive": 10, "preprocess": 200}
    assert client.get_ttft().unattributed == 0 and record.server is not None


def test_pooling(client: FakeClient) -> None:
    """An embedding request makes no first token and is not traced, in the engine core neither."""
    request = SimpleNamespace(request_id="p", trace_headers={"a": "b"}, pooling_params=object())
    api_server.register_request(DIRECT, None, request)

    assert request.trace_headers == {"a": "b", header_names.CARRIER_KEY: carrier.UNTRACED}
    assert not recorder.awaiting_traces


@pytest.mark.usefixtures("blank_identity")
@pytest.mark.parametrize(
    ("transfer", "cache", "setting", "role"),
    [
        (None, None, "", "mono"),
        ("ec_producer", None, "", "encode"),
        ("ec_consumer", None, "", "prefill_decode"),
        (None, "kv_producer", "", "prefill"),
        (None, "kv_consumer", "", "decode"),
        (None, "kv_both", "", ""),
        ("ec_both", None, "", ""),
        ("ec_both", None, "encode", "encode"),
    ],
)
def test_role(
    monkeypatch: pytest.MonkeyPatch,
    transfer: str | None,
    cache: str | None,
    setting: str,
    role: str,
) -> None:
    """The role is read from vLLM's configuration, where that tells; the operator's setting wins over it."""
    monkeypatch.setenv(env_names.TTFT_OTEL_ROLE, setting)
    monkeypatch.setattr(settings, "_frozen", [])
    encodings = SimpleNamespace(ec_role=transfer, ec_connector="ECCPUConnector")
    config = SimpleNamespace(
        ec_transfer_config=encodings if transfer else None,
        kv_transfer_config=SimpleNamespace(kv_role=cache) if cache else None,
        model_config=SimpleNamespace(served_model_name=["served", "alias"]),
    )
    owner = SimpleNamespace(vllm_config=config)  # the app's state, or its engine client
    state = owner if cache else SimpleNamespace(engine_client=owner)
    api_server.identify_server(PATCHER, vllm_fields.get_vllm_config(state))

    assert identity.role == role
    assert identity.default_role == ("prefill_decode" if transfer else "mono")
    assert identity.model == "served"
    assert identity.ec_connector == ("ECCPUConnector" if transfer else "")
    assert identity.takes_encodings is (transfer in ("ec_consumer", "ec_both"))


@pytest.mark.usefixtures("blank_identity")
@pytest.mark.parametrize("has_blocks", [True, False])
def test_engine_settings(monkeypatch: pytest.MonkeyPatch, has_blocks: bool) -> None:
    """The scheduler's settings go to the exporter as it starts; what vLLM does not tell is left out."""
    monkeypatch.setattr(handoff, "engine_settings", {})
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            async_scheduling=None,
            enable_chunked_prefill=True,
        ),
        cache_config=SimpleNamespace(num_gpu_blocks=200 if has_blocks else None, block_size=16),
        parallel_config=SimpleNamespace(data_parallel_size=2),
    )
    api_server.identify_server(PATCHER, config)

    assert handoff.engine_settings == {
        keys.ENGINE_MAX_SEQS: 64,
        keys.ENGINE_MAX_TOKENS: 2048,
        keys.ENGINE_CHUNKED: 1,
        **({keys.ENGINE_KV_TOKENS: 1600, keys.ENGINE_BLOCK_TOKENS: 16} if has_blocks else {}),
    }


KEEPS_BLOCKS = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
TAKES_BLOCKS = {"kv_transfer_params": {"do_remote_decode": False, "do_remote_prefill": True}}
ANNOUNCES_ITEMS = {"ec_transfer_params": {"0f" * 32: {"peer_host": "127.0.0.1", "peer_port": 1}}}
PUSHES_ITEMS = {"ec_transfer_params": {"consumer_zmq": "tcp://127.0.0.1:1", "ec_items": []}}


@pytest.mark.parametrize(
    ("extra", "role"),
    [
        (None, ""),
        (KEEPS_BLOCKS, "prefill"),
        (TAKES_BLOCKS, "decode"),
        (ANNOUNCES_ITEMS, "prefill_decode"),
        (TAKES_BLOCKS | ANNOUNCES_ITEMS, "decode"),
        (PUSHES_ITEMS, "encode"),
        # NIXL's turn back: what D kept, taken by P. vLLM's own rule: do_remote_decode makes it P.
        ({"kv_transfer_params": {"do_remote_decode": True, "remote_block_ids": [[1]]}}, "prefill"),
        ({"kv_transfer_params": {"do_remote_decode": False, "do_remote_prefill": False}}, ""),
        # A client's nonsense, which vLLM refuses or ignores.
        ({"kv_transfer_params": "do_remote_decode"}, ""),
        ({"ec_transfer_params": ["consumer_zmq"]}, ""),
    ],
)
def test_role_by_request(extra: dict[str, Any] | None, role: str) -> None:
    """Routers' transfer parameters say who this instance is in a request."""
    request = SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra))

    assert vllm_fields.get_request_role(request) == role


@pytest.mark.parametrize(
    ("extra", "role", "outermost"),
    [(KEEPS_BLOCKS, "prefill", False), (TAKES_BLOCKS, "decode", True)],
)
def test_behind_a_foreign_router(
    client: FakeClient, extra: dict[str, Any], role: str, outermost: bool
) -> None:
    """Without our header the parameters give role and service; what P answers goes to D."""
    client.run(ServerPlan(stream=False, extra=extra))
    record = client.records.kept[0]

    assert (record.role, record.outermost, record.service) == (role, outermost, f"vllm-{role}")
    assert record.ttft is not None
    assert ("egress" in record.ttft.stages) == (role == "prefill")


def test_an_encoder_that_runs_the_language_model(client: FakeClient) -> None:
    """An ec_both instance that encodes for another one prefills and samples, too: all of it is told."""
    client.run(ServerPlan(stream=False, extra=PUSHES_ITEMS))
    ttft = client.get_ttft()

    assert (ttft.name, ttft.unattributed) == (span_names.ENCODE, 0)
    assert {name: ttft.stages[name] for name in STAGES_US} == STAGES_US


@pytest.mark.parametrize("version", list(vllm_releases.VLLM_RELEASES))
def test_where_releases_carry_them(version: str) -> None:
    """Every release puts the body's parameters into SamplingParams.extra_args of the engine's request.

    ec_transfer_params come with 0.29; 0.20.2 and 0.24.0 have encoder caches on a shared folder only.
    """
    root = vllm_releases.fetch_sources(version) / "vllm"
    for kind in ("chat_completion", "completion", "responses"):
        path = root / "entrypoints" / "openai" / kind / "protocol.py"
        text = path.read_text("utf-8")
        assert 'extra_args["kv_transfer_params"] = self.kv_transfer_params' in text
        announced = 'extra_args["ec_transfer_params"] = self.ec_transfer_params' in text
        assert announced == (version not in ("0.20.2", "0.24.0"))


def test_build() -> None:
    """The middleware goes around whatever stack the app has built; one route of ours is added."""
    stack, routes = object(), []
    router = SimpleNamespace(add_route=lambda path, *_, **__: routes.append(path))
    built = api_server.build_middleware(PATCHER, None, stack, SimpleNamespace(router=router))

    assert built.app is stack and isinstance(built.settings, Settings)
    assert routes == [endpoints.WAITING_PATH]


def test_an_engine_core_without_hooks_is_told(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in an actor that Ray started without our variables: each is counted, the first one is logged."""
    counted: list[str] = []
    monkeypatch.setattr(recorder.meter, "count_dropped", counted.append)
    recorder._warn_of_unmeasured.cache_clear()
    caplog.set_level("WARNING", "ttft_otel")
    client.run()
    assert not counted

    for _ in range(2):
        client.run(ServerPlan(marks=False))

    assert counted == ["unmeasured"] * 2
    (told,) = [each.getMessage() for each in caplog.records if "measured" in each.getMessage()]
    assert "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY=TTFT_OTEL)" in told


END_NAMES = {keys.OUTPUT_TOKENS, keys.FINISH_REASONS, keys.TIME_PER_OUTPUT_TOKEN_US}


def read_end(records: MemorySender) -> dict[str, Any]:
    """The server span's attributes of what was generated; they are on no other span."""
    *_, last = records.kept
    assert last.server is not None
    for record in records.kept:
        assert record.ttft is None or not END_NAMES & set(record.ttft.attributes)
    return {key: value for key, value in last.server.attributes.items() if key in END_NAMES}


# From the first token, processed EGRESS_US before its chunk, to the last one.
PER_TOKEN_US = round((EGRESS_US + DECODE_US) / 4)


@pytest.mark.parametrize(
    ("plan", "tokens", "reasons", "per_token_us"),
    [
        pytest.param(ServerPlan(), 5, ("stop",), PER_TOKEN_US, id="stream"),
        pytest.param(
            ServerPlan(False, finish_reason="repetition"),
            5,
            ("repetition",),
            PER_TOKEN_US,
            id="whole",
        ),
        pytest.param(
            ServerPlan(tokens=1, finish_reason="length"), 1, ("length",), 0, id="one token"
        ),
        # Tokens add up, each generation has its reason, and no time per token is one's own.
        pytest.param(ServerPlan(count=3, tokens=4), 12, ("stop",) * 3, 0, id="several generations"),
        # A list that is cut would not be one reason for each generation.
        pytest.param(ServerPlan(count=65, tokens=4), 260, (), 0, id="more generations than fit"),
        # The convention has times per token of successful answers only.
        pytest.param(
            ServerPlan(tokens=3, finish_reason="error"), 3, ("error",), 0, id="engine fails"
        ),
        pytest.param(ServerPlan(status=404), 0, (), 0, id="refused"),
    ],
)
def test_generation_end(
    client: FakeClient, plan: ServerPlan, tokens: int, reasons: tuple[str, ...], per_token_us: int
) -> None:
    """vLLM's own words and numbers; the time after the first token is shared by the tokens after it.

    What is known is told; a time per token only where one request had steps after its first token.
    """
    client.run(plan)

    values = (tokens, reasons, per_token_us)
    names = (keys.OUTPUT_TOKENS, keys.FINISH_REASONS, keys.TIME_PER_OUTPUT_TOKEN_US)
    told = {name: value for name, value in zip(names, values, strict=True) if value}
    assert read_end(client.records) == told


async def test_all_tokens_in_one_step(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """With speculative decoding all tokens may come at once: no step after the first has a length."""
    original = recorder.record_end

    def record_end(engine_id: str, reason: str, tokens: int) -> None:
        trace: Any = recorder.current_trace.get()
        original(engine_id, reason, tokens)
        engine = trace.engine_requests[engine_id]
        engine.ended = engine.output - 1  # inside process_outputs(), which stamps `output` after it

    monkeypatch.setattr(recorder, "record_end", record_end)
    await client.call_server()

    assert read_end(client.records) == {keys.OUTPUT_TOKENS: 5, keys.FINISH_REASONS: ("stop",)}


def test_beam_search(client: FakeClient) -> None:
    """The steps of a beam search are not what the client gets."""
    client.run(ServerPlan(count=2, external_id="cmpl-1-9af3-beam-0"))

    assert read_end(client.records) == {}
    assert not any(map(vllm_fields.is_beam, (None, object())))


@pytest.mark.parametrize("role", ["encode", "prefill"])
def test_end_of_a_leg(client: FakeClient, role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder generates nothing; a prefill instance's token is the first, with none after it."""
    monkeypatch.setattr(identity, "role", role)
    client.run()

    found = read_end(client.records)
    assert keys.TIME_PER_OUTPUT_TOKEN_US not in found
    assert (keys.OUTPUT_TOKENS in found) is (role == "prefill")


@pytest.mark.parametrize(("can_see", "error"), [(True, keys.ERROR_INCOMPLETE), (False, "")])
def test_stream_that_ends_too_soon(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch, can_see: bool, error: str
) -> None:
    """Starlette ends a stream whose client has left like a complete one; vLLM has told no end.

    Without the hook nothing is known of ends, and no stream counts as one that broke off.
    """
    monkeypatch.setattr(identity, "can_see_ends", lambda: can_see)
    client.run(ServerPlan(is_left=True))

    first, last = client.records.kept
    assert first.ttft is not None and first.ttft.error == ""
    assert last.server is not None and last.server.error == error
    assert read_end(client.records) == {}


def test_nothing_is_asked_while_decoding(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between first and last token no hook reads a clock or touches a trace, however many steps there are."""
    readings = 0
    read = clock.now_us

    def count_readings() -> int:
        nonlocal readings
        readings += 1
        return read()

    decode = client.server.decode

    def decode_in_steps(sent: dict[str, int]) -> None:
        # A context of its own: the clock is a fake already, which ends after this test's fixtures.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(clock, "now_us", count_readings)
            for _ in range(1000):
                client.server.processors.process_outputs([])
            assert readings == 0
            decode(sent)
            assert readings == 1  # one generation, one end

    monkeypatch.setattr(client.server, "decode", decode_in_steps)
    client.run()

    assert read_end(client.records)[keys.OUTPUT_TOKENS] == 5


def test_no_end_is_left(client: FakeClient) -> None:
    """However a request ends, nothing of it stays; beyond the bound only its end is not told."""
    client.run(ServerPlan(dies=True))
    assert not recorder.unended_requests

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "MAX_UNENDED_REQUESTS", 0)
        client.run()
    assert read_end(client.records) == {}
    first, last = client.records.kept[-2:]
    assert first.ttft is not None and last.server is not None and last.server.error == ""
