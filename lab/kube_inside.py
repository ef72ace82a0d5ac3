# SPDX-License-Identifier: Apache-2.0
"""The node's side of scripts/kube, in the namespaces that kube_host.py made: start the node, run the trial.

kube_command.py starts it with a plan in JSON and reads the result that it writes beside the plan.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import click

from lab import kube_workload
from lab.kube_cluster import ClusterCommandError
from lab.kube_node import KubeNode
from lab.kube_trial import KubeTrial
from lab.local_servers import LocalServerError, exit_on_sigterm

RESULT_FILE: Final = "result.json"


@dataclass(frozen=True, slots=True)
class InsidePlan:
    """What the node needs to know; all paths as text.

    programs, node_programs: folders of the built programs. environment: the Python environment with vLLM.
    stand_in: small servers in place of vLLM. last: the step after which the trial ends.
    keep: wait for the end of the process afterwards.
    """

    folder: str
    group: str
    programs: str
    node_programs: str
    archives: tuple[str, ...]
    environment: str
    model: str
    stand_in: bool
    last: str
    keep: bool


@dataclass(slots=True)
class InsideResult:
    """What came of it. figures: of each step. faults: what was not as it should be."""

    figures: dict[str, Any]
    faults: list[str]


def run_plan(plan: InsidePlan) -> InsideResult:
    """Start the node, run the steps; whatever happens becomes part of the result."""
    started = time.monotonic()

    def say(text: str) -> None:
        click.echo(f"{time.monotonic() - started:6.1f} s  {text}", err=True)

    folder = Path(plan.folder)
    node = KubeNode(folder, plan.group, Path(plan.programs), Path(plan.node_programs))
    result = InsideResult({}, [])
    try:
        node.start([Path(each) for each in plan.archives], say)
        result.figures["node"] = {"seconds": round(time.monotonic() - started, 1)}
        say(f"node: seconds {time.monotonic() - started:.1f}")
        vllm = kube_workload.mount_vllm(Path(plan.environment), folder / "vllm")
        trial = KubeTrial(node, vllm, Path(plan.model), say, plan.stand_in)
        try:
            trial.run_steps(plan.last)
        finally:
            result.figures |= trial.figures
            result.faults += trial.faults
        while plan.keep:
            # Ctrl-C ends the namespaces, and this process with them.
            write_result(folder, result)
            time.sleep(3600)
    except (LocalServerError, ClusterCommandError, TimeoutError) as error:
        result.faults.append(f"{type(error).__name__}: {error}")
    except Exception:  # noqa: BLE001 - the log of a fault of ours must not be lost with the namespace
        result.faults.append(traceback.format_exc())
    finally:
        write_result(folder, result)
        node.stop()
    return result


def write_result(folder: Path, result: InsideResult) -> None:
    """Write the result where the outside looks for it."""
    (folder / RESULT_FILE).write_text(json.dumps(asdict(result), indent=2), "utf-8")


def main() -> None:
    """Run the plan in the file that is named."""
    words = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    with exit_on_sigterm():
        result = run_plan(InsidePlan(**{**words, "archives": tuple(words["archives"])}))
    sys.exit(bool(result.faults))


if __name__ == "__main__":
    main()
