# SPDX-License-Identifier: Apache-2.0
"""Two model runners with the method names of vLLM's V1 and V2, wrapped by the real hooks.

Their work takes known times on a still clock: encoder 300, save 40, preparation 20, forward 1000,
logits 5, sampler 7 microseconds.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ttft_otel.hooks import transfer, worker, wrap
from ttft_otel.hooks.targets import BY_NAME
from ttft_otel.testing import Clock

ENCODER, SAVE, PREPARE, FORWARD, LOGITS, SAMPLER = 300, 40, 20, 1000, 5, 7
EMPTY = SimpleNamespace(req_ids=[])  # vLLM shares one empty output between all its steps


class Pending:
    """An output whose copy is still under way."""

    def __init__(self, output: Any) -> None:
        self.output = output

    def get_output(self) -> Any:
        """Wait for the copy."""
        return self.output


class Connector:
    """An encoder-cache connector."""

    is_producer = True
    is_consumer = True

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.available = False

    def ensure_cache_available(self, request: Any, computed: int = 0) -> bool:
        """The scheduler's side."""
        return self.available

    def start_load_caches(self) -> None:
        """Take what another instance encoded."""
        self.clock.tick(SAVE)

    def save_caches(self) -> None:
        """Publish what was encoded here."""
        self.clock.tick(SAVE)


class Runner:
    """What both have in common; `pending` is asynchronous scheduling."""

    def __init__(self, clock: Clock, pending: bool = False, connector: Any = None) -> None:
        self.clock = clock
        self.pending = pending
        self.connector = connector
        self.encode_only = False
        self.raises = False
        self.state: Any = None

    def encode(self, scheduled: Any) -> None:
        """V1 comes by on every step, items or not."""
        if scheduled.scheduled_encoder_inputs:
            self.clock.tick(ENCODER)
            if self.connector is not None:
                self.connector.save_caches()

    def answer(self) -> Any:
        """The step's output."""
        held = list(self.state.num_scheduled_tokens) or list(self.state.scheduled_encoder_inputs)
        output = SimpleNamespace(req_ids=held) if held else EMPTY
        return Pending(output) if self.pending else output

    def logits(self) -> None:
        """Between the forward and the sampler."""
        self.clock.tick(LOGITS)


class V1(Runner):
    """As in vllm/v1/worker/gpu_model_runner.py."""

    def execute_model(self, scheduler_output: Any) -> Any:
        """One step; the output is final only on an encoder instance."""
        self.state = scheduler_output
        self.clock.tick(PREPARE)
        if self.raises:
            raise RuntimeError("out of memory")
        self._execute_mm_encoder(scheduler_output)
        if self.encode_only or not scheduler_output.num_scheduled_tokens:
            return self.answer() if self.encode_only else EMPTY
        self._model_forward()
        self.logits()
        return None

    def _execute_mm_encoder(self, scheduler_output: Any) -> None:
        self.encode(scheduler_output)

    def _model_forward(self) -> None:
        self.clock.tick(FORWARD)

    def sample_tokens(self) -> Any:
        """The second call of a step."""
        self._sample()
        return self.answer()

    def _sample(self) -> None:
        self.clock.tick(SAMPLER)


class Encoders:
    """V2's encoder runner."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    def execute_mm_encoder(self, scheduled: Any) -> None:
        """Called only with items."""
        self.runner.encode(scheduled)


class Timing:
    """V2's collector of step times: only the forward's start can be seen."""

    def forward_start(self) -> None:
        """The forward begins."""


class V2(Runner):
    """As in vllm/v1/worker/gpu/model_runner.py: the forward ends with execute_model."""

    def execute_model(self, scheduler_output: Any) -> Any:
        """One step."""
        self.state = scheduler_output
        self.clock.tick(PREPARE)
        if self.raises:
            raise RuntimeError("out of memory")
        if scheduler_output.scheduled_encoder_inputs:
            Encoders(self).execute_mm_encoder(scheduler_output)
        if self.encode_only or not scheduler_output.num_scheduled_tokens:
            return self.answer() if self.encode_only else EMPTY
        Timing().forward_start()
        self.clock.tick(FORWARD)
        return None

    def sample_tokens(self) -> Any:
        """The second call of a step."""
        self.logits()
        self.sample()
        return self.answer()

    def sample(self) -> None:
        """The sampler."""
        self.clock.tick(SAMPLER)


def fresh_classes() -> dict[str, type[Runner]]:
    """Both runners, wrapped; subclasses' methods are never patched twice."""
    for target, owner, name in (
        ("worker.execute", V1, "execute_model"),
        ("worker.encoder", V1, "_execute_mm_encoder"),
        ("worker.forward", V1, "_model_forward"),
        ("worker.sample", V1, "_sample"),
        ("worker.tokens", V1, "sample_tokens"),
        ("worker.output", Pending, "get_output"),
        ("worker.execute", V2, "execute_model"),
        ("worker.encoder", Encoders, "execute_mm_encoder"),
        ("worker.forward", Timing, "forward_start"),
        ("worker.sample", V2, "sample"),
        ("worker.tokens", V2, "sample_tokens"),
    ):
        wrap.put(BY_NAME[target], owner, name, worker.HOOKS[target])
    return {"V1": V1, "V2": V2}


def connect(clock: Clock) -> Connector:
    """A connector as its factory would hand it out, its class wrapped."""
    made = Connector(clock)
    transfer.created(None, made)
    return made


def scheduled(
    tokens: dict[str, int], encode: dict[str, list[int]] | None = None, marked: bool = True
) -> Any:
    """A scheduler's output for one step, marked for measuring or not."""
    made = SimpleNamespace(
        num_scheduled_tokens=tokens,
        scheduled_encoder_inputs=encode or {},
        scheduled_new_reqs=[SimpleNamespace(mm_features=[1] if encode else [])],
    )
    if marked:
        made._ttft = True
    return made
