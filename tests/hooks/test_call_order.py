# SPDX-License-Identifier: Apache-2.0
"""The order of calls that the simulated runners keep, against the sources of vLLM's releases.

What accelerated_runners.py does in another order than vLLM, its judgement of the device clock is worth
nothing for.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from hooks.test_target_check import BIG_VERSION, IS_BIG_MISSING, find_package

VERSIONS = [
    pytest.param(
        version, marks=pytest.mark.full if version == BIG_VERSION and IS_BIG_MISSING else ()
    )
    for version in ("0.24.0", "0.29.0", "0.32.0", BIG_VERSION)
]
SYNC = r"\w*event\.synchronize\("
# File, then class and method: regular expressions that match, each after the one before it.
ORDERS: dict[str, dict[str, tuple[str, ...]]] = {
    "v1/worker/gpu_model_runner.py": {
        "GPUModelRunner.execute_model": (
            r"self\._execute_mm_encoder\(",
            r"return make_empty_encoder_model_runner_output",
            r"self\._preprocess\(",  # receives what earlier pipeline stages computed
            r"self\.maybe_get_kv_connector_output\(",
            r"= self\._model_forward\(",
            r"compute_logits\(",
        ),
        "GPUModelRunner.sample_tokens": (
            r"self\._sample\(",
            r"propose_draft_token_ids\(sampled_token_ids\)$",
            r"self\._bookkeeping_sync\(",
            r"self\.finalize_kv_connector\(",
            r"AsyncGPUModelRunnerOutput\(",
        ),
        "GPUModelRunner._to_list": (r"transfer_event\.record\(", SYNC),
        "GPUModelRunner._preprocess": (r"sync_and_\w+_intermediate_tensors\(",),
        "AsyncGPUModelRunnerOutput.__init__": (r"wait_stream\(", r"ready_event\.record\("),
        "AsyncGPUModelRunnerOutput.get_output": (
            r"self\.async_copy_ready_event\.synchronize\(",
            r"\.tolist\(",
        ),
    },
    "v1/worker/kv_connector_model_runner_mixin.py": {
        "KVConnectorModelRunnerMixin._get_kv_connector_output": (
            r"start_load_kv\(",
            r"yield output",
            r"wait_for_save\(",
        ),
    },
    "v1/worker/gpu/model_runner.py": {
        "GPUModelRunner.execute_model": (
            r"copy_\(intermediate_tensors",
            r"pre_forward\(",
            r"self\.model\(",
        ),
        "GPUModelRunner.sample_tokens": (
            r"= self\.sample\(",
            r"= AsyncOutput\(",
            r"speculator\.propose\(",
            r"self\.kv_connector\.(post_forward|finalize_step)\(",
        ),
    },
    "v1/worker/gpu/kv_connector.py": {"ActiveKVConnector.post_forward": (r"wait_for_save\(",)},
    "v1/worker/gpu/async_utils.py": {
        "AsyncOutput.__init__": (r"wait_stream\(", r"copy_event\.record\("),
        "AsyncOutput.get_output": (r"self\.copy_event\.synchronize\(", r"\.tolist\("),
    },
    "v1/executor/multiproc_executor.py": {
        # Of all ranks the last pipeline stage's first one is read.
        "MultiprocExecutor._get_output_rank": (
            r"self\.world_size",
            r"- self\.parallel_config\.tensor_parallel_size",
        ),
        "MultiprocExecutor.execute_model": (r"unique_reply_rank=self\.output_rank",),
    },
}


def read_method(path: Path, method: str) -> list[str]:
    """The lines of a method, given as `Class.name`."""
    owner, name = method.split(".")
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef) and node.name == owner:
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and member.name == name:
                    return text.splitlines()[member.lineno - 1 : member.end_lineno]
    raise AssertionError(f"no {method} in {path}")


@pytest.mark.slow  # reads sources, which change with releases only
@pytest.mark.parametrize("version", VERSIONS)
def test_order(version: str) -> None:
    """Each release makes these calls in the order in which the simulated runners make them."""
    root = find_package(version)
    for file, orders in ORDERS.items():
        for method, patterns in orders.items():
            check_order(read_method(root / file, method), patterns, method)


def check_order(lines: list[str], patterns: tuple[str, ...], method: str) -> None:
    """Each pattern matches a line after that of the one before it."""
    at = 0
    for pattern in patterns:
        found = [n for n, line in enumerate(lines) if n >= at and re.search(pattern, line)]
        assert found, f"{method}: nothing like {pattern} after line {at} of it"
        at = found[0] + 1


@pytest.mark.parametrize("version", VERSIONS)
def test_encoder_only_answers_at_once(version: str) -> None:
    """Where a release has a runner that only encodes, nothing after the encoder waits for it."""
    path = find_package(version) / "v1/worker/mm_encoder_model_runner.py"
    if not path.exists():
        assert tuple(map(int, version.split("."))) < (0, 29)
        return
    lines = read_method(path, "MMEncoderModelRunner.execute_model")
    (begin,) = [n for n, line in enumerate(lines) if "execute_mm_encoder(" in line]

    assert not [line for line in lines[begin:] if re.search(r"synchronize|\.item\(|\.cpu\(", line)]
