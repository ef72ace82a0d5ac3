# SPDX-License-Identifier: Apache-2.0
"""Helpers of the live tests: send requests, read Server-Timing, fetch the trace that a request left."""

from __future__ import annotations

import json
import os
import re
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from lab import local_deployment, ttft_client
from lab.injection import InjectionControl
from lab.local_deployment import LocalDeployment
from lab.local_servers import LocalServer
from lab.ttft_client import TimedRequest, TimedResponse
from ttft_otel.model import stages, timing
from ttft_otel.model.names import env_names, header_names, keys, metric_names, span_names
from ttft_otel.router.disagg.request_plan import KEEP_BLOCKS_PARAMS

MAX_WAIT_S = 60.0  # for spans of a busy machine; they come within a second
MAX_ARRIVAL_S = 5.0  # of a request at the engine
READ_PROMPTS_METRIC = metric_names.ROUTER_PROMPTS + '_total{result="read"}'
ASK_HEADERS = {header_names.ASK_TIMING: "1"}


def read_breakdown(answer: TimedResponse) -> dict[str, int]:
    """Stages, `unattributed` and `ttft` of an answer in microseconds; fails unless they close."""
    found = timing.parse_server_timing(answer.headers.get(header_names.SERVER_TIMING, ""))
    assert found is not None, (answer.status, answer.headers, answer.body[:300])
    assert all(us >= 0 for us in found.stages.values())
    return {**found.stages, stages.UNATTRIBUTED: found.unattributed, "ttft": found.ttft}


def mark_repeated(names: Iterable[str], elsewhere: Container[str]) -> list[Any]:
    """The names, those of `elsewhere` for --full only: every run shows as much in another place."""
    return [
        pytest.param(each, marks=pytest.mark.full if each in elsewhere else ()) for each in names
    ]


def get_announced_params(answer: TimedResponse) -> dict[str, Any]:
    """The field of the next leg's body that says where an encoder's encodings can be fetched."""
    return {"ec_transfer_params": answer.json().get("ec_transfer_params")}


def read_output_tokens(answer: TimedResponse) -> int:
    """Output tokens as vLLM tells its client in `usage`."""
    if not answer.events:
        return int(answer.json()["usage"]["completion_tokens"])
    lines = [line for line in answer.body.decode().split("data: ") if '"usage"' in line]
    found = [json.loads(line.split("\n")[0]).get("usage") for line in lines]
    return int([usage for usage in found if usage][-1]["completion_tokens"])


def make_trace_id() -> str:
    """A random trace ID, as a caller would send it."""
    return os.urandom(16).hex()


def make_parent_header(trace: str) -> dict[str, str]:
    """A traceparent header with the sampled flag that continues the trace."""
    return {header_names.TRACEPARENT: f"00-{trace}-{'c' * 16}-01"}


def list_trunks(spans: Iterable[dict[str, Any]], role: str = "") -> list[dict[str, Any]]:
    """Attributes of the `ttft` and `encode` spans, of those of `role` if one is given."""
    wanted = (span_names.TTFT, span_names.ENCODE)
    found = [span["attributes"] for span in spans if span["name"] in wanted]
    return [each for each in found if not role or each[keys.ROLE] == role]


def get_trunks_by_role(spans: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Attributes of the `ttft` or `encode` span of each role."""
    return {found[keys.ROLE]: found for found in list_trunks(spans)}


def check_closed(spans: list[dict[str, Any]]) -> None:
    """Check that every parent is in the trace, every sum is exact, and of servers nothing is left over."""
    ids = {span["span_id"] for span in spans} | {"c" * 16}
    assert [span for span in spans if span["parent_id"] not in ids] == []
    for found in list_trunks(spans):
        parts = [value for key, value in found.items() if keys.parse_stage_attribute(key)]
        assert all(isinstance(value, int) and value >= 0 for value in parts)
        assert sum(parts) == found[keys.TOTAL_US]
        if found[keys.ROLE] != "router":
            assert found[keys.UNATTRIBUTED_US] == 0, found
            assert found[keys.CLAMPED_US] <= max(1, sum(parts) // 1000), found


def fetch_json(url: str) -> Any:
    """JSON from a server."""
    with urllib.request.urlopen(url, timeout=20) as answer:
        return json.load(answer)


def read_metric(url: str, name: str) -> list[float]:
    """The values on a server's /metrics whose line begins with the pattern `name`."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    return [float(value) for value in re.findall(rf"^{name}.* (\S+)$", text, re.M)]


def count_at_engine(url: str) -> float:
    """Requests that run or wait at a server, as its last step has counted them."""
    return sum(read_metric(url, "vllm:num_requests_(?:running|waiting)[{ ]"))


class LiveDeployment:
    """One deployment under test.

    facing: name of the server that clients call; "" for the deployment's front, its router if it has one.
    latest_client_us: the latest request's time to its first token, or to its end if it is plain, by its
    client's clock.
    """

    def __init__(self, fleet: LocalDeployment, control: InjectionControl, facing: str = "") -> None:
        self.fleet = fleet
        self.control = control
        self.facing = facing
        self.seed = time.time_ns() % 10**9  # caches on disk outlive a deployment
        self.latest_client_us = 0

    def warm_up(self) -> None:
        """Send a few requests of each kind: the first ones import modules and compile."""
        for _ in range(3):
            self.send_request(self.front_url, stream=True)
            if "prefill_decode" in self.fleet.servers:
                self.encode_then_prefill()
            else:
                self.send_request(self.front_url, pictures=(self.new_picture_seed(),))

    @property
    def front_url(self) -> str:
        """The URL that clients call."""
        return self.fleet.get_url(self.facing) if self.facing else self.fleet.front_url

    def new_picture_seed(self) -> int:
        """The seed of an image that is in no cache yet."""
        self.seed += 1
        return self.seed

    def new_prompt(self) -> str:
        """A prompt that is in no cache yet, from its first word on."""
        return str(self.new_picture_seed())

    def send_request(self, url: str, **fields: Any) -> TimedResponse:
        """Send one request with the header that asks for Server-Timing."""
        headers = {**ASK_HEADERS, **fields.pop("headers", {})}
        answer = ttft_client.send_timed_request(url, headers=headers, **fields)
        self.latest_client_us = answer.client_ttft_us or answer.total_us
        return answer

    def send_traced(self, url: str = "", **fields: Any) -> tuple[TimedResponse, str]:
        """Send one request ("": to the front) as part of a new trace; the answer and the trace's ID."""
        trace = make_trace_id()
        headers = {**make_parent_header(trace), **fields.pop("headers", {})}
        return self.send_request(url or self.front_url, headers=headers, **fields), trace

    def send_together(self, url: str, many: Iterable[dict[str, Any]]) -> list[dict[str, int]]:
        """Send requests with these fields at the same moment; their breakdowns."""
        requests = [TimedRequest(**{"headers": ASK_HEADERS, **each}) for each in many]
        return [read_breakdown(each) for each in ttft_client.send_timed_requests(url, requests)]

    def read_one(self, server: str = "", image: bool = False, **fields: Any) -> dict[str, int]:
        """The breakdown of one request to a server ("": the front), with an image that is in no cache."""
        if image:
            fields["pictures"] = (self.new_picture_seed(),)
        url = self.fleet.get_url(server) if server else self.front_url
        return read_breakdown(self.send_request(url, **fields))

    def encode_then_prefill(self) -> dict[str, int]:
        """Send a new image to the encoder, then to prefill_decode, without the router; its breakdown."""
        pictures = (self.new_picture_seed(),)
        plain = {"pictures": pictures, "max_tokens": 1, "stream": False}
        announced = get_announced_params(self.send_request(self.fleet.get_url("encode"), **plain))
        return self.read_one("prefill_decode", pictures=pictures, max_tokens=1, extra=announced)

    def prefill_then_decode(self, **fields: Any) -> tuple[TimedResponse, TimedResponse]:
        """Send one new prompt to prefill, then to decode, without the router; returns both responses."""
        question = {"prompt": self.new_prompt(), "words": 300, "max_tokens": 1, **fields}
        extra = {"kv_transfer_params": KEEP_BLOCKS_PARAMS}
        headers = fields.pop("headers", {})
        leg = {**headers, header_names.LEG: "prefill"}
        kept = {**question, "max_tokens": 1, "stream": False, "headers": leg, "extra": extra}
        first = self.send_request(self.fleet.get_url("prefill"), **kept)
        question["extra"] = {"kv_transfer_params": first.json()["kv_transfer_params"]}
        leg = {**headers, header_names.LEG: "decode"}
        return first, self.send_request(
            self.fleet.get_url("decode"), **{**question, "headers": leg}
        )

    def wait_for_trace(
        self, trace_id: str, enough: Callable[[list[dict[str, Any]]], bool], receiver: str = ""
    ) -> Any:
        """The spans of a trace, once `enough` of them have arrived; receiver: the URL of another one."""
        url = receiver or self.fleet.get_url("receiver")
        deadline = time.monotonic() + MAX_WAIT_S
        spans: list[dict[str, Any]] = []
        while time.monotonic() < deadline:
            try:
                spans = fetch_json(f"{url}/api/trace/{trace_id}")["spans"]
            except urllib.error.HTTPError as error:
                assert error.code == 404
            if enough(spans):
                return spans
            time.sleep(0.2)
        raise AssertionError(f"only {[span['name'] for span in spans]} of {trace_id}")

    def wait_for_spans(self, trace: str, name: str, many: int = 1) -> list[dict[str, Any]]:
        """The spans of a trace, once so many of them have this name."""
        found: list[dict[str, Any]] = self.wait_for_trace(
            trace, lambda got: sum(span["name"] == name for span in got) >= many
        )
        return found

    def wait_for_roles(self, trace: str, *roles: str, also: str = "") -> list[dict[str, Any]]:
        """The spans of a trace, once both halves of these roles' requests are there, as often as the role is
        named, and a span named `also`.
        """

        def is_whole(spans: list[dict[str, Any]]) -> bool:
            halves = [span["attributes"] for span in spans if span["kind"] == "server"]
            counts = [
                Counter(each[keys.ROLE] for each in got) for got in (halves, list_trunks(spans))
            ]
            has_also = not also or any(span["name"] == also for span in spans)
            return has_also and all(Counter(roles) <= each for each in counts)

        found: list[dict[str, Any]] = self.wait_for_trace(trace, is_whole)
        return found

    def fetch_ttft(self, trace: str, role: str = "") -> dict[str, Any]:
        """The attributes of the only `ttft` or `encode` span (of `role`); its sum is checked."""
        spans = self.wait_for_trace(trace, lambda got: bool(list_trunks(got, role)))
        (found,) = list_trunks(spans, role)
        parts = [us for key, us in found.items() if keys.parse_stage_attribute(key)]
        assert sum(parts) == found[keys.TOTAL_US]
        return found

    def call(self, path: str, method: str = "POST") -> Any:
        """An endpoint of the front that is no generation."""
        request = urllib.request.Request(self.front_url + path, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def sum_metric(self, name: str) -> float:
        """The sum of a metric's samples on the front's /metrics."""
        return sum(read_metric(self.front_url, f"{name}[{{ ]"))

    @contextmanager
    def run_request(self, **fields: Any) -> Iterator[Future[tuple[TimedResponse, str]]]:
        """A request to the front in a thread of its own, at the engine by now; its answer and trace."""
        before = count_at_engine(self.front_url)
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(self.send_traced, **fields)
            self.wait_for_arrival(before, future)
            yield future

    def wait_for_arrival(self, before: float, answer: Future[Any]) -> None:
        """Wait until more requests are at the engine than `before`, or the one that comes is answered."""
        # On a busy machine it takes long; the engine counts with its next step.
        deadline = time.monotonic() + MAX_ARRIVAL_S
        while count_at_engine(self.front_url) <= before and time.monotonic() < deadline:
            if answer.done():
                break
            time.sleep(0.05)

    def build_router(self, urls: dict[str, str], *flags: str) -> LocalServer:
        """Another router, before the servers at these URLs by role; its spans come to the same receiver."""
        sink = {env_names.OTEL_EXPORTER_OTLP_ENDPOINT: self.fleet.get_url("receiver")}
        legs = {role: [url] for role, url in urls.items()}
        return LocalServer(local_deployment.build_router_command(legs, sink, *flags))

    def wait_for_tokenizer(self, router: LocalServer) -> None:
        """Send requests through a router until it has read the tokens of one."""
        for _ in range(100):
            self.send_request(router.url, prompt=self.new_prompt(), max_tokens=1)
            if read_metric(router.url, READ_PROMPTS_METRIC):
                return
            time.sleep(1)

    def list_complaints(self, server: str) -> list[str]:
        """Log lines of a server that report a failure of our hooks."""
        text = self.fleet.servers[server].log_path.read_text(errors="replace")
        return [line for line in text.splitlines() if "its measurement is lost" in line]

    def get_json(self, path: str, server: str = "receiver") -> Any:
        """JSON from one of the deployment's servers."""
        return fetch_json(self.fleet.get_url(server) + path)
