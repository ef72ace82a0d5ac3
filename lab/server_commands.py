# SPDX-License-Identifier: Apache-2.0
"""Command lines that start vLLM in each role on a machine without a GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lab import free_ports
from lab.vllm_plugins import join_plugin_paths

HOST = "127.0.0.1"
EC_EXAMPLE_CONNECTOR = "ECExampleConnector"  # its aid for debugging: a shared folder
EC_CPU_CONNECTOR = "ECCPUConnector"  # vLLM's encoder-cache connector for production
EC_REGION_BYTES = 64 * 2**20  # memory for encodings of each of its servers


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """How to start one server.

    env: added to the caller's environment. health: path that answers 200 once it is ready.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    port: int
    health_path: str = "/health"
    host: str = HOST


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """Options of a vLLM server.

    python: interpreter of the environment that holds the vLLM release.
    core: the CPU core its worker is bound to; two servers must not share one.
    runner: model runner; v2 needs Triton's interpreter and is slower.
    async_scheduling: force what vLLM switches off on CPU, through the `inject` plugin.
    control: the JSON file of the `inject` plugin; naming one loads the plugin.
    connector: of the encoder cache; "ECCPUConnector" (here always over NIXL) needs runner v2.
    plugins: more of lab/vllm_plugins.
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
    connector: str = EC_EXAMPLE_CONNECTOR
    connector_module: str | None = None
    plugins: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


def build_mono_command(options: VllmOptions) -> ServerCommand:
    """One server that encodes, prefills and decodes."""
    return build_vllm_command("mono", options)


def build_encoder_command(options: VllmOptions, storage: Path) -> ServerCommand:
    """An encode server; it keeps embeddings in the folder `storage`, or in memory for NIXL."""
    # As "ec_producer" the V2 runner leaves the language model's weights out, which vLLM's CPU
    # worker cannot do: its first image dies with "Cannot copy out of meta tensor".
    role = "ec_both" if options.connector == EC_CPU_CONNECTOR else "ec_producer"
    transfer = build_ec_transfer_flag(options, storage, role)
    return build_vllm_command("encode", options, *transfer, "--no-enable-prefix-caching")


def build_prefill_decode_command(options: VllmOptions, storage: Path) -> ServerCommand:
    """A server that prefills and decodes; it takes embeddings from the folder `storage`, or over NIXL."""
    return build_vllm_command(
        "prefill_decode", options, *build_ec_transfer_flag(options, storage, "ec_consumer")
    )


def build_prefill_command(options: VllmOptions, storage: Path | None = None) -> ServerCommand:
    """A prefill server; it computes the KV cache for a decode server (NIXL).

    storage: given when there is an encoder; ECCPUConnector does not use the folder itself.
    """
    transfer = build_ec_transfer_flag(options, storage, "ec_consumer") if storage else ()
    return build_nixl_command("prefill", options, *transfer)


def build_decode_command(options: VllmOptions) -> ServerCommand:
    """A decode server; it takes the KV cache of a prefill server (NIXL)."""
    return build_nixl_command("decode", options)


def build_vllm_command(name: str, options: VllmOptions, *arguments: str) -> ServerCommand:
    """The command line that all roles share, then the role's own arguments, then the caller's."""
    port = options.port or free_ports.find_free_port()
    argv = (
        # The `vllm serve` that users type, through the interpreter: a console script names its own.
        options.python, "-m", "vllm.entrypoints.cli.main",
        "serve", str(options.model),
        # One name for all recipes, so that clients need not know the model's folder.
        "--served-model-name", "tiny",
        "--host", HOST,
        "--port", str(port),
        "--max-model-len", str(options.max_model_len),
        "--max-num-batched-tokens", str(options.max_num_batched_tokens),
        "--max-num-seqs", str(options.max_num_seqs),
        # No compilation, which takes minutes on a CPU; answers carry their x-request-id.
        "--enforce-eager", "--enable-request-id-headers",
        *arguments,
        # Last: of a flag given twice vLLM takes the last one.
        *options.extra,
    )  # fmt: skip
    return ServerCommand(name, argv, build_vllm_environment(options), port)


def build_vllm_environment(options: VllmOptions) -> dict[str, str]:
    """Environment of a vLLM server: one core, no downloads, no telemetry to vLLM, and our test plugins."""
    env = {
        # One thread on one core: more would wait for each other at every operator.
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(options.core),
        # Else vLLM reserves a core, and one more for NIXL: two servers on two cores have none left.
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        # GiB, enough for tiny models: several servers share the machine's memory.
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # Else vLLM looks for the address of a network, which a machine may not have.
        "VLLM_HOST_IP": HOST,
        "VLLM_USE_V2_MODEL_RUNNER": "1" if options.runner == "v2" else "0",
    }
    # Packages on PYTHONPATH with an entry point for vLLM's plugins.
    plugins = ["no_spin", *options.plugins]
    if options.runner == "v2":
        # The V2 runner's kernels are Triton's, which has no compiler for CPUs.
        env["TRITON_INTERPRET"] = "1"
        plugins.append("triton_cpu")
    if options.async_scheduling:
        env["TTFT_LAB_ASYNC"] = "1"
    if options.control:
        env["TTFT_LAB_CONTROL"] = str(options.control)
    over_nixl = options.connector == EC_CPU_CONNECTOR
    if options.async_scheduling or options.control or options.connector_module or over_nixl:
        plugins.append("inject")
    if over_nixl:
        plugins.append("ec_cpu")
        # A port for each server: the default one is the same for all.
        env["VLLM_EC_SIDE_CHANNEL_HOST"] = HOST
        env["VLLM_EC_SIDE_CHANNEL_PORT"] = str(free_ports.find_free_port())
    paths = [options.env.get("PYTHONPATH", ""), join_plugin_paths(*plugins)]
    # The caller's last, but for PYTHONPATH, which must still lead to the plugins.
    env |= options.env
    env["PYTHONPATH"] = ":".join(filter(None, paths))
    return env


def build_ec_transfer_flag(options: VllmOptions, storage: Path, role: str) -> tuple[str, str]:
    """The flag --ec-transfer-config for `role` (ec_producer, ec_consumer or ec_both)."""
    more: dict[str, Any] = {"shared_storage_path": str(storage)}
    if options.connector == EC_CPU_CONNECTOR:
        more = {"ec_cpu_bytes": EC_REGION_BYTES, "ec_enable_nixl": True}
    config: dict[str, Any] = {
        "ec_connector": options.connector,
        "ec_role": role,
        "ec_connector_extra_config": more,
    }
    # For a connector that is not among vLLM's own.
    if options.connector_module:
        config["ec_connector_module_path"] = options.connector_module
    return "--ec-transfer-config", json.dumps(config)


def build_nixl_command(name: str, options: VllmOptions, *arguments: str) -> ServerCommand:
    """A server with the NIXL connector over host memory and a side channel of its own."""
    # kv_both: the router decides for each request who produces and who consumes.
    config = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
    command = build_vllm_command(
        name, options, "--kv-transfer-config", json.dumps(config), *arguments
    )
    side = {
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_ports.find_free_port()),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
    }
    return ServerCommand(command.name, command.argv, {**command.env, **side}, command.port)
