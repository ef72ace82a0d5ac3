# SPDX-License-Identifier: Apache-2.0
"""The check of a vLLM source tree, on small made-up trees and through the command."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lab import compat, source_check
from lab.required_fields import FIELDS
from ttft_otel.hooks.targets import TARGETS

SCHEDULER = "v1/core/sched/scheduler.py"
FREE = "def _free_request(self, request, delay): ...\n"
EC_BASE = "distributed/ec_transfer/ec_connector/base.py"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The smallest checkout that has everything we hang into and read, as the newest vLLM."""
    owners: dict[tuple[str, str], list[str]] = {}
    for target in TARGETS:
        for place in (*target.places, *target.methods):
            if place.module.startswith("vllm.") and source_check.exists_in(place, ""):
                owner, _, name = place.name.rpartition(".")
                line = f"def {name}({', '.join(('self', *target.reads))}): ..."
                owners.setdefault((place.module, owner), []).append(line)
    for row in FIELDS:
        owners.setdefault((row.module, row.owner), []).append(f"{row.names[0]}: int = 0")
    modules: dict[str, list[str]] = {}
    for (module, owner), lines in owners.items():
        text = "\n    ".join((f"class {owner}:", *lines)) if owner else "\n".join(lines)
        modules.setdefault(module, []).append(text)
    package = tmp_path / "checkout" / "vllm"
    (package / "v1").mkdir(parents=True)
    (package / "__init__.py").touch()
    for module, classes in modules.items():
        path = package.joinpath(*module.split(".")[1:])
        path = path / "__init__.py" if module == "vllm.v1.engine" else path.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n\n".join(classes) + "\n", encoding="utf-8")
    return package.parent


def replace_text(tree: Path, name: str, old: str, new: str) -> None:
    """Replace a text that must be there in one of the tree's files."""
    path = tree / "vllm" / name
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def write(tree: Path, name: str, text: str) -> None:
    """Write one of the tree's files."""
    (tree / "vllm" / name).write_text(text, "utf-8")


def run_source_check(*arguments: str | Path) -> Result:
    """scripts/compat with these arguments."""
    return CliRunner().invoke(compat.run_compat, [str(argument) for argument in arguments])


def get_target_result(tree: Path, name: str) -> source_check.TargetResult:
    """The result for one target."""
    (found,) = [
        each for each in source_check.check_source(tree).targets if each.target.name == name
    ]
    return found


def test_complete(tree: Path) -> None:
    """A tree that has everything is complete, given as the checkout or as the package in it."""
    answer = run_source_check("--source", tree)

    assert answer.exit_code == 0
    assert "judged as the newest vLLM" in answer.output
    assert "now perhaps" not in answer.output
    assert source_check.check_source(tree / "vllm") == source_check.check_source(tree)


def test_method_moved(tree: Path) -> None:
    """A function that moved is lost; its new address is named with parameters, of many the likeliest."""
    replace_text(tree, SCHEDULER, "def _free_request(self, request): ...", "pass")
    write(tree, SCHEDULER.replace("scheduler", "lifecycle"), "class Scheduler:\n    " + FREE)
    for number in range(7):
        write(tree, f"other{number}.py", "def _free_request(x): ...\n")

    answer = run_source_check("--source", tree)

    assert answer.exit_code == 1
    first, second, *_ = re.findall(r"now perhaps: (.*)", answer.output)
    assert first == "vllm.v1.core.sched.lifecycle:Scheduler._free_request(self, request, delay)"
    assert second == "vllm.other0:_free_request(x)"
    assert "and 3 more functions of that name" in answer.output
    assert "unattributed: nothing, a detail inside a stage is missing" in answer.output


# A file, a text in it, what stands there instead -> what the command says.
LOSSES: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "name": (
        "v1/engine/core.py", "def preprocess_add_request", "def admit_request",
        ("engine.input: lost", ": the name is gone", "unattributed: ipc, encoder.queue, prefill.queue"),
    ),
    "class": (
        "v1/engine/input_processor.py", "class InputProcessor", "class InputReader",
        ("frontend.assign: lost", ": the module has no class InputProcessor", "    now perhaps: vllm."
         "v1.engine.input_processor:InputReader.assign_request_id(self, request)"),
    ),
    "parameter": (
        SCHEDULER, "_free_request(self, request)", "_free_request(self, req)",
        ("  changed: ", ": no parameter request; it has (self, req)"),
    ),
    # V1's own address is no new home for V2's.
    "one of two runners": (
        "v1/worker/gpu/mm/encoder_runner.py", "execute_mm_encoder", "run_encoder",
        ("worker.encoder: partly", "unattributed where that is what runs: dispatch, encoder.compute"),
    ),
    "field": (
        "config/ec_transfer.py", "ec_role: int = 0", "role: int = 0",
        ("ECTransferConfig.ec_role: the class has no such name", "without it: role reads `mono`"),
    ),
    "class of four fields": (
        "v1/outputs.py", "class KVConnectorOutput", "class Other", (": there is no such class",) * 4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LOSSES)
def test_lost(tree: Path, case: str) -> None:
    """What is gone or changed, which stages become unattributed, and where it may be now."""
    file, old, new, told = LOSSES[case]
    replace_text(tree, file, old, new)

    answer = run_source_check("--source", tree)

    assert answer.exit_code == 1
    for text in told:
        assert answer.output.count(text) == told.count(text), answer.output
    assert ("now perhaps" in answer.output) == ("now perhaps" in str(told))


def test_module_gone(tree: Path) -> None:
    """That a whole module is gone is said, in JSON with the stages of an encoder instance too."""
    (tree / "vllm" / "v1" / "engine" / "core.py").unlink()

    answer = run_source_check("--source", tree, "--json", "-")
    reported: dict[str, Any] = json.loads(answer.output)["targets"]["engine.input"]

    stages = ["ipc", "encoder.queue", "prefill.queue", "kv.transfer"]
    assert (answer.exit_code, reported["state"]) == (1, "lost")
    assert reported["unattributed"] == reported["unattributed_on_encoder"] == stages
    (place,) = reported["places"]
    assert (place["why"], place["candidates"]) == ("the module is gone", [])


def test_connector_method(tree: Path) -> None:
    """A connector's method may leave the base class as long as a connector there still has it."""
    replace_text(tree, EC_BASE, "ensure_cache_available", "prepare_items")
    assert get_target_result(tree, "transfer.wait").state == source_check.LOST

    heir = "class Mine:\n    def ensure_cache_available(self, request): ...\n"
    write(tree, str(Path(EC_BASE).parent / "mine.py"), heir)
    (place,) = get_target_result(tree, "transfer.wait").places

    assert place.state == source_check.PRESENT
    assert "mine:Mine.ensure_cache_available" in place.why


def test_field_elsewhere(tree: Path) -> None:
    """Fields are found on base classes, in methods that set them, and where the class has moved."""
    replace_text(tree, "config/kv_transfer.py", "kv_role: int = 0", "pass")
    replace_text(
        tree, "config/kv_transfer.py", "class KVTransferConfig:", "class KVTransferConfig(Base):"
    )
    base = "class Base(Generic[T]):\n    def __init__(self): self.kv_role = self.other = 1\n"
    write(tree, "config/base.py", base)
    config = tree / "vllm" / "config"
    (config / "model.py").rename(config / "models.py")

    result = source_check.check_source(tree)
    notes = {field.place.address: field.place.why for field in result.fields if field.place.why}

    assert result.complete
    assert notes == {
        "vllm.config.model:ModelConfig.served_model_name": "the class is in vllm.config.models now"
    }


@pytest.mark.parametrize("name", ["__init__.py", "v1/__init__.py"])
def test_not_vllm(tmp_path: Path, name: str) -> None:
    """A folder that is no vLLM, or one from before its V1 engine, is refused with a remedy."""
    assert run_source_check("--source", tmp_path / "nothing").exit_code == 2
    (tmp_path / "vllm" / name).parent.mkdir(parents=True)
    (tmp_path / "vllm" / name).touch()

    answer = run_source_check("--source", tmp_path)

    assert answer.exit_code == 2
    assert "is not a vLLM source tree" in answer.output
    assert "git clone https://github.com/vllm-project/vllm" in answer.output


def test_unreadable(tree: Path) -> None:
    """A file of ours to check that does not parse is an error that names it; others do not matter."""
    text = "def broken(:\n"
    write(tree, "unrelated.py", f"# class Base def _free_request(\n{text}")
    assert run_source_check("--source", tree).exit_code == 0

    write(tree, SCHEDULER, text)
    answer = run_source_check("--source", tree)

    assert answer.exit_code == 2
    assert "is not Python that can be read" in answer.output


def test_flags(tree: Path, tmp_path: Path) -> None:
    """--source checks one folder and nothing else; --json FILE writes the result beside the text."""
    answer = run_source_check("--source", tree, "--markdown")
    assert answer.exit_code == 2
    assert "leave VERSION and --markdown out" in answer.output

    path = tmp_path / "new" / "source.json"
    answer = run_source_check("--source", tree, "--json", path)
    assert "fields are where we look for them" in answer.output
    assert json.loads(path.read_text("utf-8")) == source_check.source_result_to_dict(
        source_check.check_source(tree)
    )


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("__version__ = version = '0.33.0'", "0.33.0"),
        ('__version__ = "0.33.1rc2+cpu"', "0.33.1rc2"),
        ("__version__ = version = '0.34.0.dev12+gabc'", ""),
        ("nothing = 1", ""),
    ],
)
def test_version_file(tree: Path, line: str, version: str) -> None:
    """A release says its number; a build between releases is judged as the newest."""
    write(tree, "_version.py", line + "\n")

    assert source_check.check_source(tree).version == version


def test_version_tag(tree: Path) -> None:
    """A work tree is a release only exactly at its tag; a broken repository does not matter."""
    git = ("git", "-C", str(tree), "-c", "user.name=a", "-c", "user.email=a@example.org")
    for arguments in (("init", "-q"), ("add", "."), ("commit", "-qm", "a")):
        subprocess.run([*git, *arguments], check=True)
    assert source_check.check_source(tree).version == ""

    subprocess.run([*git, "tag", "v0.34.0"], check=True)
    assert source_check.check_source(tree).version == "0.34.0"

    (tree / ".git" / "HEAD").unlink()
    assert source_check.check_source(tree).version == ""


def test_older_release(tree: Path) -> None:
    """What a release need not have is not asked for: 0.20 has no wait for an encoder's item."""
    write(tree, "_version.py", "__version__ = '0.20.2'\n")
    replace_text(tree, EC_BASE, "ensure_cache_available", "nothing_of_the_kind")
    names = {each.target.name for each in source_check.check_source(tree).targets}

    assert "transfer.wait" not in names
    assert "transfer.load" in names
