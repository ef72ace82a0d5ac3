# SPDX-License-Identifier: Apache-2.0
"""For each kind of request on real servers: stages add up to the TTFT, nothing is unattributed, the trace is
complete; and what is told at its end is what the answer's own `usage` and the client's clock say.

test_transfers.py has the first of prefill and decode, and of encodings over NIXL.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from lab import ttft_client
from lab.ttft_client import TimedRequest, TimedResponse
from tests.live.bench import (
    LiveDeployment,
    check_closed,
    make_parent_header,
    make_trace_id,
    read_breakdown,
    read_output_tokens,
)
from ttft_otel.model import stages
from ttft_otel.model.endpoints import CHAT_PATH, COMPLETIONS_PATH, RESPONSES_PATH
from ttft_otel.model.names import keys

pytestmark = pytest.mark.untimed  # bounds are of one exchange with itself
TEXTS: dict[str, dict[str, Any]] = {
    "text": {},
    "text plain": {"stream": False},
    "completion": {"path": COMPLETIONS_PATH},
    "completion plain": {"path": COMPLETIONS_PATH, "stream": False},
}
KINDS: dict[str, dict[str, Any]] = {
    **TEXTS,
    "responses": {"path": RESPONSES_PATH},
    "responses plain": {"path": RESPONSES_PATH, "stream": False},
    "three chunks": {"words": 1300},
    "two answers": {"n": 2},
    "two answers plain": {"n": 2, "stream": False},
    "one image": {"pictures": (1,)},
    "same image again": {"pictures": (1,)},
    "two images": {"pictures": (2, 3)},
    "image plain": {"pictures": (4,), "stream": False},
    "image after a long text": {"pictures": (5,), "words": 1300},
}


def test_each_kind_closes_through_router_and_servers(epd: LiveDeployment) -> None:
    """A request through router, the encoder and prefill_decode leaves one whole trace."""
    traces = {}
    for kind, fields in KINDS.items():
        answer, traces[kind] = epd.send_traced(**fields)
        assert answer.status == 200, kind
    for kind, trace in traces.items():
        encoders = ["encode" for _ in KINDS[kind].get("pictures", ())]
        check_closed(epd.wait_for_roles(trace, "router", "prefill_decode", *encoders))


def test_each_kind_closes_on_cudas_runner(newer: LiveDeployment) -> None:
    """The same holds on one server with the V2 runner and async scheduling."""
    for kind, fields in KINDS.items():
        found = read_breakdown(newer.send_request(newer.front_url, **fields))
        assert found[stages.UNATTRIBUTED] == 0, kind
        assert sum(us for name, us in found.items() if name != "ttft") == found["ttft"], kind


def test_many_in_a_row_and_at_once_leave_whole_traces(epd: LiveDeployment) -> None:
    """After 80 requests in a row and 50 at once no span is missing."""
    traces = [make_trace_id() for _ in range(130)]
    for trace in traces[:80]:
        epd.send_request(epd.front_url, headers=make_parent_header(trace), max_tokens=1)
    many = [TimedRequest(headers=make_parent_header(trace), max_tokens=2) for trace in traces[80:]]
    ttft_client.send_timed_requests(epd.front_url, many)

    wanted = set(stages.STAGE_NAMES) - {
        "encoder.queue", "encoder.compute", "ec.transfer", "kv.transfer", "prefill.stall", "pipeline",
    }  # fmt: skip
    for trace in traces:
        spans = epd.wait_for_roles(trace, "router", "prefill_decode")
        own = [span for span in spans if span["attributes"].get(keys.ROLE) == "prefill_decode"]
        assert wanted <= {span["attributes"].get(keys.STAGE) for span in own}, trace


USAGE = {"stream_options": {"include_usage": True}, "ignore_eos": True}
END_NAMES = {keys.OUTPUT_TOKENS, keys.FINISH_REASONS, keys.TIME_PER_OUTPUT_TOKEN_US}


def ask(bench: LiveDeployment, **fields: Any) -> tuple[TimedResponse, dict[str, Any]]:
    """One request to the server that decodes; its answer, and its server span's attributes."""
    answer, trace = bench.send_traced(bench.fleet.get_url("prefill_decode"), **fields)
    spans = bench.wait_for_trace(
        trace, lambda got: any(keys.HTTP_METHOD in span["attributes"] for span in got)
    )
    (server,) = [span for span in spans if keys.HTTP_METHOD in span["attributes"]]
    others = [span for span in spans if span is not server]
    assert not any(END_NAMES & set(span["attributes"]) for span in others)
    return answer, server["attributes"]


@pytest.mark.parametrize(("path", "stream"), [(CHAT_PATH, True), (COMPLETIONS_PATH, False)])
def test_end(epd: LiveDeployment, path: str, stream: bool) -> None:
    """Tokens are those of `usage`; decode steps of 30 ms make the time per token at least that."""
    epd.control.set_injections({"forward": 30})
    extra = USAGE if stream else {"ignore_eos": True}
    answer, reported = ask(epd, path=path, stream=stream, max_tokens=12, extra=extra)

    assert reported[keys.OUTPUT_TOKENS] == read_output_tokens(answer) == 12
    assert json.loads(reported[keys.FINISH_REASONS]) == ["length"]
    assert reported[keys.TIME_PER_OUTPUT_TOKEN_US] >= 30_000
    # What the server says of the time before its first output and after it fits into the client's exchange.
    # The client's own first chunk is no bound: it may come late. Rounding: half a microsecond a token.
    cut = read_breakdown(answer)
    until_output_us = cut["ttft"] - cut.get("egress", 0)
    assert until_output_us + reported[keys.TIME_PER_OUTPUT_TOKEN_US] * 11 <= answer.total_us + 6


def test_several_generations(epd: LiveDeployment) -> None:
    """With n = 2 tokens add up, and the steps are nobody's own."""
    answer, reported = ask(epd, stream=False, n=2, max_tokens=5, extra={"ignore_eos": True})

    assert reported[keys.OUTPUT_TOKENS] == read_output_tokens(answer) == 10
    assert json.loads(reported[keys.FINISH_REASONS]) == ["length"] * 2
    assert keys.TIME_PER_OUTPUT_TOKEN_US not in reported


def test_stop_string(epd: LiveDeployment) -> None:
    """A stop string, found in the API server itself, ends the generation with vLLM's word for it."""
    fields = {"stream": False, "path": COMPLETIONS_PATH, "max_tokens": 12}
    extra = {"ignore_eos": True, "temperature": 0, "seed": 1}
    text = epd.send_request(epd.front_url, extra=extra, **fields).text
    stop = text[len(text) // 2 :][:3]
    answer, reported = ask(epd, extra={**extra, "stop": [stop]}, **fields)

    assert answer.json()["choices"][0]["finish_reason"] == "stop"
    assert json.loads(reported[keys.FINISH_REASONS]) == ["stop"]
    assert reported[keys.OUTPUT_TOKENS] == read_output_tokens(answer) <= 12


@pytest.mark.full  # its first one takes ten seconds
def test_beam_search(epd: LiveDeployment) -> None:
    """The steps of a beam search are not the answer's: nothing is told of them."""
    extra = {"use_beam_search": True, "ignore_eos": True}
    answer, reported = ask(epd, stream=False, path=COMPLETIONS_PATH, n=2, max_tokens=4, extra=extra)

    assert answer.status == 200
    assert not END_NAMES & set(reported)


def test_client_leaves(epd: LiveDeployment) -> None:
    """Of a generation that the client cut off vLLM tells no end; the request has an error."""
    epd.control.set_injections({"forward": 50})
    answer, reported = ask(epd, max_tokens=200, abort_s=1.0, extra={"ignore_eos": True})

    assert answer.aborted
    assert reported[keys.ERROR_TYPE] == keys.ERROR_INCOMPLETE
    assert not END_NAMES & set(reported)


def test_unknown_model(epd: LiveDeployment) -> None:
    """A model that only the client knows is on no span, neither of the router nor of the server."""
    for url in (epd.front_url, epd.fleet.get_url("prefill_decode")):
        answer, trace = epd.send_traced(url, model="made-up", stream=False)
        assert answer.status == 404
        spans = epd.wait_for_trace(trace, lambda got: any(s["name"] == "ttft" for s in got))
        assert not any("made-up" in str(span["attributes"].values()) for span in spans)
