# SPDX-License-Identifier: Apache-2.0
"""The patch targets against the sources of every supported vLLM release."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from pathlib import Path

import pytest

from hooks.process import HOOKS
from lab import source_check, vllm_releases
from lab.required_fields import FIELDS
from ttft_otel import hooks
from ttft_otel.hooks import ec_fields, target_check, vllm_fields
from ttft_otel.hooks.targets import (
    ALL_STAGES,
    TARGETS,
    TARGETS_BY_NAME,
    PatchTarget,
    TargetPlace,
)
from ttft_otel.model.stages import STAGE_NAMES

GOLDEN_FILE = Path(__file__).parents[1] / "golden" / "ledger.json"

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
    """The check of a source tree finds every target and every field in each supported release."""
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


@pytest.mark.parametrize("version", VERSIONS)
def test_golden(version: str) -> None:
    """The table of places per release changes only together with the golden file.

    Each place is there, with the parameters that are read, but for its bounds.
    """
    expected = json.loads(GOLDEN_FILE.read_text(encoding="utf-8"))[version]
    table = build_table(version)

    assert expected == table
    for target in TARGETS:
        for place in (*target.places, *target.methods):
            if source_check.exists_in(place, version):
                assert table[target.name][place.address] == "present", target.name


def build_table(version: str) -> dict[str, dict[str, str]]:
    """Target -> place -> present, or what is missing."""
    root = find_package(version)
    return {
        target.name: {
            place.address: f"missing {what}" if what else "present"
            for place in (*target.places, *target.methods)
            for what in (target_check.check_place(root, place, target.reads),)
        }
        for target in TARGETS
    }


def test_fields_read() -> None:
    """Every field that the getters read is in required_fields.py, and every one there is read."""
    # On a request, on the API server's state, and what every member of an enum has.
    ours = {"_ttft_facts", "engine_client", "name", "value"}
    listed = {name for row in FIELDS for name in row.names}

    assert list_read_names(Path(vllm_fields.__file__)) - ours <= listed
    assert list_getattr_names(Path(ec_fields.__file__)) - ours <= listed
    assert listed <= set().union(*map(list_read_names, Path(hooks.__file__).parent.rglob("*.py")))


def list_getattr_names(path: Path) -> set[str]:
    """Names that a file reads by getattr()."""
    return {
        node.args[1].value
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr"
        if isinstance(node.args[1], ast.Constant)
    }


def list_read_names(path: Path) -> set[str]:
    """Names that a file reads by getattr() or, outside its getters, as attributes."""
    nodes = list(ast.walk(ast.parse(path.read_bytes())))
    asked = list_getattr_names(path)
    if path == Path(vllm_fields.__file__):
        loops = [node.iter for node in nodes if isinstance(node, ast.For)]
        words = [item for loop in loops if isinstance(loop, ast.Tuple) for item in loop.elts]
        return asked | {word.value for word in words if isinstance(word, ast.Constant)}
    return asked | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


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
    target = PatchTarget(
        name="x",
        process="api",
        places=(place,),
        marks="",
        lost=(),
        why="",
        drop_when="",
        reads=("request",),
    )

    assert target_check.check_places(tmp_path, target) == {
        "vllm.v1.thing:Thing.run": "vllm.v1.thing:Thing.run(request)"
    }


def test_rows() -> None:
    """Every row says why, what it costs and when it can go; its stages exist; it has a hook."""
    for target in TARGETS:
        lost = {*target.lost, *(target.lost_encode or ())}
        assert target.marks and target.why and target.drop_when
        assert lost <= set(STAGE_NAMES)
        assert target.name in HOOKS
    assert set(HOOKS) == set(TARGETS_BY_NAME)
    assert set(ALL_STAGES) == set(STAGE_NAMES)
