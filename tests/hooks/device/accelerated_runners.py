# SPDX-License-Identifier: Apache-2.0
"""vLLM's model runners without a model: the same calls in the same order, under the real hooks.

On a simulated device accelerator_cases.py drives them, on a GPU gpu_runners.py, and test_model_runners.py on
one whose work takes exactly as long as told. Beside each step they note the truth: when its work really ran.
Files and lines are those of vLLM 0.32, other releases keep the order (test_target_check.py): R1 =
v1/worker/gpu_model_runner.py, R2 = v1/worker/gpu/model_runner.py, A = v1/worker/gpu/async_utils.py, E =
v1/worker/mm_encoder_model_runner.py, C1 = v1/worker/kv_connector_model_runner_mixin.py, C2 =
v1/worker/gpu/kv_connector.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from types import SimpleNamespace
from typing import Any, Final

from hooks.device.accelerator import SimulatedDevice
from hooks.process import wrap_methods
from ttft_otel.model import breakdown

HOST_COSTS: Final = ("prepare_us", "launch_us", "bookkeeping_us")
PREPARE_DEVICE_US: Final = 60.0  # copies and kernels that prepare a step's inputs
COPY_US: Final = 12.0  # sampled tokens, from the device to the host
ROW_US: Final = 0.09  # of get_output() for each request of the batch, measured on vLLM 0.32


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step costs: on the device (first group) and on the host, in microseconds."""

    forward_us: float = 0.0
    encoder_us: float = 0.0
    sampler_us: float = 80.0
    slowest_rank_us: float = 0.0  # at most so long this rank waits for the others' part
    drafter_us: float = 0.0
    kv_save_us: float = 0.0
    prepare_us: float = 500.0
    encoder_launch_us: float = 600.0
    forward_launch_us: float = 900.0
    sample_launch_us: float = 200.0
    bookkeeping_us: float = 150.0

    def scale_host(self, share: float) -> StepWork:
        """The same work with a host that needs `share` of the time for it."""
        names = [each.name for each in fields(self) if each.name.endswith(HOST_COSTS)]
        return replace(self, **{name: getattr(self, name) * share for name in names})


@dataclass(slots=True)
class StepTruth:
    """When the work of one step ran, by the host's clock: (stage code, begin, end), and `sampled`."""

    intervals: list[tuple[int, float, float]] = field(default_factory=list)
    sampled: float = 0.0

    def resolve_times(self, device: Any) -> None:
        """Host times of what the streams' mark() gave; a GPU knows them after a run."""
        resolve = device.resolve_time
        self.intervals = [(code, resolve(low), resolve(high)) for code, low, high in self.intervals]
        self.sampled = self.sampled and resolve(self.sampled)


class AsyncRunnerOutput:
    """An output whose copy is under way on a stream of its own (R1:269, A:115)."""

    def __init__(self, runner: AcceleratedRunner, output: Any) -> None:
        self.runner = runner
        self.output = output
        stream = runner.copy_stream
        stream.wait_stream(runner.device.main)
        stream.queue_work(COPY_US)
        setattr(self, runner.awaited_event, stream.make_awaited())

    def get_output(self) -> Any:
        """Sleep until the copy is complete (R1:324, A:174), then make lists of what was copied."""
        runner = self.runner
        getattr(self, runner.awaited_event).synchronize()
        runner.device.host.work(20 + runner.rows * ROW_US + runner.aux_us)
        return self.output


class AcceleratedRunner:
    """What both runners share. `asynchronous`: async scheduling.

    kv_connector, ec_connector: None without. encode_only: an instance without a language model.
    receive_us: earlier pipeline stages' work, for which this one waits. rows: requests of the batch;
    aux_us: what get_output() does with other outputs after the copy.
    """

    awaited_event = "async_copy_ready_event"

    def __init__(self, device: SimulatedDevice, work: StepWork, **options: Any) -> None:
        self.device = device
        self.work = work
        self.asynchronous: bool = options.get("asynchronous", True)
        self.kv_connector: Any = options.get("kv_connector")
        self.ec_connector: Any = options.get("ec_connector")
        self.encode_only: bool = options.get("encode_only", False)
        self.receive_us: float = options.get("receive_us", 0.0)
        self.rows: int = options.get("rows", 1)
        self.aux_us: float = options.get("aux_us", 0.0)
        self.speculative_config = object() if work.drafter_us else None
        self.copy_stream = device.make_stream()
        self.truth = StepTruth()
        self.scheduled: Any = None

    def prepare_inputs(self) -> None:
        """Host work, and small device work that it queues."""
        self.device.host.work(self.work.prepare_us / 2)
        self.device.main.queue_work(PREPARE_DEVICE_US)
        self.device.host.work(self.work.prepare_us / 2)

    def launch_encoder(self) -> None:
        self.device.host.work(self.work.encoder_launch_us / 2)
        self.device.main.queue_work(self.work.encoder_us)
        self.device.host.work(self.work.encoder_launch_us / 2)

    def launch_forward(self) -> None:
        """Launch the forward's kernels: the first early, the last when the host is done."""
        main, host = self.device.main, self.device.host
        for _ in range(4):
            main.queue_work(self.work.forward_us / 4)
            host.work(self.work.forward_launch_us / 4)
        main.queue_work(host.chance.uniform(0, self.work.slowest_rank_us))

    def note(self, code: int, begin: float) -> None:
        """The truth of an interval that ends at this point of the stream."""
        self.truth.intervals.append((code, begin, self.device.main.mark()))

    def run_sampler(self) -> None:
        self.device.host.work(self.work.sample_launch_us)
        self.device.main.queue_work(self.work.sampler_us)
        self.truth.sampled = self.device.main.mark()

    def run_drafter(self) -> None:
        if self.work.drafter_us:
            self.device.host.work(self.work.sample_launch_us)
            self.device.main.queue_work(self.work.drafter_us)

    def make_output(self) -> Any:
        """The step's output, with the truth beside it for the judge."""
        ids = list(self.scheduled.num_scheduled_tokens) or list(
            self.scheduled.scheduled_encoder_inputs
        )
        return SimpleNamespace(req_ids=ids, truth=self.truth)

    def receive_tensors(self) -> Any:
        """What an earlier pipeline stage sends (v1/worker/gpu_worker.py:1315); None without one."""
        return object() if self.receive_us else None

    def await_tensors(self) -> None:
        """The stage before has to send first: the receive is queued on this device's stream."""
        self.device.main.queue_work(self.receive_us)


class AcceleratedRunnerV1(AcceleratedRunner):
    """R1."""

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        """R1:3940."""
        self.scheduled, self.truth = scheduler_output, StepTruth()
        host = self.device.host
        self.prepare_inputs()
        if self.encode_only:  # R1:3981
            self._encode_and_finish(scheduler_output)
            return self.make_output()
        if intermediate_tensors is None:  # R1:3318, on the first pipeline stage in every step
            self._execute_mm_encoder(scheduler_output)
        if self.kv_connector is not None and scheduler_output.has_sync_kv_loads:  # C1:85
            self.kv_connector.start_load_kv(self)
        if intermediate_tensors is not None:
            self.await_tensors()
        self._model_forward()  # R1:4207
        if self.kv_connector is not None:  # C1:90
            if not scheduler_output.has_sync_kv_loads:
                self.kv_connector.start_load_kv(self)
            if not self.work.drafter_us:
                self.kv_connector.wait_for_save(self)
        host.work(50)
        return None

    def _encode_and_finish(self, scheduler_output: Any) -> None:
        if self.ec_connector is not None:
            self.ec_connector.start_save_caches(self)
        self._execute_mm_encoder(scheduler_output)
        if self.ec_connector is not None:
            self.ec_connector.get_finished(self)

    def _execute_mm_encoder(self, scheduler_output: Any) -> None:
        """R1:2787."""
        if scheduler_output.scheduled_encoder_inputs:
            begin = self.device.main.mark()
            self.launch_encoder()
            if self.ec_connector is not None:
                self.ec_connector.save_caches(self)
            self.note(breakdown.CODE_ENCODER, begin)

    def _model_forward(self) -> None:
        """R1:3620."""
        begin = self.device.main.mark()
        self.launch_forward()
        self.note(breakdown.CODE_FORWARD, begin)

    def sample_tokens(self, grammar_output: Any = None) -> Any:
        """R1:4304; R1:4364 drafts, R1:4467 books, R1:4509 saves, R1:4549 starts the copy."""
        self._sample()
        if self.work.drafter_us:
            self.propose_draft_token_ids()
        self.device.host.work(self.work.bookkeeping_us)
        if not self.asynchronous:  # R1:7195, a copy on the main stream and a wait for it
            self.device.main.queue_work(COPY_US)
            self.device.main.make_awaited().synchronize()
            self.device.host.work(self.work.bookkeeping_us)
        if self.kv_connector is not None and self.work.drafter_us:
            self.kv_connector.wait_for_save(self)
        output = self.make_output()
        return AsyncRunnerOutput(self, output) if self.asynchronous else output

    def _sample(self) -> None:
        """R1:3437."""
        self.run_sampler()

    def propose_draft_token_ids(self) -> None:
        """R1:4748."""
        self.run_drafter()


class AcceleratedRunnerV2(AcceleratedRunner):
    """R2, and E where it only encodes. Its outputs are always asynchronous (A:115)."""

    awaited_event = "copy_event"
    loads_before_drafter = False

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        """R2:1719, E:123."""
        self.scheduled, self.truth = scheduler_output, StepTruth()
        self.prepare_inputs()
        if scheduler_output.scheduled_encoder_inputs and intermediate_tensors is None:
            # R2:1950, E:170
            if self.ec_connector is not None:
                self.ec_connector.start_save_caches(self)
            self.execute_mm_encoder(scheduler_output)
            if self.ec_connector is not None:
                self.ec_connector.save_caches(self)
                self.ec_connector.get_finished(self)
        if self.encode_only:
            return self.make_output()
        if intermediate_tensors is not None:
            self.await_tensors()
        begin = self.begin_forward()
        self.launch_forward()
        self.note(breakdown.CODE_FORWARD, begin)
        return None

    def execute_mm_encoder(self, scheduled: Any) -> None:
        """v1/worker/gpu/mm/encoder_runner.py:150; called only with items."""
        begin = self.device.main.mark()
        self.launch_encoder()
        self.note(breakdown.CODE_ENCODER, begin)

    def forward_start(self) -> None:
        """A:94."""

    def begin_forward(self) -> Any:
        """R2:1995, C2:89; the truth of where it begins."""
        self.forward_start()
        begin = self.device.main.mark()
        if self.kv_connector is not None and self.scheduled.has_sync_kv_loads:
            self.kv_connector.start_load_kv(self)
        return begin

    def sample_tokens(self, grammar_output: Any = None) -> Any:
        """R2:2088: sample, start the copy (R2:2184), draft, save (R2:2299, C2:139)."""
        self.sample()
        output = AsyncRunnerOutput(self, self.make_output())
        self.device.host.work(self.work.bookkeeping_us)
        if self.loads_before_drafter:
            self._start_load()
        self.run_drafter()
        if not self.loads_before_drafter:
            self._start_load()
        if self.kv_connector is not None:
            self.kv_connector.wait_for_save(self)
        return output

    def _start_load(self) -> None:
        if self.kv_connector is not None and not self.scheduled.has_sync_kv_loads:
            self.kv_connector.start_load_kv(self)

    def sample(self) -> None:
        """R2:1592."""
        self.run_sampler()


class AcceleratedRunnerV2Of033(AcceleratedRunnerV2):
    """As of vLLM 0.33 (R2:2259): KV loads start right after the output's copy."""

    loads_before_drafter = True


class AcceleratedRunnerV2Of026(AcceleratedRunnerV2):
    """As up to vLLM 0.28: hooked where loads begin, before the forward and nowhere else."""

    def pre_forward(self) -> None:
        """v1/worker/gpu/kv_connector.py:51 of 0.24: loads begin, whether the forward needs them or not."""
        if self.kv_connector is not None:
            self.kv_connector.start_load_kv(self)

    def begin_forward(self) -> Any:
        """R2:1261 of 0.24."""
        begin = self.device.main.mark()
        self.pre_forward()
        return begin

    def _start_load(self) -> None:
        """They have begun before the forward."""


class AcceleratedKvConnector:
    """A connector that loads nothing and saves on the compute stream."""

    def start_load_kv(self, runner: AcceleratedRunner) -> None:
        """Looks at an empty list."""
        runner.device.host.work(10)

    def wait_for_save(self, runner: AcceleratedRunner) -> None:
        """Copies blocks away, in the order of the stream."""
        begin = runner.device.main.mark()
        runner.device.host.work(30)
        if runner.work.kv_save_us:
            runner.device.main.queue_work(runner.work.kv_save_us)
            runner.note(breakdown.CODE_KV_TRANSFER, begin)


class AcceleratedEcConnector:
    """An encoder's connector; `synchronizes`: it saves by a copy that waits for the encoder."""

    is_producer = True
    is_consumer = False

    def __init__(self, synchronizes: bool) -> None:
        self.synchronizes = synchronizes

    def start_save_caches(self, runner: AcceleratedRunner) -> None:
        """Nothing was cached before."""
        self._move(runner, 5)

    def save_caches(self, runner: AcceleratedRunner) -> None:
        """ECExampleConnector's `.cpu()` waits for the encoder; ECCPUConnector's only notes the item."""
        self._move(runner, 10, self.synchronizes)

    def get_finished(self, runner: AcceleratedRunner) -> None:
        """ECCPUConnector starts its copies here, on a stream of their own."""
        self._move(runner, 40)

    def _move(self, runner: AcceleratedRunner, host_us: float, waits: bool = False) -> None:
        begin = runner.device.main.mark()
        runner.device.host.work(host_us)
        if waits:
            runner.device.main.make_awaited().synchronize()
        runner.note(breakdown.CODE_EC_TRANSFER, begin)


def wrap_accelerated_classes() -> dict[str, type[AcceleratedRunner]]:
    """Both runners with the real hooks around them, and around what V2 leaves to others."""
    steps = {"worker.execute": "execute_model", "worker.tokens": "sample_tokens"}
    inner = {
        "worker.encoder": "_execute_mm_encoder",
        "worker.forward": "_model_forward",
        "worker.sample": "_sample",
        "worker.draft": "propose_draft_token_ids",
    }
    of_v2 = {
        "worker.encoder": "execute_mm_encoder",
        "worker.forward": "forward_start",
        "worker.sample": "sample",
    }
    for owner, method_by_target in (
        (AcceleratedRunnerV1, steps | inner),
        (AcceleratedRunnerV2, steps | of_v2),
        (AcceleratedRunnerV2Of026, {"worker.forward": "pre_forward"}),
        (AsyncRunnerOutput, {"worker.output": "get_output"}),
        (AcceleratedKvConnector, {"kv.load": "start_load_kv", "kv.save": "wait_for_save"}),
    ):
        wrap_methods(owner, method_by_target)
    return {
        "V1": AcceleratedRunnerV1,
        "V2": AcceleratedRunnerV2,
        "V2 of 0.33": AcceleratedRunnerV2Of033,
    }
