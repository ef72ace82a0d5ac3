# SPDX-License-Identifier: Apache-2.0
"""W3C trace context, by the specification's own examples, and the SDK's sampling decisions."""

from __future__ import annotations

import subprocess
import sys

import pytest
from opentelemetry.sdk.trace import sampling

from ttft_otel.tracing import context
from ttft_otel.tracing.settings import Settings

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ON = Settings(on=True)


def test_continued() -> None:
    """A valid parent is continued, its state kept, its decision trusted."""
    made = context.start_context(f"00-{TRACE_ID}-{PARENT_ID}-01", "vendor=1", ON)

    assert (made.trace_id, made.parent_id, made.tracestate, made.sampled) == (
        TRACE_ID,
        PARENT_ID,
        "vendor=1",
        True,
    )
    assert made.span_id != PARENT_ID and len(made.span_id) == 16
    assert made.format_traceparent() == f"00-{TRACE_ID}-{made.span_id}-01"


@pytest.mark.parametrize(
    "bad",
    [
        "",
        f"00-{'0' * 32}-{PARENT_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"ff-{TRACE_ID}-{PARENT_ID}-01",
        f"00-{TRACE_ID.upper()}-{PARENT_ID}-01",
        f"00-{TRACE_ID}-{PARENT_ID}-01-more",
        f"00-{TRACE_ID}-{PARENT_ID}-01" + "x" * 200,
    ],
)
def test_malformed(bad: str) -> None:
    """What is malformed is ignored, with its state: a new trace starts."""
    made = context.start_context(bad, "vendor=1", ON)

    assert made.parent_id == "" and made.tracestate == ""
    assert len(made.trace_id) == 32 and int(made.trace_id, 16)
    assert made.trace_id != TRACE_ID


def test_future_version() -> None:
    """A later version's header is read as far as it is known."""
    made = context.start_context(f"cc-{TRACE_ID}-{PARENT_ID}-01-what-the-future-holds", "", ON)

    assert made.parent_id == PARENT_ID and made.sampled


@pytest.mark.parametrize("state", ["x=" + "y" * 600, "naïve=1"])
def test_state_bounded(state: str) -> None:
    """A state that is too long or not plain text is left out, the trace is continued."""
    made = context.start_context(f"00-{TRACE_ID}-{PARENT_ID}-01", state, ON)

    assert (made.parent_id, made.tracestate) == (PARENT_ID, "")


def test_untrusted() -> None:
    """Callers that are not trusted keep their trace id, not their sampling flag."""
    settings = Settings(on=True, trust_sampled=False, sampler="parentbased_always_off")
    made = context.start_context(f"00-{TRACE_ID}-{PARENT_ID}-01", "", settings)

    assert made.trace_id == TRACE_ID and made.parent_id == PARENT_ID and not made.sampled


def test_ratio_like_the_sdk() -> None:
    """Half the traces, and the same half as the SDK's sampler: traces stay whole across services."""
    settings = Settings(on=True, sampler="traceidratio", ratio=0.5)
    theirs = sampling.TraceIdRatioBased(0.5)
    for number in range(200):
        trace = f"{(number * 0x9E3779B97F4A7C15F39CC0605CEDC835 + 1) % (1 << 128):032x}"
        ours = context.start_context(f"00-{trace}-{PARENT_ID}-00", "", settings).sampled
        wanted = theirs.should_sample(None, int(trace, 16), "x").decision
        assert ours is (wanted is sampling.Decision.RECORD_AND_SAMPLE)


def test_ids_are_nobody_elses() -> None:
    """Whatever a host seeds, and in a forked child too, ids differ; their form is W3C's."""
    code = (
        "import os, random; from ttft_otel.tracing import context; context.new_span_id(); random.seed(0);"
        "child = os.fork(); child and os.waitpid(child, 0);"
        "os.write(1, f'{context.new_span_id()} {context.new_trace_id()} '.encode())"
    )
    runs = [subprocess.check_output([sys.executable, "-c", code], text=True) for _ in range(2)]
    ids = " ".join(runs).split()

    assert len(set(ids)) == len(ids) == 8
    assert {len(each) for each in ids} == {16, 32}
    assert set("".join(ids)) <= set("0123456789abcdef")
