# SPDX-License-Identifier: Apache-2.0
"""A session of a real vLLM's /v1/realtime: each input of the stream is a request with a trace of its own.

The model is a Qwen3-ASR of random weights. vLLM takes five seconds of speech for one input, and makes of an
utterance, from a commit to the final one, one session of its engine core.
"""

from __future__ import annotations

import base64
import json
import os
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from lab import tiny_models
from lab.injection import InjectionControl
from tests.live.conftest import DeploymentDeck
from tests.live.test_alone import run_alone

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
INPUT_BYTES = 5 * 16000 * 2  # 16-bit samples
QUIET_S = 2.0  # without a message: the answer to an input has ended
PAUSE_S = 3.0  # in which nobody speaks
DELAY_MS = 400.0
ARRIVAL_S = 20.0  # until a span must have come
INPUTS = 5  # of the first utterance, before two that come at once


@dataclass
class Utterance:
    """What a client saw of one: when it sent each input, and when the first words of the answer came."""

    sent_ns: list[int] = field(default_factory=list)
    waited_ms: list[float] = field(default_factory=list)


def send(socket: ClientConnection, kind: str, **content: Any) -> None:
    """Send an event."""
    socket.send(json.dumps({"type": kind, **content}))


def make_noise() -> str:
    """Speech for one input; other noise each time, because equal audio is encoded once."""
    return base64.b64encode(os.urandom(INPUT_BYTES)).decode()


def read_answer(socket: ClientConnection, timeout_s: float) -> str:
    """The last event's type, once the answer is done, or nothing comes for `timeout_s`."""
    kind = ""
    while kind != "transcription.done":
        try:
            event = json.loads(socket.recv(timeout=timeout_s))
        except TimeoutError:
            break
        kind = event["type"]
        assert kind != "error", event
    return kind


def speak(socket: ClientConnection, control: InjectionControl) -> Utterance:
    """One utterance: INPUTS one after the other, the third and the fourth delayed, then two at once."""
    told = Utterance()
    send(socket, "input_audio_buffer.commit")
    for number in range(INPUTS):
        time.sleep(PAUSE_S)
        control.set_injections({2: {"multimodal": DELAY_MS}, 3: {"encoder": DELAY_MS}}.get(number))
        told.sent_ns.append(time.time_ns())
        begun = time.monotonic()
        send(socket, "input_audio_buffer.append", audio=make_noise())
        event = json.loads(socket.recv(timeout=120))
        told.waited_ms.append((time.monotonic() - begun) * 1000)
        assert event["type"] == "transcription.delta", event
        read_answer(socket, QUIET_S)
    control.set_injections()
    for _ in range(2):
        told.sent_ns.append(time.time_ns())
        send(socket, "input_audio_buffer.append", audio=make_noise())
    send(socket, "input_audio_buffer.commit", final=True)
    assert read_answer(socket, 120) == "transcription.done"
    return told


@pytest.fixture(scope="module")
def session(
    deck: DeploymentDeck, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Utterance, list[dict[str, Any]]]:
    """Two utterances in one WebSocket: what the client saw of the first, and all that was traced."""
    folder = tmp_path_factory.mktemp("realtime")
    model = tiny_models.write_speech_model(folder / "speech")
    extra = ("--load-format", "dummy")
    with run_alone(deck, folder, extra, model=model, max_model_len=4096, warm=False) as bench:
        address = bench.front_url.replace("http", "ws", 1)
        with connect(f"{address}/v1/realtime", max_size=None) as socket:
            assert json.loads(socket.recv(timeout=60))["type"] == "session.created"
            send(socket, "session.update", model="tiny")
            told = speak(socket, bench.control)
            speak(socket, bench.control)
        count, until, found = 2 * (INPUTS + 2), time.monotonic() + ARRIVAL_S, list[Any]()
        while len(found) < count and time.monotonic() < until:
            time.sleep(0.5)
            found = bench.get_json("/api/requests")
    return told, sorted(found, key=lambda each: each["start_ns"])


def test_each_input(session: tuple[Utterance, list[dict[str, Any]]]) -> None:
    """A trace each, exact sums; it begins when its input came, and ends before the client had words."""
    told, found = session
    assert len(found) == 2 * (INPUTS + 2)
    assert len({each["trace_id"] for each in found}) == len(found)
    assert len({each["request_id"] for each in found}) == 2  # utterances
    for each in found:
        assert not each["error"] and each["unattributed_ms"] == 0.0, each
        assert not {"receive", "egress"} & set(each["stages"])
        assert {"preprocess", "encoder.compute", "prefill.compute", "output"} <= set(each["stages"])
        assert sum(each["stages"].values()) == pytest.approx(each["ttft_ms"], abs=0.01)
    for number, waited_ms in enumerate(told.waited_ms):
        late_ms = (found[number]["start_ns"] - told.sent_ns[number]) / 1e6
        assert 0 <= late_ms < PAUSE_S * 1000  # the pause is before it
        assert late_ms + found[number]["ttft_ms"] < waited_ms + 1


def test_delays(session: tuple[Utterance, list[dict[str, Any]]]) -> None:
    """A delay in one input is in its own stage, and in no other input."""
    _, found = session
    for first in (0, INPUTS + 2):
        inputs = found[first : first + INPUTS]
        for number, stage in ((2, "preprocess"), (3, "encoder.compute")):
            own = inputs[number]["stages"]
            assert own[stage] >= DELAY_MS
            assert sum(own.values()) - own[stage] < DELAY_MS
            others = [
                each["stages"][stage] for at, each in enumerate(inputs) if at not in (0, number)
            ]
            assert max(others) < DELAY_MS
