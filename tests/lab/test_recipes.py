# SPDX-License-Identifier: Apache-2.0
"""The command lines and environments of local vLLM servers, and the guests they take along."""

from __future__ import annotations

import json
from importlib.metadata import distributions
from pathlib import Path

import pytest

from ttft_otel.lab import recipes
from ttft_otel.lab.guests import guests_path
from ttft_otel.lab.recipes import Options

MODEL = Path("/models/tiny")


def flag(command: recipes.Command, name: str) -> str:
    """The value after a flag."""
    return command.argv[command.argv.index(name) + 1]


def test_mono() -> None:
    """A server alone has no transfer, the V1 runner, one core and no guest."""
    command = recipes.mono(Options(MODEL, core=1, port=8123))

    assert "--ec-transfer-config" not in command.argv
    assert "8123" == flag(command, "--port")
    assert "1" == command.env["VLLM_CPU_OMP_THREADS_BIND"]
    assert "0" == command.env["VLLM_USE_V2_MODEL_RUNNER"]
    assert guests_path("calm") == command.env["PYTHONPATH"]


def test_pair() -> None:
    """Encoder and prefill-decode share the storage folder, with opposite roles."""
    storage = Path("/storage")
    commands = (
        recipes.encoder(Options(MODEL), storage),
        recipes.prefill_decode(Options(MODEL), storage),
    )
    configs = [json.loads(flag(command, "--ec-transfer-config")) for command in commands]

    assert ["ec_producer", "ec_consumer"] == [config["ec_role"] for config in configs]
    assert ["/storage"] * 2 == [
        config["ec_connector_extra_config"]["shared_storage_path"] for config in configs
    ]
    assert commands[0].port != commands[1].port


def test_split() -> None:
    """Prefill and decode have side channels of their own; prefill can also follow an encoder."""
    first = recipes.prefill(Options(MODEL), Path("/storage"))
    second = recipes.decode(Options(MODEL))
    channels = {command.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] for command in (first, second)}

    assert 2 == len(channels)
    assert "--ec-transfer-config" in first.argv
    assert "NixlConnector" == json.loads(flag(second, "--kv-transfer-config"))["kv_connector"]


def test_v2() -> None:
    """The V2 runner brings Triton's interpreter and the guest that makes it run."""
    env = recipes.mono(Options(MODEL, runner="v2")).env

    assert ("1", "1") == (env["VLLM_USE_V2_MODEL_RUNNER"], env["TRITON_INTERPRET"])
    assert guests_path("calm", "triton_cpu") == env["PYTHONPATH"]


def test_steered() -> None:
    """A control file or forced async scheduling brings the injection guest; own paths come first."""
    options = Options(
        MODEL, control=Path("/c.json"), async_scheduling=True, env={"PYTHONPATH": "/own"}
    )
    env = recipes.mono(options).env

    assert ("/c.json", "1") == (env["TTFT_LAB_CONTROL"], env["TTFT_LAB_ASYNC"])
    assert f"/own:{guests_path('calm', 'inject')}" == env["PYTHONPATH"]


def test_connector() -> None:
    """A connector of the tests is named by its module and brings the guest that holds it."""
    options = Options(MODEL, connector="WaitingConnector", connector_module="ttft_inject.connector")
    command = recipes.prefill_decode(options, Path("/storage"))
    config = json.loads(flag(command, "--ec-transfer-config"))

    assert "ttft_inject.connector" == config["ec_connector_module_path"]
    assert guests_path("calm", "inject") == command.env["PYTHONPATH"]


@pytest.mark.parametrize(
    ("guest", "group"), [("inject", "vllm.general_plugins"), ("triton_cpu", "triton.backends")]
)
def test_guest(guest: str, group: str) -> None:
    """A guest is found by its entry point, and only where its folder is on the path."""
    found = [
        entry
        for distribution in distributions(path=[guests_path(guest)])
        for entry in distribution.entry_points
    ]

    assert [group] == [entry.group for entry in found]


def test_unknown() -> None:
    """A guest that does not exist is an error, not an empty path."""
    with pytest.raises(LookupError, match="no guest named nobody"):
        guests_path("nobody")
