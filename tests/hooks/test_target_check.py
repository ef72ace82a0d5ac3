# SPDX-License-Identifier: Apache-2.0
"""What hooks and simulated runners take for granted, against the sources of every supported vLLM release.

The patch targets, the fields that getters read, the decisions of schedule() (lab/schedule_decisions.py), and
the order of calls: if accelerated_runners.py had another one, its judgement of the device clock was void.
"""

from __future__ import annotations

import ast
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from hooks.process import HOOKS
from lab import source_check, vllm_releases
from lab.required_fields import FIELDS
from lab.schedule_decisions import DECISIONS, NO_WAIT, list_decisions, list_unknown
from ttft_otel import hooks
from ttft_otel.hooks import target_check, vllm_fields
from ttft_otel.hooks.targets import (
    ALL_STAGES,
    TARGETS,
    TARGETS_BY_NAME,
    TargetPlace,
)
from ttft_otel.model.stages import STAGE_NAMES, WAIT_REASON_NAMES

# A wheel of 336 MB, where its sources are not in the laboratory's cache yet.
BIG_VERSION = "0.33.0"
IS_BIG_MISSING = not vllm_releases.get_sources_folder(BIG_VERSION).is_dir()
VERSIONS = [
    pytest.param(
        version, marks=pytest.mark.full if version == BIG_VERSION and IS_BIG_MISSING else ()
    )
    for version in vllm_releases.VLLM_RELEASES
]


def find_package(version: str) -> Path:
    """The vllm package of a release; a release whose files are not where we think fails here."""
    root = vllm_releases.fetch_sources(version) / "vllm"
    assert (root / "v1" / "engine" / "core.py").is_file(), f"no sources of vLLM {version}"
    return root


@pytest.mark.parametrize("version", VERSIONS)
def test_background_task(version: str) -> None:
    """Tasks for `background` responses, which run in their HTTP requests' context, are known by this name."""
    path = find_package(version) / "entrypoints" / "openai" / "responses" / "serving.py"
    assert re.search(
        r"create_task\(\s+self\._run_background_request\(", path.read_text(encoding="utf-8")
    )


@pytest.mark.full
def test_newest_release() -> None:
    """The newest release on the package index, named here or not, has no surprise for us."""
    try:
        version = vllm_releases.find_newest()
    except subprocess.CalledProcessError:
        pytest.skip("no package index answers; configure one for uv, then: scripts/compat --newest")
    result = source_check.check_source(vllm_releases.fetch_sources(version))

    assert result.complete, source_check.format_source_result(result)


@pytest.mark.parametrize("version", VERSIONS)
def test_source_complete(version: str) -> None:
    """The check of a source tree finds every target and every field in each supported release.

    And no decision of its schedule() that leaves requests out for a new reason.
    """
    result = source_check.check_source(vllm_releases.fetch_sources(version))

    assert result.version == version
    # fastapi's target is no part of the tree; other targets came with later releases.
    absent = {"frontend.app"} | {
        target.name
        for target in TARGETS
        if target.methods
        and not any(source_check.exists_in(place, version) for place in target.methods)
    }
    assert ("transfer.wait" in absent) is (version == "0.20.2")  # whose connectors make nobody wait
    assert {target.target.name for target in result.targets} == set(TARGETS_BY_NAME) - absent
    assert not [field for field in result.fields if field.place.state != source_check.PRESENT]
    assert result.complete


def test_fields_read() -> None:
    """Every field that the getters read is in required_fields.py, and every one there is read."""
    # On a request, on the API server's state, and what every member of an enum has.
    ours = {"_ttft_facts", "engine_client", "name", "value"}
    listed = {name for row in FIELDS for name in row.names}

    assert list_asked_names(Path(vllm_fields.__file__)) - ours <= listed
    assert listed <= set().union(*map(list_read_names, Path(hooks.__file__).parent.rglob("*.py")))


def list_asked_names(path: Path) -> set[str]:
    """Names that a file reads by getattr(), some of them in a loop over a few."""
    nodes = list(ast.walk(ast.parse(path.read_bytes())))
    loops = [node.iter for node in nodes if isinstance(node, ast.For)]
    words = [item for loop in loops if isinstance(loop, ast.Tuple) for item in loop.elts]
    words += [
        node.args[1]
        for node in nodes
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr"
    ]
    return {word.value for word in words if isinstance(word, ast.Constant)}


def list_read_names(path: Path) -> set[str]:
    """Those, and what it reads as an attribute of others than itself."""
    return list_asked_names(path) | {
        node.attr
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") != "self"
    }


@pytest.mark.parametrize(
    ("since", "until", "version", "expected"),
    [
        ("0.29", "", "0.29.0", True),
        ("", "0.29", "0.24.0", True),
        ("", "0.29", "0.29.0", False),
        ("0.29", "", "", True),
        ("", "0.29", "", False),
    ],
)
def test_bounds(since: str, until: str, version: str, expected: bool) -> None:
    """A place is expected from `since` to before `until`; a tree between releases is the newest."""
    place = TargetPlace("vllm.v1.thing", "run", since, until)
    assert source_check.exists_in(place, version) is expected


def test_parameter(tmp_path: Path) -> None:
    """A target whose parameter was renamed is missing, and the parameter is named."""
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "thing.py").write_text("class Thing:\n    def run(self, other): ...\n")
    place = TargetPlace("vllm.v1.thing", "Thing.run")

    missing = target_check.check_place(tmp_path, place, ("request",))
    assert missing == "vllm.v1.thing:Thing.run(request)"


def test_rows() -> None:
    """Every row says why, what it costs and when it can go; its stages exist; it has a hook."""
    for target in TARGETS:
        lost = {*target.lost, *(target.lost_encode or ())}
        assert target.marks and target.why and target.drop_when
        assert lost <= set(STAGE_NAMES)
        assert target.name in HOOKS
    assert set(HOOKS) == set(TARGETS_BY_NAME)
    assert set(ALL_STAGES) == set(STAGE_NAMES)


def test_every_known_decision_exists() -> None:
    """No row of DECISIONS is left over from a release that is not supported; its reasons are names."""
    conditions = {
        condition
        for version in VERSIONS
        if not version.marks
        for _, condition in list_decisions(find_package(str(version.values[0])))
    }
    unused = {
        known for known in DECISIONS if not any(each.startswith(known) for each in conditions)
    }
    # Only in the release whose sources may not be here.
    assert unused <= {
        "self.policy == SchedulingPolicy.PRIORITY and request.status == RequestStatus.PREEMPTED"
    }
    assert set(DECISIONS.values()) - {NO_WAIT} <= set(WAIT_REASON_NAMES)


def test_a_new_decision_is_named(tmp_path: Path) -> None:
    """A condition that no release has fails, with its line and the file to edit."""
    folder = tmp_path / "v1" / "core" / "sched"
    folder.mkdir(parents=True)
    (folder / "scheduler.py").write_text(
        "class Scheduler:\n  def schedule(self):\n    while self.waiting:\n"
        "      if self.is_monday:\n        break\n"
    )
    (told,) = list_unknown(tmp_path)
    whole = source_check.SourceResult(tmp_path, "", (), ())
    found = replace(whole, decisions=(told,))
    assert whole.complete and not found.complete
    assert told in source_check.format_source_result(found)
    assert "line 5" in told and "`self.is_monday`" in told and "queue_reasons.py" in told


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
ORDER_VERSIONS = [each for each in VERSIONS if each.values[0] != "0.20.2"]


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
@pytest.mark.parametrize("version", ORDER_VERSIONS)
def test_order(version: str) -> None:
    """Each release makes these calls in the order in which the simulated runners make them."""
    for file, orders in ORDERS.items():
        for method, patterns in orders.items():
            lines = iter(read_method(find_package(version) / file, method))
            for pattern in patterns:  # each matches a line after that of the one before it
                found = any(re.search(pattern, line) for line in lines)
                assert found, f"{method}: nothing like {pattern} there"


@pytest.mark.parametrize("version", ORDER_VERSIONS)
def test_encoder_only_answers_at_once(version: str) -> None:
    """Where a release has a runner that only encodes, nothing after the encoder waits for it."""
    path = find_package(version) / "v1/worker/mm_encoder_model_runner.py"
    if not path.exists():
        assert tuple(map(int, version.split("."))) < (0, 29)
        return
    lines = read_method(path, "MMEncoderModelRunner.execute_model")
    (begin,) = [n for n, line in enumerate(lines) if "execute_mm_encoder(" in line]

    assert not [line for line in lines[begin:] if re.search(r"synchronize|\.item\(|\.cpu\(", line)]
