# SPDX-License-Identifier: Apache-2.0
"""The public vocabulary: frozen in a golden file, written once, used everywhere else."""

from __future__ import annotations

import ast
import functools
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

import ttft_otel
from ttft_otel.model import stages, timing
from ttft_otel.model.names import env_names, header_names, keys, metric_names, span_names
from ttft_otel.tracing import settings

PACKAGE = Path(ttft_otel.__file__).parent
ROOT = PACKAGE.parent
GOLDEN = Path(__file__).parents[1] / "golden"
HOMES = ("names", "stages.py")
MODULES = (env_names, header_names, keys, metric_names, span_names)

# Modules of our own are spelled with an underscore or a dot after ttft_otel, never `ttft.`.
WORD = re.compile(r"(?<![\w./-])ttft\.[a-z_]+(?:\.[a-z_]+)*(?![\w(])")
SHIPPED = [
    pytest.param(path, id=str(path.relative_to(ROOT)))
    for folder in (PACKAGE, ROOT / "collector", ROOT / "grafana", GOLDEN)
    for path in sorted(folder.rglob("*"))
    if path.suffix in (".py", ".html", ".js", ".yaml", ".yml", ".json", ".md")
    and "__pycache__" not in path.parts
    and not {path.name, path.parent.name} & set(HOMES)
]


# What users may rely on of a stage's row.
PUBLIC = ("name", "kind", "process", "roles", "code", "says")
WAITING_STAGES = (stages.QUEUE_STAGES[0], stages.STALL_STAGE)


@functools.cache
def list_constants() -> dict[str, str]:
    """Every public name in names/, by its module and the constant that holds it."""
    return {
        f"{module.__name__.rpartition('.')[2]}.{key}": value
        for module in MODULES
        for key, value in vars(module).items()
        if key.isupper() and isinstance(value, str)
    }


def build_vocabulary() -> dict[str, Any]:
    """The public vocabulary: all names that users may rely on."""
    return {
        "stages": [{key: getattr(stage, key) for key in PUBLIC} for stage in stages.STAGES],
        "stage attributes": {name: keys.name_stage_attribute(name) for name in stages.STAGE_NAMES},
        "unattributed": stages.UNATTRIBUTED,
        "parts": stages.STAGE_PARTS,
        "wait reasons": {
            reason: [keys.name_reason_attribute(stage, reason) for stage in WAITING_STAGES]
            for reason in stages.WAIT_REASON_NAMES
        },
        "router stages": {name: stage.says for name, stage in stages.ROUTER_STAGES.items()},
        "roles": stages.ROLES,
        "services": stages.SERVICE_NAMES,
        "holding kinds": [*stages.HOLDING_KINDS],
        "report fields": stages.REPORT_FIELDS,
        "report totals": [
            timing.TTFT_MS_KEY,
            timing.UNATTRIBUTED_MS_KEY,
            timing.STAGES_KEY,
        ],
        "names": list_constants(),
        "on": sorted(settings.ON_WORDS),
        "off": sorted(settings.OFF_WORDS),
    }


def is_known_word(word: str) -> bool:
    """Whether a `ttft.*` word is a name, a stage's attribute or the beginning of some."""
    return (
        word in list_constants().values()
        # The collector's connector appends the end of a metric's name itself.
        or f"{word}.duration" in list_constants().values()
        or keys.parse_stage_attribute(word) is not None
        or keys.parse_reason_attribute(word) is not None
        or word in map(keys.name_held_attribute, stages.HOLDING_KINDS)
        or stages.is_known_stage(word.removeprefix("ttft."))
        or keys.parse_stage_attribute(word.replace(f"{span_names.HANDOVER}.", "ttft.")) is not None
        or word == keys.name_handover_attribute(span_names.FIRST_DECODE)
    )


def test_vocabulary() -> None:
    """A change of any public name, stage, code or order shows as a diff of the golden file."""
    expected = json.loads((GOLDEN / "vocabulary.json").read_text(encoding="utf-8"))

    assert expected == json.loads(json.dumps(build_vocabulary()))


def test_unique() -> None:
    """No stage, code or attribute name stands for two things."""
    shared = {span_names.TTFT, header_names.TIMING_TTFT, keys.PROVIDER_VLLM}
    values = [value for value in list_constants().values() if value not in shared]

    assert len(values) == len(set(values))
    assert len(stages.STAGES_BY_NAME) == len(stages.STAGES_BY_CODE) == len(stages.STAGES)
    # The original report's names are sums of stages that exist.
    assert {*itertools.chain(*stages.REPORT_FIELDS.values())} <= {*stages.STAGE_NAMES}


def test_attributes_round_trip() -> None:
    """A stage's attribute gives the stage back; an attribute that is no stage's gives nothing."""
    for stage in (
        *stages.STAGE_NAMES,
        stages.UNATTRIBUTED,
        "encode.preprocess",
        "router.hop.encode",
    ):
        assert keys.parse_stage_attribute(keys.name_stage_attribute(stage)) == stage
    for attribute in (keys.TOTAL_US, keys.CLAMPED_US, "other"):
        assert keys.parse_stage_attribute(attribute) is None


def test_no_double() -> None:
    """Our own span attributes are named for integers; only the convention's one is in seconds.

    A prediction and its error are in whole milliseconds: nobody predicts microseconds.
    """
    whole = {keys.PREDICTED_MS, keys.PREDICTION_ERROR_MS}
    own = [v for v in list_constants().values() if v.startswith("ttft.") and v not in whole]

    assert not [name for name in own if name.endswith(("_ms", "_s", "_seconds"))]


@pytest.mark.parametrize("path", SHIPPED)
def test_words(path: Path) -> None:
    """Every `ttft.*` word anywhere in what is shipped belongs to the vocabulary.

    Code takes attribute, header and environment names from names/: it never spells them.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":  # in code `ttft.end` is a field; its strings and comments are words
        text = "\n".join(list_literals(path, prose=True))
    words = {word for word in WORD.findall(text) if word.rpartition(".")[2] not in SUFFIXES}

    assert [] == sorted(word for word in words if not is_known_word(word))
    if path.suffix == ".py":
        assert [] == sorted((set(list_literals(path)) & SPELLED) - FREE.get(path.name, set()))


SPELLED = {
    value
    for value in list_constants().values()
    if value.startswith(("ttft.", "gen_ai.", "x-ttft", "TTFT_", "OTEL_", "ttft_otel_"))
}
# It may import nothing while off.
FREE = {"plugin.py": {env_names.TTFT_OTEL}}
# Files named ttft.*, and a pattern's dot in ttft.otel.
SUFFIXES = {"json", "db", "sqlite", "py", "yaml", "html", "js", "otel"}


def list_literals(path: Path, prose: bool = False) -> tuple[str, ...]:
    """The string constants of a file: those in its code, with `prose` its docstrings too."""
    nodes = list(ast.walk(ast.parse(path.read_bytes())))
    docstrings = set[int]()
    if not prose:
        docstrings = {
            id(node.value)
            for node in nodes
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
    values = (
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and id(node) not in docstrings
    )
    return tuple(
        value if isinstance(value, str) else value.decode("latin-1")
        for value in values
        if isinstance(value, str | bytes)
    )


def test_used() -> None:
    """Every name in names/ is used by the package or the laboratory: none outlives its purpose."""
    used: set[str] = set()
    for path in (*PACKAGE.rglob("*.py"), *(ROOT / "lab").rglob("*.py")):
        if path.parent.name != "names":
            used |= set(re.findall(r"\w+\.[A-Z][A-Z0-9_]*", path.read_text(encoding="utf-8")))

    assert [] == sorted(set(list_constants()) - used)


if __name__ == "__main__":
    (GOLDEN / "vocabulary.json").write_text(
        json.dumps(build_vocabulary(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
