# SPDX-License-Identifier: Apache-2.0
"""Serve a request by a prefill and then a decode instance; endpoint.py asks.

The prefill token may go to the client at once, and the prefill instance's KV blocks go to the decode
instance. Blocks that no decode instance fetches are always released (decode_leg.py).
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from ttft_otel.model.stages import DECODE, PREFILL
from ttft_otel.router.disagg import decode_leg, stream_splice
from ttft_otel.router.disagg.decode_leg import DecodeLeg, DisaggregatedRequest, KvReleases
from ttft_otel.router.disagg.request_plan import LegPlan
from ttft_otel.router.disagg.stream_splice import PrefillToken, StreamSplicer
from ttft_otel.router.errors import UpstreamRefused
from ttft_otel.router.types import MODE_OFF, HeaderList
from ttft_otel.router.upstream import http_headers
from ttft_otel.router.upstream.instance_answer import InstanceAnswer
from ttft_otel.router.upstream.upstream_client import UpstreamClient

# The prefill answer was one JSON object, the client's is a stream.
_EVENT_STREAM_HEADER: Final = (b"content-type", b"text/event-stream; charset=utf-8")


class PrefillDecodeFlow:
    """The prefill and decode legs of one router."""

    def __init__(self, upstream: UpstreamClient) -> None:
        self.upstream = upstream
        self.releases = KvReleases(upstream)
        self.decode_leg = DecodeLeg(upstream, self.releases)

    async def serve_request(self, job: DisaggregatedRequest) -> None:
        """Serve the request of `job` by the legs of its plan."""
        plan, exchange, client_stream = job.plan, job.exchange, job.client_stream
        answer, data = await self._run_prefill(job)
        try:
            first_token = self._take_first_token(job, data)
            exchange.record_first_token_mode(plan.mode, plan.reason)
            if first_token is None:
                await self.decode_leg.serve_full_answer(job)
                return
            # From here on the client has a stream, whatever becomes of the decode instance.
            exchange.record_answer(is_streaming=True)
            events = stream_splice.render_first_events(first_token, plan)
            await client_stream.send_first_chunk(200, _build_stream_headers(answer), events, True)
            # The prefill token was the last one: nothing is left for the decode instance.
            if first_token.finish_reason == "stop":
                await client_stream.send_end()
            else:
                splicer = StreamSplicer(first_token, plan, events)
                await self.decode_leg.continue_generation(job, splicer)
        finally:
            # Also when the client has left: the prefill instance would keep the blocks until its time-out.
            if job.unfetched_kv_params:
                self.releases.start_release(job.unfetched_kv_params, job.leg_headers)

    async def _run_prefill(self, job: DisaggregatedRequest) -> tuple[InstanceAnswer, bytes]:
        """The prefill answer and its body, one token. Raises UpstreamRefused, UpstreamUnavailable."""
        # Not kept: its body may be as large as the client's, and the decode answer long.
        request = replace(
            job.request, leg=PREFILL, headers=job.leg_headers, body=job.plan.build_prefill_body()
        )
        attempts = job.exchange.add_attempts()
        response, data = await decode_leg.read_whole_answer(
            self.upstream, request, job.exchange, attempts
        )
        # Mostly an error in the request, which the decode instance would find, too.
        if response.status >= 400:
            headers = http_headers.filter_response_headers(response.raw_headers)
            raise UpstreamRefused(response.status, headers, data)
        return response, data

    def _take_first_token(self, job: DisaggregatedRequest, data: bytes) -> PrefillToken | None:
        """The token in the prefill answer; None if the decode instance is to answer everything.

        Also takes where the prefill instance keeps the KV blocks.
        """
        plan = job.plan
        if plan.mode == MODE_OFF:
            job.unfetched_kv_params = stream_splice.parse_kv_params(data)
            return None
        first_token = stream_splice.parse_prefill_answer(data, plan.is_chat)
        # Not vLLM's form: the decode instance answers all of it, with the blocks if the answer names them.
        if first_token is None:
            job.unfetched_kv_params = stream_splice.parse_kv_params(data)
            plan.turn_off("answer")
            return None
        job.unfetched_kv_params = first_token.kv_params
        reason = first_token.explain_refusal(plan) or self._explain_too_long(plan, first_token)
        if reason:
            plan.turn_off(reason)
            return None
        return first_token

    def _explain_too_long(self, plan: LegPlan, first_token: PrefillToken) -> str:
        """Reason if prompt and requested tokens exceed the context of a decode instance; else ""."""
        # The prefill instance checks its own context only, and the decode instance's may be shorter.
        # The smallest of them, as any may be chosen.
        decoders = self.upstream.pool.get(DECODE)
        max_model_len = min(
            (each.max_model_len for each in decoders if each.max_model_len), default=0
        )
        wanted_tokens = first_token.usage.get("prompt_tokens", 0) + (plan.max_tokens or 0)
        return "max_model_len" if max_model_len and wanted_tokens > max_model_len else ""


def _build_stream_headers(answer: InstanceAnswer) -> HeaderList:
    """The headers of the client's stream, from those of the prefill instance's `answer`."""
    # Length and type were those of the prefill instance's JSON.
    headers = [
        header
        for header in http_headers.filter_response_headers(answer.raw_headers)
        if header[0] not in (b"content-type", b"content-length")
    ]
    return [*headers, _EVENT_STREAM_HEADER]
