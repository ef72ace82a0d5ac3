# SPDX-License-Identifier: Apache-2.0
"""`ttft-otel explain` on real vLLM: a cause that was made on purpose is the one that is named.

Each test sends like requests, then one with the cause, and asks for that one. Causes: injected delays in
every part of a server, late KV blocks and encodings, a slow wire. Those of waiting: test_waits.py.
"""

from __future__ import annotations

import json
import time
from datetime import datetime, timezone
from typing import Any

import pytest
from click.testing import CliRunner

from lab.ttft_client import TimedResponse
from tests.live.bench import LiveDeployment, make_parent_header, make_trace_id, mark_repeated
from tests.live.test_router import run_router_behind_proxies
from ttft_otel.commands import main as cli
from ttft_otel.model import stages

# To compare with: 20 are needed, and those that were delayed on purpose must stay below a tenth.
LIKE = 100
FEWER_LIKE = 40
MAX_WAIT_S = 20.0
MIN_SHARE = 0.95  # of a wait, that its reason has
DELAY_MS = 400.0
LATE = 5  # requests of a window; of fewer it asks to explain each
# place of the delay -> the stage that must be named; for a text, and for an image.
TEXT_STAGES = {
    "receive": "receive",
    "tokenize": "preprocess",
    "ipc": "ipc",
    "dispatch": "dispatch",
    "forward": "prefill.compute",
    "output": "output",
}
IMAGE_STAGES = {"multimodal": "preprocess", "encoder": "encoder.compute", "ec_load": "ec.transfer"}
EVERY_DAY = ("receive", "forward")  # one of each process
# Of a delay that stops a process once nothing more can be known than that; where it waits, not even that.
SLEEPS = ("process_pause", "not_known")


class LikeRequests:
    """Requests of one kind that were sent to `bench`; they are the window of what is explained later."""

    def __init__(
        self, bench: LiveDeployment, url: str = "", count: int = LIKE, **fields: Any
    ) -> None:
        self.bench, self.url, self.fields = bench, url or bench.front_url, fields
        self.since = datetime.now(timezone.utc)
        self.sent = [self.time_one() for _ in range(count)]

    def send_one(self, **fields: Any) -> str:
        """One more, which is new to every cache; returns its ID. fields: what is other than usual."""
        return str(self.time_one(**fields).request_id)

    def delay_one(self, place: str) -> str:
        """One more with a delay in this place; its ID."""
        with self.bench.control.inject_delay(place, DELAY_MS):
            return self.send_one()

    def trace_one(self, **fields: Any) -> tuple[str, str]:
        """One more; its ID and that of its trace."""
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

    def run_explain(self, *words: str) -> Any:
        """What `ttft-otel explain --json` says of the window or a request in it."""
        window = ("--db", str(self.bench.fleet.database), "--since", f"{self.since.isoformat()}..")
        result = CliRunner().invoke(cli.main, ["explain", *window, *words, "--json"])
        return json.loads(result.stdout)

    def explain(self, request_id: str) -> dict[str, Any]:
        """What it says of a request, once its spans of all servers are stored."""
        deadline = time.monotonic() + MAX_WAIT_S
        while True:
            reported: dict[str, Any] = self.run_explain("--request", request_id)
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
    first, told = reported["stages"][0], reported["sentences"]
    assert reported["unusual"] and first["share"] >= min_share, told
    assert first["name"].endswith(stage), told
    assert sum(each["share"] for each in reported["stages"]) == pytest.approx(1, abs=0.002)


@pytest.fixture(scope="module")
def texts() -> dict[str, LikeRequests]:
    """Like requests by the database of the deployment: one window serves many places."""
    return {}


@pytest.mark.parametrize("place", mark_repeated(TEXT_STAGES, {*TEXT_STAGES} - {*EVERY_DAY}))
def test_delays_of_a_text(epd: LiveDeployment, texts: dict[str, LikeRequests], place: str) -> None:
    """A delay in one place of the server is found, and has the answer for its stage."""
    database = str(epd.fleet.database)
    like = texts.get(database) or texts.setdefault(database, LikeRequests(epd))
    reported = like.explain(like.delay_one(place))
    check_stage(reported, TEXT_STAGES[place])
    assert reported["cause"]["kind"] in SLEEPS, reported["sentences"]
    top = reported["stages"][0]
    assert top["late_ms"] - top["typical_ms"] == pytest.approx(DELAY_MS, rel=0.25)


def test_delays_of_an_image(epd: LiveDeployment) -> None:
    """Media: what the processor, the encoder and the encoder cache took longer is told apart.

    An item that comes late is waited for as `ec.transfer`, and the queues have nothing of it.
    """
    like = LikeRequests(epd, count=FEWER_LIKE, image=True)
    for place, stage in IMAGE_STAGES.items():
        # The encoder and prefill_decode both prepare an image, so that its processor is late twice.
        check_stage(like.explain(like.delay_one(place)), stage, min_share=0.4)
    reported = like.explain(like.delay_one("ec_wait"))
    check_cause(reported, "slow_hop")
    assert reported["cause"]["stage"] == "prefill_decode.ec.transfer"
    late = {each["name"]: each["late_ms"] for each in reported["stages"]}
    waited = late["prefill_decode.ec.transfer"]
    queued = sum(late.get(f"prefill_decode.{name}", 0.0) for name in stages.QUEUE_STAGES)
    assert waited >= DELAY_MS
    assert waited >= MIN_SHARE * (waited + queued), late


def test_remote_kv(pd: LiveDeployment) -> None:
    """KV blocks come late from the prefill instance, of a prompt that fills some."""
    like = LikeRequests(pd, count=FEWER_LIKE, words=300)
    reported = like.explain(like.delay_one("kv_wait"))
    check_cause(reported, "slow_hop")
    assert reported["cause"]["stage"] == "decode.kv.transfer"


def test_the_wire(epd: LiveDeployment) -> None:
    """A delay between router and server is the hop's, and no server's."""
    with run_router_behind_proxies(epd) as (router, legs):
        like = LikeRequests(epd, url=router.url, count=FEWER_LIKE)
        legs["prefill_decode"].delay_s = DELAY_MS / 1000
        reported = like.explain(like.send_one())
    check_cause(reported, "slow_hop")
    assert reported["cause"]["stage"] == "router.hop.prefill_decode"


def test_window(epd: LiveDeployment) -> None:
    """The late requests of a window: the stage that was delayed ate the objective."""
    like = LikeRequests(epd, count=12 * LATE)
    names = [like.delay_one("dispatch") for _ in range(LATE)]
    like.explain(names[-1])  # until it is stored
    # Half of the delay is lateness then: what delays a single request besides is less than that of these.
    reported = like.run_explain("--slo", str(DELAY_MS / 2))
    check_stage(reported, "dispatch")
    # What other tests asked of this server is the time before, in which some may have been later.
    assert reported["cause"]["kind"] in (*SLEEPS, "nothing"), reported["sentences"]
    assert reported["requests"]["late"] >= LATE and reported["slo"]["stages"][0]["share"] >= 0.5
    assert reported["slo"]["stages"][0]["name"].endswith("dispatch")
