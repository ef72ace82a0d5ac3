# SPDX-License-Identifier: Apache-2.0
"""Stages, and all that consumes them: it accounts for every stage, or its failure names the file to edit."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from grafana.build import ttft_queries
from lab.vllm_plugins.inject.ttft_inject import places
from ttft_otel.explain.explain.cause_kinds import LOOK_AT
from ttft_otel.hooks.targets import TARGETS, WORKER_STAGES
from ttft_otel.model import breakdown, stages
from ttft_otel.model.names import keys
from ttft_otel.model.stages import STAGES, Stage

ROOT: Final = Path(__file__).parents[2]
NEW_STAGE: Final = Stage(
    name="prefill.unheard_of",
    code=99,
    kind="move",
    process="worker",
    roles=("prefill", "mono"),
    says="Known to nobody but this test.",
    color="#123456",
    rule_group="unheard_of",
    replayed="modelled",
    lost_with="worker",
    injected_at=("unheard_of",),
    ends_as="prefill.unheard_of",
    in_worker=True,
)


def read_file(path: str) -> str:
    """The text of a file of the checkout."""
    return (ROOT / path).read_text("utf-8")


def list_strings(path: str) -> set[str]:
    """All string literals of a Python file."""
    return {
        node.value
        for node in ast.walk(ast.parse(read_file(path)))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def list_sources(folder: str) -> str:
    """The text of all Python files below a folder."""
    return "\n".join(path.read_text("utf-8") for path in sorted((ROOT / folder).rglob("*.py")))


def find_codes() -> dict[str, int]:
    """breakdown.py's constants for codes of the worker's intervals."""
    return {name: value for name, value in vars(breakdown).items() if name.startswith("CODE_")}


def is_stamped(stage: Stage) -> bool:
    """Whether a hook uses the code of an interval of the worker."""
    names = [name for name, code in find_codes().items() if code == stage.code]
    source = list_sources("ttft_otel/hooks")
    return not stage.in_worker or any(re.search(rf"\b{name}\b", source) for name in names)


def is_cut(stage: Stage) -> bool:
    """Whether the partition of marks can give the stage."""
    partition = read_file(BREAKDOWN).partition("def find_failed_stage")[0]
    return stage.in_worker or f'"{stage.name}"' in partition


def is_lost_with_its_hook(stage: Stage) -> bool:
    """Whether the target whose hook measures an interval of the worker says that it is lost without it."""
    return not stage.in_worker or any(
        stage.name in target.lost for target in TARGETS if len(target.lost) < len(WORKER_STAGES)
    )


def is_replayed(stage: Stage) -> bool:
    """Whether what-if gives a stage anew that it says it models."""
    return stage.replayed != "modelled" or stage.name in list_strings(FLEET_MODEL)


def is_told_of_failures(stage: Stage) -> bool:
    """Whether a request can be said to have ended in the stage that its row names."""
    told = inspect.getsource(breakdown.find_failed_stage)
    return not stage.ends_as or f'"{stage.ends_as}"' in told


def is_injected(stage: Stage) -> bool:
    """Whether vLLM can be delayed in the stage."""
    return bool(stage.injected_at) and set(stage.injected_at) <= set(places.PLACES)


def is_proved(stage: Stage) -> bool:
    """Whether a live test delays vLLM in each of the stage's places."""
    tests = list_sources("tests/live") + read_file("lab/compat.py")
    return all(f'"{place}"' in tests for place in stage.injected_at)


def is_in_dashboards(stage: Stage) -> bool:
    """Whether exactly one of the dashboards' stacks has the stage."""
    patterns = {kind: ttft_queries.match_stage_kind(kind) for kind in ttft_queries.STAGE_KINDS}
    return [kind for kind, each in patterns.items() if re.fullmatch(each, stage.name)] == [
        stage.kind
    ]


BREAKDOWN: Final = "ttft_otel/model/breakdown.py"
FLEET_MODEL: Final = "ttft_otel/explain/whatif/engine_model.py"
# Files that have to follow the table of stages: what to do in each, and whether that is done for a stage.
CONSUMERS: Final[tuple[tuple[str, str, Callable[[Stage], bool]], ...]] = (
    (
        BREAKDOWN,
        "add a CODE_ constant for the worker's interval",
        lambda stage: not stage.in_worker or stage.code in find_codes().values(),
    ),
    (BREAKDOWN, "cut the stage out of the marks, in partition_marks() or what it calls", is_cut),
    (
        "ttft_otel/hooks/worker/model_runners.py",
        "stamp the interval with its code, there or in another hook of the worker",
        is_stamped,
    ),
    (
        "ttft_otel/hooks/targets.py",
        "name the stage in `lost` of the target whose hook measures it",
        is_lost_with_its_hook,
    ),
    (
        "ttft_otel/explain/explain/cause_kinds.py",
        "say in LOOK_AT what to look at, or take a rule_group that has it",
        lambda stage: stage.rule_group in LOOK_AT,
    ),
    (
        FLEET_MODEL,
        'model the stage in merge_stages(), or say replayed="inside" in its row',
        is_replayed,
    ),
    (
        BREAKDOWN,
        "let find_failed_stage() tell it, or say in ends_as which stage is told instead",
        is_told_of_failures,
    ),
    (
        "lab/vllm_plugins/inject/ttft_inject/places.py",
        "add each place of injected_at to INJECTION_POINTS and PLACES",
        is_injected,
    ),
    (
        "lab/compat.py",
        "say in which stage a delay at its places shows, there or in tests/live/test_injected.py",
        is_proved,
    ),
    (
        "docs/stages.md",
        "describe it in the table",
        lambda stage: f"| `{stage.name}` |" in read_file("docs/stages.md"),
    ),
    (
        "tests/golden/vocabulary.json",
        "run `.venv/bin/python tests/model/test_names.py`, which writes it",
        lambda stage: f'"{stage.name}"' in read_file("tests/golden/vocabulary.json"),
    ),
    (
        "collector/config.yaml",
        "run `.venv/bin/python -m lab.collector_config`, which writes it",
        lambda stage: keys.name_stage_attribute(stage.name) in read_file("collector/config.yaml"),
    ),
    (
        "grafana/build/ttft_queries.py",
        "give its kind a stack, then run `.venv/bin/python -m grafana.build`",
        is_in_dashboards,
    ),
)


def list_gaps(rows: tuple[Stage, ...]) -> list[str]:
    """What has to be done for the stages `rows`, one line for each file that does not account for one."""
    return [
        f"edit {file} for {stage.name}: {remedy}"
        for stage in rows
        for file, remedy, accounts_for in CONSUMERS
        if not accounts_for(stage)
    ]


def test_every_consumer_accounts_for_every_stage() -> None:
    """No list elsewhere has been forgotten; the failure is the list of what is to be done."""
    gaps = list_gaps(STAGES)
    assert not gaps, "\n" + "\n".join(gaps)


def test_a_stage_that_nobody_knows_names_every_file() -> None:
    """For a new row every file is named that has to follow, and none twice for the same reason."""
    gaps = list_gaps((NEW_STAGE,))
    # What it is cut by comes from the row itself, and so do its colour and its place in the dashboards.
    follows = {BREAKDOWN, "grafana/build/ttft_queries.py"}
    assert {line.split()[1] for line in gaps} >= {file for file, *_ in CONSUMERS} - follows
    assert len(gaps) == len(set(gaps))


def test_a_row_can_say_that_a_consumer_need_not_follow() -> None:
    """A stage that what-if leaves as recorded, or that failures do not tell, asks for no edit there."""
    row = replace(NEW_STAGE, replayed="inside", ends_as="prefill.compute")
    gaps = "".join(list_gaps((row,)))
    assert "engine_model.py" not in gaps and "find_failed_stage" not in gaps


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("prefill.queue", ("", "prefill.queue")),
        ("prefill.prefill.queue", ("prefill", "prefill.queue")),
        ("encode.encoder.compute", ("encode", "encoder.compute")),
        ("encode.unattributed", ("encode", "unattributed")),
        ("router.hop.encode", ("", "router.hop.encode")),
        ("", ("", "")),
    ],
)
def test_split(name: str, split: tuple[str, str]) -> None:
    """A leg's prefix is told from a stage's own dot."""
    assert stages.split_stage(name) == split


def test_rows() -> None:
    """Every stage has a sentence, a code and a colour of its own, roles and parts that exist."""
    for stage in stages.STAGES:
        assert stage.says.endswith(".") and set(stage.roles) <= {*stages.ROLES} - {"router"}
    colors = [*stages.STAGE_COLORS.values()]
    assert len(colors) == len(set(colors))
    assert all(re.fullmatch(r"#[0-9a-f]{6}", color) for color in colors)
    assert len({stage.code for stage in STAGES}) == len(STAGES)
    assert {stage.ends_as for stage in STAGES} - {""} <= {*stages.STAGE_NAMES}
    assert set(stages.STAGE_PARTS) <= set(stages.STAGE_NAMES)
    assert set(stages.SERVICE_NAMES) == set(stages.ROLES)
