# SPDX-License-Identifier: Apache-2.0
"""Containers that are killed and an engine that is restarted: everything comes back and works."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.containers.conftest import ContainerStack, wait_for

pytestmark = pytest.mark.full

PLAIN = ("collector", "tempo", "prometheus", "grafana")


def test_each_killed_container_comes_back(stack: ContainerStack) -> None:
    """kill -9 of one after the other; then a trace passes every hop again."""
    stack.start("plain")
    for service in PLAIN:
        pid = int(stack.inspect_container(service, "{{.State.Pid}}"))
        os.kill(pid, signal.SIGKILL)
        wait_for(
            lambda service=service, pid=pid: (
                stack.inspect_container(service, "{{.State.Pid}}") not in ("0", str(pid))
            )
        )
        assert stack.inspect_container(service, "{{.RestartCount}}") == "1"
        stack.wait_until_up(PLAIN)
    stack.check_smoke()


def test_the_collectors_queue_outlives_its_kill(stack: ContainerStack) -> None:
    """Traces that Tempo has not taken yet are on the volume: a killed collector sends them later."""
    stack.start("plain")
    stack.run_compose("stop", "--timeout", "5", "tempo")
    trace_id = stack.send_smoke_trace()
    # Written to disk before it is confirmed; a moment for the batch to get there.
    time.sleep(3)
    pid = int(stack.inspect_container("collector", "{{.State.Pid}}"))
    os.kill(pid, signal.SIGKILL)
    stack.run_compose("start", "tempo")
    stack.wait_until_up(PLAIN)

    wait_for(lambda: trace_id in stack.find_traces("{}"), 150)


def test_an_engine_that_restarts(stack: ContainerStack) -> None:
    """What ran before runs again, with its data, and without anybody's help."""
    stack.start("plain")
    stack.check_smoke()
    traces = stack.find_traces("{}")
    assert traces
    stack.engine.stop_engine()
    stack.engine.start()
    stack.wait_until_up(PLAIN)

    stack.check_smoke()
    wait_for(lambda: traces <= stack.find_traces("{}"))
