# SPDX-License-Identifier: Apache-2.0
"""Requests whose front-end has no hooks: the engine core sends a record of its own, and only of these."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tracing_fakes import MemorySender

from hooks.fakes import HEADERS, FakeEngineCore, make_request
from hooks.process import CORE
from ttft_otel.hooks import api_server
from ttft_otel.hooks.engine_core import tracer
from ttft_otel.model import breakdown
from ttft_otel.model.names import header_names, keys
from ttft_otel.model.record import Ttft
from ttft_otel.tracing import clock as clocks
from ttft_otel.tracing import settings
from ttft_otel.tracing.context import TraceContext
from ttft_otel.tracing.request_trace import identity
from ttft_otel.tracing.settings import Settings

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
NOW_S = 1_800_000_000.0  # the wall clock stands still
FORWARD_US = 700


@pytest.fixture(autouse=True)
def own_process(
    monkeypatch: pytest.MonkeyPatch, blank_identity: None, records: MemorySender
) -> Iterator[None]:
    """An engine core's process: nothing is known of its server, and no exporter is started."""
    monkeypatch.setattr(api_server, "time", SimpleNamespace(time=lambda: NOW_S))
    monkeypatch.setattr(records, "start_exporter", lambda: None)
    monkeypatch.setattr(settings, "_frozen", [Settings(on=True)])
    tracer._begin_sending.cache_clear()
    yield
    assert not CORE.own_reports


def make_own(name: str = "chatcmpl-1", headers: Any = None, **more: Any) -> Any:
    """A request as a front-end without hooks sends it."""
    sampling = SimpleNamespace(extra_args=None)
    fields = {"sampling_params": sampling, "arrival_time": NOW_S - 0.002} | more
    made = make_request(name, **fields)
    made.trace_headers = headers
    return made


def answer(core: FakeEngineCore, *requests: Any, ends: bool = False) -> Any:
    """They come, and one step has their whole prompts; gives the outputs' trace headers."""
    core.add(*requests)
    names = tuple(each.request_id for each in requests)
    core.clock.tick(300)
    step = core.schedule(names, dict.fromkeys(names, 10))
    begun = core.clock.tick(100)
    at = core.clock.tick(FORWARD_US)
    core.clock.tick(50)
    record = (clocks.get_boot_number(), at, 0, breakdown.CODE_FORWARD, begun, at)
    return core.update(step, record=record, **{"finish" if ends else "first": names})


def read_ttft(records: MemorySender) -> Ttft:
    """The only part of the only record."""
    (record,) = records.kept
    assert record.ttft is not None and record.server is None
    return record.ttft


def test_stages(core: FakeEngineCore, records: MemorySender) -> None:
    """Stages from the core's input on; before that, what the front-end's clock says, and no stage."""
    out = answer(core, make_own())
    ttft, (record,) = read_ttft(records), records.kept

    assert {**ttft.stages} == {
        "prefill.queue": 800, "dispatch": 100, "prefill.compute": FORWARD_US, "output": 50,
    }  # fmt: skip
    assert ttft.unattributed == 2000
    assert ttft.end == 2000 + 800 + 100 + FORWARD_US + 50
    assert record.attributes[keys.ENGINE_ONLY] is True
    assert keys.STREAMING not in ttft.attributes and keys.STREAM not in record.attributes
    assert record.outermost and record.role == "mono"
    assert out["chatcmpl-1"] is None  # nothing of ours for a front-end that does not know it
    assert core.requests["chatcmpl-1"].trace_headers is None


@pytest.mark.parametrize("ends", [False, True], ids=["goes on", "one token"])
def test_tree(core: FakeEngineCore, records: MemorySender, ends: bool) -> None:
    """Without anybody above it the `ttft` span is the root, under which the stages are."""
    answer(core, make_own(), ends=ends)
    root, *below = records.build_spans()
    stages = [each for each in below if keys.STAGE in (each.attributes or {})]
    above = [each.parent.span_id for each in stages if each.parent]

    assert root.name == "ttft" and root.parent is None
    assert len(above) == 5 and {*above} == {root.context.span_id}


def test_trace_headers(core: FakeEngineCore, records: MemorySender) -> None:
    """A front-end that hands trace headers on: its span is above ours, and gets its headers back."""
    core = type(core)(core.clock, tracing="http://collector:4317")
    answer(core, make_own(headers={header_names.TRACEPARENT: PARENT}))
    (root, *_) = records.build_spans()

    assert root.context.trace_id == int(TRACE_ID, 16)
    assert root.parent is not None and root.parent.span_id == int(SPAN_ID, 16)
    assert root.parent.is_remote


@pytest.mark.parametrize(
    ("name", "request_id"),
    [
        (f"chatcmpl-{PARENT}", PARENT),
        (f"cmpl-{PARENT}-0", PARENT),
        (f"{PARENT}-encode-1", PARENT),
        (f"chatcmpl-x{PARENT}", f"chatcmpl-x{PARENT}"),
    ],
)
def test_behind_our_router(
    core: FakeEngineCore, records: MemorySender, name: str, request_id: str
) -> None:
    """Our router's request ID names its span; then this is not the client's TTFT."""
    answer(core, make_own(external_req_id=name))
    (record,) = records.kept

    is_routed = request_id == PARENT
    assert record.request_id == request_id
    assert (record.trace_id == TRACE_ID and record.span_id == SPAN_ID) is is_routed
    assert record.outermost is not is_routed


def test_router_not_sampled(core: FakeEngineCore, records: MemorySender) -> None:
    """The router's decision holds."""
    answer(core, make_own(f"chatcmpl-{PARENT[:-1]}0"))

    assert not records.kept


def test_only_unmarked(core: FakeEngineCore, records: MemorySender) -> None:
    """Beside requests of an API server with hooks, traced and untraced, only the unmarked one is ours."""
    others = make_request("traced"), make_request("untraced", traced=False)
    out = answer(core, *others, make_own("bare"))

    assert [each.request_id for each in records.kept] == ["bare"]
    assert list(out["traced"]) == [header_names.CARRIER_KEY]
    assert not out["untraced"] and not out["bare"]
    assert HEADERS[header_names.CARRIER_KEY] not in out["traced"].values()


@pytest.mark.parametrize(
    "more",
    [
        {"sampling_params": None},  # pooling
        {"abort_immediately": True},  # frees another instance's blocks
        {"resumable": True},
    ],
)
def test_no_generation(core: FakeEngineCore, more: dict[str, Any]) -> None:
    """What makes no first token, or several, has no record."""
    made = make_own(**more)
    core.add(made)

    assert not hasattr(made, "_ttft_timeline") and made.trace_headers is None


@pytest.mark.parametrize(
    ("address", "arrival"),
    [
        ("tcp://10.0.0.1:9", NOW_S - 0.002),  # another clock
        ("ipc:///tmp/a", NOW_S + 1),
        ("ipc:///tmp/a", 0.0),
    ],
)
def test_unbelievable_arrival(
    core: Any, records: MemorySender, address: str, arrival: float
) -> None:
    """The front-end's arrival time counts only where both have one clock, and it can be right."""
    core.addresses = SimpleNamespace(inputs=[address])
    answer(core, make_own(arrival_time=arrival))

    assert read_ttft(records).unattributed == 0


def test_aborted(core: FakeEngineCore, records: MemorySender) -> None:
    """A request whose client left is told with the stage in which it was; nobody could ask for it."""
    core.add(make_own())
    core.clock.tick(40)
    core.schedule()
    core.clock.tick(60)
    core.free("chatcmpl-1")
    ttft = read_ttft(records)

    assert (ttft.error, ttft.died) == (keys.ERROR_CANCELLED, "prefill.queue")
    assert ttft.end == 2000 + 500 + 100
    assert not CORE.aborted


def test_ended_by_the_engine(
    core: FakeEngineCore, records: MemorySender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An only output without a token is an error of the engine."""
    monkeypatch.setattr(tracer.vllm_fields, "lacks_first_token", lambda output: True)
    answer(core, make_own(), ends=True)

    assert read_ttft(records).error == keys.ERROR_ENGINE


def test_bounded(core: FakeEngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest of too many is forgotten, as one that never reaches the scheduler would stay."""
    monkeypatch.setattr(tracer, "MAX_AWAITING_REQUESTS", 2)
    core.add(*(make_own(str(number)) for number in range(4)))

    assert list(CORE.own_reports) == ["2", "3"]
    CORE.own_reports.clear()


def test_counted(
    core: FakeEngineCore, records: MemorySender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unsampled one goes to the exporter where metrics count all requests."""
    chosen = Settings(on=True, sampler="always_off", metrics=True)
    monkeypatch.setattr(settings, "_frozen", [chosen])
    answer(core, make_own())

    assert read_ttft(records).stages
    assert not records.build_spans()


def test_start_line(core: FakeEngineCore, caplog: pytest.LogCaptureFixture) -> None:
    """Said once, with the identity of the instance."""
    core.vllm_config.kv_transfer_config = SimpleNamespace(
        kv_role="kv_producer", kv_connector="NixlConnector"
    )
    with caplog.at_level(logging.INFO, "ttft_otel"):
        core.add(make_own("a"), make_own("b"))

    assert caplog.text.count("front-end without its hooks") == 1
    assert identity.role == "prefill" and identity.kv_connector == "NixlConnector"
    assert {each.role for each in CORE.own_reports.values()} == {"prefill"}
    CORE.own_reports.clear()


def test_holder(core: FakeEngineCore) -> None:
    """Another request that it holds up can name it: its traceparent is that of its `ttft` span."""
    made = make_own()
    core.add(made)
    (report,) = CORE.own_reports.values()

    assert isinstance(report.context, TraceContext)
    assert made._ttft_headers[header_names.TRACEPARENT] == report.context.format_traceparent()
    CORE.own_reports.clear()
