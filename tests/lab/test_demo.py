# SPDX-License-Identifier: Apache-2.0
"""The demo without servers: what it asks, how it judges, what it shows, what it removes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from lab import compat, demo
from lab.demo import DemoRequest, RequestObservation
from lab.ttft_client import TimedRequest
from ttft_otel.model.endpoints import CHAT_PATH, COMPLETIONS_PATH, RESPONSES_PATH
from ttft_otel.model.names import header_names, keys, span_names
from ttft_otel.report.report_types import StoredSpan
from ttft_otel.report.store.database_reader import StoredTrace


def build_server_spans(
    role: str, span: str, parent: str, parts: dict[str, int]
) -> list[StoredSpan]:
    """A server span and the ttft span in it, whose stages add up."""
    have = {keys.name_stage_attribute(name): us for name, us in parts.items()}
    have |= {keys.UNATTRIBUTED_US: 0, keys.TOTAL_US: sum(parts.values())}
    more = {"service": role, "scope": span_names.SCOPE}
    attributes = {**have, keys.ROLE: role}
    return [
        StoredSpan("t", span, parent, "POST", demo.SERVER_KIND, 0, 9, **more),
        StoredSpan(
            "t", f"{span}-ttft", span, span_names.TTFT, 1, 0, 9, **more, attributes=attributes
        ),
    ]


def build_routed_spans(images: int = 1) -> list[StoredSpan]:
    """The spans of one routed request that closes."""
    legs = {f"e{number}": "encode" for number in range(images)} | {"pd": "prefill_decode"}
    spans = build_server_spans("router", "r", "", {"router.receive": 30, "encode.preprocess": 400})
    for name, role in legs.items():
        spans.append(StoredSpan("t", f"c-{name}", "r", "POST", 3, 0, 9))
        spans += build_server_spans(role, name, f"c-{name}", {"receive": 100, "preprocess": 400})
    return spans


def build_observation(
    spans: Sequence[StoredSpan], images: int = 1, status: int = 200
) -> RequestObservation:
    """That request as the demo sees it."""
    return RequestObservation(
        "demo-01", status, 1 + images, StoredTrace(spans[0].trace_id, tuple(spans), ())
    )


def test_questions() -> None:
    """At least 24 requests, of every kind, under names of their own; a picture twice."""
    asked = demo.build_demo_requests()
    pictures = [each.request.pictures for each in asked]

    assert len(asked) >= 24
    assert len({each.name for each in asked}) == len(asked)
    assert {each.request.path for each in asked} == {CHAT_PATH, COMPLETIONS_PATH, RESPONSES_PATH}
    assert {each.request.stream for each in asked} == {True, False}
    assert {len(each) for each in pictures} == {0, 1, 2}
    assert pictures.count((1,)) == 2
    waves = [each.wave for each in asked]
    assert max(waves.count(wave) for wave in waves) == 4


def test_legs() -> None:
    """How many servers a request passes depends on the deployment, its images and its path."""
    text, image = TimedRequest(), TimedRequest(pictures=(1, 2))
    plain = TimedRequest(path=RESPONSES_PATH)
    found = {
        shape: [DemoRequest("", each, 0).count_legs(shape) for each in (text, image, plain)]
        for shape in demo.TOPOLOGIES
    }

    assert found == {"epd": [1, 3, 1], "pd": [2, 2, 1], "epd3": [2, 4, 1]}


def test_the_connector_is_about_encodings() -> None:
    """Where there is no encoder the flag is refused, with the reason."""
    found = CliRunner().invoke(
        demo.run_demo, ["--topology", "pd", "--ec-connector", demo.EC_CPU_CONNECTOR]
    )

    assert found.exit_code == 2
    assert "has no encoder" in found.output


def test_warming() -> None:
    """The warm-up has the same shape, shares no picture with the demo and leaves no trace."""
    asked = demo.build_demo_requests()
    warm = [each for wave in demo.build_warmup_waves(asked) for each in wave]
    mine = {seed for each in asked for seed in each.request.pictures}

    assert [each.path for each in warm] == [each.request.path for each in asked]
    assert all(each.headers[header_names.TRACEPARENT].endswith("-00") for each in warm)
    assert not mine & {seed for each in warm for seed in each.pictures}


@pytest.mark.parametrize("images", [0, 1, 2])
def test_closed(images: int) -> None:
    """A whole trace with exact sums has no fault."""
    assert demo.judge_requests([build_observation(build_routed_spans(images), images)]) == {}
    # A consumer that has encoded nothing again says so.
    none_twice = change_span(-1, attributes={keys.EC_RECOMPUTED_ITEMS: 0})
    assert demo.find_faults(none_twice) == []


def change_span(place: int, **fields: object) -> RequestObservation:
    """A routed request of which one span is other; attributes are added to those that it has."""
    spans = build_routed_spans()
    if added := fields.pop("attributes", None):
        fields["attributes"] = {**spans[place].attributes, **added}  # type: ignore[dict-item]
    spans[place] = replace(spans[place], **fields)  # type: ignore[arg-type]
    return build_observation(spans)


ENCODE = 4  # the place of the encoder's ttft span
PREPROCESS = keys.name_stage_attribute("preprocess")


@pytest.mark.parametrize(
    ("observed", "fault"),
    [
        (build_observation(build_routed_spans(), status=503), "was answered with 503"),
        (RequestObservation("demo-01", 200, 0, None), "no span"),
        (build_observation(build_routed_spans(1), images=2), "not whole"),
        (change_span(-1, parent_id="f" * 16), "parents are missing"),
        # A sum that is off by one microsecond, in any span.
        (change_span(ENCODE, attributes={keys.TOTAL_US: 501}), "stages and unattributed are"),
        (change_span(ENCODE, attributes={PREPROCESS: 401}), "stages and unattributed are"),
        (change_span(ENCODE, attributes={keys.UNATTRIBUTED_US: 7}), "7 µs unattributed"),
        # An image that an encoder had, with number and remedy.
        (
            change_span(-1, attributes={keys.EC_RECOMPUTED_ITEMS: 2}),
            "prefill_decode: encoded 2 media items that an encoder had encoded",
        ),
    ],
)
def test_faults(observed: RequestObservation, fault: str) -> None:
    """What is wrong with a request or its trace is told."""
    assert fault in "; ".join(demo.find_faults(observed))


def test_clean(tmp_path: Path) -> None:
    """Files of an earlier demo are removed, others are kept."""
    for name in ("report.json", "spans.db-wal", "mine.txt"):
        (tmp_path / name).touch()
    (tmp_path / "logs").mkdir()

    demo.remove_old_outputs(tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_schema() -> None:
    """A report that does not match its schema is refused."""
    line = dict.fromkeys(("p50", "p95", "p99", "mean"), 1.0) | {"count": 1}
    summary = {
        **{"count": 1, "failed": 0, "closed": True, "ttft": line, "missing": [], "by_kind": {}},
        **{"stages": {"unattributed": line}, "before": None, "recomputed": []},
        **{"client_ttft": None, "client_minus_ttft": None},
    }

    assert demo.validate_report({"requests": [], "summary": summary}) == []
    assert demo.validate_report({"requests": [{}], "summary": {**summary, "missing": ["a"]}})


def test_answer() -> None:
    """Where the time went over all roles, and the slowest."""
    rows = [
        {
            **{"request_id": f"demo-0{number}", "kind": "text", "ttft_ms": ms},
            "stages": {
                "encode.dispatch": ms / 4,
                "prefill.dispatch": ms / 4,
                "prefill.ipc": ms / 8,
            },
        }
        for number, ms in enumerate((100.0, 300.0))
    ]
    report = {"requests": rows, "summary": {"ttft": {"mean": 200.0}}}

    where, slowest = demo.list_answer(report, "Own size.")

    assert where == "Where the time went: dispatch 50%, ipc 12% of a mean TTFT of 200 ms."
    assert slowest == "The slowest was demo-01 (text), 300 ms. Own size."
    assert demo.list_answer({"requests": []}, "") == ["No trace of any request has come."]


STAGE_SHIFTS = {"ipc": 80.2, "output": 0.4, "unattributed": 0.0}


@pytest.mark.parametrize(
    "moved, missing, state, note",
    [
        (STAGE_SHIFTS, {}, compat.STATE_WORKS, "+80.2 ms"),
        ({"unattributed": 80.0}, {"engine.input": "gone"}, "unattributed", "engine.input: gone"),
        ({"unattributed": 80.0}, {}, "unattributed", "no target is missing"),
        ({"output": 80.0}, {}, compat.STATE_WRONG, "ipc +0.0 ms; output +80.0"),
        (
            {**STAGE_SHIFTS, "output": 20.0},
            {},
            compat.STATE_WRONG,
            "ipc +80.2 ms; output +20.0",
        ),
    ],
)
def test_judge(moved: dict[str, float], missing: dict[str, str], state: str, note: str) -> None:
    """A delay is in its stage, unattributed with the target named, or somewhere wrong."""
    cell = compat.judge_shift(moved, "ipc", 80.0, 5.0, missing)

    assert (cell.state, cell.note) == (state, note)


def test_markdown() -> None:
    """One column for each release; what is not a tick is explained below."""
    cells = {
        "ipc": compat.MatrixCell(compat.STATE_WORKS, "+80.0 ms"),
        "queue": compat.MatrixCell("wrong", "why"),
    }
    rows = [
        compat.ReleaseRow(
            "1.0", {"text": "", "image": ""}, cells, {}, (), {"text": 0.5, "image": 0.0}
        ),
        compat.ReleaseRow("2.0", {"text": "", "image": "status 500"}, {}, {"engine.input": "gone"}),
    ]
    table = compat.format_release_matrix(rows)

    assert "| `ipc` (ipc) | ✓ | not tried |" in table
    assert "| text request | closes, 0.500 ms unattributed | closes |" in table
    assert "| image request | closes | **open** |" in table
    assert [row.closed for row in rows] == [True, False]
    assert [line.split(":")[0] for line in compat.list_remarks(rows)] == [
        "1.0",
        "2.0",
        "2.0",
    ]
    assert json.dumps(table)


def test_moved() -> None:
    """Medians are compared; a stage that a request lacks counts as nothing there."""
    plain = [{"ipc": 1000}, {"ipc": 3000}, {"ipc": 2000}]

    assert compat.compute_stage_shifts(plain, [{"ipc": 82000, "egress": 500}]) == {
        "egress": 0.5,
        "ipc": 80.0,
    }
