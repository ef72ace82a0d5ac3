# SPDX-License-Identifier: Apache-2.0
"""Real vLLM servers on a GPU for gpu_serve.py: tiny models, their command lines, and how they are asked."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lab import free_ports, tiny_models, ttft_client
from lab.injection import InjectionControl
from lab.server_commands import HOST, ServerCommand
from lab.ttft_client import TimedRequest, TimedResponse
from lab.vllm_plugins import join_plugin_paths
from ttft_otel.model.names import env_names, header_names

RUNNERS: Final = {"v1": "0", "v2": "1"}
COMPILATION: Final = {
    "mode": 0,
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "cudagraph_capture_sizes": [1, 2, 4, 8],
}
GPU_MEMORY_SHARE: Final = "0.2"  # of 141 GB; three servers live side by side
# Where FlashAttention 3 was not brought along.
PLAIN_ATTENTION: Final = (
    *("--attention-backend", "TRITON_ATTN"),
    *("--mm-encoder-attn-backend", "TORCH_SDPA"),
)
PROBE_WORDS: Final = 600  # of a probe's prompt: more tokens than a step of the streams has
MIN_PROBE_TOKENS: Final = 256
STREAM_TOKENS: Final = 400
CALL_TIMEOUT_S: Final = 120


@dataclass(frozen=True, slots=True)
class ServeAnswer:
    """One answer. stages: milliseconds by name, without `unattributed` and `ttft`."""

    stages: dict[str, float]
    unattributed_ms: float
    text: str
    token_gaps_us: tuple[int, ...]


def build_gpu_command(
    name: str, runner: str, plain_attention: bool, control: Path | None, *arguments: str
) -> ServerCommand:
    """A vLLM server on the GPU. control: of the `inject` plugin; None: tracing is off as well."""
    port = free_ports.find_free_port()
    model = tiny_models.build_model(tiny_models.VISION_RECIPE)
    argv = (
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)),
        *("--served-model-name", "tiny", "--host", HOST, "--port", str(port)),
        *("--dtype", "bfloat16", "--max-model-len", "8192", "--max-num-seqs", "64"),
        *("--gpu-memory-utilization", GPU_MEMORY_SHARE),
        *("--compilation-config", json.dumps(COMPILATION), "--enable-request-id-headers"),
        *("--no-enable-prefix-caching", "--mm-processor-cache-gb", "0", "--enable-sleep-mode"),
        *(PLAIN_ATTENTION if plain_attention else ()),
        *arguments,
    )
    env = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_USE_V2_MODEL_RUNNER": RUNNERS[runner],
        "VLLM_GPU_SYNC_CHECK": "error",
        "VLLM_SERVER_DEV_MODE": "1",  # /sleep, /wake_up
    }
    plugins = join_plugin_paths(*(["inject"] if control else []))
    env["PYTHONPATH"] = ":".join(filter(None, (plugins, os.environ.get("PYTHONPATH", ""))))
    if control:
        env |= {env_names.TTFT_OTEL: "1", "TTFT_LAB_CONTROL": str(control)}
    return ServerCommand(name, argv, env, port)


def build_encode_command(runner: str, plain_attention: bool, folder: Path) -> ServerCommand:
    """An instance that only encodes; its encodings go to files."""
    config = {
        "ec_connector": "ECExampleConnector",
        "ec_role": "ec_producer",
        "ec_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    return build_gpu_command(
        f"encode-{runner}",
        runner,
        plain_attention,
        folder / "encode.json",
        *("--ec-transfer-config", json.dumps(config)),
    )


class GpuServer:
    """A running server; `control` is None where tracing is off."""

    def __init__(self, url: str, control: InjectionControl | None) -> None:
        self.url = url
        self.control = control

    def ask(self, seed: int, image: bool = False, tokens: int = 8) -> ServeAnswer:
        """One probe; equal seeds are equal requests. Raises RuntimeError when it fails."""
        return self.ask_many([seed], image, tokens)[0]

    def ask_many(
        self, seeds: Sequence[int], image: bool = False, tokens: int = 8
    ) -> list[ServeAnswer]:
        """All at once, each from a thread of its own."""
        requests = [
            TimedRequest(
                prompt=f"probe {seed}",
                words=PROBE_WORDS,
                pictures=(seed,) if image else (),
                max_tokens=tokens,
                headers={header_names.ASK_TIMING: "1"},
            )
            for seed in seeds
        ]
        return [read_answer(each) for each in ttft_client.send_timed_requests(self.url, requests)]

    def sleep_and_wake(self) -> None:
        """Its weights leave the device and come back, and what was captured is captured anew."""
        for call in ("sleep?level=1", "wake_up"):
            urllib.request.urlopen(f"{self.url}/{call}", data=b"", timeout=CALL_TIMEOUT_S).close()

    @contextlib.contextmanager
    def delay_device(self, place: str, ms: float) -> Iterator[None]:
        """Each probe's step sleeps at `place`, on the device, while the block runs."""
        assert self.control is not None
        self.control.set_injections({place: ms}, device=True, min_tokens=MIN_PROBE_TOKENS)
        try:
            yield
        finally:
            self.control.set_injections()

    @contextlib.contextmanager
    def stream_beside(self, count: int) -> Iterator[None]:
        """Keep `count` streams decoding while the block runs."""
        stopped = threading.Event()

        def run_streams() -> None:
            while not stopped.is_set():
                ttft_client.send_timed_request(self.url, prompt="go on", max_tokens=STREAM_TOKENS)

        threads = [threading.Thread(target=run_streams, daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stopped.set()
            for thread in threads:
                thread.join()


def read_answer(response: TimedResponse) -> ServeAnswer:
    """What is judged of a response. Raises RuntimeError when it is not one."""
    if response.status != 200:
        raise RuntimeError(f"status {response.status}: {response.text[:200]}")
    stages = dict(response.server_timing)
    unattributed = stages.pop("unattributed", 0.0)
    stages.pop("ttft", None)
    times = [event.at_us for event in response.events]
    gaps = tuple(later - earlier for earlier, later in zip(times[1:], times[2:], strict=False))
    return ServeAnswer(stages, unattributed, response.text, gaps)
