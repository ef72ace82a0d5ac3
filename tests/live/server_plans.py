# SPDX-License-Identifier: Apache-2.0
"""Options of the live tests' deployments, by name; conftest.py starts them, and says what they are for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from lab import tiny_models
from lab.injection import InjectionControl
from lab.local_deployment import DeploymentPlan
from lab.server_commands import EC_CPU_CONNECTOR, VllmOptions

NIXL_SHAPE = "epd-nixl-v2-async"
# Few of everything that requests can wait for, so that few of them suffice to use it up.
TEXT_PLACES = 4  # max_num_seqs; the control file can leave one of them
TEXT_CHUNK = 128  # max_num_batched_tokens
BLOCK_TOKENS = 128  # tokens of a KV block on CPU
CACHE_BLOCKS = 72  # of them is one for nothing; the longest prompt takes 64
ADAPTERS = ("first", "second")  # of which one at a time has a place
TEXT_ENV = {
    "VLLM_SERVER_DEV_MODE": "1",  # /pause, /resume, /sleep; the cache can be reset
    "VLLM_ENABLE_RESPONSES_API_STORE": "1",  # background responses
}


def build_plan(shape: str, folder: Path, control: InjectionControl) -> DeploymentPlan:
    """The plan of `shape`: V1 runner for text, epd, pd and epd3; V2 and async scheduling for all others."""
    if shape == "text":
        return build_text_plan(folder, control)
    model = tiny_models.build_model(tiny_models.VISION_RECIPE)
    # Servers inherit pytest's environment; ours must behave as it does without pytest.
    guard = {"TTFT_OTEL_GUARD": "keep"}
    if shape in ("epd", "pd", "epd3"):
        options = VllmOptions(model=model, control=control.path)
        return DeploymentPlan(
            shape, options, use_waiting_connector=shape == "epd", folder=folder, env=guard
        )
    options = VllmOptions(model=model, control=control.path, runner="v2", async_scheduling=True)
    if "nixl" in shape:
        options = replace(options, connector=EC_CPU_CONNECTOR)
    return DeploymentPlan(shape.partition("-")[0], options, folder=folder, env=guard)


def build_text_plan(folder: Path, control: InjectionControl) -> DeploymentPlan:
    """One text server with few places, tokens, KV blocks and adapters, and all features that go together."""
    adapter = tiny_models.write_adapter(folder / "adapter", tiny_models.TEXT_RECIPE)
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{folder}/events",
        "replay_endpoint": f"ipc://{folder}/replay",
        "topic": "kv",
    }
    extra = (
        "--kv-events-config", json.dumps(events), "--enable-prompt-tokens-details",
        "--num-gpu-blocks-override", str(CACHE_BLOCKS),
        "--enable-lora", "--max-loras", "1", "--max-lora-rank", "8",
        *("--lora-modules", *(f"{name}={adapter}" for name in ADAPTERS)),
        "--scheduling-policy", "priority", "--enable-scale-out",  # which has endpoints that render prompts
    )  # fmt: skip
    options = VllmOptions(
        model=tiny_models.build_model(tiny_models.TEXT_RECIPE),
        core=1,
        max_num_seqs=TEXT_PLACES,
        control=control.path,
        extra=extra,
        env=TEXT_ENV,
    )
    env = {"TTFT_OTEL_GUARD": "keep"}
    return DeploymentPlan("mono", options, folder=folder, env=env, chunk_tokens=TEXT_CHUNK)
