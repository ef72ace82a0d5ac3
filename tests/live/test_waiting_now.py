# SPDX-License-Identifier: Apache-2.0
"""What waits now, on one real server: on /metrics and in `ttft-otel top`, also while its engine core hangs.

The server of `small` has few places, tokens and KV blocks; how many wait is compared with vLLM's own count on
the same page.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from click.testing import CliRunner

from lab.session_processes import list_session_pids
from tests.live.bench import LiveDeployment
from tests.live.test_waits import STEP_MS, Fields, plan_holders
from ttft_otel.commands.top import top
from ttft_otel.model.names import metric_names

pytestmark = pytest.mark.timeout(900)  # what comes next is started meanwhile

WAITERS: Final = 2
HANG_S: Final = 2.0
PATIENCE_S: Final = 60.0
OURS = re.compile(rf'^{metric_names.WAITING}{{reason="(\w+)"}} ([\d.]+)$', re.M)
VLLMS = re.compile(r"^vllm:num_requests_waiting\{.*\} ([\d.]+)$", re.M)


def read_waiting(bench: LiveDeployment) -> tuple[dict[str, int], int]:
    """Our counts that are not 0, and vLLM's one, from one page."""
    with urllib.request.urlopen(f"{bench.front_url}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    ours = {reason: int(float(number)) for reason, number in OURS.findall(text)}
    return {reason: n for reason, n in ours.items() if n}, sum(
        map(int, map(float, VLLMS.findall(text)))
    )


def ask_top(bench: LiveDeployment) -> dict[str, Any]:
    """What `ttft-otel top --json` says of the server."""
    done = CliRunner().invoke(top, ["--server", bench.front_url, "--json"])
    assert done.exit_code == 0, done.output
    (view,) = json.loads(done.output)
    return dict(view)


@contextmanager
def keep_waiting(bench: LiveDeployment, holders: list[Fields], waiter: Fields) -> Iterator[None]:
    """While WAITERS requests wait behind the holders, by vLLM's own count; steps are slow meanwhile."""
    with bench.control.inject_delay("forward", STEP_MS), ExitStack() as stack:
        for each in holders:
            stack.enter_context(bench.run_request(**each))
        pool = stack.enter_context(ThreadPoolExecutor(WAITERS))
        for _ in range(WAITERS):
            pool.submit(bench.send_request, bench.front_url, **{"max_tokens": 2, **waiter})
        yield


def wait_until_it_waits(bench: LiveDeployment) -> tuple[dict[str, int], int]:
    """The first page on which both count WAITERS; the last one when time is up.

    Who has come within a step waits for its end first (`in_step`), and is looked at again after it.
    """
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        found = read_waiting(bench)
        if sum(found[0].values()) == found[1] == WAITERS and "in_step" not in found[0]:
            return found
        time.sleep(0.05)
    return found


def test_the_reason_is_on_the_page(small: LiveDeployment) -> None:
    """While requests wait, /metrics counts as many as vLLM does, under the reason that was made."""
    with keep_waiting(small, *plan_holders(small, "kv_blocks")):
        ours, vllms = wait_until_it_waits(small)
    assert (ours, vllms) == ({"kv_blocks": WAITERS}, WAITERS)
    assert read_waiting(small) == ({}, 0)


def test_a_stopped_engine_core_shows_while_it_stands(small: LiveDeployment) -> None:
    """The oldest wait grows, reasons and holders stay with their age; all is 0 when it has gone on."""
    pids = list_session_pids(small.fleet.servers["mono"].pid)
    (pid,) = [each for each in pids if b"EngineCore" in Path(f"/proc/{each}/cmdline").read_bytes()]
    with keep_waiting(small, *plan_holders(small, "max_num_seqs")):
        wait_until_it_waits(small)
        before = ask_top(small)
        assert before["waiting"] == {"max_num_seqs": WAITERS} and before["age_s"] < 1
        assert {each["kind"] for each in before["holders"]} == {"decode"}
        os.kill(pid, signal.SIGSTOP)
        try:
            first = ask_top(small)
            time.sleep(HANG_S)
            second = ask_top(small)
        finally:
            os.kill(pid, signal.SIGCONT)
    assert first["pending"] == second["pending"] == WAITERS
    for key in ("oldest_s", "age_s"):
        assert HANG_S <= second[key] - first[key] < HANG_S + 5
    assert second["waiting"] == before["waiting"]
    held_by = [[each["request_id"] for each in view["holders"]] for view in (before, second)]
    assert held_by[0] == held_by[1]
    after = ask_top(small)
    assert (after["pending"], after["oldest_s"], after["waiting"], after["age_s"]) == (0, 0, {}, 0)
    assert small.sum_metric(f"{metric_names.HOOK_ERRORS}_total") == 0
