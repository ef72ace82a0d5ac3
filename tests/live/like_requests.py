# SPDX-License-Identifier: Apache-2.0
"""Like requests with which a late one is compared, and what `ttft-otel explain` says of it.

Used by the tests of causes and of reasons of waiting, on real servers.
"""

from __future__ import annotations

import json
import time
from datetime import datetime, timezone
from typing import Any

import pytest
from click.testing import CliRunner

from lab.ttft_client import TimedResponse
from tests.live.bench import LiveDeployment, make_parent_header, make_trace_id
from ttft_otel.commands import main as cli

# To compare with: 20 are needed, and those that were delayed on purpose must stay below a tenth.
LIKE = 100
FEWER_LIKE = 40
MAX_WAIT_S = 20.0


class LikeRequests:
    """Requests of one kind that were sent to `bench`; they are the window of what is explained later."""

    def __init__(
        self, bench: LiveDeployment, url: str = "", count: int = LIKE, **fields: Any
    ) -> None:
        self.bench, self.url, self.fields = bench, url or bench.front_url, fields
        self.since = datetime.now(timezone.utc)
        sent = [self.time_one() for _ in range(count)]
        self.sent = sorted(sent, key=lambda each: each.client_ttft_us or 0)

    def send_one(self, **fields: Any) -> str:
        """One more, which is new to every cache; returns its ID. fields: what is other than usual."""
        return str(self.time_one(**fields).request_id)

    def trace_one(self, **fields: Any) -> tuple[str, str]:
        """The same; its ID and that of its trace."""
        trace = make_trace_id()
        return self.send_one(headers=make_parent_header(trace), **fields), trace

    def time_one(self, **more: Any) -> TimedResponse:
        """One more; its answer with the client's times."""
        seed = self.bench.new_picture_seed()
        fields = {"prompt": f"question {seed}", "max_tokens": 2, **self.fields, **more}
        if fields.pop("image", False):
            fields["pictures"] = (seed,)
        answer = self.bench.send_request(self.url, **fields)
        assert answer.status == 200, answer.body[:300]
        return answer

    def explain(self, request_id: str) -> dict[str, Any]:
        """What `ttft-otel explain --json` says of a request, once its spans of all servers are stored."""
        words = ["--request", request_id, "--since", f"{self.since.isoformat()}.."]
        database = str(self.bench.fleet.database)
        deadline = time.monotonic() + MAX_WAIT_S
        while True:
            result = CliRunner().invoke(cli.main, ["explain", "--db", database, *words, "--json"])
            reported: dict[str, Any] = json.loads(result.stdout)
            usual = "no longer than usual" in reported.get("refusal", "")
            # The router's spans may be there first, of which none says why the request waited.
            waits = any(
                word in str(reported.get("stages", [{}])[:1]) for word in ("queue", "stall")
            )
            is_whole = reported["answered"] and (reported["reasons"] or not waits)
            if is_whole or usual or time.monotonic() > deadline:
                return reported
            time.sleep(0.5)


def check_cause(reported: dict[str, Any], kind: str, subject: str = "") -> None:
    """The answer names this kind of cause, of this subject if one is given, in a stage with half of it."""
    assert reported["cause"]["kind"] == kind, reported["sentences"]
    assert not subject or reported["cause"]["subject"] == subject, reported["sentences"]
    check_stage(reported)


def check_stage(reported: dict[str, Any], stage: str = "", min_share: float = 0.5) -> None:
    """The answer's largest stage ends with this name, and has so much of the difference."""
    assert reported["answered"], reported
    assert reported["unusual"] and reported["stages"][0]["share"] >= min_share, reported[
        "sentences"
    ]
    assert reported["stages"][0]["name"].endswith(stage), reported["sentences"]
    assert sum(stage["share"] for stage in reported["stages"]) == pytest.approx(1, abs=0.002)
