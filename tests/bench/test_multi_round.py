# SPDX-License-Identifier: Apache-2.0
"""How a load of conversations ends."""

from __future__ import annotations

from time import monotonic

from bench.conftest import RunBench
from bench.scripted_server import ServerScript, run_scripted_server


def test_used_up(bench: RunBench) -> None:
    """--requests ends the run with its last answer, whoever still waits for a next question."""
    words = "--num-users 2 --num-rounds 3 --qps 2 --requests 8 --time 60"
    with run_scripted_server(ServerScript(first_token_ms=[100.0], token_count=2)) as server:
        start = monotonic()
        found = bench("--url", server.url, "--dataset multi-round", words)
        took = monotonic() - start
        notes = server.fetch_notes()

    run = found["targets"][0]["runs"][0]
    assert (len(notes), run["succeeded"], run["unfinished"], run["stopped"]) == (8, 8, 0, False)
    assert took < 20, "8 questions at 2 a second take some 4 s"


def test_used_up_at_once(bench: RunBench) -> None:
    """A user that waits for room when the last request leaves sends none, and does not stay either."""
    words = "--num-users 6 --num-rounds 2 --qps 100 --requests 3 --time 60"
    with run_scripted_server(ServerScript(first_token_ms=[300.0], token_count=1)) as server:
        start = monotonic()
        load = ("--dataset multi-round", words, "--max-unfinished 1")
        found = bench("--url", server.url, *load)
        took = monotonic() - start

    assert found["targets"][0]["runs"][0]["started"] == 3
    assert took < 20
