# SPDX-License-Identifier: Apache-2.0
"""What gpu_clock.py asks of a device, and how a CUDA device does it: work, copies, graphs, waiting.

tests/benchmarks/test_figures.py has a simulated one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from ttft_otel.tracing import clock


class Gpu(Protocol):
    """A device with one stream, as CudaGpu and the simulated one are."""

    def make_event(self) -> Any:
        """An event with timing."""

    def is_idle(self) -> bool:
        """Whether all queued work is done."""

    def queue_work(self, us: float) -> None:
        """Queue work of about `us` microseconds; returns at once."""

    def queue_copy(self) -> Callable[[], None]:
        """Queue the copy of an output; returns the call that sleeps until it is complete."""

    def synchronize(self) -> None:
        """Wait until all queued work is done."""

    def forbid_waits(self) -> AbstractContextManager[None]:
        """While the block runs, a call that waits for the device raises RuntimeError."""

    def queue_graph(self) -> tuple[Callable[[], None], float]:
        """A captured graph's replay, and how long it takes by the host's clock, in microseconds."""


class CudaGpu:
    """The current CUDA device. Work is a kernel that spins for a number of cycles."""

    def __init__(self) -> None:
        import torch  # 3 s, and not installed where the simulated device is measured

        self.torch = torch
        self.stream = torch.cuda.current_stream()
        self.copy_stream = torch.cuda.Stream()
        # Pinned, as vLLM's output buffers: a copy to pageable memory would wait on the host.
        self.source = torch.zeros(64, device="cuda")
        self.target = torch.zeros(64, pin_memory=True)
        # A guess, with which the true rate is measured: it differs from GPU to GPU.
        self.cycles_per_us = 1000.0
        self.cycles_per_us *= 20_000 / self._measure_work(20_000)

    def _measure_work(self, us: float) -> float:
        first, last = self.make_event(), self.make_event()
        self.queue_work(us)  # warm-up
        first.record()
        self.queue_work(us)
        last.record()
        self.synchronize()
        return float(first.elapsed_time(last)) * 1000

    def make_event(self) -> Any:
        """As choose_clock() makes them."""
        return self.torch.cuda.Event(enable_timing=True)

    def is_idle(self) -> bool:
        """As choose_clock() asks."""
        return bool(self.torch.cuda.current_stream().query())

    def queue_work(self, us: float) -> None:
        """Spin."""
        # Spins on the device without using its memory: lengths do not depend on data.
        self.torch.cuda._sleep(int(us * self.cycles_per_us))

    def queue_copy(self) -> Callable[[], None]:
        """On a stream of its own, with a blocking event, as vLLM's AsyncOutput."""
        # Blocking: the host sleeps until it is done, as vLLM's does, instead of spinning.
        done = self.torch.cuda.Event(blocking=True)
        self.copy_stream.wait_stream(self.stream)
        with self.torch.cuda.stream(self.copy_stream):
            self.target.copy_(self.source, non_blocking=True)
            done.record()
        return done.synchronize  # type: ignore[no-any-return]

    def synchronize(self) -> None:
        """The whole device."""
        self.torch.cuda.synchronize()

    @contextlib.contextmanager
    def forbid_waits(self) -> Iterator[None]:
        """By torch's own check."""
        self.torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            self.torch.cuda.set_sync_debug_mode("default")

    def queue_graph(self) -> tuple[Callable[[], None], float]:
        """Ten pieces of work of 1 ms."""
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            for _ in range(10):
                self.queue_work(1_000)
        lengths = []
        for _ in range(5):
            self.synchronize()
            began = clock.now_us()
            graph.replay()
            self.synchronize()
            lengths.append(clock.now_us() - began)
        # The least: whatever disturbs makes it longer, never shorter.
        return graph.replay, float(min(lengths))
