# SPDX-License-Identifier: Apache-2.0
"""Requests from Tempo are those from the embedded store, and every failure of Tempo has its remedy."""

from __future__ import annotations

import os
import socket
import ssl
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner
from opentelemetry.sdk.trace import ReadableSpan
from sample_records import DECODE_US, make_leg_record, make_routed_records, make_spans

from lab.certificates import make_certificate
from tests.explain.stored_records import store_spans
from tests.fake_tempo import FakeTempo, TempoFault
from ttft_otel.commands import main as cli
from ttft_otel.commands.source_options import parse_headers
from ttft_otel.model.names import env_names
from ttft_otel.model.record import Record
from ttft_otel.report.breakdown_source import BreakdownSource, open_source
from ttft_otel.report.report_types import LATE, LOST, OTHER, REFUSED, SourceChoice
from ttft_otel.report.store.database_reader import RequestFilter, open_reader
from ttft_otel.report.tempo import tempo_source
from ttft_otel.report.tempo.tempo_client import TempoClient, TempoError, parse_go_duration
from ttft_otel.report.tempo.tempo_source import TempoSource

BEGIN_S = int(time.time()) - 3000
SECRET = "s3cret-value"
COUNT = 30
WITHOUT_OUTERMOST = [number for number in range(COUNT) if number % 3 and number % 7 == 1]


def make_requests(count: int = COUNT) -> list[Record]:
    """Routed and single requests a second apart, some failed, some of another model or pending."""
    records: list[Record] = []
    for number in range(count):
        start_ns = (BEGIN_S + number) * 10**9 + number * 1000
        if number % 3:
            records.append(
                make_leg_record(
                    "prefill" if number % 7 == 1 else "mono",
                    DECODE_US,
                    start_ns=start_ns,
                    request_id=f'chosen {number}"\\' if number % 2 else "",
                    outermost=number not in WITHOUT_OUTERMOST,
                    error="timeout" if number % 5 == 0 else "",
                    model="other" if number % 4 == 0 else "tiny-vl",
                )
            )
        else:
            records += make_routed_records(f"r{number}", 1 + number / 50, 2, start_ns)
    return records


@pytest.fixture(scope="module")
def spans() -> list[ReadableSpan]:
    """The spans of make_requests(); nobody changes them."""
    return make_spans(make_requests())


@pytest.fixture(scope="module")
def both(
    tmp_path_factory: pytest.TempPathFactory, spans: list[ReadableSpan]
) -> Iterator[tuple[Path, FakeTempo]]:
    """The same spans in a database and in a Tempo."""
    path = store_spans(tmp_path_factory.mktemp("tempo") / "spans.db", spans)
    with FakeTempo() as tempo:
        tempo.add(spans)
        yield path, tempo


@pytest.fixture
def tempo(spans: list[ReadableSpan]) -> Iterator[FakeTempo]:
    """A Tempo with 30 traces that a test may break."""
    with FakeTempo() as made:
        made.add(spans)
        yield made


FILTERS = (
    RequestFilter(),
    RequestFilter(last=1),
    RequestFilter(last=7),
    RequestFilter(model="other"),
    RequestFilter(role="router"),
    RequestFilter(role="prefill"),  # and not prefill_decode
    RequestFilter(role="encode", last=3),
    RequestFilter(error="any"),
    RequestFilter(error="none"),
    RequestFilter(error="timeout"),
    RequestFilter(min_us=120_000),
    RequestFilter(since_ns=(BEGIN_S + 10) * 10**9 + 5),
    RequestFilter(since_ns=(BEGIN_S + 4) * 10**9, until_ns=(BEGIN_S + 20) * 10**9 + 20_000),
    RequestFilter(since_ns=1, until_ns=2),
)


def test_same_requests(both: tuple[Path, FakeTempo]) -> None:
    """Every filter gives the same requests in the same order, field by field, from either."""
    path, tempo = both
    for wanted in FILTERS:
        with open_reader(path) as stored, open_source(SourceChoice(tempo=tempo.url)) as searched:
            expected = stored.list_latest(wanted)
            assert searched.list_latest(wanted) == expected, wanted
        assert expected or wanted.since_ns == 1


def test_same_traces(both: tuple[Path, FakeTempo]) -> None:
    """A trace's spans and requests, and a request by any form of its ID, are the same from either."""
    path, tempo = both
    choice = SourceChoice(tempo=tempo.url)
    with open_reader(path) as stored, open_source(choice) as searched:
        requests = stored.list_latest(RequestFilter())
        for request in requests:
            trace = stored.find_trace(request.trace_id)
            assert trace and trace.spans and searched.find_trace(request.trace_id) == trace
        ids = [request.request_id for request in requests[:4]]
        for name in (*ids, f"chatcmpl-{ids[0]}", "f" * 32, "nobody", ""):
            assert searched.find_request(name) == stored.find_request(name)
        for trace_id in ("f" * 32, "../../api/echo"):
            assert searched.find_trace(trace_id) is None
        assert searched.list_models() == stored.list_models() == ["other", "tiny-vl"]


@pytest.fixture
def searched(tempo: FakeTempo) -> Iterator[BreakdownSource]:
    """A source over that Tempo."""
    with open_source(SourceChoice(tempo=tempo.url)) as source:
        yield source


def test_paging(
    searched: BreakdownSource, tempo: FakeTempo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows are halved until no search reaches its limit: all are found however small it is."""
    monkeypatch.setattr(tempo_source, "SEARCH_LIMIT", 2)
    assert len(searched.list_latest(RequestFilter(since_ns=BEGIN_S * 10**9))) == 30
    assert any(int(asked["limit"]) == 2 for asked in tempo.list_searches())


def test_one_second(
    searched: BreakdownSource, tempo: FakeTempo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be divided is asked for at once; more than a search can give is refused, not cut."""
    monkeypatch.setattr(tempo_source, "SEARCH_LIMIT", 2)
    start_ns = (BEGIN_S - 100) * 10**9 + 1000
    for number in range(6):
        tempo.add(make_spans([make_leg_record("mono", DECODE_US, start_ns=start_ns + number)]))
    wanted = RequestFilter(since_ns=start_ns, until_ns=start_ns + 10**9)
    assert len(searched.list_latest(wanted)) == 6
    tempo.max_limit = 6
    with pytest.raises(TempoError, match="6 traces or more in one second"):
        searched.list_latest(wanted)


@pytest.mark.full
def test_sampled_window(both: tuple[Path, FakeTempo]) -> None:
    """A window's counts are those of the store, and a trace that is chosen is fetched once."""
    path, tempo = both
    limits = {LATE: 3, OTHER: 8, LOST: 1, REFUSED: 0}
    with open_reader(path) as stored:
        for wanted in (*FILTERS, RequestFilter(last=0)):
            with open_source(SourceChoice(tempo=tempo.url)) as searched:
                expected = stored.sample_window(wanted, 100_000)
                before = tempo.count_fetched()
                found = searched.sample_window(wanted, 100_000)
                assert found.coverage == expected.coverage
                # Those that a search tells without an outermost span may be parts, and are read whole.
                read_whole = tempo.count_fetched() - before
                assert read_whole <= len(WITHOUT_OUTERMOST)
                every = {each.request.trace_id: each.request for each in expected.requests}
                assert {each.request.trace_id: each.request for each in found.requests} == every
                assert tempo.count_fetched() - before == len(every) + read_whole
                # A second answer over the same requests has them already.
                again = searched.sample_window(wanted, 100_000).requests
                assert {each.request.trace_id: each.request for each in again} == every
                assert tempo.count_fetched() - before == len(every) + read_whole
    with open_source(SourceChoice(tempo=tempo.url)) as searched:
        some = list(searched.sample_window(RequestFilter(last=0), 100_000, limits).requests)
        total = sum(each.weight for each in some if not each.request.error)
        counts = searched.sample_window(RequestFilter(last=0), 100_000).coverage.counts
        assert len(some) == 12 and total == pytest.approx(counts[LATE] + counts[OTHER])


@pytest.mark.full
def test_limits_of_tempo(searched: BreakdownSource, tempo: FakeTempo) -> None:
    """A Tempo that takes only short windows and small limits is asked in such."""
    tempo.max_limit, tempo.max_range_s = 10, 600
    assert len(searched.list_latest(RequestFilter(since_ns=BEGIN_S * 10**9))) == 30


def test_bounds(
    searched: BreakdownSource, tempo: FakeTempo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the newest one not all traces are fetched, and nothing is read beyond an answer's bounds."""
    assert len(searched.list_latest(RequestFilter(last=1))) == 1
    assert tempo.count_fetched() <= 2 * tempo_source.MAX_PARALLEL
    # Requests without an outermost span refuse no window; beyond their bound they stay as they are told.
    monkeypatch.setattr(tempo_source, "MAX_WHOLE_TRACES", 0)
    monkeypatch.setattr(tempo_source, "MAX_PARTIAL_TRACES", 1)
    before = tempo.count_fetched()
    assert searched.sample_window(RequestFilter(last=0), 100_000).coverage.requests
    assert tempo.count_fetched() == before + 1
    monkeypatch.setattr(tempo_source, "MAX_REQUESTS", 5)
    assert len(searched.list_latest(RequestFilter())) == 5
    monkeypatch.setattr("ttft_otel.report.tempo.tempo_client.MAX_TRACE_BYTES", 100)
    monkeypatch.setattr(searched, "_kept", {})
    with pytest.raises(TempoError, match="ask for a shorter window"):
        searched.find_trace(next(iter(tempo.traces)))


def test_progress_and_notes(tempo: FakeTempo) -> None:
    """Searching and reading are told; so is a window that begins before what Tempo keeps."""
    steps: list[tuple[str, int, int]] = []
    notes: list[str] = []
    tempo.retention = "30m0s"
    report = (lambda *step: steps.append(step)), notes.append
    with closing(TempoSource(SourceChoice(tempo=tempo.url), *report)) as source:
        source.list_latest(RequestFilter(since_ns=BEGIN_S * 10**9))
    assert {text for text, *_ in steps} == {"searching Tempo", "reading traces from Tempo", ""}
    assert ("reading traces from Tempo", 8, 30) in steps
    assert len(notes) == 1 and "before what Tempo keeps" in notes[0]


@pytest.mark.parametrize(
    ("fault", "reported"),
    [
        (
            TempoFault("/api/search", 401),
            "wants to know who asks: give credentials by --tempo-header",
        ),
        (TempoFault("/api", 404, b""), "is not Tempo"),
        (TempoFault("/api/status", 200, b"<html>"), "and not Grafana's or the collector's"),
        (TempoFault("/api/search", 200, b"[]"), "gave no search result"),
        (TempoFault("/api/search", 503, b"busy"), "too much to do: try again"),
        (TempoFault("/api/traces", 422, b"trace exceeds max size"), "trace exceeds max size"),
        (TempoFault("/api/traces", 206, b""), "some of its blocks cannot be read"),
        (TempoFault("/api/traces", 200, b"\xff\xff\xff"), "is not in Tempo's form"),
        (TempoFault("/api", 302, b"", "https://login.example/"), "a redirection to login.example"),
        (TempoFault("/api/search", 400, b"no org id"), "X-Scope-OrgID=TENANT"),
        (TempoFault("/api/status", 200, b'{"version": "v1.5.0"}'), "2.0 or newer is needed"),
        (TempoFault("/api/search", delay_s=1.0), "--tempo-timeout"),
        (TempoFault(missing_jobs=1), "searched only a part"),
        (TempoFault("/api", 302, b"", "http://[::1"), "a redirection to another page"),
        (TempoFault("/api/status", 200, b'{"version": "1.5.0 \\u001b]0;x"}'), "2.0 or newer"),
        (TempoFault("/api/status", 200, b"[" * 100_000), "is not Tempo"),
        *(
            (TempoFault("/api/search", 200, answer), "gave no search result")
            for answer in (
                b'{"traces": [{"traceID": "../../../api/admin", "startTimeUnixNano": "1"}]}',
                b'{"traces": [{"traceID": "ab", "durationMs": "NaN"}]}',
                b'{"traces": [], "metrics": {"totalJobs": 1e400}}',
                b'{"traces":' + b"[" * 100_000,
            )
        ),
        (
            TempoFault("/api/search", 500, f"bad \x1b[31m key {SECRET}".encode()),
            "(bad [31m key ***)",
        ),
    ],
)
def test_failures(tempo: FakeTempo, fault: TempoFault, reported: str) -> None:
    """Every failure ends with one sentence that has its remedy, and never with the credentials."""
    tempo.fault = fault
    # A busy machine delays any answer by a second: only the late one may meet the limit.
    words = ["report", "--tempo", tempo.url, "--tempo-timeout", "0.5" if fault.delay_s else "30"]
    result = CliRunner().invoke(
        cli.main, [*words, "--tempo-header", f"authorization=Bearer {SECRET}"], env={}
    )
    if SECRET in fault.body.decode(errors="replace"):
        result = CliRunner().invoke(cli.main, [*words, "--tempo-header", f"x-key={SECRET}"])
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit), result.exception
    assert reported in " ".join(result.output.split())
    assert SECRET not in result.output and "\x1b" not in result.output


def test_no_address() -> None:
    """A refused connection, and addresses and headers that cannot be used, end with a sentence."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = f"http://user:{SECRET}@127.0.0.1:{free.getsockname()[1]}"
    example, here = "http://127.0.0.1:3200", "http://127.0.0.1:1"
    for words, *reported in (
        ((closed,), "is not reachable (Connect", example),
        (("127.0.0.1:3200",), "is not an HTTP address", example),
        (("http://[::1",), "is no address"),
        (("http://127.0.0.1:99999",), "is no address"),
        (("ftp://127.0.0.1",), "is not an HTTP address"),
        ((here, "--tempo-header", "a=b\r\nc: d"), "no header may have"),
        ((here, "--tempo-header", "\udcff=b"), "no header may have"),
        ((here, "--tempo-timeout", "nan"), "not a number"),
    ):
        result = CliRunner().invoke(cli.main, ["report", "--tempo", *words])
        assert result.exit_code != 0 and isinstance(result.exception, SystemExit), words
        assert all(each in " ".join(result.output.split()) for each in reported), result.output
        assert SECRET not in result.output


def test_credentials(tempo: FakeTempo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers of the environment and of the command line are sent; no representation shows them."""
    monkeypatch.setenv(
        env_names.TTFT_OTEL_TEMPO_HEADERS, f"authorization=Bearer%20{SECRET},x-scope-orgid=a"
    )
    headers = parse_headers(("X-Scope-OrgID=team", "x-key: v"))
    assert headers == {"authorization": f"Bearer {SECRET}", "x-scope-orgid": "team", "x-key": "v"}
    choice = SourceChoice(tempo=tempo.url, headers=headers)
    with open_source(choice) as searched:
        searched.list_latest(RequestFilter(last=1))
    assert all(sent["authorization"] == f"Bearer {SECRET}" for sent in tempo.headers)
    assert SECRET not in repr(choice)
    result = CliRunner().invoke(
        cli.main, ["report", "--tempo", tempo.url, "--tempo-header", SECRET]
    )
    assert result.exit_code == 2 and SECRET not in result.output
    assert TempoClient(SourceChoice(tempo="http://tempo.example", headers=headers)).is_exposed
    assert not TempoClient(SourceChoice(tempo="https://tempo.example", headers=headers)).is_exposed
    assert not TempoClient(SourceChoice(tempo="http://127.0.0.1:1", headers=headers)).is_exposed


def test_tls(tempo: FakeTempo, tmp_path: Path) -> None:
    """A certificate of a private CA is refused, and taken once its CA is named."""
    certificate, key = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    tempo.server.socket = context.wrap_socket(tempo.server.socket, server_side=True)
    url = tempo.url.replace("http://", "https://")
    words = ["report", "--last", "1", "--tempo", url]
    refused = CliRunner().invoke(cli.main, words)
    assert refused.exit_code == 1 and "name its CA by --tempo-ca" in refused.output
    taken = CliRunner().invoke(cli.main, [*words, "--tempo-ca", str(certificate)])
    assert taken.exit_code == 0, taken.output
    unread = CliRunner().invoke(cli.main, [*words, "--tempo-ca", os.devnull])
    assert unread.exit_code == 1 and "file of PEM certificates" in unread.output


def test_commands_take_either(both: tuple[Path, FakeTempo]) -> None:
    """`report` prints the same from either; both at once are refused."""
    path, tempo = both
    printed = [
        CliRunner().invoke(cli.main, ["report", "--json", *words]).stdout
        for words in (["--db", str(path)], ["--tempo", tempo.url])
    ]
    assert printed[0] == printed[1] and '"closed": true' in printed[0]
    result = CliRunner().invoke(cli.main, ["report", "--db", str(path), "--tempo", tempo.url])
    assert result.exit_code == 2 and "exclude each other" in result.output


def test_without_aiohttp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the extra is missing, `report` still reads the embedded store, and says what --tempo needs."""
    for module in [name for name in sys.modules if name.startswith("ttft_otel.report.tempo")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    result = CliRunner().invoke(cli.main, ["report", "--tempo", "http://127.0.0.1:1"])
    assert result.exit_code == 1 and "pip install 'ttft-otel[explain]'" in result.output


def test_address_with_a_path(tempo: FakeTempo) -> None:
    """Tempo behind Grafana, or another proxy, is asked below the path of its address."""
    with (
        pytest.raises(TempoError, match="is not Tempo"),
        open_source(SourceChoice(tempo=f"{tempo.url}/api/datasources/proxy/uid/tempo/")),
    ):
        pass
    assert [path for path, _ in tempo.asked] == [
        "/api/datasources/proxy/uid/tempo/api/status/buildinfo"
    ]


def test_durations() -> None:
    """Durations in Go's form."""
    assert parse_go_duration("336h0m0s") == 336 * 3600
    assert parse_go_duration("1m30.5s") == 90.5
    assert parse_go_duration("500ms") == 0 == parse_go_duration("no")
