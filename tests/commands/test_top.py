# SPDX-License-Identifier: Apache-2.0
"""`ttft-otel top`: what it makes of servers' /metrics, also of one that hangs or does not answer."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator

import pytest
from click.testing import CliRunner
from rich.console import Console

from lab.http_servers import HttpServerThread, SilentHandler
from ttft_otel.commands import top
from ttft_otel.model import endpoints

# As vLLM 0.32 writes it: two engines, and our own gauges beside.
PAGE = """# TYPE ttft_otel_pending gauge
ttft_otel_pending {pending}
# TYPE ttft_otel_oldest_pending_seconds gauge
ttft_otel_oldest_pending_seconds {oldest}
# TYPE ttft_otel_waiting gauge
ttft_otel_waiting{{reason="kv_blocks"}} 3
ttft_otel_waiting{{reason="lora"}} 0
# TYPE ttft_otel_waiting_age_seconds gauge
ttft_otel_waiting_age_seconds {age}
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="m"}} 2.0
vllm:num_requests_running{{engine="1",model_name="m"}} 1.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{{engine="0",reason="capacity"}} 3.0
vllm:num_requests_waiting_by_reason{{engine="1",reason="capacity"}} 1.0
vllm:num_requests_waiting_by_reason{{engine="0",reason="deferred"}} 0.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{engine="0",le="0.1"}} {fast}
vllm:time_to_first_token_seconds_bucket{{engine="0",le="1.0"}} {count}
vllm:time_to_first_token_seconds_bucket{{engine="0",le="+Inf"}} {count}
vllm:time_to_first_token_seconds_count{{engine="0"}} {count}
vllm:time_to_first_token_seconds_sum{{engine="0"}} {total}
"""


def scrape(now: float, pending: int, oldest: float, count: int, total: float) -> top.Scrape:
    """A page at `now` seconds, of whose `count` first tokens half came within 0.1 s."""
    text = PAGE.format(
        pending=pending, oldest=oldest, age=0, count=count, fast=count // 2, total=total
    )
    return top.parse_page(text, now)


def test_last_minute() -> None:
    """TTFTs are those between the oldest scrape of the last minute and now, of all engines together."""
    watch = top.ServerWatch("http://a/metrics")
    watch.add(scrape(0.0, 0, 0.0, 1000, 1.0))
    watch.add(scrape(50.0, 0, 0.0, 1000, 1.0))
    view = watch.add(scrape(100.0, 4, 2.5, 1010, 6.0))

    assert (view.server, view.pending, view.oldest_s, view.running) == ("http://a", 4, 2.5, 3)
    assert (view.waiting, view.age_s, view.queued) == ({"kv_blocks": 3}, 0.0, {"capacity": 4})
    assert view.ttft == {"count": 10, "mean": 0.5, "p99": 1.0} and view.window_s == 50.0
    # Of a server whose engine cores cannot be asked vLLM's own count is shown.
    view = top.ServerView("http://a", pending=2, queued={"capacity": 4})
    assert top.describe_queue(view, hangs=False).plain == "4 capacity"


@pytest.mark.parametrize(("pending", "hangs"), [(3, True), (0, False)])
def test_hang(pending: int, hangs: bool) -> None:
    """Requests that wait while no first token comes are told as such; an idle server is not."""
    watch = top.ServerWatch("http://a")
    for second in range(12):
        view = watch.add(scrape(float(second), pending, float(second), 1000, 1.0))
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(top.build_table([view]))

    assert (view.quiet_s >= top.HANG_S) is hangs
    assert ("no first token for 11 s" in console.export_text()) is hangs
    again = watch.add(scrape(12.0, pending, 1.0, 1001, 1.0))
    assert again.quiet_s == 0.0


KEY = "a key"
HOLDERS = [{"request_id": "cmpl-1", "kind": "decode", "held_s": 6.25, "tokens": 9}]


@pytest.fixture
def server() -> Iterator[str]:
    """A server whose engine core has not answered for 6 seconds; who holds up is told to those with KEY."""

    class MetricsHandler(SilentHandler):
        def do_GET(self) -> None:
            numbers = {"pending": 1, "oldest": 7.5, "age": 6.0, "count": 4, "fast": 2, "total": 2.0}
            if self.path != endpoints.WAITING_PATH:
                self.send_answer(200, PAGE.format(**numbers).encode())
            elif self.headers["authorization"] == f"Bearer {KEY}":
                self.send_answer(200, json.dumps([{"holders": HOLDERS}]).encode())
            else:
                self.send_answer(401)

    with HttpServerThread(MetricsHandler) as http:
        yield http.url


def test_json(server: str) -> None:
    """--json has one object for each server, in their order; the exit code says that one does not answer."""
    words = ["--server", server, "--server", "http://127.0.0.1:9", "--json"]
    done = CliRunner().invoke(top.top, words)
    found = json.loads(done.output)

    assert done.exit_code == 1
    assert [each["server"] for each in found] == [server, "http://127.0.0.1:9"]
    assert (found[0]["oldest_s"], found[0]["error"]) == (7.5, "")
    assert found[0]["ttft"] == {"count": 4, "mean": 0.5, "p99": 1.0}
    assert found[1]["error"] == "Connection refused" and found[1]["pending"] is None


@pytest.mark.parametrize("key", [KEY, "", "another"])
def test_once(server: str, key: str) -> None:
    """--once prints one table, for people, with an exit code of 0; holders for those who may know them."""
    env = {"COLUMNS": "160", top.VLLM_API_KEY: key}
    done = CliRunner().invoke(top.top, ["--server", server, "--once"], env=env)

    assert done.exit_code == 0
    assert "7.5 s" in done.output and "3 kv_blocks" in done.output and "500 ms" in done.output
    assert "as of 6 s ago" in done.output
    assert ("cmpl-1 decode 6.2 s" in done.output) is (key == KEY)
