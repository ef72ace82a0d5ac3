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


def test_held(bench: RunBench) -> None:
    """--max-unfinished holds requests back, and says so; a held request is not the generator's lag."""
    words = "--rate 1000 --requests 6 --max-unfinished 2"
    found, notes = send(bench, script_tokens(60.0), words)

    assert found["targets"][0]["runs"][0]["held"] == 4
    assert notes[2]["came"] > min(note["tokens"][0] for note in notes)


def test_shared(bench: RunBench) -> None:
    """shared-prefix: all prompts open with one of the prefixes, and no two are the same."""
    words = "--dataset shared-prefix --prefixes 2 --prefix-len 30 --input-len 10"
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
    """replay: lengths, times and exactly the shared prefixes of the trace."""
    trace = write_trace(tmp_path, (0, 1100, [1, 2, 3]), (300, 1024, [1, 2]), (600, 700, [1, 9]))
    _, notes = send(bench, QUICK_SCRIPT, "--dataset replay", trace, "--speed 2")

    first, second, third = list_prompts(notes)
    assert list(map(len, (first, second, third))) == [1100, 1024, 700]
    assert first[:1024] == second and second[:512] == third[:512]
    assert second[512:700] != third[512:]
    assert (notes[2]["came"] - notes[0]["came"]) / 1e9 == pytest.approx(0.3, abs=0.15)


def test_rounds(bench: RunBench) -> None:
    """multi-round: a user's next question carries the whole conversation, answers included."""
    words = "--num-users 2 --num-rounds 3 --qps 20 --time 0.6"
    _, notes = send(bench, QUICK_SCRIPT, "--dataset multi-round", words)

    longest = max(notes, key=lambda note: len(list_roles(note)))
    assert list_roles(longest) == ["user", "assistant", "user", "assistant", "user"]
    assert longest["body"]["messages"][1]["content"] == "t0 ét1 é"
    asked = [
        note for note in notes if note["headers"]["x-user-id"] == longest["headers"]["x-user-id"]
    ]
    turns = [note["body"]["messages"] for note in asked]
    assert all(later[: len(one)] == one for one, later in zip(turns, turns[1:], strict=False))


def test_late(bench: RunBench) -> None:
    """multi-round: the next question leaves a gap after the one before, or when its answer is there."""
    words = "--num-users 1 --num-rounds 9 --qps 10 --requests 4 --time 30"
    slow = script_tokens(300.0, 5.0, 5.0, 5.0)
    _, notes = send(bench, slow, "--dataset multi-round", words)

    came = [note["came"] / 1e6 for note in notes]
    assert len(came) == 4, "--requests ends it before --time"
    assert came[1] - came[0] >= 300, "the answer was awaited"
    # Two gaps of 100 ms; lost rounds that are caught up would come one right after the other. Half,
    # because the late one may have been connected late, too.
    assert came[3] - came[1] >= 100, "lost rounds are not caught up"


def test_warm_rounds(bench: RunBench) -> None:
    """multi-round: a warm-up asks first questions of its kind, as other users than the run's."""
    words = "--num-users 1 --num-rounds 2 --qps 20 --requests 1"
    lengths = "--shared-system-prompt 50 --user-history-prompt 30 --question-len 7"
    with run_scripted_server(script_tokens(5.0, context_tokens=500)) as server:
        more = "--answer-len 11 --warmup 3"
        bench("--url", server.url, "--dataset multi-round", words, lengths, more)
        *warm, own = server.fetch_notes()

    said = [note["body"]["messages"][0]["content"] for note in (*warm, own)]
    assert [len(each.split()) for each in said] == [87] * 4
    assert {note["body"]["max_tokens"] for note in warm} == {11}
    assert len(set(said)) == 4
    users = [note["headers"]["x-user-id"] for note in warm]
    assert len(set(users)) == 3 and own["headers"]["x-user-id"] not in users


def test_forgotten(bench: RunBench) -> None:
    """multi-round: a question that failed is not part of the following prompts."""
    words = "--num-users 1 --num-rounds 9 --qps 20 --requests 3"
    _, notes = send(bench, script_tokens(5.0, failures={"1": 503}), "--dataset multi-round", words)

    assert [len(list_roles(note)) for note in notes] == [1, 3, 3]


def test_used_up(bench: RunBench) -> None:
    """--requests ends the run with its last answer, whoever still waits for a next question."""
    words = "--num-users 2 --num-rounds 3 --qps 2 --requests 8 --time 60"
    with run_scripted_server(ServerScript(first_token_ms=[100.0], token_count=2)) as server:
        start = time.monotonic()
        found = bench("--url", server.url, "--dataset multi-round", words)
        took = time.monotonic() - start
        notes = server.fetch_notes()

    run = found["targets"][0]["runs"][0]
    assert (len(notes), run["succeeded"], run["unfinished"], run["stopped"]) == (8, 8, 0, False)
    assert took < 20, "8 questions at 2 a second take some 4 s"


def test_used_up_at_once(bench: RunBench) -> None:
    """A user that waits for a slot when the last request leaves sends none, and does not stay either."""
    words = "--num-users 6 --num-rounds 2 --qps 100 --requests 3 --time 60"
    with run_scripted_server(script_tokens(300.0)) as server:
        start = time.monotonic()
        load = ("--dataset multi-round", words, "--max-unfinished 1")
        found = bench("--url", server.url, *load)
        took = time.monotonic() - start

    assert found["targets"][0]["runs"][0]["started"] == 3
    assert took < 20


def test_learnt(bench: RunBench) -> None:
    """Token ids are those that the server's tokenizer makes of plain words, unless --vocab names them."""
    words = "--concurrency 1 --requests 1 --input-len 200"
    with run_scripted_server(QUICK_SCRIPT) as server:
        bench("--url", server.url, words)
        bench("--url", server.url, words, "--vocab 240")
        learnt, told = list_prompts(server.fetch_notes())

    assert 300 <= min(learnt) and len(learnt) == 200
    assert 100 <= min(told) and max(told) < 240


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
        ("--max-input", "--dataset replay"),
        ("--input-len", "--concurrency 1"),
        ("--num-rounds", "--dataset multi-round"),
    ],
)
def test_context(tmp_path: Path, remedy: str, words: str) -> None:
    """Requests beyond the server's context are refused before any is sent, with what makes them fit."""
    trace = [write_trace(tmp_path, (0, 1000, [1, 2]))] if "replay" in words else []
    with run_scripted_server(ServerScript(context_tokens=500)) as server:
        result = invoke_bench("--url", server.url, words, *trace)
        assert server.fetch_notes() == []

    assert result.exit_code == 1
    assert remedy in result.output and "context is" in result.output


@pytest.mark.parametrize(
    "words",
    [
        "--input-len 480",
        "--input-len 400 --spread 0.2 --repeat 30",
        "--input-len 410 --spread 0.2 --warmup 200",
    ],
)
def test_context_first(words: str) -> None:
    """All targets and rounds are checked before the first warm-up: B's, a later round, a warm-up."""
    load = ("--concurrency 1 --requests 1 --warmup 2 --output-len 30", words)
    with (
        run_scripted_server(QUICK_SCRIPT) as big,
        run_scripted_server(ServerScript(context_tokens=500)) as small,
    ):
        result = invoke_bench("--ab", big.url, small.url, *load)
        alone = invoke_bench("--url", small.url, *load)
        assert big.fetch_notes() == [] and small.fetch_notes() == []

    assert (result.exit_code, alone.exit_code) == (1, 1)
    assert "context is 500" in " ".join(result.output.split())


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_unreadable_first(tmp_path: Path, api: str) -> None:
    """A trace's last line is read before its first requests are sent as a warm-up."""
    trace = write_trace(tmp_path, (0, 10, [1]))
    trace.write_text(trace.read_text("utf-8") + "\n{}\n", "utf-8")
    with run_scripted_server(QUICK_SCRIPT) as server:
        words = ("--dataset replay", trace, "--warmup 1 --api", api)
        result = invoke_bench("--url", server.url, *words)
        assert server.fetch_notes() == []

    assert result.exit_code == 1 and "jsonl:2" in "".join(result.output.split())


def test_cut(bench: RunBench, tmp_path: Path) -> None:
    """replay: --max-input cuts a prompt's end, so that shared prefixes stay; --max-output cuts answers."""
    trace = write_trace(tmp_path, (0, 1000, [1, 2]), (1, 600, [1, 3]), answer=30)
    words = "--max-input 550 --max-output 7"
    _, notes = send(bench, QUICK_SCRIPT, "--dataset replay", trace, words)

    first, second = list_prompts(notes)
    assert len(first) == len(second) == 550 and first[:512] == second[:512]
    assert sorted(note["body"]["max_tokens"] for note in notes) == [3, 7]


def test_images(bench: RunBench) -> None:
    """images: a chat request with pictures that no other request has."""
    words = "--dataset images --images 2 --image-size 16 --concurrency 1"
    _, notes = send(bench, QUICK_SCRIPT, words, "--requests 2")

    parts = [part for note in notes for part in note["body"]["messages"][0]["content"]]
    pictures = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    assert len(set(pictures)) == 4
    assert all(each.startswith("data:image/png;base64,") for each in pictures)


@pytest.mark.parametrize("shrink", [2, 64, 512])
def test_shrink(bench: RunBench, tmp_path: Path, shrink: int) -> None:
    """replay: --shrink divides lengths exactly, and shared prefixes with them."""
    trace = write_trace(tmp_path, (0, 1536, [1, 2, 3]), (1, 1200, [1, 2, 4]))
    with run_scripted_server(QUICK_SCRIPT) as server:
        bench("--url", server.url, "--dataset replay", trace, "--shrink", shrink)
        first, second = sorted(list_prompts(server.fetch_notes()), key=len, reverse=True)

    shared = 1024 // shrink
    assert (len(first), len(second)) == (1536 // shrink, 1200 // shrink)
    assert first[:shared] == second[:shared]


def test_shrink_refused(tmp_path: Path) -> None:
    """replay: a --shrink that would cut blocks, so that prompts came out short, is refused."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text("", "utf-8")
    result = invoke_bench(GONE, "--dataset replay", trace, "--shrink 3")

    assert result.exit_code == 2
    assert "power of two" in result.output and "--max-input" in result.output


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
        ("--dataset replay", 3),
        ("--dataset replay --repeat 2", 6),
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
    _, notes = send(bench, QUICK_SCRIPT, words, *([trace] if "replay" in words else []))

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
        ([GONE, "--dataset replay"], "a FILE belongs"),
        (["--url http://user:hidden@127.0.0.1:1 --rate 1"], "--header 'Authorization"),
        (["--url ftp://user:hidden@x --rate 1"], "--header 'Authorization"),
        (["--dataset replay", __file__, "--rate 1 --speed 2"], "--speed divides"),
        (["--dataset replay", __file__, "--concurrency 1 --speed 2"], "--speed divides"),
        ([GONE, "--rate 1 --slo x=1"], "--slo needs"),
        ([GONE, "--rate 1 --header x"], "--header needs"),
        (["--rate 1 --num-users 3 --speed 2"], "--speed, --num-users would do"),
        (["--dataset replay", __file__, "--prefixes 1"], "--prefixes would do nothing"),
        ([GONE, "--rate 1 --apart"], "--apart needs --ab"),
        ([GONE, "--find", "ttft.p95<0"], "no condition"),
        (["--ab", "http://x", "http://y", "--find", "ttft.p95<5"], "--find takes one --url"),
        ([GONE, "--dataset multi-round --find", "ttft.p95<5"], "--find takes one --url"),
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
    result = invoke_bench(GONE, "--model m --dataset replay", trace)

    assert result.exit_code == 1
    assert re.search(r"trace\.jsonl:1: not a\s+line", result.output)


def test_private(bench: RunBench) -> None:
    """Values of request headers are not in the results."""
    words = ("--header", "authorization: Bearer hidden", "--concurrency 1 --requests 1")
    found, notes = send(bench, QUICK_SCRIPT, *words)

    assert notes[-1]["headers"]["authorization"] == "Bearer hidden"
    assert "hidden" not in json.dumps(found)
