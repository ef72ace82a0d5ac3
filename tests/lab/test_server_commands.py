# SPDX-License-Identifier: Apache-2.0
"""The command lines and environments of local vLLM servers, and the plugins they take along."""

from __future__ import annotations

import json
from importlib.metadata import distributions
from pathlib import Path

import pytest

from lab import server_commands
from lab.server_commands import VllmOptions
from lab.vllm_plugins import join_plugin_paths

MODEL = Path("/models/tiny")


def get_flag(command: server_commands.ServerCommand, name: str) -> str:
    """The value after a flag."""
    return command.argv[command.argv.index(name) + 1]


def test_mono() -> None:
    """A server alone has no transfer, the V1 runner, one core and no plugin."""
    command = server_commands.build_mono_command(VllmOptions(MODEL, core=1, port=8123))

    assert "--ec-transfer-config" not in command.argv
    assert "8123" == get_flag(command, "--port")
    assert "1" == command.env["VLLM_CPU_OMP_THREADS_BIND"]
    assert "0" == command.env["VLLM_USE_V2_MODEL_RUNNER"]
    assert join_plugin_paths("no_spin") == command.env["PYTHONPATH"]


def test_pair() -> None:
    """Encoder and prefill-decode share the storage folder, with opposite roles."""
    storage = Path("/storage")
    commands = (
        server_commands.build_encoder_command(VllmOptions(MODEL), storage),
        server_commands.build_prefill_decode_command(VllmOptions(MODEL), storage),
    )
    configs = [json.loads(get_flag(command, "--ec-transfer-config")) for command in commands]

    assert ["ec_producer", "ec_consumer"] == [config["ec_role"] for config in configs]
    assert ["/storage"] * 2 == [
        config["ec_connector_extra_config"]["shared_storage_path"] for config in configs
    ]
    assert commands[0].port != commands[1].port


def test_split() -> None:
    """Prefill and decode have side channels of their own; prefill can also follow an encoder."""
    first = server_commands.build_prefill_command(VllmOptions(MODEL), Path("/storage"))
    second = server_commands.build_decode_command(VllmOptions(MODEL))
    channels = {command.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] for command in (first, second)}

    assert 2 == len(channels)
    assert "--ec-transfer-config" in first.argv
    assert "NixlConnector" == json.loads(get_flag(second, "--kv-transfer-config"))["kv_connector"]


def test_v2() -> None:
    """The V2 runner brings Triton's interpreter and the plugin that makes it run."""
    env = server_commands.build_mono_command(VllmOptions(MODEL, runner="v2")).env

    assert ("1", "1") == (env["VLLM_USE_V2_MODEL_RUNNER"], env["TRITON_INTERPRET"])
    assert join_plugin_paths("no_spin", "triton_cpu") == env["PYTHONPATH"]


def test_steered() -> None:
    """A control file or forced async scheduling brings the injection plugin; own paths come first."""
    options = VllmOptions(
        MODEL, control=Path("/c.json"), async_scheduling=True, env={"PYTHONPATH": "/own"}
    )
    env = server_commands.build_mono_command(options).env

    assert ("/c.json", "1") == (env["TTFT_LAB_CONTROL"], env["TTFT_LAB_ASYNC"])
    assert f"/own:{join_plugin_paths('no_spin', 'inject')}" == env["PYTHONPATH"]


def test_connector() -> None:
    """A connector of the tests is named by its module and brings the plugin that holds it."""
    options = VllmOptions(
        MODEL,
        connector="WaitingConnector",
        connector_module="lab.vllm_plugins.inject.ttft_inject.connector",
    )
    command = server_commands.build_prefill_decode_command(options, Path("/storage"))
    config = json.loads(get_flag(command, "--ec-transfer-config"))

    assert "lab.vllm_plugins.inject.ttft_inject.connector" == config["ec_connector_module_path"]
    assert join_plugin_paths("no_spin", "inject") == command.env["PYTHONPATH"]


def test_connector_over_nixl() -> None:
    """ECCPUConnector reads over NIXL: side channels of their own, no folder, and its plugin."""
    options = VllmOptions(MODEL, runner="v2", connector=server_commands.EC_CPU_CONNECTOR)
    commands = [
        make(options, Path("/storage"))
        for make in (
            server_commands.build_encoder_command,
            server_commands.build_prefill_decode_command,
            server_commands.build_prefill_command,
        )
    ]
    configs = [json.loads(get_flag(command, "--ec-transfer-config")) for command in commands]

    assert ["ec_both", "ec_consumer", "ec_consumer"] == [config["ec_role"] for config in configs]
    for config in configs:
        expected = {"ec_cpu_bytes": 64 * 2**20, "ec_enable_nixl": True}
        assert expected == config["ec_connector_extra_config"]
    assert 3 == len({command.env["VLLM_EC_SIDE_CHANNEL_PORT"] for command in commands})
    path = join_plugin_paths("no_spin", "triton_cpu", "inject", "ec_cpu")
    assert {path} == {command.env["PYTHONPATH"] for command in commands}


@pytest.mark.parametrize(
    ("plugin", "group"),
    [
        ("inject", "vllm.general_plugins"),
        ("ec_cpu", "vllm.general_plugins"),
        ("triton_cpu", "triton.backends"),
    ],
)
def test_plugin(plugin: str, group: str) -> None:
    """A plugin is found by its entry point, and only where its folder is on the path."""
    found = [
        entry
        for distribution in distributions(path=[join_plugin_paths(plugin)])
        for entry in distribution.entry_points
    ]

    assert [group] == [entry.group for entry in found]


def test_unknown() -> None:
    """A plugin that does not exist is an error, not an empty path."""
    with pytest.raises(LookupError, match="no plugin named nobody"):
        join_plugin_paths("nobody")
