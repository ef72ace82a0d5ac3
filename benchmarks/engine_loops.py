# SPDX-License-Identifier: Apache-2.0
"""A vLLM engine without work in it, for hooks.py: empty methods, hooked as wrap.py does it, and loops
that call them as an engine would. Each loop returns the CPU time that it took, in nanoseconds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from time import monotonic_ns, process_time_ns
from types import SimpleNamespace
from typing import Any, Final

from lab.fake_vllm.engine_objects import build_media_item, build_request, build_scheduler_output
from ttft_otel.hooks.install import build_hooks
from ttft_otel.hooks.targets import TARGETS_BY_NAME
from ttft_otel.hooks.worker import device
from ttft_otel.hooks.wrap import Patcher
from ttft_otel.model.names import header_names

# Rounds of some milliseconds: process_time_ns() is exact enough, and a round rarely interrupted.
REQUESTS_PER_ROUND: Final = 400
STEPS_PER_ROUND: Final = 2000
DEVICE_STEPS_PER_ROUND: Final = REQUESTS_PER_ROUND  # a request's prompt is one such step or more
DECODE_BATCH: Final = 64  # requests in each step
# Target -> the method of FakeVllmHost that stands for it.
METHOD_BY_TARGET: Final = {
    "scheduler.schedule": "schedule",
    "scheduler.update": "update_from_output",
    "scheduler.free": "_free_request",
    "engine.input": "preprocess_add_request",
    "worker.execute": "execute_model",
    "worker.encoder": "_execute_mm_encoder",
    "worker.forward": "_model_forward",
    "worker.sample": "_sample",
    "worker.tokens": "sample_tokens",
    "worker.output": "get_output",
    "transfer.wait": "ensure_cache_available",
    "transfer.place": "update_state_after_alloc",
    "transfer.keep": "request_finished",
    "kv.load": "start_load_kv",
    "kv.save": "wait_for_save",
    "kv.arrive": "_update_from_kv_xfer_finished",
}


PATCHER: Final = Patcher()
HOOKS: Final = build_hooks(PATCHER)
PREFILL_RESULT: Final = SimpleNamespace(outputs={}, req_ids=["r0"])


class FakeEvent:
    """A timing event that happens at once: what is measured is our code around it."""

    at_ns = 0

    def record(self) -> None:
        self.at_ns = monotonic_ns()

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: FakeEvent) -> float:
        return (other.at_ns - self.at_ns) / 1e6


class FakeVllmHost:
    """The methods of vLLM that we wrap, with nothing in them."""

    requests: dict[str, Any] = {}
    is_producer, is_consumer = False, True
    speculative_config = None
    # What vLLM's own scheduler has, and our hooks look at in each step while somebody waits.
    _pause_state = num_waiting_for_streaming_input = 0
    deferred_waiting: set[Any] = set()

    def ensure_cache_available(self, request: Any, computed: int) -> bool:
        return True

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        return None

    def request_finished(self, request: Any) -> tuple[bool, None]:
        return False, None

    def schedule(self, output: Any) -> Any:
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        return model_runner_output.outputs

    def preprocess_add_request(self, request: Any) -> Any:
        return (request.made, 0)

    def _free_request(self, request: Any) -> None:
        return None

    def execute_model(self, scheduler_output: Any) -> None:
        self._execute_mm_encoder(scheduler_output)
        self._model_forward()

    def _execute_mm_encoder(self, scheduler_output: Any) -> None:
        return None

    def _model_forward(self) -> None:
        return None

    def _sample(self) -> None:
        return None

    def sample_tokens(self, result: Any) -> Any:
        self._sample()
        return result

    def get_output(self) -> Any:
        return PREFILL_RESULT

    def start_load_kv(self, context: Any) -> None:
        return None

    def wait_for_save(self) -> None:
        return None

    def _update_from_kv_xfer_finished(self, output: Any) -> None:
        return None


def wrap_fake_host() -> type[FakeVllmHost]:
    """FakeVllmHost with our hooks in, as wrap.py puts them into vLLM."""

    # A subclass of its own: patching must not reach the plain host that is subtracted.
    class HookedHost(FakeVllmHost):
        pass

    for target, name in METHOD_BY_TARGET.items():
        PATCHER.patch_attribute(TARGETS_BY_NAME[target], HookedHost, name, HOOKS[target])
    return HookedHost


def wrap_fake_host_empty() -> type[FakeVllmHost]:
    """FakeVllmHost with wrappers that only forward the call: the reference for a step."""

    class PassingHost(FakeVllmHost):
        pass

    for name in METHOD_BY_TARGET.values():
        setattr(PassingHost, name, _wrap_empty(getattr(FakeVllmHost, name)))
    return PassingHost


# The least that any patch costs: one more Python call with all arguments passed through.
def _wrap_empty(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def pass_on(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    return pass_on


def run_decode_steps(kind: type[FakeVllmHost]) -> int:
    """Decode steps with DECODE_BATCH requests, none without a first token; CPU ns of STEPS_PER_ROUND."""
    host = kind()
    output = build_scheduler_output({f"r{n}": 1 for n in range(DECODE_BATCH)})
    result = SimpleNamespace(outputs={}, req_ids=["r0"])
    # CPU time of this process: neighbours on the machine do not count.
    began_ns = process_time_ns()
    for _ in range(STEPS_PER_ROUND):
        host.schedule(output)
        host.execute_model(output)
        host.sample_tokens(result)
        host.update_from_output(output, result)
    return process_time_ns() - began_ns


def run_device_steps(kind: type[FakeVllmHost]) -> int:
    """Steps that the scheduler has marked, on a device; CPU ns of DEVICE_STEPS_PER_ROUND steps."""
    host = kind()
    output = build_scheduler_output({"r0": 100})
    # What the scheduler's hook sets on a step that somebody waits for.
    output._ttft_marked = True
    worker = PATCHER.tracers[1]
    worker.clock = device.DeviceClock(FakeEvent, lambda: True)
    began_ns = process_time_ns()
    for _ in range(DEVICE_STEPS_PER_ROUND):
        host.execute_model(output)
        host.sample_tokens(host).get_output()
    spent_ns = process_time_ns() - began_ns
    worker.clock = None
    return spent_ns


def run_connector_steps(kind: type[FakeVllmHost]) -> int:
    """The calls that a KV connector adds to such a step; CPU ns of STEPS_PER_ROUND steps."""
    host = kind()
    began = process_time_ns()
    for _ in range(STEPS_PER_ROUND):
        host.start_load_kv(None)
        host.wait_for_save()
        host._update_from_kv_xfer_finished(None)
    return process_time_ns() - began


def run_core_requests(kind: type[FakeVllmHost], items: int = 0, overlaps: bool = False) -> int:
    """One request of one chunk through the engine core, with so many images that an encoder has
    announced. CPU ns for REQUESTS_PER_ROUND requests. overlaps: async scheduling is on.
    """
    host: Any = kind()
    host.scheduler = host  # one object stands for the engine core and its scheduler
    host.scheduler_config = SimpleNamespace(async_scheduling=overlaps)
    # As in an engine without a connector, of whose calls the loop below makes none.
    host.ec_connector = host if items else None
    made = []
    # All objects exist before the clock starts: only the calls are measured.
    for n in range(REQUESTS_PER_ROUND):
        name = f"r{n}"
        request = build_request(
            name,
            100,
            {header_names.CARRIER_KEY: "1", header_names.TRACEPARENT: "x"},
            computed=100,
            mm_features=[
                build_media_item(f"{name}-{number}" * 8, length=64) for number in range(items)
            ],
            kv_transfer_params=None,
        )
        params = {each.identifier: {"size_bytes": 4096} for each in request.mm_features}
        request.sampling_params = SimpleNamespace(extra_args={"ec_transfer_params": params})
        entered = SimpleNamespace(trace_headers=request.trace_headers, made=request)
        new = build_scheduler_output({name: 100}, [name])
        first = SimpleNamespace(request_id=name, trace_headers=request.trace_headers)
        outputs = {0: SimpleNamespace(outputs=[first])}
        result = SimpleNamespace(outputs=outputs, _ttft_record=(1, 9, 0, 10, 5, 8))
        made.append((name, request, entered, new, result))
    # On the class, because plain and hooked host both look requests up there.
    FakeVllmHost.requests = {name: request for name, request, *_ in made}
    began_ns = process_time_ns()
    for _, request, entered, new, result in made:
        host.preprocess_add_request(entered)
        if items:
            host.ensure_cache_available(request, 0)
            for index in range(items):
                host.update_state_after_alloc(request, index)
        host.schedule(new)
        host.update_from_output(new, result)
        if items:
            host.request_finished(request)
        host._free_request(request)
    return process_time_ns() - began_ns
