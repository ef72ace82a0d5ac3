# SPDX-License-Identifier: Apache-2.0
"""vLLM's own Scheduler in process, wrapped by the real hooks: a test drives it step by step.

No worker and no model runs: a step takes as long as the test says, by a fake clock, and samples one
token of each request whose prompt is complete.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tracing_fakes import FakeClock
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from hooks.fakes import HEADERS, UNTRACED_HEADERS
from hooks.process import CORE, wrap_methods
from lab import tiny_models
from ttft_otel.model import breakdown
from ttft_otel.model.breakdown import CODE_FORWARD, Breakdown, Marks
from ttft_otel.model.names import header_names
from ttft_otel.tracing import carrier
from ttft_otel.tracing import clock as clocks
from ttft_otel.tracing.carrier import EngineTimeline

BLOCK_SIZE = 16
STEP_US = 10_000
WRAPPED_METHODS = {
    "scheduler.schedule": "schedule",
    "scheduler.update": "update_from_output",
    "scheduler.pause": "set_pause_state",
    "scheduler.free": "_free_request",
    "scheduler.session": "_update_request_as_session",
}


class WrappedScheduler(Scheduler):
    """vLLM's scheduler with our hooks around the methods that they wrap."""


def make_vllm_config(**limits: Any) -> VllmConfig:
    """A tiny text model on a CPU. limits: of SchedulerConfig."""
    model = ModelConfig(
        model=str(tiny_models.build_model(tiny_models.ModelRecipe(vision=False))),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
    )
    settings = {
        "max_num_seqs": 64,
        "max_num_batched_tokens": 4096,
        "max_model_len": model.max_model_len,
        "enable_chunked_prefill": True,
        "is_encoder_decoder": False,
        "async_scheduling": False,
    }
    return VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=False),
        scheduler_config=SchedulerConfig(**(settings | limits)),
        device_config=DeviceConfig("cpu"),
    )


@dataclass
class StepInFlight:
    """A step that was scheduled: the tokens that it samples, the embeddings that it encodes of each.

    resumed: the scheduler had been paused since the step before. is_dummy: another rank needed it.
    """

    output: Any
    scheduled: int
    sampled: dict[str, list[int]]
    embeddings: dict[str, int]
    end: int = 0
    resumed: bool = False
    is_dummy: bool = False


class SchedulerDriver:
    """A scheduler, its clock, and what its requests' first outputs carried.

    blocks: KV blocks of BLOCK_SIZE tokens. limits: of SchedulerConfig.
    """

    def __init__(self, clock: FakeClock, blocks: int = 4096, **limits: Any) -> None:
        import torch

        self.clock = clock
        config = make_vllm_config(**limits)
        config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        self.scheduler: Any = WrappedScheduler(
            config,
            KVCacheConfig(
                num_blocks=blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            SimpleNamespace(accept_tokens=lambda request, tokens: True),  # type: ignore[arg-type]
            block_size=BLOCK_SIZE,
        )
        self.timelines: dict[str, EngineTimeline] = {}
        self.headers: dict[str, str] = {}
        self.steps: list[StepInFlight] = []
        self.last_end = 0
        self.paused = False  # since the latest schedule()

    def limit_encoder(self, embeds: int) -> None:
        self.scheduler.max_num_encoder_input_tokens = embeds
        self.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=1 << 20)

    def add(self, name: str, tokens: int = 8, answer: int = 4, **options: Any) -> Request:
        """A request comes in through the engine core's input thread and is added at once.

        answer: tokens that it generates. options: `traced`, `headers`, `images` (embeddings of each), those
        of Request.
        """
        request = self.build(name, tokens, answer, **options)
        self.scheduler.add_request(request)
        return request

    def queue_behind(self, answer: int) -> None:
        """The request `first`, in its first step of so many tokens; then `second` comes, and waits."""
        self.add("first", answer=answer)
        self.step()
        self.add("second")

    def run_steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def build(
        self,
        name: str,
        tokens: int = 8,
        answer: int = 4,
        traced: bool = True,
        images: tuple[int, ...] = (),
        **options: Any,
    ) -> Request:
        """A request that the input thread has taken, and the scheduler does not know yet."""
        features, offset = [], 0
        for number, length in enumerate(images):
            place = PlaceholderRange(offset=offset, length=length)
            features.append(MultiModalFeatureSpec(None, "image", f"{name}-{number}", place))
            offset += length + 1
        request = Request(
            name,
            [7] * max(tokens, offset),
            options.pop("sampling", SamplingParams(max_tokens=answer, ignore_eos=True)),
            None,
            arrival_time=options.pop("arrival_time", self.clock.at / 1e6),
            mm_features=features or None,
            trace_headers=options.pop("headers", dict(HEADERS if traced else UNTRACED_HEADERS)),
            **options,
        )
        token = CORE.stamp_input(self, request)
        if token is not None:
            CORE.attach_timeline(token, (request, 0), self)
        return request

    def abort(self, *ids: str) -> None:
        self.scheduler.finish_requests([*ids], RequestStatus.FINISHED_ABORTED)

    def set_pause(self, state: str) -> None:
        """The scheduler is paused, or goes on: a name of PauseState."""
        self.scheduler.set_pause_state(PauseState[state])

    def pause(self, length_us: int) -> None:
        """The scheduler is paused for `length_us`, and the engine core blocks meanwhile."""
        self.paused = True
        self.set_pause("PAUSED_ALL")
        self.clock.tick(length_us)
        self.set_pause("UNPAUSED")

    def step(self, length_us: int = STEP_US, idle_us: int = 0) -> Any:
        """One step that takes `length_us`; `idle_us` pass before it. Gives the scheduler's output."""
        self.clock.tick(idle_us)
        step = self.begin_step()
        self.clock.tick(length_us)
        self.end_step(step)
        return step.output

    def run_dummy(self, length_us: int = STEP_US) -> None:
        """A batch without requests, which another rank needs; no step runs."""
        core = SimpleNamespace(scheduler=self.scheduler)
        none = SimpleNamespace(num_scheduled_tokens={})
        step = StepInFlight(none, self.clock.at, {}, {}, resumed=self.paused, is_dummy=True)
        self.paused = False
        begun = clocks.now_us()
        self.clock.tick(length_us)
        CORE.record_dummy(begun, None, core)
        step.end = self.last_end = self.clock.at
        self.steps.append(step)

    def begin_step(self) -> StepInFlight:
        """Schedule a step; it may be that an earlier one has not ended."""
        output = self.scheduler.schedule()
        requests = self.scheduler.requests
        sampled = {
            each: [7] if requests[each].num_computed_tokens >= requests[each].num_tokens else []
            for each in output.num_scheduled_tokens
        }
        embeddings = {
            each: sum(requests[each].mm_features[item].mm_position.length for item in items)
            for each, items in output.scheduled_encoder_inputs.items()
        }
        step = StepInFlight(output, self.clock.at, sampled, embeddings, resumed=self.paused)
        self.paused = False
        self.steps.append(step)
        return step

    def end_step(self, step: StepInFlight) -> None:
        """The step's output is there; steps end in the order in which they began."""
        output, ids = step.output, list(step.sampled)
        result = ModelRunnerOutput(
            req_ids=ids, req_id_to_index={each: at for at, each in enumerate(ids)},
            sampled_token_ids=[*step.sampled.values()],
        )  # fmt: skip
        began = max(step.scheduled, self.last_end)
        end = step.end = self.last_end = self.clock.at
        pair = (CODE_FORWARD, began, end - 1) if end - 1 > began else ()
        result._ttft_record = (clocks.get_boot_number(), end, 0, *pair)  # type: ignore[attr-defined]
        for batch in self.scheduler.update_from_output(output, result).values():
            for each in batch.outputs:
                if each.trace_headers and header_names.CARRIER_KEY in each.trace_headers:
                    self.headers.setdefault(
                        each.request_id, each.trace_headers[header_names.CARRIER_KEY]
                    )

    def run_until_answered(self, *ids: str) -> None:
        """Steps until all `ids` have their first token."""
        for _ in range(2000):
            if all(each in self.headers for each in ids):
                return
            self.step()
        raise AssertionError(f"no first token in 2000 steps: {ids}")

    def read(self, name: str) -> tuple[Breakdown, Marks]:
        """The breakdown of an answered request, as the API server would make it."""
        marks = Marks(1)
        timeline = carrier.decode_timeline(self.headers[name], marks)
        assert timeline is not None
        self.timelines[name] = timeline
        marks.arrive = marks.render = marks.assign = marks.added
        marks.output = marks.entered
        return breakdown.partition_marks(marks), marks

    def sum_reasons(self, name: str, *stages: str) -> dict[str, int]:
        """Microseconds per reason in `stages` (all waiting ones without any)."""
        cut, _ = self.read(name)
        sums: dict[str, int] = {}
        for part in cut.reasons:
            if not stages or part.stage in stages:
                sums[part.reason] = sums.get(part.reason, 0) + part.end - part.start
        return sums


def wrap_scheduler() -> None:
    """Put the hooks around WrappedScheduler's methods, anew for each test."""
    for name in WRAPPED_METHODS.values():
        setattr(WrappedScheduler, name, getattr(Scheduler, name))
    wrap_methods(WrappedScheduler, WRAPPED_METHODS)
