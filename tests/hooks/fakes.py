# SPDX-License-Identifier: Apache-2.0
"""Plain objects with vLLM's method names, each call through the real hooks: an engine core."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ttft_otel import names
from ttft_otel.breakdown import Marks
from ttft_otel.carrier import unfold
from ttft_otel.hooks import engine, scheduler

HEADERS = {names.TRACEPARENT: "00-" + "a" * 32 + "-" + "b" * 16 + "-01", names.CARRIER: "1"}


def request(request_id: str, tokens: int = 10, traced: bool = True, items: int = 0) -> Any:
    """A vLLM Request as far as the hooks look at it."""
    return SimpleNamespace(
        request_id=request_id,
        trace_headers=dict(HEADERS) if traced else None,
        num_computed_tokens=0,
        num_prompt_tokens=tokens,
        num_tokens=tokens,
        mm_features=[object()] * items,
    )


class Core:
    """An engine core of one scheduler; each method goes through the real hooks."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_rank=3))

    def enter(self, made: Any) -> Any:
        """The input thread's preprocess_add_request()."""
        token = engine.entering(self, made)
        engine.entered(token, (made, 0), self, made)
        return made

    def add(self, made: Any) -> Any:
        """add_request()."""
        self.requests[made.request_id] = made
        return made

    def schedule(
        self,
        new: tuple[str, ...] = (),
        tokens: dict[str, int] | None = None,
        encode: dict[str, list[int]] | None = None,
        preempted: tuple[str, ...] = (),
    ) -> Any:
        """schedule(): as vLLM does, tokens are counted as computed before it returns."""
        tokens = tokens or {}
        for request_id, count in tokens.items():
            self.requests[request_id].num_computed_tokens += count
        for request_id in preempted:
            self.requests[request_id].num_computed_tokens = 0
        output = SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=name, mm_features=self.requests[name].mm_features)
                for name in new
            ],
            num_scheduled_tokens=tokens,
            scheduled_encoder_inputs=encode or {},
            total_num_scheduled_tokens=sum(tokens.values()),
            preempted_req_ids=set(preempted),
        )
        scheduler.scheduled(None, output, self)
        return output

    def update(
        self,
        step: Any,
        first: tuple[str, ...] = (),
        record: Any = None,
        finish: tuple[str, ...] = (),
        silent: tuple[str, ...] = (),
        fail: bool = False,
    ) -> dict[str, Any]:
        """update_from_output(): `first` get an output, `finish` end with theirs, `silent` without."""
        runner = SimpleNamespace(_ttft=record)
        held = scheduler.updating(self, step, runner)
        outputs: list[Any] = []
        if fail:
            scheduler.updated(held, None, self, step, runner)
            return {}
        for name in (*first, *finish, *silent):
            made = self.requests[name]
            if name not in silent:
                headers = made.trace_headers
                outputs.append(SimpleNamespace(request_id=name, trace_headers=headers))
            if name not in first:
                self.free(name)
        scheduler.updated(held, {0: SimpleNamespace(outputs=outputs)}, self, step, runner)
        return {each.request_id: each.trace_headers for each in outputs}

    def free(self, request_id: str) -> None:
        """_free_request()."""
        scheduler.freed(self, self.requests[request_id])
        del self.requests[request_id]


def told(headers: Any) -> tuple[Marks, dict[str, int]]:
    """What an output's headers say to the API server."""
    marks = Marks(1)
    counts = unfold(headers[names.CARRIER], marks)
    assert counts is not None
    return marks, counts
