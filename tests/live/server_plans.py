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
ADAPTER_NAME = "adapter"
# One place, so that a second request waits; drafts by n-grams need no model.
FEATURE_FLAGS = (
    *(
        "--speculative-config",
        json.dumps(
            {
                "method": "ngram",
                "num_speculative_tokens": 3,
                "prompt_lookup_max": 3,
                "prompt_lookup_min": 1,
            }
        ),
    ),
    "--enable-lora", "--max-lora-rank", "8",
    "--scheduling-policy", "priority",
)  # fmt: skip
FEATURE_ENV = {
    "VLLM_SERVER_DEV_MODE": "1",  # /pause, /resume, /sleep
    "VLLM_ENABLE_RESPONSES_API_STORE": "1",  # background responses
}
# Few of everything that requests can wait for, so that few of them suffice to use it up.
SMALL_PLACES = 4  # max_num_seqs
SMALL_CHUNK = 128  # max_num_batched_tokens
BLOCK_TOKENS = 128  # tokens of a KV block on CPU
CACHE_BLOCKS = 72  # of them is one for nothing; the longest prompt takes 64
SMALL_ADAPTERS = ("first", "second")  # of which one at a time has a place


def build_plan(shape: str, folder: Path, control: InjectionControl) -> DeploymentPlan:
    """The plan of `shape`: V1 runner for epd, pd and epd3; V2 and async scheduling for all others."""
    if shape == "features":
        return build_feature_plan(folder)
    if shape == "small":
        return build_small_plan(folder, control)
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


def build_feature_plan(folder: Path) -> DeploymentPlan:
    """One server of the text model with speculative decoding, LoRA, priorities and dev endpoints."""
    adapter = tiny_models.write_adapter(folder / "adapter", tiny_models.TEXT_RECIPE)
    options = VllmOptions(
        model=tiny_models.build_model(tiny_models.TEXT_RECIPE),
        max_num_seqs=1,
        extra=(*FEATURE_FLAGS, "--lora-modules", f"{ADAPTER_NAME}={adapter}"),
        env=FEATURE_ENV,
    )
    return DeploymentPlan("mono", options, folder=folder, env={"TTFT_OTEL_GUARD": "keep"})


def build_small_plan(folder: Path, control: InjectionControl) -> DeploymentPlan:
    """One text server with few places, tokens and KV blocks, that publishes KV events."""
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
        *("--lora-modules", *(f"{name}={adapter}" for name in SMALL_ADAPTERS)),
    )  # fmt: skip
    options = VllmOptions(
        model=tiny_models.build_model(tiny_models.TEXT_RECIPE),
        core=1,
        max_num_seqs=SMALL_PLACES,
        control=control.path,
        extra=extra,
        env={"VLLM_SERVER_DEV_MODE": "1"},  # the cache can be reset
    )
    env = {"TTFT_OTEL_GUARD": "keep"}
    return DeploymentPlan("mono", options, folder=folder, env=env, chunk_tokens=SMALL_CHUNK)
