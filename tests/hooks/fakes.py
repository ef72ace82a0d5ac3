# SPDX-License-Identifier: Apache-2.0
"""A fake engine core with vLLM's method names under the real hooks; vLLM itself, and random events for it."""

from __future__ import annotations

import gc
import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tracing_fakes import FakeClock

from lab.fake_vllm.engine_objects import build_media_item, build_request, build_scheduler_output
from ttft_otel.model.breakdown import Marks
from ttft_otel.model.names import header_names
from ttft_otel.tracing import carrier
from ttft_otel.tracing.carrier import EngineTimeline, decode_timeline

HEADERS = {
    header_names.TRACEPARENT: "00-" + "a" * 32 + "-" + "b" * 16 + "-01",
    header_names.CARRIER_KEY: "1",
}
UNTRACED_HEADERS = {header_names.CARRIER_KEY: carrier.UNTRACED}
WRAPPED_METHODS = {
    "engine.input": "preprocess_add_request",
    "scheduler.schedule": "schedule",
    "scheduler.update": "update_from_output",
    "scheduler.free": "_free_request",
}


def make_request(
    request_id: str, tokens: int = 10, traced: bool = True, items: int = 0, **more: Any
) -> Any:
    """A vLLM Request with the fields that the hooks read; `more`: others, or other values."""
    fields = {
        "mm_features": [media_item(number) for number in range(items)],
        "get_num_encoder_embeds": lambda index: 2,
    }
    headers = HEADERS if traced else UNTRACED_HEADERS
    return build_request(request_id, tokens, headers, **(fields | more))


def media_item(number: int, identifier: str = "", length: int = 2) -> Any:
    """A media item with the fields that the hooks read: two tokens each, at 0, 3, 6, ... of the prompt."""
    return build_media_item(identifier or f"item-{number}", 3 * number, length)


class FakeEngineCore:
    """An engine core and its scheduler in one; the test determines what a step does."""

    def __init__(self, clock: FakeClock, tracing: str = "") -> None:
        self.clock = clock
        self.requests: dict[str, Any] = {}
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_rank=3),
            observability_config=SimpleNamespace(otlp_traces_endpoint=tracing),
        )

    def preprocess_add_request(self, request: Any) -> tuple[Any, int]:
        self.clock.tick(500)
        return request, 0

    def add(self, *requests: Any) -> None:
        """Requests come in and are added to the scheduler."""
        for each in requests:
            self.requests[each.request_id] = self.preprocess_add_request(each)[0]

    def schedule(
        self,
        new: tuple[str, ...] = (),
        tokens: dict[str, int] | None = None,
        encode: dict[str, list[int]] | None = None,
        preempted: tuple[str, ...] = (),
    ) -> Any:
        """As vLLM does, tokens count as computed before this returns."""
        tokens = tokens or {}
        for name, count in tokens.items():
            self.requests[name].num_computed_tokens += count
        for name in preempted:
            self.requests[name].num_computed_tokens = 0
        return build_scheduler_output(tokens, new, encode, preempted)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """`first` get an output, `finish` end with theirs, `silent` end without, all as told."""
        runner_output = model_runner_output
        if runner_output.fail:
            raise RuntimeError("the host's own")
        outputs = []
        for name in (*runner_output.first, *runner_output.finish, *runner_output.silent):
            if name not in runner_output.silent:
                headers = self.requests[name].trace_headers
                outputs.append(SimpleNamespace(request_id=name, trace_headers=headers))
            if name not in runner_output.first:
                self.free(name)
        return {0: SimpleNamespace(outputs=outputs)}

    def _free_request(self, request: Any) -> None:
        del self.requests[request.request_id]

    def free(self, name: str) -> None:
        self._free_request(self.requests[name])

    def update(
        self,
        step: Any,
        first: tuple[str, ...] = (),
        record: Any = None,
        finish: tuple[str, ...] = (),
        silent: tuple[str, ...] = (),
        fail: bool = False,
        runs: Any = None,
    ) -> dict[str, Any]:
        """Update from a step; give each output's trace headers."""
        runner = SimpleNamespace(first=first, finish=finish, silent=silent, fail=fail)
        if record is not None:
            runner._ttft_record = record
        if runs is not None:
            runner._ttft_runs = runs
        outputs = self.update_from_output(step, runner)[0].outputs
        return {each.request_id: each.trace_headers for each in outputs}


def decode_headers(headers: Any) -> tuple[Marks, EngineTimeline]:
    """The timeline in an output's trace headers."""
    marks = Marks(1)
    timeline = decode_timeline(headers[header_names.CARRIER_KEY], marks)
    assert timeline is not None
    return marks, timeline


def with_any_events(kinds: Sequence[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test with `events` (kind, size, microseconds before it), `places` and a `tokens` budget per step.

    kinds: what can happen; named twice, twice as often.
    """
    event = st.tuples(st.sampled_from(kinds), st.integers(1, 400), st.integers(0, 3_000))
    drawn: dict[str, Any] = {
        "events": st.lists(event, min_size=5, max_size=60),
        "places": st.integers(1, 4),
        "tokens": st.sampled_from([32, 64, 512]),
    }
    repeated = settings(
        max_examples=settings.default.max_examples // 5,  # 20, or 4 with the profile `quick`
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    return lambda test: repeated(given(**drawn)(test))


def import_from_vllm(*names: str) -> list[ModuleType]:
    """The modules `names`, of vLLM or such as import it, without the warnings of other people's code.

    Six seconds of CPU the first time; three more if garbage were looked for meanwhile, and as many
    if vLLM's million of objects were looked through with later garbage.
    """
    if all(name in sys.modules for name in names):
        return [sys.modules[name] for name in names]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()  # what tests have left would else be frozen, too
        gc.disable()
        try:
            return [importlib.import_module(name) for name in names]
        finally:
            gc.freeze()
            gc.enable()
