# SPDX-License-Identifier: Apache-2.0
"""The engine core's input thread, and its answer to where an aborted request was."""

from __future__ import annotations

from hooks.fakes import FakeEngineCore, make_request
from ttft_otel import testing
from ttft_otel.model.names import header_names
from ttft_otel.tracing import carrier


def test_entry_counts(core: FakeEngineCore, clock: testing.FakeClock) -> None:
    """IPC ends at the entry of the call, not at its end."""
    made = core.preprocess_add_request(make_request("a"))[0]

    assert clock.at == 1_000_500
    assert made._ttft_timeline.added == 1_000_000


def test_untraced(core: FakeEngineCore) -> None:
    """What the API server has marked as untraced has no timeline, and vLLM's own headers alone."""
    made = make_request("a", traced=False)
    made.trace_headers = {header_names.TRACEPARENT: "x", **made.trace_headers}
    for request, left in (
        (made, {header_names.TRACEPARENT: "x"}),
        (make_request("b", traced=False), None),
    ):
        arrived = core.preprocess_add_request(request)[0]

        assert not hasattr(arrived, "_ttft_timeline")
        assert arrived.trace_headers == left


def test_utility(core: FakeEngineCore) -> None:
    """The engine core answers over its own utility channel; an unknown request is an empty answer."""
    core.preprocess_add_request(make_request("a"))

    assert getattr(core, carrier.ABORTED_QUERY)("unknown") == ""
