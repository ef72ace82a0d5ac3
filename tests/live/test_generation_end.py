# SPDX-License-Identifier: Apache-2.0
"""What a real server tells at a request's end, against the answer's own `usage` and the client's clock."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lab.ttft_client import TimedResponse
from tests.live.bench import LiveDeployment, read_breakdown, read_output_tokens
from ttft_otel.model.endpoints import CHAT_PATH, COMPLETIONS_PATH
from ttft_otel.model.names import keys

pytestmark = pytest.mark.untimed  # bounds are of one exchange with itself
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
