# SPDX-License-Identifier: Apache-2.0
"""What tests measure with: servers that are started and stopped, with small scripts in place of vLLM; the
client, against a real socket that answers as slowly as the test says; and verdicts on repeated measurements:
noise alone passes, a wrong number fails.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from lab import evidence, free_ports, local_servers, session_processes, ttft_client
from lab.evidence import Errors, ErrorTolerance, MedianInterval, measure_until_decided
from lab.free_ports import accept_connections
from lab.local_servers import LocalServer, LocalServerError, run_servers
from lab.server_commands import ServerCommand

# Answers its health check, has a child that ignores SIGTERM, and may ignore it itself.
SERVER_SCRIPT = """
import http.server, signal, subprocess, sys
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", child])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
# Prints the names of a segment and a semaphore of its own, and maps the segment named by its third argument.
SHARING_SCRIPT = """
import multiprocessing, sys
from multiprocessing.shared_memory import SharedMemory
own, lock = SharedMemory(create=True, size=4096), multiprocessing.get_context("spawn").Lock()
of_others = SharedMemory(sys.argv[3])
print(own.name, lock._semlock.name.replace("/", "sem."), flush=True)
"""


def build_command(mood: str = "gentle", script: str = SERVER_SCRIPT) -> ServerCommand:
    """A ServerCommand for the script above."""
    port = free_ports.find_free_port()
    return ServerCommand("fake", (sys.executable, "-c", script, str(port), mood), {}, port)


@pytest.mark.parametrize("mood", ["gentle", "stubborn"])
def test_stop(tmp_path: Path, mood: str) -> None:
    """Nothing of a server is left, not even children that ignore SIGTERM."""
    server = LocalServer(build_command(mood), tmp_path / "log").start().wait_until_ready(30)
    before = session_processes.list_session_pids(server.pid)
    server.stop(timeout_s=0.5)
    server.stop()

    assert 2 == len(before)
    assert [] == session_processes.list_session_pids(server.pid)


def test_what_a_killed_server_shared_is_removed(tmp_path: Path) -> None:
    """Its segments and semaphores are gone once it is stopped; one that another process has mapped stays."""
    ours = SharedMemory(create=True, size=4096)
    try:
        command = build_command(script=SHARING_SCRIPT + SERVER_SCRIPT)
        command = replace(command, argv=(*command.argv, ours.name))
        server = LocalServer(command, tmp_path / "log").start().wait_until_ready(30)
        left = [local_servers.SHARED_MEMORY / name for name in server.read_log()[0].split()]
        # Or the resource tracker removes them before it is killed itself, where this process has to wait.
        for pid in session_processes.list_session_pids(server.pid):
            os.kill(pid, signal.SIGSTOP)
        server.kill()
        session_processes.wait_for_session_end(server.pid, 30)
        assert [True, True] == [path.exists() for path in left]
        server.stop()

        assert [False, False] == [path.exists() for path in left]
        assert (local_servers.SHARED_MEMORY / ours.name).exists()
    finally:
        ours.close()
        ours.unlink()


def test_running(tmp_path: Path) -> None:
    """Several servers are up inside the block and gone after it, also when the block fails."""
    pids = []
    with (
        pytest.raises(KeyError),
        run_servers(build_command(), build_command(), logs=tmp_path) as servers,
    ):
        pids = [server.pid for server in servers]
        assert all(server.is_healthy() for server in servers)
        for server in servers:
            os.kill(server.pid, signal.SIGKILL)
        raise KeyError

    assert [[], []] == [session_processes.list_session_pids(pid) for pid in pids]


def test_failure(tmp_path: Path) -> None:
    """A server that dies at start says why, at once, with the end of its log."""
    dying = build_command(script="import sys; print('no such model'); sys.exit(3)")
    server = LocalServer(dying, tmp_path / "log").start()

    with pytest.raises(LocalServerError, match=r"ended with code 3(.|\n)*no such model"):
        server.wait_until_ready(30)
    server.stop()


def test_timeout(tmp_path: Path) -> None:
    """A server that never gets ready is reported after the time allowed, with progress before."""
    seen: list[str] = []
    sleeping = build_command(script="import time; print('loading', flush=True); time.sleep(600)")
    server = LocalServer(sleeping, tmp_path / "log").start()

    with pytest.raises(LocalServerError, match="was not ready"):
        server.wait_until_ready(1.0, lambda name, spent, line: seen.append(line))
    server.stop()

    assert "loading" in seen


def test_signal(tmp_path: Path) -> None:
    """A caller that gets SIGTERM stops its servers."""
    fake = build_command()
    caller = (
        "import sys; from pathlib import Path\n"
        "from lab.server_commands import ServerCommand; from lab.local_servers import run_servers\n"
        f"fake = ServerCommand('fake', {fake.argv!r}, {{}}, {fake.port})\n"
        f"with run_servers(fake, logs=Path({str(tmp_path)!r})) as up:\n"
        # Short sleeps: a signal that comes just before one is seen only after it.
        "    print(up[0].pid, flush=True); import time\n"
        "    while True:\n"
        "        time.sleep(0.1)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", caller], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        leader = int(process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        process.wait(60)

    assert [] == session_processes.list_session_pids(leader)


def test_ports() -> None:
    """A port is given out once, and lies below the range of outgoing connections."""
    chosen = [free_ports.find_free_port() for _ in range(50)]

    assert 50 == len(set(chosen))
    assert max(chosen) < free_ports.MAX_PORT


HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
    b"X-Request-Id: r1\r\nServer-Timing: receive;dur=0.25, encoder.compute;dur=12.5\r\n\r\n"
)


def encode_chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def encode_token_event(text: str) -> bytes:
    """One chat event."""
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n"


@contextmanager
def run_scripted_server(*script: tuple[float, bytes]) -> Iterator[tuple[str, list[bytes]]]:
    """A server that plays (pause in seconds, bytes) to each connection; its URL, and requests."""
    listener, requests = socket.create_server(("127.0.0.1", 0)), list[bytes]()

    def play_script(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):  # a caller who hangs up is fine
            requests.append(read_request(connection))
            for pause, data in script:
                time.sleep(pause)
                connection.sendall(data)

    def start_script(connection: socket.socket) -> None:
        threading.Thread(target=play_script, args=(connection,), daemon=True).start()

    serving = threading.Thread(
        target=accept_connections, args=(listener, start_script), daemon=True
    )
    serving.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", requests
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        serving.join()


def read_request(connection: socket.socket) -> bytes:
    """The head and the body of one request."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    while len(body) < length:
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


def test_stream() -> None:
    """TTFT ends at the first body data that is no keep-alive comment, not at the headers or the last byte."""
    script = [
        (0.05, HEAD + encode_chunk(b": ping\n\n")),
        (0.1, encode_chunk(encode_token_event("a"))),
        (0.1, encode_chunk(encode_token_event("b")) + b"0\r\n\r\n"),
    ]
    with run_scripted_server(*script) as (url, requests):
        answer = ttft_client.send_timed_request(url, headers={"traceparent": "00-1-2-01"})
    sent = requests[0].lower()

    assert answer.client_ttft_us is not None
    assert 150_000 <= answer.client_ttft_us < 240_000
    assert 250_000 <= answer.total_us < 400_000
    assert ("r1", 200, "ab") == (answer.request_id, answer.status, answer.text)
    assert {"receive": 0.25, "encoder.compute": 12.5} == answer.server_timing
    assert len(answer.events) == 2
    assert b"traceparent: 00-1-2-01" in sent and b"x-request-id: " in sent


def test_plain() -> None:
    """A plain answer has a text and a total, but no time to first token."""
    body = b'{"choices": [{"message": {"content": "yes"}}]}'
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    with run_scripted_server((0, head % len(body) + body)) as (url, _):
        answer = ttft_client.send_timed_request(url, stream=False)

    assert ("yes", None) == (answer.text, answer.client_ttft_us)


@pytest.mark.parametrize("script", [[(5.0, HEAD)], [(0, HEAD), (5.0, b"")]])
def test_abort(script: list[tuple[float, bytes]]) -> None:
    """The client hangs up on time, before the headers or in the middle of the body."""
    with run_scripted_server(*script) as (url, _):
        answer = ttft_client.send_timed_request(url, abort_s=0.1)

    assert answer.aborted
    # The time to connect is in abort_s.
    assert 90_000 <= answer.total_us < 1_000_000


def test_together() -> None:
    """Many questions are under way at once, and the answers come in order."""
    token = encode_chunk(encode_token_event("a")) + b"0\r\n\r\n"
    with run_scripted_server((0.2, HEAD + token)) as (url, _):
        began = time.monotonic()
        answers = ttft_client.send_timed_requests(url, [ttft_client.TimedRequest()] * 8)

    assert time.monotonic() - began < 1.0
    assert ["a"] * 8 == [answer.text for answer in answers]


def test_pieces() -> None:
    """An event that comes in two pieces has the time of the second; entries without a duration are zero."""
    events = ttft_client.split_events([(1_000, b"data: a"), (5_000, b"\n\ndata: b\n\n")], 0)

    assert (ttft_client.TimedEvent(5, "a"), ttft_client.TimedEvent(5, "b")) == events
    assert {"a": 0.0, "b": 1.5} == ttft_client.parse_timing('a, b;desc="x";dur=1.5')
    assert {} == ttft_client.parse_timing("")


DELAY = 80.0
LIMIT = 2.0  # ms
CASES = 100


def get_tolerance(_: str) -> ErrorTolerance:
    """What live tests allow: 2 ms, and intervals of three quarters of the delay."""
    return ErrorTolerance(-LIMIT, LIMIT, 0.75 * DELAY)


def draw_noise(rng: random.Random, scale: float) -> float:
    """What a busy machine adds to a difference of two requests: heavy tails to both sides."""
    return rng.gauss(0, scale) * (10 if rng.random() < 0.1 else 1)


def make_rounds(seed: int, scale: float, **bias: float) -> Callable[[], Errors]:
    """Rounds of four stages; bias: by how much a stage is wrong, ms."""
    rng = random.Random(seed)
    stages = ("receive", "encoder_compute", "dispatch", "sample")
    return lambda: {name: bias.get(name, 0.0) + draw_noise(rng, scale) for name in stages}


def count_failures(scale: float, **bias: float) -> int:
    """Of so many measurements of the same truth, how many failed."""
    failed = 0
    for seed in range(CASES):
        try:
            measure_until_decided(make_rounds(seed, scale, **bias), get_tolerance)
        except AssertionError:
            failed += 1
    return failed


@pytest.mark.parametrize("scale", (0.1, 1.0, 5.0, 10.0, 20.0))
def test_noise_alone_is_accepted(scale: float) -> None:
    """Stages that wander by 20 ms, and ten times that now and then: fewer than 1 in 100 fail."""
    assert count_failures(scale) <= CASES // 100


@pytest.mark.parametrize("scale", (0.1, 1.0, 5.0, 10.0))
@pytest.mark.parametrize("share", (1.0, 0.5))
def test_a_delay_booked_to_its_neighbour_fails(scale: float, share: float) -> None:
    """All or half of 80 ms in the stage after it: refused, whatever the noise."""
    wrong = share * DELAY
    assert count_failures(scale, encoder_compute=-wrong, dispatch=wrong) >= CASES * 0.99


@pytest.mark.parametrize("wrong", (2 * LIMIT, -2 * LIMIT))
def test_a_stage_that_is_wrong_by_twice_the_tolerance_fails(wrong: float) -> None:
    """Where stages wander by less than the tolerance, twice the tolerance is refused."""
    assert count_failures(0.5, sample=wrong) >= CASES * 0.99


def test_what_is_too_noisy_to_tell_fails_and_says_so() -> None:
    """An interval as wide as the delay fails, with the noise as reason."""
    with pytest.raises(AssertionError, match="too wide to tell"):
        measure_until_decided(make_rounds(1, 150.0), get_tolerance)


def test_what_is_inside_open_limits_may_be_as_wide_as_it_is() -> None:
    """With a lower limit only, an interval far above it passes however wide it is."""
    tolerance = ErrorTolerance(-6.0, math.inf, 10.0)

    assert tolerance.explain_failure(MedianInterval(90.0, 70.0, 110.0)) == ""
    assert tolerance.explain_failure(MedianInterval(90.0, -7.0, 110.0))


def test_a_failure_names_the_stage_its_interval_and_the_limits() -> None:
    """The failure's text has the stage, its interval and the limits."""
    with pytest.raises(AssertionError, match=r"dispatch: \+5\.\d+ \[.* ms is outside -2\.00 to"):
        measure_until_decided(make_rounds(1, 0.1, dispatch=5.0), get_tolerance)


def test_quiet_measurements_take_the_fewest_rounds() -> None:
    """Without noise the smallest number of rounds decides."""
    assert len(measure_until_decided(make_rounds(1, 0.1), get_tolerance)) == evidence.MIN_ROUNDS


def test_a_stage_that_a_round_lacks_had_no_error_there() -> None:
    """A stage that appears in one round of many is an exception, not a shift."""
    rounds: Iterator[Errors] = iter([{"a": 0.0}, {"a": 0.1, "b": 50.0}, *[{"a": 0.1}] * 20])

    found = measure_until_decided(lambda: next(rounds), get_tolerance)

    assert evidence.find_failures(found, get_tolerance) == {}
