# SPDX-License-Identifier: Apache-2.0
"""docs/upstream/: each patch fits vLLM 0.33, and what it adds does what its head says.

The patched classes are taken out of their files, because vLLM 0.33 itself is not installed.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hooks.test_target_check import BIG_VERSION, IS_BIG_MISSING, find_package

FOLDER = Path(__file__).parents[1] / "docs" / "upstream"
PATCHES = sorted(FOLDER.glob("*.patch"))
# Its sources are 336 MB where the laboratory's cache has none: scripts/compat --newest fetches them.
pytestmark = [pytest.mark.full] if IS_BIG_MISSING else []
TOUCHED = re.compile(r"^\+\+\+ b/(\S+)", re.M)


@pytest.fixture
def apply(tmp_path: Path) -> Callable[[Path], Path]:
    """Apply a patch to copies of the files that it touches; gives the folder."""

    def apply_patch(patch: Path) -> Path:
        package = find_package(BIG_VERSION)
        for name in TOUCHED.findall(patch.read_text("utf-8")):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes((package.parent / name).read_bytes())
        subprocess.run(["git", "apply", str(patch)], cwd=tmp_path, check=True)
        return tmp_path / "vllm"

    return apply_patch


def load_name(path: Path, name: str, **given: Any) -> Any:
    """A class or method of a file, made with `given` names alone."""
    nodes = ast.walk(ast.parse(path.read_text("utf-8")))
    found = next(node for node in nodes if getattr(node, "name", "") == name)
    future = ast.parse("from __future__ import annotations").body
    tree = ast.fix_missing_locations(ast.Module([*future, found], []))  # type: ignore[list-item]
    namespace: dict[str, Any] = {"__name__": __name__, **given}
    exec(compile(tree, str(path), "exec"), namespace)
    return namespace[name]


@pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.stem)
def test_applies(apply: Callable[[Path], Path], patch: Path) -> None:
    """It applies, what comes out is Python, and its head has reason and cost."""
    package = apply(patch)
    head = patch.read_text("utf-8").partition("\n---")[0]

    assert "Why:" in head and "Cost:" in head
    assert [ast.parse(path.read_text("utf-8")) for path in package.rglob("*.py")]


def test_timings(apply: Callable[[Path], Path]) -> None:
    """001: an output without timings has one byte more; with them they come once, as they were given."""
    package = apply(PATCHES[0])
    output, plain = (
        load_name(each / "v1" / "engine" / "__init__.py", "EngineCoreOutput", msgspec=msgspec)
        for each in (package, find_package(BIG_VERSION))
    )
    take = load_name(package / "v1" / "request.py", "take_timings")
    request = SimpleNamespace(timings={"scheduled": 5})

    sizes = [len(msgspec.msgpack.encode(each("r", [1]))) for each in (output, plain)]
    assert sizes[0] == sizes[1] + 1
    assert output.__struct_fields__[-1] == "timings"
    sent = msgspec.msgpack.encode(output("r", [1], timings=take(request)))
    assert msgspec.msgpack.decode(sent)[-1] == {"scheduled": 5}
    assert take(request) is None


def test_queued(apply: Callable[[Path], Path]) -> None:
    """002: the event's time is that of the input thread, before what it does with the request."""
    package = apply(PATCHES[1])
    made = SimpleNamespace(use_structured_output=False)

    def build(request: Any, hasher: Any) -> Any:
        time.sleep(0.02)
        return made

    prepare = load_name(
        package / "v1" / "engine" / "core.py", "preprocess_add_request",
        time=time, Request=SimpleNamespace(from_engine_core_request=build),
    )  # fmt: skip
    before = time.monotonic()
    core = SimpleNamespace(mm_receiver_cache=None, request_block_hasher=None)
    prepare(core, SimpleNamespace(current_wave=0))

    assert before <= made.queued_ts < time.monotonic() - 0.02
    scheduler = (package / "v1" / "core" / "sched" / "scheduler.py").read_text("utf-8")
    assert "record_event(EngineCoreEventType.QUEUED, request.queued_ts)" in scheduler


def test_forward_events(apply: Callable[[Path], Path]) -> None:
    """003: who asks gets a step's events outside collect(), where nothing is kept; others see no change."""
    done: list[str] = []

    class Events:
        def __init__(self) -> None:
            for name in ("forward_start", "forward_end", "drafter_start", "drafter_end"):
                setattr(self, name, SimpleNamespace(record=lambda name=name: done.append(name)))

    path = apply(PATCHES[2]) / "v1" / "worker" / "gpu" / "async_utils.py"
    contextlib = sys.modules["contextlib"]
    collector = load_name(
        path, "StepTimingCollector", StepTimingEvents=Events, contextlib=contextlib
    )()

    def step() -> None:
        for name in ("forward_start", "forward_end", "drafter_start", "drafter_end"):
            getattr(collector, name)()

    step()
    assert done == []
    seen: list[Any] = []
    collector.on_forward = seen.append
    step()
    assert done == ["forward_start", "forward_end"] and len(seen) == 1
    assert collector._timed == [] and collector._step is None
    collector._collecting = True
    step()
    assert len(seen) == 2 and len(collector._timed) == 1
