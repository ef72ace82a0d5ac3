# SPDX-License-Identifier: Apache-2.0
"""The command against real sockets: what is sent, and when; how failures and plain servers are told."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from threading import Thread
from typing import Any
from unittest import mock

import pytest

from bench.conftest import RunBench, invoke_bench, list_words, validate_document
from bench.scripted_server import ServerScript, run_scripted_server
from ttft_otel.bench import terminal_report
from ttft_otel.bench.load_plan import LoadPlan
from ttft_otel.bench.request_factory import BenchRequest, RequestFactory
from ttft_otel.model.names import header_names

QUICK_SCRIPT = ServerScript(first_token_ms=[5.0], queue_ms=[2.0], token_count=2, gap_ms=2.0)
GONE = "--url http://127.0.0.1:1"


def script_tokens(*first_token_ms: float, **more: Any) -> ServerScript:
    """A server that answers with one token, so many milliseconds after each request in turn."""
    return ServerScript(first_token_ms=list(first_token_ms), token_count=1, **more)


def send(bench: RunBench, script: ServerScript, *words: object) -> tuple[Any, list[dict[str, Any]]]:
    """The document of a run against one server, and what that server was sent."""
    with run_scripted_server(script) as server:
        return bench("--url", server.url, *words), server.fetch_notes()


def list_command(*words: object) -> list[str]:
    """The command line of a process of its own."""
    return [sys.executable, "-m", "ttft_otel.commands.main", "bench", *list_words(*words)]


def write_trace(folder: Path, *rows: dict[str, Any]) -> Path:
    """A trace file of these rows; answers have three tokens where a row does not say it."""
    trace = folder / "trace.jsonl"
    trace.write_text("\n".join(json.dumps({"output_length": 3} | row) for row in rows), "utf-8")
    return trace


def list_prompts(notes: list[dict[str, Any]]) -> list[list[int]]:
    """The token ids that the server was sent."""
    return [note["body"]["prompt"] for note in notes]


def list_roles(note: dict[str, Any]) -> list[str]:
    """Who speaks, message by message."""
    return [each["role"] for each in note["body"]["messages"]]


def test_closed(bench: RunBench) -> None:
    """Closed loop: every request is sent, joined with its trace and its breakdown, and adds up.

    Prompts are of the ids that the server's tokenizer makes of plain words; header values are in no result.
    """
    flags = ("--header", "authorization: Bearer hidden", "--input-len 40")
    found, notes = send(bench, QUICK_SCRIPT, "--concurrency 2 --requests 6", *flags)

    run = found["targets"][0]["runs"][0]
    headers = {note["headers"][header_names.REQUEST_ID]: note["headers"] for note in notes}
    assert (run["succeeded"], run["failures"], run["unfinished"]) == (6, {}, 0)
    for request in run["requests"]:
        sent = headers[request["request_id"]]
        assert sent[header_names.TRACEPARENT].split("-")[1] == request["trace_id"]
        assert sum(request["stages_ms"].values()) == pytest.approx(request["ttft_ms"], abs=0.01)
        assert (request["input_tokens"], request["output_tokens"]) == (40, 2)
        assert sent["authorization"] == "Bearer hidden"
    assert {"prefill.queue", "prefill.compute", "unattributed", "outside"} == set(
        found["targets"][0]["summary"]["stages_ms"]
    )
    assert min(map(min, list_prompts(notes))) >= 300 and "hidden" not in json.dumps(found)


def test_open(bench: RunBench) -> None:
    """Open loop: requests are sent at their times although earlier answers are still missing."""
    _, notes = send(bench, script_tokens(400.0), "--rate 50 --requests 5 --arrivals constant")

    assert max(note["came"] for note in notes) < min(note["tokens"][0] for note in notes)


def test_prompts(bench: RunBench) -> None:
    """All open with one of the prefixes, no two are the same; rounds, warm-up and other seeds send others."""
    words = "--concurrency 4 --prefixes 2 --prefix-len 30 --input-len 10"
    with run_scripted_server(QUICK_SCRIPT) as server:
        for more in ("--seed 1 --requests 12", "--seed 1 --requests 12"):
            bench("--url", server.url, words, more)
        bench("--url", server.url, words, "--seed 7 --requests 2 --repeat 2 --warmup 2")
        sent = [tuple(each) for each in list_prompts(server.fetch_notes())]

    assert len({each[:30] for each in sent[:12]}) == 2
    assert len(set(sent[:12])) == 12 and sorted(sent[:12]) == sorted(sent[12:24])
    assert len(set(sent)) == 12 + 8


def test_trace(bench: RunBench, tmp_path: Path) -> None:
    """Lengths, times and exactly the shared prefixes of a trace; a session's later rows follow answers."""
    rows: list[dict[str, Any]] = [
        {"timestamp": 5, "input_length": 1100, "hash_ids": [1, 2, 3]},
        {"timestamp": 305, "input_length": 1024, "hash_ids": [1, 2], "session_id": "a"},
        {"timestamp": 1205, "input_length": 700, "hash_ids": [1, 9]},
        {"delay": 1200, "input_length": 1024, "hash_ids": [1, 2], "session_id": "a"},
    ]
    found, notes = send(bench, QUICK_SCRIPT, write_trace(tmp_path, *rows), "--speed 2")

    first, second, third, last = list_prompts(notes)
    assert list(map(len, (first, second, third))) == [1100, 1024, 700]
    assert first[:1024] == second == last and second[:512] == third[:512]
    assert second[512:700] != third[512:]
    late_ms = max(found["targets"][0]["runs"][0]["lag_ms"].values())
    assert (notes[2]["came"] - notes[0]["came"]) / 1e6 == pytest.approx(600, abs=200 + late_ms)
    assert notes[3]["came"] - notes[1]["end"] >= 595e6, "the delay, but for the way"


def test_cut(bench: RunBench, tmp_path: Path) -> None:
    """A trace: --max-input cuts a prompt's end, so that shared prefixes stay; --max-output cuts answers.

    A server that reports no token ids gets ids that are in every vocabulary.
    """
    trace = write_trace(
        tmp_path,
        {"timestamp": 0, "input_length": 1000, "hash_ids": [1, 2], "output_length": 30},
        {"timestamp": 1, "input_length": 600, "hash_ids": [1, 3]},
    )
    script = replace(QUICK_SCRIPT, tokens_per_word=0)
    _, notes = send(bench, script, trace, "--max-input 550 --max-output 7")

    first, second = list_prompts(notes)
    assert len(first) == len(second) == 550 and first[:512] == second[:512]
    assert 100 <= min(first) and max(first) < 256
    assert sorted(note["body"]["max_tokens"] for note in notes) == [3, 7]


def test_conversation(bench: RunBench) -> None:
    """--turns: a question carries the conversation, without what failed, a while after the answer before."""
    words = "--turns 3 --think 0.1 --concurrency 1 --arrivals constant --requests 8"
    _, notes = send(bench, replace(QUICK_SCRIPT, failures={"4": 503}), words)

    users = [note["headers"]["x-user-id"] for note in notes]
    assert [users.count(user) for user in dict.fromkeys(users)] == [3, 3, 2]
    turns = [note["body"]["messages"] for note in notes]
    assert list_roles(notes[2]) == ["user", "assistant", "user", "assistant", "user"]
    assert turns[2][1]["content"] == "t0 ét1 é"
    assert turns[1][:1] == turns[0] and turns[2][:3] == turns[1] and turns[3][0] != turns[0][0]
    assert turns[5][:2] == turns[4][:2] and turns[5][2] != turns[4][2] and len(turns[5]) == 3
    for before, later in ((0, 1), (1, 2), (3, 4)):
        assert notes[later]["came"] - notes[before]["end"] >= 95e6, "100 ms but for the way"


def test_warm_conversations(bench: RunBench) -> None:
    """A warm-up has the run's lengths, first questions only, and users and words of its own."""
    words = "--turns 2 --concurrency 1 --requests 2 --warmup 3 --input-len 20 --prefix-len 30"
    _, notes = send(bench, script_tokens(5.0), words)

    said = [note["body"]["messages"][0]["content"] for note in notes]
    assert [len(each.split()) for each in said] == [50] * 5
    assert len(set(said)) == 4 and len(list_roles(notes[-1])) == 3
    assert len({note["headers"]["x-user-id"] for note in notes}) == 4


def test_texts(bench: RunBench, tmp_path: Path) -> None:
    """A file in ShareGPT's form: its questions, and answers about as long as those in it."""
    said = [
        ("system", "s"),
        ("human", "why"),
        ("gpt", "word " * 40),
        ("human", "how"),
        ("gpt", "so"),
    ]
    entry = {"conversations": [{"from": speaker, "value": text} for speaker, text in said]}
    file = tmp_path / "texts.json"
    file.write_text(json.dumps([entry, {"conversations": []}]), "utf-8")
    _, notes = send(
        bench, QUICK_SCRIPT, file, "--concurrency 1 --repeat 2 --think 0.02 --arrivals constant"
    )

    assert [list_roles(note) for note in notes] == [["user"], ["user", "assistant", "user"]] * 2
    asked = [note["body"]["messages"][-1]["content"] for note in notes]
    assert [each.split()[-1] for each in asked] == ["why", "how"] * 2
    assert asked[0] != asked[2], "the second round's is in no cache"
    assert notes[1]["came"] - notes[0]["end"] >= 15e6
    assert 30 <= notes[0]["body"]["max_tokens"] <= 50 and notes[1]["body"]["max_tokens"] == 1


def test_sweep(bench: RunBench) -> None:
    """Several rates in one run, in a table with the knee; and a ramp's slices."""
    script = ServerScript(first_token_ms=[10.0], token_count=1, has_queue=True)
    with run_scripted_server(script) as server:
        words = ("--url", server.url, "--input-len 10")
        found = bench(*words, "--requests 20", "--rate 40,200")
        shown = invoke_bench(*words, "--requests 20", "--concurrency 1,8").stdout
        ramp = bench(*words, "--requests 50", "--rate 40..200")["targets"][0]["runs"][0]

    sweep, targets = found["sweep"], found["targets"]
    assert [row["rate"] for row in sweep["rates"]] == [target["rate"] for target in targets]
    assert "prefill.queue" in sweep["rates"][1]["slowest_stages_ms"]
    assert sweep["rates"][1]["ttft_ms"]["p50"] > sweep["rates"][0]["ttft_ms"]["p50"]
    assert "The knee is at 1 concurrent requests" in shown and "█" in shown
    rates = [part["rate"] for part in ramp["slices"]]
    assert sum(rates[5:]) > sum(rates[:5]) and ramp["steady"] is None


@pytest.mark.parametrize(("tokens_per_word", "words"), [(5, 40), (0, 200)])
def test_words(bench: RunBench, tokens_per_word: int, words: int) -> None:
    """Chat prompts have so many words that the server counts about the tokens asked for, if it does count."""
    flags = "--api chat --concurrency 1 --requests 1 --input-len 200"
    _, (note,) = send(bench, script_tokens(5.0, tokens_per_word=tokens_per_word), flags)

    assert len(note["body"]["messages"][0]["content"].split()) == words


@pytest.mark.parametrize(
    ("remedy", "words"),
    [
        ("--max-input", "trace"),
        ("shorter", "--concurrency 1"),
        ("shorter", "--turns 10 --input-len 10 --concurrency 1"),
        ("shorter", "--concurrency 1 --input-len 400 --spread 0.2"),
    ],
)
def test_context(tmp_path: Path, remedy: str, words: str) -> None:
    """Requests beyond one server's context are refused before any is sent, with what makes them fit."""
    row = {"timestamp": 0, "input_length": 1000, "hash_ids": [1, 2]}
    load = write_trace(tmp_path, row) if words == "trace" else words
    with (
        run_scripted_server(QUICK_SCRIPT) as big,
        run_scripted_server(ServerScript(context_tokens=500)) as small,
    ):
        result = invoke_bench("--ab", big.url, small.url, "--warmup 2", load)
        assert big.fetch_notes() == [] and small.fetch_notes() == []

    assert result.exit_code == 1
    assert remedy in result.output and "context is" in result.output


def test_unreadable_first(tmp_path: Path) -> None:
    """A trace's last line is read before its first requests are sent as a warm-up."""
    trace = write_trace(tmp_path, {"timestamp": 0, "input_length": 10, "hash_ids": [1]}, {})
    with run_scripted_server(QUICK_SCRIPT) as server:
        result = invoke_bench("--url", server.url, trace, "--warmup 1")
        assert server.fetch_notes() == []

    assert result.exit_code == 1 and "jsonl:2" in "".join(result.output.split())


def test_images(bench: RunBench) -> None:
    """--images: a chat request with pictures that no other request has."""
    words = "--images 2 --image-size 16 --concurrency 1"
    _, notes = send(bench, QUICK_SCRIPT, words, "--requests 2")

    parts = [part for note in notes for part in note["body"]["messages"][0]["content"]]
    pictures = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    assert len(set(pictures)) == 4
    assert all(each.startswith("data:image/png;base64,") for each in pictures)


def test_failures(bench: RunBench) -> None:
    """Failures are counted by kind, in no percentile, and the first of each kind have ids to look up."""
    refused = {str(number): 503 for number in range(3, 15)}
    script = script_tokens(5.0, failures={"1": "cut", "2": "error", **refused})
    with run_scripted_server(script) as server:
        words = "--concurrency 1 --requests 18 --slo ttft=9999"
        found = bench("--url", server.url, words)
        sent = [note["headers"] for note in server.fetch_notes()]
    with run_scripted_server(script) as server:
        shown = invoke_bench("--url", server.url, "--concurrency 1 --requests 2").output
        _, cut = server.fetch_notes()

    target = found["targets"][0]
    run = target["runs"][0]
    assert run["failures"] == {"HTTP 503": 12, "cut off": 1, "error in the stream": 1}
    assert run["complaints"]["HTTP 503"] == "503 as scripted"
    assert target["summary"]["figures_ms"]["ttft"]["count"] == 4
    assert target["summary"]["goodput"]["share"] == round(4 / 18, 3)
    failed = run["failed"]["HTTP 503"]
    traces = [headers[header_names.TRACEPARENT].split("-")[1] for headers in sent[3:13]]
    assert [each["trace_id"] for each in failed] == traces
    assert failed[3]["request_id"] == sent[6][header_names.REQUEST_ID] and failed[0]["sent_ms"] > 0
    first = cut["headers"][header_names.TRACEPARENT].split("-")[1]
    assert f"cut off: first trace {first}" in " ".join(shown.split())


def test_plain(bench: RunBench) -> None:
    """A server without ttft-otel: all client figures, no stage, and a sentence that says so."""
    script = script_tokens(5.0, sends_timing=False, reports_usage=False)
    with run_scripted_server(replace(script, token_count=4)) as server:
        words = ("--url", server.url, "--concurrency 1 --requests 2")
        summary = bench(*words)["targets"][0]["summary"]
        said = invoke_bench(*words).output

    assert summary["stages_ms"] == {} and summary["breakdowns"] == 0
    assert set(summary["figures_ms"]) == {"ttft", "tpot", "itl", "latency"}
    assert summary["explanation"].startswith("No breakdown")
    assert not summary["counted"]
    assert "counted as events" in " ".join(said.split()) and "tokens/s in" not in said


@contextmanager
def run_on_terminal(*words: object) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The command as a process whose stderr is a terminal; it, and the terminal's other end."""
    told, terminal = os.openpty()
    env = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(
        list_command(*words), stderr=terminal, stdout=subprocess.PIPE, env=env
    ) as process:
        os.close(terminal)
        yield process, told
    os.close(told)


def read_terminal(told: int, text: str = "") -> str:
    """What is on the terminal until `text` is, or until it is closed."""
    said = ""
    while not text or text not in said:
        assert select.select([told], [], [], 30)[0], "nothing on the terminal"
        try:
            said += os.read(told, 65536).decode()
        except OSError:  # closed
            break
    return said


def test_interrupt(tmp_path: Path) -> None:
    """A line on the terminal says how far it is. Ctrl-C prints what there is, counts the rest, exits 130."""
    output = tmp_path / "out.json"
    words = "--concurrency 2 --output"
    with (
        run_scripted_server(script_tokens(50.0, 20_000.0)) as server,
        run_on_terminal("--url", server.url, words, output) as (process, told),
    ):
        said = read_terminal(told, "2 done, 2 under way, 0 failed")
        process.send_signal(signal.SIGINT)
        printed = process.communicate(timeout=30)[0].decode()
        said += read_terminal(told)

    run = validate_document(json.loads(output.read_text("utf-8")))["targets"][0]["runs"][0]
    assert process.returncode == 130
    assert run["stopped"] and run["succeeded"] >= 1 and run["unfinished"] == 2
    assert "stopped" in printed and "TTFT" in printed and "under way" not in printed
    assert said.rindex("\x1b[?25l") < said.rindex("\x1b[?25h"), "the cursor is there again"


def test_interrupt_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while results are printed loses none of them, there and in the file."""

    def print_interrupted(*given: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        print_document(*given)

    print_document, output = terminal_report.print_document, tmp_path / "out.json"
    monkeypatch.setattr(terminal_report, "print_document", print_interrupted)
    with run_scripted_server(QUICK_SCRIPT) as server:
        words = "--concurrency 1 --requests 1 --output"
        result = invoke_bench("--url", server.url, words, output)

    assert result.exit_code in (0, 3) and "1 of 1 requests" in result.stdout
    assert validate_document(json.loads(output.read_text("utf-8")))["targets"][0]["runs"]


def test_interrupt_making(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends the making of prompts, which may take long; nothing is sent."""

    def make_slowly(*_: Any) -> Iterator[BenchRequest]:
        while True:
            time.sleep(0.3)
            signal.raise_signal(signal.SIGINT)
            yield BenchRequest("", b"")

    monkeypatch.setattr(LoadPlan, "generate_requests", make_slowly)
    with run_scripted_server(QUICK_SCRIPT) as server:
        result = invoke_bench("--url", server.url, "--concurrency 1")
        assert server.fetch_notes() == []

    assert result.exit_code == 130 and "nothing to explain" in result.stdout


def test_made_once(bench: RunBench, tmp_path: Path) -> None:
    """No body is made only to know its length: each is made once, for the round that sends it."""
    row = {"timestamp": 0, "input_length": 10, "hash_ids": [1]}
    make = RequestFactory._encode_body
    with mock.patch.object(RequestFactory, "_encode_body", autospec=True, side_effect=make) as made:
        trace = write_trace(tmp_path, row, row, row)
        _, notes = send(bench, QUICK_SCRIPT, trace, "--max-input 9 --repeat 2")

    assert made.call_count == len(notes) == 6


def test_refused() -> None:
    """With no server at the URL: a remedy, or, with --model, failures by kind and exit status 1."""
    words = (GONE, "--concurrency 1 --requests 1")

    assert "is the server up?" in invoke_bench(*words).output
    result = invoke_bench(*words, "--model m --json")
    run = validate_document(json.loads(result.stdout))["targets"][0]["runs"][0]
    assert run["failures"] == {"connection: ConnectionRefusedError": 1}
    assert result.exit_code == 1 and not run["valid"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([GONE], "give --rate"),
        ([GONE, "--rate 1 --concurrency 1"], "exclude"),
        (["--rate 1"], "give --url"),
        (["--url ftp://x --rate 1"], "not an http"),
        ([GONE, "--rate 1..2,3"], "give a number above 0"),
        ([GONE, "--rate 0"], "give a number above 0"),
        ([GONE, "--concurrency 1.5"], "whole numbers"),
        (["--url http://user:hidden@127.0.0.1:1 --rate 1"], "--header 'Authorization"),
        (["--url ftp://user:hidden@x --rate 1"], "--header 'Authorization"),
        ([GONE, __file__, "--rate 1 --speed 2"], "--speed divides"),
        ([GONE, __file__, "--concurrency 1 --speed 2"], "--speed divides"),
        *(
            ([GONE, "--rate 1 --slo", limit], "--slo needs NAME=MS")
            for limit in ("ttft=nan", "ttft=0", "ttft=-1", "ttft=inf", "ttft", "x=1")
        ),
        *(
            ([GONE, "--rate 1 --header", header], "--header")
            for header in ("a: b\nhidden: d", "a: \u2603hidden", "a b: c", ": c", "connection: x")
        ),
        ([GONE, "--rate 1 --max-input 3"], "--max-input would do nothing without"),
        ([GONE, __file__, "--prefixes 1"], "--prefixes would do nothing"),
        ([GONE, "--turns 2 --rate 1 --api completions"], "need --api chat"),
        *(
            ([GONE, "--find", condition], "no condition")
            for condition in ("ttft<500", "ttft.p0<5", "itl.p95<5", "ttft.p95>500", "ttft.p95<0")
        ),
        (["--ab", "http://x", "http://y", "--find", "ttft.p95<5"], "--find takes one --url"),
        ([GONE, "--rate 1..9 --find", "ttft.p95<5"], "--find takes one --url"),
    ],
)
def test_usage(words: list[str], says: str) -> None:
    """Flags that do not go together, or say nothing that could be, are refused before anything is sent."""
    result = invoke_bench(*words)

    assert result.exit_code == 2
    assert says in result.output and "hidden" not in result.output


ABSENT_SERVER = "--url http://127.0.0.1:1 --model m"
TRACE_ROW = {"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": [1]}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"[]", "no question"),
        (b'[{"conversations": [{"from": "human"}]}]', "form of ShareGPT"),
        (b"\xde\xad\n", ":1: not a line"),
        (json.dumps(TRACE_ROW | {"input_length": 3.5}).encode(), "`$.input_length`"),
        (json.dumps(TRACE_ROW | {"timestamp": float("nan")}).encode(), ":1: not a line"),
        (json.dumps(TRACE_ROW | {"delay": -1}).encode(), "`$.delay`"),
        (json.dumps(TRACE_ROW | {"output_length": True}).encode(), "`$.output_length`"),
        (
            json.dumps(TRACE_ROW | {"timestamp": None}).encode(),
            ":1: neither a timestamp nor a delay",
        ),
        (json.dumps(TRACE_ROW | {"hash_ids": "abc"}).encode(), "`$.hash_ids`"),
        (json.dumps(TRACE_ROW | {"input_length": 513}).encode(), ":1: input_length"),
        (
            f"{json.dumps(TRACE_ROW | {'timestamp': 5})}\n{json.dumps(TRACE_ROW)}".encode(),
            ":2: earlier than the line before",
        ),
    ],
)
def test_unplayable(tmp_path: Path, content: bytes, says: str) -> None:
    """A trace that cannot be played is refused with its line and why, before anything is sent."""
    trace = tmp_path / "trace"
    trace.write_bytes(content)
    result = invoke_bench(ABSENT_SERVER, trace)

    assert result.exit_code == 1
    assert says in " ".join(result.output.split())


def test_steering() -> None:
    """A server that does not speak HTTP is named; its bytes, which may control a terminal, are not shown."""

    class SteeringHandler(StreamRequestHandler):
        def handle(self) -> None:
            self.request.recv(4096)
            self.wfile.write(b"\x1b[2J\x07\r\n\r\n")

    with ThreadingTCPServer(("127.0.0.1", 0), SteeringHandler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        result = invoke_bench("--url", f"http://127.0.0.1:{server.server_address[1]}", "--rate 1")
        server.shutdown()

    assert result.exit_code == 1 and "names no model" in result.output
    assert not {"\x1b", "\x07"} & set(result.output)


@pytest.mark.parametrize("flag", ["--output", "--csv"])
def test_nowhere(tmp_path: Path, flag: str) -> None:
    """Results that could not be written are known before the load, not after it."""
    with run_scripted_server(ServerScript()) as server:
        result = invoke_bench("--url", server.url, "--rate 1", flag, tmp_path / "no" / "file")
        notes = server.fetch_notes()

    assert result.exit_code == 2 and "cannot be written" in result.output
    assert not notes


def test_disk_full() -> None:
    """With the disk full the results are on the terminal all the same."""
    with run_scripted_server(ServerScript()) as server:
        words = "--concurrency 1 --requests 1 --output /dev/full"
        result = invoke_bench("--url", server.url, words)

    assert result.exit_code == 1
    assert "Latency" in result.output and "No space left on device" in result.output
