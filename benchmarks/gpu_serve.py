# SPDX-License-Identifier: Apache-2.0
"""Whether the stages of real vLLM servers on a GPU are true, on both model runners.

    python -m benchmarks.gpu_serve [--runner v1|v2] [--plain-attention] [--json FILE]

Needs a GPU and the pieces that scripts/gpu packs; three servers per runner (traced, untraced, encoder-only)
from gpu_servers.py. The truth is a kernel that spins in the stream that computes. Judged is what each server
answers in Server-Timing. tests/benchmarks/test_figures.py runs it on servers that are simulated.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from benchmarks.figures import Figure, build_figure, divide_rounds, report_figures
from benchmarks.gpu_servers import (
    RUNNERS,
    GpuServer,
    ServeAnswer,
    build_encode_command,
    build_gpu_command,
)
from lab.injection import InjectionControl
from lab.local_servers import run_servers

REQUESTS: Final = 20  # of text, and of an image each
PAIRS: Final = 7  # of a probe with and one without the delay
DELAY_MS: Final = 80.0
MAX_DELAY_ERROR_MS: Final = 2.0
STREAMS: Final = 32
SATURATING: Final = 16  # probes at once, each delayed: the device is the bottleneck
MAX_OUTPUT_GROWTH: Final = 0.1  # of what dispatch grows by
LONG_ANSWER: Final = 256
ROUNDS: Final = 5
MAX_GAP_RATIO: Final = 1.02
# Where the device sleeps -> the stage that has to grow.
STAGE_BY_PLACE: Final = {
    "encoder": "encoder.compute",
    "forward": "prefill.compute",
    "sample": "sample",
}
START_TIMEOUT_S: Final = 300


class ProbedServer(Protocol):
    """A server that is asked and delayed, as GpuServer and the simulated one are."""

    def ask(self, seed: int, image: bool = False, tokens: int = 8) -> ServeAnswer:
        """One probe."""

    def ask_many(
        self, seeds: Sequence[int], image: bool = False, tokens: int = 8
    ) -> list[ServeAnswer]:
        """All at once."""

    def sleep_and_wake(self) -> None:
        """Give the device's memory back, and take it again."""

    def delay_device(self, place: str, ms: float) -> AbstractContextManager[None]:
        """Each probe's step sleeps at `place`, on the device."""

    def stream_beside(self, count: int) -> AbstractContextManager[None]:
        """So many streams decode meanwhile."""


@dataclass(frozen=True, slots=True)
class ServerSet:
    """The servers of one model runner."""

    traced: ProbedServer
    untraced: ProbedServer
    encoder: ProbedServer


def measure_closing(server: ProbedServer, images: Sequence[bool], tokens: int = 8) -> Figure:
    """The share of requests of which nothing is unattributed."""
    answers = [
        server.ask(seed, image, tokens) for image in images for seed in range(1, REQUESTS + 1)
    ]
    closed = sum(answer.unattributed_ms == 0 for answer in answers)
    return build_figure([closed / len(answers)], 1.0, at_least=True)


def measure_delay(server: ProbedServer, place: str, name: str) -> dict[str, Figure]:
    """By how much the delay's own stage misses it, and how much all others together claim of it.

    Pairs of a request with and one without it: what else happens to a server happens to both.
    """
    own_stage, image = STAGE_BY_PLACE[place], place == "encoder"
    own: list[float] = []
    others: dict[str, list[float]] = {}
    with server.delay_device(place, DELAY_MS):
        server.ask(999, image)  # the first one measures the device's clock
    for number in range(PAIRS):
        plain = server.ask(1000 + number, image).stages
        with server.delay_device(place, DELAY_MS):
            delayed = server.ask(2000 + number, image).stages
        own.append(delayed.get(own_stage, 0.0) - plain.get(own_stage, 0.0))
        for stage in (plain.keys() | delayed.keys()) - {own_stage}:
            growth = delayed.get(stage, 0.0) - plain.get(stage, 0.0)
            others.setdefault(stage, []).append(growth)
    elsewhere = max(abs(statistics.median(growths)) for growths in others.values())
    missed = abs(statistics.median(own) - DELAY_MS)
    return {
        f"{name}_error_ms": build_figure([missed], MAX_DELAY_ERROR_MS),
        f"{name}_elsewhere_ms": build_figure([elsewhere], MAX_DELAY_ERROR_MS),
    }


def measure_saturation(server: ProbedServer) -> dict[str, Figure]:
    """With the device as the bottleneck it is `dispatch` (or the queue) that grows, not `output`."""
    alone = server.ask(3000).stages
    with server.delay_device("forward", DELAY_MS):
        server.ask(3001)
        crowd = server.ask_many(range(3100, 3100 + SATURATING))
    waits = [sum(each.stages.get(name, 0.0) for name in ("queue", "dispatch")) for each in crowd]
    waited = max(waits) - alone.get("dispatch", 0.0) - alone.get("queue", 0.0)
    output = max(each.stages.get("output", 0.0) for each in crowd) - alone.get("output", 0.0)
    return {
        "saturated_wait_ms": build_figure([waited], DELAY_MS / 2, at_least=True),
        "saturated_output_share": build_figure([output / max(waited, 1.0)], MAX_OUTPUT_GROWTH),
    }


def measure_against_untraced(servers: ServerSet) -> dict[str, Figure]:
    """Equal tokens, and the time per output token as a ratio of rounds that take turns."""
    seeds = range(4000, 4000 + REQUESTS)
    both = servers.traced, servers.untraced
    texts = [[server.ask(seed, image=True).text for seed in seeds] for server in both]
    equal = sum(ours == theirs for ours, theirs in zip(*texts, strict=True))
    gaps: list[list[float]] = [[], []]
    for number in range(ROUNDS):
        for server, medians in zip(both, gaps, strict=True):
            answer = server.ask(5000 + number, tokens=LONG_ANSWER)
            medians.append(statistics.median(answer.token_gaps_us))
    return {
        "equal_texts_share": build_figure([equal / REQUESTS], 1.0, at_least=True),
        "token_gap_ratio": build_figure(divide_rounds(*gaps), MAX_GAP_RATIO, digits=4),
        "token_gap_us": build_figure(gaps[0]),
    }


def measure_servers(servers: ServerSet) -> dict[str, Figure]:
    """All figures of one model runner."""
    figures = {"closed_share": measure_closing(servers.traced, (False, True))}
    for place in STAGE_BY_PLACE:
        figures |= measure_delay(servers.traced, place, place)
    with servers.traced.stream_beside(STREAMS):
        for place in STAGE_BY_PLACE:
            figures |= measure_delay(servers.traced, place, f"{place}_beside_{STREAMS}_streams")
        servers.traced.sleep_and_wake()
    figures["closed_after_sleep_share"] = measure_closing(servers.traced, (False, True))
    figures |= measure_saturation(servers.traced)
    figures |= measure_against_untraced(servers)
    figures["encoder_only_closed_share"] = measure_closing(servers.encoder, (True,), tokens=1)
    return figures


def measure_runner(runner: str, plain_attention: bool) -> dict[str, Figure]:
    """Start the runner's servers, one after the other, and measure them."""
    with tempfile.TemporaryDirectory(prefix="ttft-otel-") as scratch:
        folder = Path(scratch)
        control, encode_control = folder / "control.json", folder / "encode.json"
        controls = InjectionControl(control), InjectionControl(encode_control)
        commands = [
            build_gpu_command(f"traced-{runner}", runner, plain_attention, control),
            build_gpu_command(f"untraced-{runner}", runner, plain_attention, None),
            build_encode_command(runner, plain_attention, folder),
        ]
        with run_servers(*commands, timeout=START_TIMEOUT_S, logs=folder) as started:
            traced, untraced, encoder = (each.url for each in started)
            return measure_servers(
                ServerSet(
                    GpuServer(traced, controls[0]),
                    GpuServer(untraced, None),
                    GpuServer(encoder, controls[1]),
                )
            )


def main() -> int:
    """Measure, print, and write the file that was asked for; 1 when a goal is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runner", choices=list(RUNNERS), help="this one alone")
    parser.add_argument(
        "--plain-attention", action="store_true", help="without FlashAttention 3: Triton and SDPA"
    )
    parser.add_argument("--json", type=Path, help="write {figure: {value, goal, met}} there")
    options = parser.parse_args()
    figures: dict[str, Figure] = {}
    for runner in [options.runner] if options.runner else RUNNERS:
        measured = measure_runner(runner, options.plain_attention)
        figures |= {f"{runner}_{name}": figure for name, figure in measured.items()}
    return report_figures(figures, options.json)


if __name__ == "__main__":
    sys.exit(main())
