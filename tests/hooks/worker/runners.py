# SPDX-License-Identifier: Apache-2.0
"""Fake model runners with the method names of vLLM's V1 and V2, wrapped by the real hooks.

Their work takes known times on a still clock: encoder 300, save 40, preparation 20, forward 1000,
logits 5, sampler 7, drafter 60, agreement of the ranks 500 microseconds.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tracing_fakes import FakeClock

from hooks.process import wrap_ec_connector, wrap_methods

ENCODER_US, SAVE_US, PREPARE_US, FORWARD_US, LOGITS_US, SAMPLER_US = 300, 40, 20, 1000, 5, 7
DRAFTER_US, SYNC_US = 60, 500
EMPTY = SimpleNamespace(req_ids=[])  # vLLM shares one empty output between all its steps


class PendingOutput:
    """An async output whose copy from the device is not complete."""

    def __init__(self, output: Any) -> None:
        self.output = output

    def get_output(self) -> Any:
        """Wait for the copy."""
        return self.output


class FakeEcConnector:
    """An encoder-cache connector."""

    is_producer = True
    is_consumer = True

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.available = False

    def ensure_cache_available(self, request: Any, computed: int = 0) -> bool:
        """The scheduler's side."""
        return self.available

    def start_load_caches(self) -> None:
        """Take what another instance encoded."""
        self.clock.tick(SAVE_US)

    def save_caches(self) -> None:
        """Publish what was encoded here."""
        self.clock.tick(SAVE_US)


class FakeRunner:
    """The common part of both; `pending` is asynchronous scheduling."""

    def __init__(self, clock: FakeClock, pending: bool = False, connector: Any = None) -> None:
        self.clock = clock
        self.pending = pending
        self.connector = connector
        self.encode_only = False
        self.speculative_config: Any = None
        self.raises = False
        self.state: Any = None
        self.ranks = 1  # data-parallel ones
        self.kv: Any = None  # a KV connector
        self.has_encoded = False  # all items of its steps are in its cache, or prompt embeddings

    def encode_items(self, scheduled: Any) -> None:
        """The encoder's call, which V1 makes in every step, with or without items."""
        if scheduled.scheduled_encoder_inputs and not self.has_encoded:
            self.clock.tick(ENCODER_US)
            if self.connector is not None:
                self.connector.save_caches()

    def begin_step(self, scheduler_output: Any) -> None:
        """What both versions do first; the step may fail there."""
        self.state = scheduler_output
        self.clock.tick(PREPARE_US)
        if self.raises:
            raise RuntimeError("out of memory")
        for _ in range(self.ranks - 1):
            self.synchronize_ranks()

    def synchronize_ranks(self) -> None:
        """Functions of their own in vLLM."""
        self.clock.tick(SYNC_US)

    def make_output(self) -> Any:
        """The step's output."""
        held = list(self.state.num_scheduled_tokens) or list(self.state.scheduled_encoder_inputs)
        output = SimpleNamespace(req_ids=held) if held else EMPTY
        return PendingOutput(output) if self.pending else output

    def compute_logits(self) -> None:
        """Between the forward and the sampler."""
        self.clock.tick(LOGITS_US)


class RunnerV1(FakeRunner):
    """As in vllm/v1/worker/gpu_model_runner.py."""

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        """One step; the output is final only on an encoder instance."""
        self.begin_step(scheduler_output)
        if intermediate_tensors is None:
            self._execute_mm_encoder(scheduler_output)
        if self.encode_only or not scheduler_output.num_scheduled_tokens:
            return self.make_output() if self.encode_only else EMPTY
        loads_first = self.kv is not None and scheduler_output.has_sync_kv_loads
        if loads_first:
            self.kv.start_load_kv(None)
        self._model_forward()
        if self.kv is not None:
            if not loads_first:
                self.kv.start_load_kv(None)
            self.kv.wait_for_save()
        self.compute_logits()
        return None

    def _execute_mm_encoder(self, scheduler_output: Any) -> None:
        self.encode_items(scheduler_output)

    def _model_forward(self) -> None:
        self.clock.tick(FORWARD_US)

    def sample_tokens(self) -> Any:
        """The second call of a step."""
        self._sample()
        self.clock.tick(LOGITS_US)
        if self.speculative_config is not None:
            self.propose_draft_token_ids()
        return self.make_output()

    def _sample(self) -> None:
        self.clock.tick(SAMPLER_US)

    def propose_draft_token_ids(self) -> None:
        """The drafter."""
        self.clock.tick(DRAFTER_US)


class FakeEncoderRunner:
    """V2's encoder runner."""

    def __init__(self, runner: FakeRunner) -> None:
        self.runner = runner

    def execute_mm_encoder(self, scheduled: Any) -> None:
        """Called only with items."""
        self.runner.encode_items(scheduled)


class FakeStepTimingCollector:
    """V2's collector of step times: only the forward's start can be seen."""

    def forward_start(self) -> None:
        """The forward begins."""


class RunnerV2(FakeRunner):
    """As in vllm/v1/worker/gpu/model_runner.py: the forward ends with execute_model."""

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        """One step."""
        self.begin_step(scheduler_output)
        encodes = scheduler_output.scheduled_encoder_inputs and not self.has_encoded
        if encodes and intermediate_tensors is None:
            FakeEncoderRunner(self).execute_mm_encoder(scheduler_output)
        if self.encode_only or not scheduler_output.num_scheduled_tokens:
            return self.make_output() if self.encode_only else EMPTY
        FakeStepTimingCollector().forward_start()
        self.clock.tick(FORWARD_US)
        return None

    def sample_tokens(self) -> Any:
        """The second call of a step."""
        self.compute_logits()
        self.sample()
        return self.make_output()

    def sample(self) -> None:
        """The sampler."""
        self.clock.tick(SAMPLER_US)


def wrap_runner_methods(
    v1: type, v2: type, encoder_runner: type, step_timing: type, pending_output: type
) -> None:
    """Put the real hooks around both runners' methods, and those of what V2 leaves to others."""
    steps = {"worker.execute": "execute_model", "worker.tokens": "sample_tokens"}
    inner = {
        "worker.encoder": "_execute_mm_encoder",
        "worker.forward": "_model_forward",
        "worker.sample": "_sample",
        "worker.draft": "propose_draft_token_ids",
    }
    for owner, method_by_target in (
        (v1, steps | inner),
        (v2, {**steps, "worker.sample": "sample"}),
        (encoder_runner, {"worker.encoder": "execute_mm_encoder"}),
        (step_timing, {"worker.forward": "forward_start"}),
        (pending_output, {"worker.output": "get_output"}),
    ):
        wrap_methods(owner, method_by_target)


def wrap_runner_classes() -> dict[str, type[FakeRunner]]:
    """Both runners, wrapped; subclasses' methods are never patched twice."""
    wrap_runner_methods(
        RunnerV1, RunnerV2, FakeEncoderRunner, FakeStepTimingCollector, PendingOutput
    )
    for kind in (RunnerV1, RunnerV2):
        wrap_methods(kind, {"worker.dp_sync": "synchronize_ranks"})
    return {"V1": RunnerV1, "V2": RunnerV2}


def connect_ec(clock: FakeClock) -> FakeEcConnector:
    """A connector as its factory would hand it out, its class wrapped."""
    made = FakeEcConnector(clock)
    wrap_ec_connector(made)
    return made


def make_scheduler_output(
    tokens: dict[str, int], encode: dict[str, list[int]] | None = None, marked: bool = True
) -> Any:
    """A scheduler's output for one step, marked for measuring or not."""
    output = SimpleNamespace(
        num_scheduled_tokens=tokens,
        scheduled_encoder_inputs=encode or {},
        scheduled_new_reqs=[SimpleNamespace(mm_features=[1] if encode else [])],
    )
    if marked:
        output._ttft_marked = True
    return output
