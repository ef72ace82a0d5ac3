# SPDX-License-Identifier: Apache-2.0
"""Say how to start vLLM in each role on a machine without a GPU; servers.py runs the Commands."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ttft_otel.lab import ports
from ttft_otel.lab.guests import guests_path

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Command:
    """All it takes to start one server.

    env: added to the caller's environment. health: path that answers 200 once it is ready.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    port: int
    health: str = "/health"
    host: str = HOST


@dataclass(frozen=True, slots=True)
class Options:
    """What a caller may choose about a vLLM server.

    python: interpreter of the environment that holds the vLLM release.
    core: the CPU core its worker is bound to; two servers must not share one.
    runner: model runner; v2 needs Triton's interpreter and is slower.
    async_scheduling: force what vLLM switches off on CPU, through the `inject` guest.
    control: the JSON file of the `inject` guest; naming one loads the guest.
    """

    model: Path
    python: str = sys.executable
    core: int = 0
    port: int | None = None
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    max_model_len: int = 8192
    runner: Literal["v1", "v2"] = "v1"
    async_scheduling: bool = False
    control: Path | None = None
    connector: str = "ECExampleConnector"
    connector_module: str | None = None
    extra: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


def mono(options: Options) -> Command:
    """One server that does everything."""
    return vllm("mono", options)


def encoder(options: Options, storage: Path) -> Command:
    """E: encodes images and leaves the embeddings in the storage folder."""
    transfer = ec_transfer(options, storage, "ec_producer")
    return vllm("encode", options, *transfer, "--no-enable-prefix-caching")


def prefill_decode(options: Options, storage: Path) -> Command:
    """PD: takes embeddings from the storage folder, does the rest."""
    return vllm("prefill_decode", options, *ec_transfer(options, storage, "ec_consumer"))


def prefill(options: Options, storage: Path | None = None) -> Command:
    """P: fills the KV cache for a decode server (NIXL); with a storage folder, after an E."""
    transfer = ec_transfer(options, storage, "ec_consumer") if storage else ()
    return nixl("prefill", options, *transfer)


def decode(options: Options) -> Command:
    """D: takes the KV cache of a prefill server (NIXL) and answers."""
    return nixl("decode", options)


def vllm(name: str, options: Options, *arguments: str) -> Command:
    """The command line that all roles share, then the role's own arguments, then the caller's."""
    port = options.port or ports.free()
    argv = (
        # The `vllm serve` that users type, through the interpreter: a console script names its own.
        *(options.python, "-m", "vllm.entrypoints.cli.main"),
        *("serve", str(options.model)),
        *("--served-model-name", "tiny"),
        *("--host", HOST),
        *("--port", str(port)),
        *("--max-model-len", str(options.max_model_len)),
        *("--max-num-batched-tokens", str(options.max_num_batched_tokens)),
        *("--max-num-seqs", str(options.max_num_seqs)),
        *("--enforce-eager", "--enable-request-id-headers"),
        *arguments,
        *options.extra,
    )
    return Command(name, argv, environment(options), port)


def environment(options: Options) -> dict[str, str]:
    """The variables of a vLLM server: one core, no hub, no reports home, chosen runner."""
    env = {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(options.core),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": HOST,
        "VLLM_USE_V2_MODEL_RUNNER": "1" if options.runner == "v2" else "0",
    }
    guests = ["calm"]
    if options.runner == "v2":
        env["TRITON_INTERPRET"] = "1"
        guests.append("triton_cpu")
    if options.async_scheduling:
        env["TTFT_LAB_ASYNC"] = "1"
    if options.control:
        env["TTFT_LAB_CONTROL"] = str(options.control)
    if options.async_scheduling or options.control or options.connector_module:
        guests.append("inject")
    paths = [options.env.get("PYTHONPATH", ""), guests_path(*guests)]
    env |= options.env
    env["PYTHONPATH"] = ":".join(filter(None, paths))
    return env


def ec_transfer(options: Options, storage: Path, role: str) -> tuple[str, str]:
    """The flag that makes a server one end of the encoder cache's way."""
    config: dict[str, Any] = {
        "ec_connector": options.connector,
        "ec_role": role,
        "ec_connector_extra_config": {"shared_storage_path": str(storage)},
    }
    if options.connector_module:
        config["ec_connector_module_path"] = options.connector_module
    return "--ec-transfer-config", json.dumps(config)


def nixl(name: str, options: Options, *arguments: str) -> Command:
    """A server with the NIXL connector over host memory and a side channel of its own."""
    config = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
    command = vllm(name, options, "--kv-transfer-config", json.dumps(config), *arguments)
    side = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports.free()), "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST}
    return Command(command.name, command.argv, {**command.env, **side}, command.port)
