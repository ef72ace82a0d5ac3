# SPDX-License-Identifier: Apache-2.0
"""What is posted to `serve`, and its database while somebody removes, replaces or lays it, or sets the clock.

Exports of any shape and size and alerts are stored or refused at a bounded cost; what was confirmed is
stored, and the log stays short.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from router import fake_instances, raw_http
from router.fake_instances import InstancePlan

from lab.http_servers import HttpServerThread, SilentHandler
from ttft_otel.commands.command_options import write_whole
from ttft_otel.model import stages
from ttft_otel.model.names import keys, span_names
from ttft_otel.report.breakdown_source import ExplainAnswer, ServeOptions
from ttft_otel.report.receive import alert_webhook, otlp_decoder, receiver
from ttft_otel.report.report_server import ReportServer, run_server
from ttft_otel.report.store.database_reader import open_reader
from ttft_otel.report.store.database_schema import StoreError
from ttft_otel.report.store.span_store import SpanStore


@contextmanager
def run_serve(folder: Path, grpc_port: int = -1, **more: Any) -> Iterator[ReportServer]:
    """Serve a database in `folder` on a free port. more: fields of ServeOptions."""
    servers: list[ReportServer] = []
    ready = Event()
    options = ServeOptions(folder / "spans.db", http_port=0, grpc_port=grpc_port, **more)
    thread = Thread(target=run_server, args=(options, lambda it: (servers.append(it), ready.set())))
    thread.start()
    assert ready.wait(30)
    try:
        yield servers[0]
    finally:
        servers[0].close()
        thread.join(30)


ELEMENTS = 2_000_000  # of two bytes each: 4 MB, the most that one export may have
# Of the time that protobuf's C code takes for the same bytes: 0.7 to 3 times were seen, and 10 to 40 before.
MAX_RATIO = 8.0
SPAN_COUNT = 5000


def encode_field(number: int, data: bytes) -> bytes:
    """A field of a protobuf message that has a length."""
    length, rest = b"", len(data)
    while rest > 127:
        length += bytes([rest & 127 | 128])
        rest >>= 7
    return bytes([number << 3 | 2]) + length + bytes([rest]) + data


def encode_span(more: bytes, number: int = 1) -> bytes:
    """A span with valid IDs and times."""
    ids = encode_field(1, b"\1" * 16) + encode_field(2, number.to_bytes(8, "big"))
    return ids + b"\x39" + b"\1" * 8 + b"\x41" + b"\1" * 8 + more


def encode_export(span: bytes = b"", scope: bytes = b"", resource: bytes = b"") -> bytes:
    """An export of one span, with more fields of each message."""
    spans = encode_field(2, encode_field(1, scope) + encode_field(2, encode_span(span)))
    return encode_field(1, encode_field(1, resource) + spans)


def encode_value(number: int, data: bytes) -> bytes:
    """An attribute of a span whose value has this field."""
    return encode_field(9, encode_field(1, b"a") + encode_field(2, encode_field(number, data)))


def repeat_empty(tag: int) -> bytes:
    """So many empty elements."""
    return bytes([tag, 0]) * ELEMENTS


@pytest.mark.parametrize(
    ("build", "is_stored"),
    [
        (lambda: repeat_empty(0x0A), False),  # resource spans
        (lambda: encode_field(1, repeat_empty(0x12)), False),  # scope spans
        (lambda: encode_field(1, encode_field(2, repeat_empty(0x12))), False),  # spans
        (lambda: encode_export(repeat_empty(0x4A)), True),  # attributes
        (lambda: encode_export(repeat_empty(0x5A)), True),  # events
        (lambda: encode_export(repeat_empty(0x6A)), True),  # links
        (lambda: encode_export(encode_field(11, repeat_empty(0x1A))), True),  # of an event
        (lambda: encode_export(scope=repeat_empty(0x1A)), True),
        (lambda: encode_export(resource=repeat_empty(0x0A)), True),
        (lambda: encode_export(encode_value(5, repeat_empty(0x0A))), True),  # values of a list
        (lambda: encode_export(encode_value(6, repeat_empty(0x0A))), True),  # values of a map
    ],
)
def test_empty_elements(build: Callable[[], bytes], is_stored: bool) -> None:
    """Whatever is repeated, it costs the decoder no time; a span that has too much of it is stored, cut."""
    data = build()
    assert len(data) <= 4 << 20
    start_s = time.thread_time()
    with contextlib.suppress(DecodeError):
        ExportTraceServiceRequest.FromString(data)
    parsed_s = time.thread_time()
    try:
        accepted = otlp_decoder.chunk_export(data).accepted
    except otlp_decoder.OtlpDecodeError:
        accepted = 0
    assert time.thread_time() - parsed_s < MAX_RATIO * (parsed_s - start_s)
    assert accepted == int(is_stored)


def test_an_honest_export() -> None:
    """The control: as many bytes of real spans are stored, each with its attributes."""
    attributes = b"".join(
        encode_field(9, encode_field(1, b"key%d" % at) + encode_field(2, encode_field(1, b"value")))
        for at in range(20)
    )
    spans = b"".join(
        encode_field(2, encode_span(attributes, at)) for at in range(1, SPAN_COUNT + 1)
    )
    data = encode_field(1, encode_field(2, spans))
    assert otlp_decoder.chunk_export(data).accepted == SPAN_COUNT
    assert len(otlp_decoder.decode_export(data).spans[0].attributes) == 20


TIMES = st.one_of(
    st.sampled_from([0, 1, (1 << 62) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]),
    st.integers(0, (1 << 64) - 1),
)
TEXTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["", "\x00", "x" * 5000, "<script>alert(1)</script>", "\U0001f600" * 300]),
)
# Few IDs, so that spans meet: the same twice, loops of parents, parents in other traces.
TRACE_IDS = st.sampled_from([b"\x01" * 16, b"\x02" * 16, b"\x00" * 16, b"\x03" * 15, b""])
SPAN_IDS = st.sampled_from([bytes([number]) * 8 for number in range(5)] + [b"\x01" * 7])
OUR_KEYS = (
    *(keys.ROLE, keys.OUTERMOST, keys.TOTAL_US, keys.UNATTRIBUTED_US, keys.REQUEST_ID),
    *(keys.MODEL, keys.ERROR_TYPE, keys.DIED_IN, keys.STREAMING, keys.EC_RECOMPUTED_ITEMS),
    "ttft.stage.sample_us",
    "service.name",
    "service.instance.id",
)
NUMBERS = st.one_of(
    st.integers(-(1 << 63), (1 << 63) - 1), st.sampled_from([0, 1, -1, (1 << 63) - 1])
)
VALUES = st.recursive(
    st.one_of(
        st.fixed_dictionaries({"stringValue": TEXTS | st.sampled_from([*stages.ROLES])}),
        st.fixed_dictionaries({"intValue": NUMBERS}),
        st.fixed_dictionaries(
            {
                "doubleValue": st.floats(allow_nan=False, allow_infinity=False)
                | st.sampled_from(["NaN", "Infinity", "-Infinity"])
            }
        ),
        st.fixed_dictionaries({"boolValue": st.booleans()}),
        st.just({}),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda each: {"arrayValue": {"values": each}}),
        st.lists(st.fixed_dictionaries({"key": TEXTS, "value": inner}), max_size=3).map(
            lambda each: {"kvlistValue": {"values": each}}
        ),
    ),
    max_leaves=8,
)
ATTRIBUTES = st.lists(
    st.fixed_dictionaries({"key": st.one_of(st.sampled_from(OUR_KEYS), TEXTS), "value": VALUES}),
    max_size=8,
)
SPANS = st.fixed_dictionaries(
    {
        "traceId": TRACE_IDS.map(bytes.hex),
        "spanId": SPAN_IDS.map(bytes.hex),
        "name": st.one_of(st.sampled_from([span_names.TTFT, span_names.ENCODE]), TEXTS),
        "startTimeUnixNano": TIMES.map(str),
        "endTimeUnixNano": TIMES.map(str),
    },
    optional={
        "parentSpanId": SPAN_IDS.map(bytes.hex),
        "kind": st.integers(-(1 << 31), (1 << 31) - 1),
        "attributes": ATTRIBUTES,
        "status": st.fixed_dictionaries({"code": st.integers(0, 5), "message": TEXTS}),
        "droppedAttributesCount": st.integers(0, (1 << 32) - 1),
    },
)
SCOPES = st.fixed_dictionaries({"name": st.one_of(st.just(span_names.SCOPE), TEXTS)})
EXPORTS = st.lists(
    st.fixed_dictionaries(
        {
            "resource": st.fixed_dictionaries({"attributes": ATTRIBUTES}),
            "scopeSpans": st.lists(
                st.fixed_dictionaries({"scope": SCOPES, "spans": st.lists(SPANS, max_size=6)}),
                max_size=2,
            ),
        }
    ),
    max_size=2,
).map(lambda groups: {"resourceSpans": groups})


def fetch(url: str, data: bytes | None = None) -> tuple[int, bytes]:
    """Status and body of a GET, or of a POST of `data`."""
    try:
        with urlopen(
            Request(url, data, {"Content-Type": "application/json"}), timeout=60
        ) as answer:
            return answer.status, answer.read()
    except HTTPError as error:
        with error:
            return error.code, error.read()


PATHS = (
    *("/", "/?error=any", "/api/requests", "/api/summary", "/healthz"),
    *(f"/{page}/{each * 16}" for page in ("trace", "api/trace") for each in ("01", "02")),
)


def test_spans_of_any_content(tmp_path: Path) -> None:
    """Spans with any times, IDs, parents, attributes and resources are stored, or refused one by one.

    Whatever is stored, list, traces and API show it.
    """
    with run_serve(tmp_path) as server:
        url = f"http://127.0.0.1:{server.http_port}"

        @settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
        @given(export=EXPORTS)
        def check_export(export: dict[str, Any]) -> None:
            assert fetch(f"{url}/v1/traces", json.dumps(export).encode())[0] == 200
            for path in PATHS:
                assert fetch(url + path)[0] in (200, 404), path

        check_export()


SCRIPT = '"><script>alert(1)</script>'


def explain(*_: Any) -> ExplainAnswer:
    """As long as an answer may be."""
    stage = {"name": "x" * 1000, "typical_ms": 1.0, "late_ms": 2.0, "share": 0.1}
    return ExplainAnswer(["because"], {"answered": True, "stages": [stage] * 8, "held": None})


@contextlib.contextmanager
def answer_alerts(folder: Path, **more: Any) -> Iterator[str]:
    """The address of a `serve` with these options."""
    with run_serve(folder, explain=explain, **more) as server:
        yield f"http://127.0.0.1:{server.http_port}"


def make_alert(**labels: str) -> dict[str, Any]:
    """One that fires."""
    named = {"alertname": "Late", "gen_ai_request_model": "chat", **labels}
    return {"status": "firing", "labels": named, "startsAt": "2026-01-01T00:00:00Z"}


def encode_group(*alerts: dict[str, Any]) -> bytes:
    """What Alertmanager posts."""
    return json.dumps({"version": "4", "alerts": list(alerts)}, ensure_ascii=False).encode(
        "latin-1"
    )


def post(url: str, *alerts: dict[str, Any]) -> dict[str, Any]:
    """The answer to these alerts."""
    status, data = fetch(f"{url}/api/alerts", encode_group(*alerts))
    assert status == 200
    answer: dict[str, Any] = json.loads(data)
    return answer


def begin_post(url: str, length: int) -> socket.socket:
    """A connection that has announced a webhook of so many bytes, and sent nothing of it."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), 10)
    head = f"POST /api/alerts HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode())
    return connection


UNREADABLE = {
    "deep": b'{"version": "4", "alerts": [], "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "no text": encode_group(make_alert(model="\xff")),
    "no time": encode_group({**make_alert(), "startsAt": "0001-01-01T00:00:00"}),
}


def test_what_cannot_be_read_is_no_failure(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is refused, and no body that ends too soon makes a traceback either."""
    with answer_alerts(tmp_path) as url:
        for name, body in UNREADABLE.items():
            assert fetch(f"{url}/api/alerts", body)[0] == 400, name
        for _ in range(3):
            with begin_post(url, 1000) as connection:
                connection.sendall(b"{")
                time.sleep(0.1)
        assert not post(url)["answers"]
    assert "Traceback" not in capfd.readouterr().err


def test_bodies_share_the_receiver_s_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many webhooks arrive at once: the largest gives way, a small one is answered."""
    monkeypatch.setattr(receiver.BodyBudget.__init__, "__defaults__", (1 << 20,))
    with answer_alerts(tmp_path) as url:
        slow = [begin_post(url, alert_webhook.MAX_BODY_BYTES - each) for each in range(4)]
        for connection in slow:
            connection.sendall(b" " * 600_000)
            time.sleep(0.3)
        assert len(post(url, make_alert())["answers"]) == 1
        answers = []
        for connection in slow:
            connection.settimeout(1)
            with connection, contextlib.suppress(TimeoutError):
                connection.sendall(b" ")
                answers.append(connection.recv(12))
    assert answers.count(b"HTTP/1.1 503") == 3


def test_an_answer_is_no_multiple_of_the_question(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Thousands of alerts in one body get no explanation each."""
    alert = {"status": "firing", "labels": {}, "startsAt": "2026-01-01T00:00:00Z"}
    with answer_alerts(tmp_path) as url:
        found = post(url, *[alert] * 9000)
    assert len(found["answers"]) == alert_webhook.MAX_ANSWERS
    assert found["left_out"] == 9000 - alert_webhook.MAX_ANSWERS
    assert len(json.dumps(found)) < alert_webhook.MAX_BODY_BYTES
    assert len(capsys.readouterr().out.splitlines()) < 200


def test_no_redirect_is_followed(tmp_path: Path) -> None:
    """An Alertmanager leads us to no other address."""
    asked: list[str] = []

    class Inside(SilentHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_answer(200, b"")

        do_POST = do_GET

    class Leading(SilentHandler):
        def do_POST(self) -> None:
            self.read_body()
            self.send_answer(302, Location=f"{inside.url}/latest/meta-data")

    with (
        HttpServerThread(Inside) as inside,
        HttpServerThread(Leading) as leading,
        answer_alerts(tmp_path, alertmanager_url=leading.url) as url,
    ):
        found = post(url, make_alert())
    assert ("302" in found["not_sent"], asked) == (True, [])


def test_labels_are_text(tmp_path: Path) -> None:
    """On the page that an answer links to, whatever the alert's labels are."""
    with answer_alerts(tmp_path) as url:
        found = post(url, make_alert(gen_ai_request_model=SCRIPT, alertname=SCRIPT))
        page = found["answers"][0]["page"]
        assert page.startswith("/why?") and "<" not in page
        text = fetch(url + page)[1].decode()
    assert "<script>alert" not in text and "&lt;script&gt;" in text


FILES = ("spans.db", "spans.db-wal", "spans.db-shm")
MAX_LOG_BYTES = 4000
REQUESTS = 300


def build_export(number: int) -> bytes:
    """One span of a trace of its own."""
    span = encode_span(b"", number).replace(b"\1" * 16, number.to_bytes(16, "big"))
    return encode_field(1, encode_field(2, encode_field(2, span)))


def store_span(store: SpanStore, number: int) -> None:
    """Store that span; returns when it is on disk."""
    store.add_chunks(otlp_decoder.chunk_export(build_export(number)).chunks).result(20)


def count_traces(path: Path) -> int:
    """As a reader sees them now."""
    with open_reader(path) as db:
        return db.count_rows()["traces"]


def remove(path: Path) -> None:
    """As an operator does who wants to begin anew."""
    path.unlink()


def remove_all(path: Path) -> None:
    """With what SQLite has beside it."""
    for name in FILES:
        (path.parent / name).unlink(missing_ok=True)


def replace(path: Path) -> None:
    """As from a backup."""
    copy = path.with_suffix(".new")
    shutil.copy(path, copy)
    copy.rename(path)


@pytest.mark.parametrize("change", [remove, remove_all, replace])
def test_a_file_that_is_gone(
    change: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What is confirmed from then on is in the file that is there, and it is said once."""
    path = tmp_path / "spans.db"
    store = SpanStore(path)
    try:
        store_span(store, 1)
        change(path)
        for number in (2, 3):
            store_span(store, number)
        assert count_traces(path) in (2, 3)
        assert not store.last_error
    finally:
        store.close()
    assert caplog.text.count("was removed or replaced") == 1


def test_a_folder_that_is_gone(tmp_path: Path, eventually: Callable[..., None]) -> None:
    """While it cannot be opened nothing is confirmed; then all is."""
    path = tmp_path / "folder" / "spans.db"
    store = SpanStore(path)
    try:
        store_span(store, 1)
        shutil.rmtree(path.parent)
        path.parent.write_text("no folder")
        eventually(lambda: "choose another" in store.last_error, 20)
        with pytest.raises(Exception, match="database|choose"):
            store_span(store, 2)
        path.parent.unlink()
        eventually(lambda: not store.last_error, 20)
        store_span(store, 3)
        assert count_traces(path) == 1
    finally:
        store.close()


def test_files_that_all_may_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are closed to others, as new ones are; what is another user's is refused."""
    path = tmp_path / "spans.db"
    for name in FILES:
        (tmp_path / name).touch()
        (tmp_path / name).chmod(0o666)
    store = SpanStore(path)
    store_span(store, 1)
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) & 0o007 for name in FILES}
    store.close()
    assert modes == {0}
    path.chmod(0o666)

    def refuse(*_: object) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(os, "chmod", refuse)
    monkeypatch.setattr(Path, "chmod", refuse)
    with pytest.raises(StoreError, match="not yours"):
        SpanStore(path)


async def test_log_lines_are_bounded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whatever is sent so many times costs no line of the log each."""
    good = (
        b"POST /v1/traces HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-protobuf\r\n"
    )
    unfinished = good + b"Content-Length: 9\r\n\r\n"  # its sender leaves before the rest
    kinds = (
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"GET /trace/\xff%00%0a HTTP/1.1\r\nHost: localhost\r\n\r\n",
        good + b"Content-Length: 3\r\n\r\nxyz",
        unfinished,
        good + b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\nxyz",
        good + b"Transfer-Encoding: chunked\r\n\r\nZ\r\n",
        good + b"Content-Length: %d\r\n\r\n" % len(encode_export()) + encode_export(),
    )
    with run_serve(tmp_path) as server:
        url = f"http://127.0.0.1:{server.http_port}"
        for kind in kinds * (REQUESTS // len(kinds)):
            await raw_http.send_bytes(url, kind, 0 if kind is unfinished else None)
    captured = capfd.readouterr()
    logged = caplog.text + captured.out + captured.err
    assert len(logged) < MAX_LOG_BYTES, logged


NOBODY = 65534
needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="needs root, to make another user's files"
)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder as /tmp is."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


@needs_root
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("is_link", [True, False])
def test_a_database_of_somebody_else(
    name: str, is_link: bool, shared: Path, tmp_path: Path
) -> None:
    """`serve` writes neither through another user's link nor into another user's file, and says so."""
    target, laid = tmp_path / "precious", shared / name
    target.write_bytes(b"precious")
    laid.symlink_to(target) if is_link else laid.touch(0o666)
    os.chown(laid, NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(StoreError, match="is another user's; choose another with --db"):
        SpanStore(shared / "spans.db")
    assert target.read_bytes() == b"precious"
    assert not any((shared / each).exists() for each in FILES if each != name)


def test_a_link_of_our_own(shared: Path, tmp_path: Path) -> None:
    """The control: an operator's own link leads to where it should."""
    path = shared / "spans.db"
    path.symlink_to(tmp_path / "elsewhere.db")
    store = SpanStore(path)
    store_span(store, 1)
    store.close()
    assert count_traces(tmp_path / "elsewhere.db") == 1


def test_a_report_goes_through_no_link(shared: Path, tmp_path: Path) -> None:
    """--json FILE is written beside it first, under a name that somebody may have guessed."""
    target, wanted = tmp_path / "precious", shared / "report.json"
    target.write_text("precious")
    (shared / "report.json.part").symlink_to(target)
    write_whole(wanted, "{}")
    assert (target.read_text(), wanted.read_text()) == ("precious", "{}")
    assert not wanted.is_symlink()


YEARS_NS = 10 * 365 * 86_400 * 10**9
CLOCK_LOOKS = 20


def set_clock(monkeypatch: pytest.MonkeyPatch, shift_ns: int) -> None:
    """From now on the wall clock is so much ahead."""
    true_ns, true_s = time.clock_gettime_ns, time.clock_gettime
    monkeypatch.setattr(time, "time_ns", lambda: true_ns(time.CLOCK_REALTIME) + shift_ns)
    monkeypatch.setattr(time, "time", lambda: true_s(time.CLOCK_REALTIME) + shift_ns / 1e9)


def test_what_is_stored_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards and back: traces are as old as they are."""
    path = tmp_path / "spans.db"
    store = SpanStore(path)
    try:
        for number, shift_ns in enumerate((0, YEARS_NS, -YEARS_NS, 0), 1):
            set_clock(monkeypatch, shift_ns)
            store_span(store, number)
            assert not store._remove_old()
            assert count_traces(path) == number
    finally:
        store.close()


async def test_lengths_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that jumps at each look: every TTFT adds up, and is as long as it was."""
    looks = itertools.count()
    true_ns = time.clock_gettime_ns
    async with fake_instances.run_routed_instances([InstancePlan(gap_s=0.01)]) as (router, _):
        with monkeypatch.context() as patched:
            patched.setattr(
                time,
                "time_ns",
                lambda: true_ns(time.CLOCK_REALTIME) + (next(looks) % 3 - 1) * YEARS_NS,
            )
            for _ in range(CLOCK_LOOKS):
                began_ns = time.monotonic_ns()
                assert (await router.post_chat())[0] == 200
                took_us = (time.monotonic_ns() - began_ns) // 1000
        records = [
            each.ttft for each in await router.wait_for_records(2 * CLOCK_LOOKS) if each.ttft
        ]
    assert next(looks) > CLOCK_LOOKS and len(records) == CLOCK_LOOKS
    for ttft in records:
        assert 0 < ttft.end - ttft.start < 10**7
        assert sum(ttft.stages.values()) + ttft.unattributed == ttft.end - ttft.start
    assert records[-1].end <= took_us
