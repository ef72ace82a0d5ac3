# SPDX-License-Identifier: Apache-2.0
"""The benchmark of real servers on a GPU, dry: simulated servers, whose answers are right or wrong."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks import gpu_serve, gpu_servers
from benchmarks.gpu_servers import ServeAnswer
from lab import tiny_models

STAGES = ("queue", "dispatch", "encoder.compute", "prefill.compute", "sample", "output")


class SimulatedServer:
    """One request at a time on a device; `told_in`: a stage that gets what another one took.

    unattributed_ms: of every answer; lost_by_sleep_ms: more of it after a sleep.
    """

    lost_by_sleep_ms = 0.0

    def __init__(self, told_in: str = "", unattributed_ms: float = 0.0) -> None:
        self.told_in = told_in
        self.unattributed_ms = unattributed_ms
        self.delays: dict[str, float] = {}
        self.chance = random.Random(5)
        self.streams = 0

    def ask(self, seed: int, image: bool = False, tokens: int = 8) -> ServeAnswer:
        """Every stage takes about a millisecond, and its delay."""
        return self._answer(seed, image, tokens, waited_ms=0.0)

    def ask_many(
        self, seeds: Sequence[int], image: bool = False, tokens: int = 8
    ) -> list[ServeAnswer]:
        """They wait for each other."""
        step_ms = 1 + sum(self.delays.values())
        return [
            self._answer(seed, image, tokens, place * step_ms) for place, seed in enumerate(seeds)
        ]

    def _answer(self, seed: int, image: bool, tokens: int, waited_ms: float) -> ServeAnswer:
        stages = {name: self.chance.uniform(0.8, 1.2) for name in STAGES}
        if not image:
            del stages["encoder.compute"]
        stages["dispatch"] += waited_ms
        for place, ms in self.delays.items():
            own = gpu_serve.STAGE_BY_PLACE[place]
            if own in stages:
                stages[self.told_in or own] += ms
        gaps = tuple(self.chance.randrange(990, 1010) for _ in range(tokens - 1))
        return ServeAnswer(stages, self.unattributed_ms, f"answer to {seed}", gaps)

    def sleep_and_wake(self) -> None:
        """After that something may be lost."""
        self.unattributed_ms += self.lost_by_sleep_ms

    @contextlib.contextmanager
    def delay_device(self, place: str, ms: float) -> Iterator[None]:
        """For the block."""
        self.delays = {place: ms}
        yield
        self.delays = {}

    @contextlib.contextmanager
    def stream_beside(self, count: int) -> Iterator[None]:
        """For the block."""
        self.streams = count
        yield
        self.streams = 0


def measure(traced: SimulatedServer, encoder: SimulatedServer) -> dict[str, bool]:
    """Which goals are met."""
    servers = gpu_serve.ServerSet(traced, SimulatedServer(), encoder)
    figures = gpu_serve.measure_servers(servers)
    return {name: figure["met"] for name, figure in figures.items() if figure["goal"] is not None}


def test_right() -> None:
    """Servers that tell the truth meet every goal; there is one for each sentence of the job."""
    met = measure(SimulatedServer(), SimulatedServer())

    assert all(met.values()), met
    places = [f"{place}{beside}" for place in gpu_serve.STAGE_BY_PLACE
              for beside in ("", "_beside_32_streams")]  # fmt: skip
    assert met.keys() == {
        *("closed_share", "encoder_only_closed_share", "equal_texts_share", "token_gap_ratio"),
        "closed_after_sleep_share",
        *("saturated_wait_ms", "saturated_output_share"),
        *(f"{place}_{kind}_ms" for place in places for kind in ("error", "elsewhere")),
    }


def test_told_elsewhere() -> None:
    """A delay that shows in another stage misses both goals of its place."""
    met = measure(SimulatedServer(told_in="output"), SimulatedServer())

    assert not met["forward_error_ms"] and not met["forward_elsewhere_ms"]
    assert not met["sample_beside_32_streams_elsewhere_ms"]
    assert met["closed_share"]


def test_open() -> None:
    """Unattributed time misses the goals of closing."""
    met = measure(SimulatedServer(unattributed_ms=0.001), SimulatedServer(unattributed_ms=0.001))

    assert not met["closed_share"] and not met["encoder_only_closed_share"]
    assert met["forward_error_ms"]


def test_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is lost once a server has slept misses the goal after it, and not the one before."""
    monkeypatch.setattr(SimulatedServer, "lost_by_sleep_ms", 1.0)
    met = measure(SimulatedServer(), SimulatedServer())

    assert met["closed_share"] and not met["closed_after_sleep_share"]


def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Command lines and environments: graphs as wanted, nothing of a CPU build, delays only if traced."""
    monkeypatch.setattr(tiny_models, "build_model", lambda recipe: tmp_path)
    traced = gpu_servers.build_gpu_command("a", "v2", False, tmp_path / "control.json")
    untraced = gpu_servers.build_gpu_command("b", "v1", True, None)
    encode = gpu_servers.build_encode_command("v1", True, tmp_path)

    at = traced.argv.index("--compilation-config")
    assert json.loads(traced.argv[at + 1])["cudagraph_mode"] == "FULL_DECODE_ONLY"
    assert "--enforce-eager" not in traced.argv and "TRITON_ATTN" not in traced.argv
    assert traced.env["VLLM_USE_V2_MODEL_RUNNER"] == "1" and traced.env["TTFT_OTEL"] == "1"
    assert "inject" in traced.env["PYTHONPATH"]
    assert "TTFT_OTEL" not in untraced.env and "inject" not in untraced.env["PYTHONPATH"]
    assert "TRITON_ATTN" in untraced.argv and "TORCH_SDPA" in untraced.argv
    assert "ec_producer" in " ".join(encode.argv)
