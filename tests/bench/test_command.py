# SPDX-License-Identifier: Apache-2.0
"""The command against real sockets: what is sent, when, how failures and plain servers are told."""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import signal
import subprocess
import sys
import termios
import time
from array import array
from pathlib import Path
from typing import Any

import pytest

from bench.conftest import RunBench, invoke_bench, list_words, validate_document
from bench.scripted_server import ServerScript, run_scripted_server
from ttft_otel.bench.request_factory import BenchRequest
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


def write_trace(folder: Path, *rows: tuple[int, int, list[int]], answer: int = 3) -> Path:
    """A trace file of (timestamp, input_length, hash_ids); the first answer has so many tokens, others 3."""
    names = ("timestamp", "input_length", "hash_ids", "output_length")
    lengths = (answer, *[3] * len(rows))
    lines = [
        json.dumps(dict(zip(names, (*row, length), strict=True)))
        for row, length in zip(rows, lengths, strict=False)
    ]
    trace = folder / "trace.jsonl"
    trace.write_text("\n".join(lines), "utf-8")
    return trace


def list_prompts(notes: list[dict[str, Any]]) -> list[list[int]]:
    """The token ids that the server was sent."""
    return [note["body"]["prompt"] for note in notes]


def list_roles(note: dict[str, Any]) -> list[str]:
    """Who speaks, message by message."""
    return [each["role"] for each in note["body"]["messages"]]


def test_closed(bench: RunBench) -> None:
    """Closed loop: every request is sent, joined with its trace and its breakdown, and adds up."""
    found, notes = send(bench, QUICK_SCRIPT, "--concurrency 2 --requests 6 --input-len 40")

    run = found["targets"][0]["runs"][0]
    headers = {note["headers"][header_names.REQUEST_ID]: note["headers"] for note in notes}
    assert (run["succeeded"], run["failures"], run["unfinished"]) == (6, {}, 0)
    for request in run["requests"]:
        sent = headers[request["request_id"]]
        assert sent[header_names.TRACEPARENT].split("-")[1] == request["trace_id"]
        assert sum(request["stages_ms"].values()) == pytest.approx(request["ttft_ms"], abs=0.01)
        assert (request["input_tokens"], request["output_tokens"]) == (40, 2)
    assert {"prefill.queue", "prefill.compute", "unattributed", "outside"} == set(
        found["targets"][0]["summary"]["stages_ms"]
    )


def test_open(bench: RunBench) -> None:
    """Open loop: requests are sent at their times although earlier answers are still missing."""
    _, notes = send(bench, script_tokens(600.0), "--rate 50 --requests 10 --arrivals constant")

    assert max(note["came"] for note in notes) < min(note["tokens"][0] for note in notes)


def test_shared(bench: RunBench) -> None:
    """All prompts open with one of the prefixes, and no two are the same."""
    words = "--prefixes 2 --prefix-len 30 --input-len 10"
    _, notes = send(bench, QUICK_SCRIPT, words, "--concurrency 4 --requests 20")
    sent = list_prompts(notes)

    assert len({tuple(each[:30]) for each in sent}) == 2
    assert len({tuple(each) for each in sent}) == 20


def test_seed(bench: RunBench) -> None:
    """The same seed sends the same prompts; rounds, warm-up and other seeds send others."""
    words = "--concurrency 1 --requests 2 --input-len 20"
    with run_scripted_server(QUICK_SCRIPT) as server:
        for more in ("--seed 1", "--seed 1", "--seed 7 --repeat 2 --warmup 2"):
            bench("--url", server.url, words, more)
        sent = list_prompts(server.fetch_notes())

    assert sent[0:2] == sent[2:4]
    assert len({tuple(each) for each in sent}) == 2 + 8


def test_replay(bench: RunBench, tmp_path: Path) -> None:
    """A trace: lengths, times and exactly the shared prefixes of the trace."""
    trace = write_trace(tmp_path, (0, 1100, [1, 2, 3]), (300, 1024, [1, 2]), (600, 700, [1, 9]))
    _, notes = send(bench, QUICK_SCRIPT, trace, "--speed 2")

    first, second, third = list_prompts(notes)
    assert list(map(len, (first, second, third))) == [1100, 1024, 700]
    assert first[:1024] == second and second[:512] == third[:512]
    assert second[512:700] != third[512:]
    assert (notes[2]["came"] - notes[0]["came"]) / 1e9 == pytest.approx(0.3, abs=0.15)


def test_conversation(bench: RunBench) -> None:
    """--turns: the next question carries the conversation, a time to think after the answer before."""
    words = "--turns 3 --think 0.2 --concurrency 1 --arrivals constant --requests 8"
    _, notes = send(bench, QUICK_SCRIPT, words)

    users = [note["headers"]["x-user-id"] for note in notes]
    assert [users.count(user) for user in dict.fromkeys(users)] == [3, 3, 2]
    turns = [note["body"]["messages"] for note in notes]
    assert list_roles(notes[2]) == ["user", "assistant", "user", "assistant", "user"]
    assert turns[2][1]["content"] == "t0 ét1 é"
    assert turns[1][:1] == turns[0] and turns[2][:3] == turns[1] and turns[3][0] != turns[0][0]
    for before, later in ((0, 1), (1, 2), (3, 4)):
        assert notes[later]["came"] - notes[before]["end"] >= 195e6, "200 ms but for the way"


def test_forgotten(bench: RunBench) -> None:
    """A question that failed is not part of the following prompts."""
    words = "--turns 3 --concurrency 1 --requests 3"
    _, notes = send(bench, script_tokens(5.0, failures={"1": 503}), words)

    assert [len(list_roles(note)) for note in notes] == [1, 3, 3]


def test_warm_conversations(bench: RunBench) -> None:
    """A warm-up has the run's lengths, first questions only, and users and words of its own."""
    words = "--turns 2 --concurrency 1 --requests 2 --warmup 3 --input-len 20 --prefix-len 30"
    _, notes = send(bench, script_tokens(5.0), words)

    said = [note["body"]["messages"][0]["content"] for note in notes]
    assert [len(each.split()) for each in said] == [50] * 5
    assert len(set(said)) == 4 and len(list_roles(notes[-1])) == 3
    assert len({note["headers"]["x-user-id"] for note in notes}) == 4


def test_sessions(bench: RunBench, tmp_path: Path) -> None:
    """Rows of one session are sent one after the other, each its delay after the answer before."""
    trace = tmp_path / "trace.jsonl"
    lengths = {"input_length": 600, "output_length": 2}
    rows = [
        {"timestamp": 5, "session_id": "a", "hash_ids": [1, 2]},
        {"session_id": "a", "delay": 100, "hash_ids": [1, 2]},
    ]
    trace.write_text("\n".join(json.dumps(lengths | row) for row in rows), "utf-8")
    _, (first, second) = send(bench, QUICK_SCRIPT, trace)

    assert first["body"]["prompt"] == second["body"]["prompt"]
    assert second["came"] - first["end"] >= 95e6


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
    """Several rates in one run: a table with the knee and the stage that grows first, and a ramp's slices."""
    script = ServerScript(first_token_ms=[10.0], token_count=1, has_queue=True)
    with run_scripted_server(script) as server:
        words = ("--url", server.url, "--input-len 10 --requests 60")
        found = bench(*words, "--rate 20,50,200")
        shown = invoke_bench(*words, "--concurrency 1,8").stdout
        ramp = bench(*words, "--rate 20..200")["targets"][0]["runs"][0]

    sweep, targets = found["sweep"], found["targets"]
    assert [row["rate"] for row in sweep["rates"]] == [target["rate"] for target in targets]
    assert sweep["knee"] in (20, 50) and "prefill.queue" in sweep["rates"][2]["slowest_stages_ms"]
    assert sweep["rates"][2]["ttft_ms"]["p50"] > 2 * sweep["rates"][0]["ttft_ms"]["p50"]
    assert "The knee is at 1 concurrent requests" in shown and "█" in shown
    rates = [part["rate"] for part in ramp["slices"]]
    assert sum(rates[5:]) > sum(rates[:5]) and ramp["steady"] is None


def test_learnt(bench: RunBench) -> None:
    """Token ids are those that the server's tokenizer makes of plain words."""
    _, notes = send(bench, QUICK_SCRIPT, "--concurrency 1 --requests 1 --input-len 200")
    (learnt,) = list_prompts(notes)

    assert 300 <= min(learnt) and len(learnt) == 200


def test_unlearnt(bench: RunBench) -> None:
    """A server that reports no token ids gets ids that are in every vocabulary."""
    _, notes = send(
        bench,
        script_tokens(5.0, tokens_per_word=0),
        "--concurrency 1 --requests 1 --input-len 200",
    )
    (sent,) = list_prompts(notes)

    assert 100 <= min(sent) and max(sent) < 256


def test_words(bench: RunBench) -> None:
    """Chat prompts have so many words that the server counts about the tokens asked for."""
    words = "--api chat --concurrency 1 --requests 1 --input-len 200"
    _, (note,) = send(bench, script_tokens(5.0, tokens_per_word=5), words)

    assert len(note["body"]["messages"][0]["content"].split()) == 40


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
    """Requests beyond the server's context are refused before any is sent, with what makes them fit."""
    load = write_trace(tmp_path, (0, 1000, [1, 2])) if words == "trace" else words
    with run_scripted_server(ServerScript(context_tokens=500)) as server:
        result = invoke_bench("--url", server.url, load)
        assert server.fetch_notes() == []

    assert result.exit_code == 1
    assert remedy in result.output and "context is" in result.output


def test_context_first() -> None:
    """Both targets are checked before the first warm-up."""
    load = ("--concurrency 1 --requests 1 --warmup 2 --output-len 30 --input-len 480",)
    with (
        run_scripted_server(QUICK_SCRIPT) as big,
        run_scripted_server(ServerScript(context_tokens=500)) as small,
    ):
        result = invoke_bench("--ab", big.url, small.url, *load)
        assert big.fetch_notes() == [] and small.fetch_notes() == []

    assert result.exit_code == 1
    assert "context is 500" in " ".join(result.output.split())


def test_unreadable_first(tmp_path: Path) -> None:
    """A trace's last line is read before its first requests are sent as a warm-up."""
    trace = write_trace(tmp_path, (0, 10, [1]))
    trace.write_text(trace.read_text("utf-8") + "\n{}\n", "utf-8")
    with run_scripted_server(QUICK_SCRIPT) as server:
        result = invoke_bench("--url", server.url, trace, "--warmup 1")
        assert server.fetch_notes() == []

    assert result.exit_code == 1 and "jsonl:2" in "".join(result.output.split())


def test_cut(bench: RunBench, tmp_path: Path) -> None:
    """A trace: --max-input cuts a prompt's end, so that shared prefixes stay; --max-output cuts answers."""
    trace = write_trace(tmp_path, (0, 1000, [1, 2]), (1, 600, [1, 3]), answer=30)
    words = "--max-input 550 --max-output 7"
    _, notes = send(bench, QUICK_SCRIPT, trace, words)

    first, second = list_prompts(notes)
    assert len(first) == len(second) == 550 and first[:512] == second[:512]
    assert sorted(note["body"]["max_tokens"] for note in notes) == [3, 7]


def test_images(bench: RunBench) -> None:
    """--images: a chat request with pictures that no other request has."""
    words = "--images 2 --image-size 16 --concurrency 1"
    _, notes = send(bench, QUICK_SCRIPT, words, "--requests 2")

    parts = [part for note in notes for part in note["body"]["messages"][0]["content"]]
    pictures = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    assert len(set(pictures)) == 4
    assert all(each.startswith("data:image/png;base64,") for each in pictures)


def test_failures(bench: RunBench) -> None:
    """Failures are counted by kind, and are in no percentile."""
    script = ServerScript(
        first_token_ms=[5.0], token_count=2, failures={"1": 503, "2": "cut", "3": "error", "4": 503}
    )
    with run_scripted_server(script) as server:
        found = bench("--url", server.url, "--concurrency 1 --requests 8 --slo ttft=9999")

    target = found["targets"][0]
    assert target["runs"][0]["failures"] == {"HTTP 503": 2, "cut off": 1, "error in the stream": 1}
    assert target["runs"][0]["complaints"]["HTTP 503"] == "503 as scripted"
    assert target["summary"]["figures_ms"]["ttft"]["count"] == 4
    assert target["summary"]["goodput"]["share"] == 0.5


def test_failure_traced(bench: RunBench) -> None:
    """The first failures of each kind can be looked up: the JSON has the ids that the server was sent."""
    words = "--concurrency 1 --requests 14"
    with run_scripted_server(
        ServerScript(
            first_token_ms=[5.0], token_count=1, failures={str(n): 503 for n in range(1, 13)}
        )
    ) as server:
        found = bench("--url", server.url, words)
        sent = [note["headers"] for note in server.fetch_notes()]
    with run_scripted_server(script_tokens(5.0, failures={"0": "cut"})) as server:
        shown = invoke_bench("--url", server.url, words).output
        (cut, *_) = server.fetch_notes()

    (failed,) = found["targets"][0]["runs"][0]["failed"].values()
    traces = [headers[header_names.TRACEPARENT].split("-")[1] for headers in sent[1:11]]
    assert [each["trace_id"] for each in failed] == traces
    assert failed[3]["request_id"] == sent[4][header_names.REQUEST_ID]
    assert failed[0]["sent_ms"] > 0
    first = cut["headers"][header_names.TRACEPARENT].split("-")[1]
    assert f"cut off: first trace {first}" in " ".join(shown.split())


def test_plain(bench: RunBench) -> None:
    """A server without ttft-otel: all client figures, no stage, and a sentence that says so."""
    with run_scripted_server(
        ServerScript(first_token_ms=[5.0], sends_timing=False, reports_usage=False)
    ) as server:
        found = bench("--url", server.url, "--concurrency 1 --requests 3")

    summary = found["targets"][0]["summary"]
    assert summary["stages_ms"] == {} and summary["breakdowns"] == 0
    assert set(summary["figures_ms"]) == {"ttft", "tpot", "itl", "latency"}
    assert summary["explanation"].startswith("No breakdown")
    assert not summary["counted"]


def test_progress() -> None:
    """On a terminal one line says how far it is while it runs; elsewhere nothing does."""
    told, terminal = os.openpty()
    with run_scripted_server(script_tokens(700.0)) as server:
        command = list_command("--url", server.url, "--concurrency 1 --requests 1")
        env = {**os.environ, "TERM": "xterm"}
        shown = subprocess.run(command, stderr=terminal, stdout=subprocess.PIPE, text=True, env=env)
        quiet = subprocess.run(command, capture_output=True, text=True)
    os.close(terminal)

    said = os.read(told, 65536).decode()
    os.close(told)
    assert "0 done, 1 under way, 0 failed" in said
    assert said.rindex("\x1b[?25l") < said.rindex("\x1b[?25h"), "the cursor is there again"
    assert "under way" not in shown.stdout + quiet.stdout + quiet.stderr


def test_split(bench: RunBench) -> None:
    """A server that writes byte by byte, with CR LF, gives the same tokens."""
    with run_scripted_server(ServerScript(first_token_ms=[5.0], splits_bytes=True)) as server:
        found = bench("--url", server.url, "--concurrency 1 --requests 2")

    assert found["targets"][0]["summary"]["figures_ms"]["itl"]["count"] == 2 * 3


def test_interrupt(tmp_path: Path) -> None:
    """Ctrl-C prints what there is, counts what was not finished, and exits 130."""
    output = tmp_path / "out.json"
    with run_scripted_server(script_tokens(50.0, 20_000.0)) as server:
        command = list_command("--url", server.url, "--concurrency 2 --output", str(output))
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            while len(server.fetch_notes()) < 3:
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            said = process.communicate(timeout=30)[0]

    run = validate_document(json.loads(output.read_text("utf-8")))["targets"][0]["runs"][0]
    assert process.returncode == 130
    assert run["stopped"] and run["succeeded"] >= 1 and run["unfinished"] == 2
    assert "stopped" in said and "TTFT" in said


def test_interrupt_results(tmp_path: Path) -> None:
    """A second Ctrl-C while results are printed loses none of them, there and in the file."""
    output = tmp_path / "out.json"
    many = 300
    script = ServerScript(first_token_ms=[1.0] * many + [60_000.0] * many, token_count=1)
    with run_scripted_server(script) as server:
        words = "--concurrency 8 --requests 600 --input-len 1 --json"
        command = list_command("--url", server.url, words, "--output", output)
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            while len(server.fetch_notes()) < many + 8:
                time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            assert process.stdout
            wait_until_full(process.stdout.fileno())
            process.send_signal(signal.SIGINT)
            said = process.communicate(timeout=30)[0]

    assert process.returncode == 130
    printed, written = json.loads(said), json.loads(output.read_text("utf-8"))
    assert printed == written
    assert validate_document(printed)["targets"][0]["runs"][0]["succeeded"] == many


def wait_until_full(pipe: int) -> None:
    """Wait until nothing more goes into a pipe that nobody reads."""
    before, held = -1, array("i", [0])
    while not held[0] or held[0] != before:
        before = held[0]
        time.sleep(0.5)
        fcntl.ioctl(pipe, termios.FIONREAD, held)
    assert held[0] >= 65536 - 4096


def test_interrupt_making() -> None:
    """Prompts that take long to make are counted on the terminal, and Ctrl-C ends their making."""
    told, terminal = os.openpty()
    with run_scripted_server(QUICK_SCRIPT) as server:
        words = "--concurrency 1 --requests 4000 --input-len 50000"
        command = list_command("--url", server.url, words)
        env = {**os.environ, "TERM": "xterm"}
        with subprocess.Popen(
            command, stderr=terminal, stdout=subprocess.PIPE, text=True, env=env
        ) as process:
            said = ""
            while "of 4000 prompts made" not in said:
                assert select.select([told], [], [], 30)[0], "nothing on the terminal"
                said += os.read(told, 65536).decode()
            process.send_signal(signal.SIGINT)
            printed = process.communicate(timeout=30)[0]
        assert server.fetch_notes() == []
    os.close(terminal)
    os.close(told)

    assert process.returncode == 130 and "nothing to explain" in printed


@pytest.mark.parametrize(
    ("words", "made"),
    [
        ("--max-input 9", 3),
        ("--max-input 9 --repeat 2", 6),
        ("--requests 4 --concurrency 1", 4),
    ],
)
def test_made_once(
    bench: RunBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: Any, made: int
) -> None:
    """No body is made only to know its length: each is made once, for the round that sends it."""
    trace = write_trace(tmp_path, *[(0, 10, [1])] * 3)
    bodies: list[Any] = []
    monkeypatch.setattr(BenchRequest, "__init__", record_calls(BenchRequest.__init__, bodies))
    _, notes = send(bench, QUICK_SCRIPT, words, *([trace] if "max" in words else []))

    assert (len(bodies), len(notes)) == (made, made)


def record_calls(method: Any, calls: list[Any]) -> Any:
    """The same method, whose calls are noted."""

    def record_call(*given: Any, **more: Any) -> None:
        calls.append(given)
        method(*given, **more)

    return record_call


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
        ([GONE, "--rate 1 --slo x=1"], "--slo needs"),
        ([GONE, "--rate 1 --header x"], "--header needs"),
        ([GONE, "--rate 1 --max-input 3"], "--max-input would do nothing without"),
        ([GONE, __file__, "--prefixes 1"], "--prefixes would do nothing"),
        ([GONE, "--turns 2 --rate 1 --api completions"], "need --api chat"),
        ([GONE, "--find", "ttft.p95<0"], "no condition"),
        (["--ab", "http://x", "http://y", "--find", "ttft.p95<5"], "--find takes one --url"),
        ([GONE, "--rate 1..9 --find", "ttft.p95<5"], "--find takes one --url"),
    ],
)
def test_usage(words: list[str], says: str) -> None:
    """Flags that do not go together are refused before anything is sent."""
    result = invoke_bench(*words)

    assert result.exit_code == 2
    assert says in result.output and "hidden" not in result.output


def test_unreadable(tmp_path: Path) -> None:
    """A line that is not in the trace format is named by its number."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0}\n', "utf-8")
    result = invoke_bench(GONE, "--model m", trace)

    assert result.exit_code == 1
    assert re.search(r"trace\.jsonl:1: not a\s+line", result.output)


def test_private(bench: RunBench) -> None:
    """Values of request headers are not in the results."""
    words = ("--header", "authorization: Bearer hidden", "--concurrency 1 --requests 1")
    found, notes = send(bench, QUICK_SCRIPT, *words)

    assert notes[-1]["headers"]["authorization"] == "Bearer hidden"
    assert "hidden" not in json.dumps(found)
