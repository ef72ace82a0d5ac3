# SPDX-License-Identifier: Apache-2.0
"""Join the result file of another load generator with our requests, by request ID.

AIPerf's profile_export.jsonl has each request's ID, which it sends as x-request-id; vLLM's
`bench serve --save-result --save-detailed` sends its prefix and the request's number. `ttft-otel report`
shows the joined requests, whose sum is then the TTFT that the other tool measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ttft_otel.model.stages import OUTSIDE
from ttft_otel.report.report_types import Request

MAX_BYTES: Final = 1 << 30  # a result file; answers' texts are in vLLM's
# A client cannot have waited for less than its server took; clocks and time stamps differ by less.
TOLERANCE_US: Final = 2000
MAX_IMPOSSIBLE: Final = 0.01  # of the joined requests


class JoinError(Exception):
    """The file cannot be read, or does not fit the stored requests; the message has the remedy."""


@dataclass(frozen=True, slots=True)
class JoinedRequests:
    """The requests that are in both, with the client's TTFT."""

    requests: list[Request]
    in_file: int  #: requests of the file that have a TTFT
    not_in_file: int  #: requests that were read and are not in the file


def read_client_ttfts(path: Path, prefix: str | None) -> dict[str, int]:
    """The client's TTFT in microseconds by request ID, of those that have one.

    prefix: what `vllm bench serve --request-id-prefix` was given, for its files.
    Raises JoinError.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise JoinError(f"{path} is larger than {MAX_BYTES >> 20} MiB")
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise JoinError(f"{path} cannot be read: {error}") from error
    try:
        if '"x_request_id"' in text:
            return dict(_list_aiperf(text))
        return dict(_list_vllm_bench(json.loads(text), prefix))
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError) as error:
        raise JoinError(
            f"{path} is neither AIPerf's profile_export.jsonl nor a result of `vllm bench serve "
            "--save-result --save-detailed`"
        ) from error


def join_requests(requests: Sequence[Request], client_ttfts: Mapping[str, int]) -> JoinedRequests:
    """Those of `requests` that the file has; what the client waited beyond them is their stage `outside`.

    client_ttfts: microseconds by request ID. Raises JoinError where none fits, or clients would have
    waited for less than their servers took, so that the IDs are those of other requests.
    """
    joined = [
        _add_outside(each, client_ttfts[each.request_id])
        for each in requests
        if each.request_id in client_ttfts and not each.error
    ]
    if not joined:
        raise JoinError(
            f"none of the {len(client_ttfts)} requests of the file is among the {len(requests)} that were "
            "read: --since names the window; both have to have the same x-request-id"
        )
    impossible = sum(each.stages[OUTSIDE] < -TOLERANCE_US for each in joined)
    if impossible > MAX_IMPOSSIBLE * len(joined):
        raise JoinError(
            f"{impossible} of {len(joined)} clients would have waited for less than their server took: "
            "the IDs are those of another run, or the file has its requests in another order"
        )
    return JoinedRequests(
        joined, len(client_ttfts), sum(each.request_id not in client_ttfts for each in requests)
    )


def _add_outside(request: Request, client_us: int) -> Request:
    outside = client_us - request.ttft_us
    return replace(request, ttft_us=client_us, stages={**request.stages, OUTSIDE: outside})


def _list_aiperf(text: str) -> Iterator[tuple[str, int]]:
    factors = {"ns": 0.001, "us": 1.0, "ms": 1000.0, "sec": 1e6, "s": 1e6}
    for line in filter(None, map(str.strip, text.splitlines())):
        record: dict[str, Any] = json.loads(line)
        ttft = record["metrics"].get("time_to_first_token")
        # Warm-up is in the file, too, and a failed request has no first token.
        if ttft and record["metadata"].get("benchmark_phase", "profiling") == "profiling":
            yield record["metadata"]["x_request_id"], round(ttft["value"] * factors[ttft["unit"]])


def _list_vllm_bench(result: Any, prefix: str | None) -> Iterator[tuple[str, int]]:
    ttfts, errors = result["ttfts"], result.get("errors") or []
    if prefix is None:
        raise JoinError(
            "vLLM's file has no request IDs: start `vllm bench serve` with --request-id-prefix NAME, "
            "and give NAME here as --join-prefix"
        )
    for number, seconds in enumerate(ttfts):
        if seconds and not (number < len(errors) and errors[number]):
            yield f"{prefix}{number}", round(seconds * 1e6)
