# SPDX-License-Identifier: Apache-2.0
"""The command `scripts/kube`: a Kubernetes node on this machine, and our parts on it, for real."""

from __future__ import annotations

import json
import platform
import shutil
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click

from lab import kube_host, kube_images, tiny_models
from lab.container_engine import EngineError
from lab.container_images import ImageSourceError
from lab.kube_configs import NODE_NAME, PLUGIN_FOLDER
from lab.kube_host import MachineState
from lab.kube_inside import RESULT_FILE, InsidePlan
from lab.kube_tools import find_tool
from lab.local_servers import exit_on_sigterm
from lab.stack import go_builds
from lab.stack.go_builds import GoBuildError
from lab.stack.program_pins import CHECKOUT, KUBERNETES_NODE_TOOL, KUBERNETES_TOOL

STEPS: Final = (
    "service", "servers", "router", "request", "backend rollout", "router rollout",
    "pod deleted", "pod killed",
)  # fmt: skip
FAULT_CODE = 1
CANNOT_RUN_CODE = 2
INTERRUPTED_CODE = 130
PROGRESS_PAUSE_S: Final = 10.0


class ProgressLines:
    """Lines on stderr: each new text, and of a text that changes all the time one line in ten seconds."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.last = -PROGRESS_PAUSE_S

    def say(self, text: str) -> None:
        """Print it, unless another line was printed a moment ago."""
        now = time.monotonic()
        if now - self.last >= PROGRESS_PAUSE_S:
            self.last = now
            self.say_always(text)

    def say_always(self, text: str) -> None:
        """Print it."""
        click.echo(f"{time.monotonic() - self.started:6.1f} s  {text}", err=True)


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="""\b
Examples:
  scripts/kube                       all steps: about 10 minutes once everything is built
  scripts/kube --until service       the node alone; a minute
  scripts/kube --stand-in            without vLLM: pods, discovery, rollouts; five minutes
  scripts/kube --json figures.json   the figures; - is standard output
  scripts/kube --keep                leave all of it up until Ctrl-C
Needs root, Go 1.25, and Debian's packages that it names. The first run builds Kubernetes (20 minutes of
CPU) and images. Whatever it changes on the machine it puts back, also when it fails; what a killed run left
is put back by the next.
Exit codes: 0 all as it should be, 1 something was not (it says what), 2 it cannot run here, 130 interrupted.
""",
)
@click.option("--json", "target", metavar="FILE", help="Write figures and faults there.")
@click.option(
    "--until",
    type=click.Choice(STEPS),
    default=STEPS[-1],
    help="Stop after this step.  [default: all]",
)
@click.option(
    "--stand-in", is_flag=True, help="Small servers in place of vLLM; no traces of servers."
)
@click.option("--keep", is_flag=True, help="Leave the node up until Ctrl-C.")
@click.option(
    "--logs",
    type=click.Path(path_type=Path, file_okay=False),
    default=CHECKOUT / "out" / "kube",
    help="Where logs of a run with faults go.  [default: out/kube]",
)
def run_kube(target: str | None, until: str, stand_in: bool, keep: bool, logs: Path) -> None:
    """Start a whole Kubernetes node, and on it vLLM servers, our router and our collector.

    \b
    service            a pod answers behind its Service
    servers            deploy/kubernetes/mono.yaml: two vLLM servers, traced by the init container alone
    router             our chart: two routers that find the servers by k8s://, and the collector
    request            one request; its trace has spans of a router and of a server
    backend rollout    all servers replaced under load: no failed request, no lost trace
    router rollout     the same with the routers
    pod deleted        kubectl delete pod for a server under load: the same
    pod killed         SIGKILL for a server under load: what was handed off before arrives
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    lines = ProgressLines()
    if lacking := kube_host.find_lacking(PLUGIN_FOLDER):
        for each in lacking:
            click.echo(f"missing: {each}", err=True)
        sys.exit(CANNOT_RUN_CODE)
    with exit_on_sigterm():
        try:
            result = run_node(lines, until, stand_in, keep, logs)
        except KeyboardInterrupt:
            lines.say_always("interrupted; the machine is as it was")
            sys.exit(INTERRUPTED_CODE)
        except BlockingIOError:
            lines.say_always("another scripts/kube runs on this machine")
            sys.exit(CANNOT_RUN_CODE)
        except (EngineError, ImageSourceError, GoBuildError) as error:
            lines.say_always(str(error))
            sys.exit(CANNOT_RUN_CODE)
    report_result(lines, result, target)
    sys.exit(FAULT_CODE if result["faults"] else 0)


def run_node(
    lines: ProgressLines, until: str, stand_in: bool, keep: bool, logs: Path
) -> dict[str, Any]:
    """Build what is missing, start the node, and give what it wrote as its result."""
    programs = go_builds.build_tool(KUBERNETES_TOOL, lines.say)
    node_programs = go_builds.build_tool(KUBERNETES_NODE_TOOL, lines.say)
    archives = kube_images.prepare_archives(lines.say_always)
    model = tiny_models.build_model(tiny_models.TEXT_RECIPE)
    with kube_host.borrow_machine() as state:
        plan = InsidePlan(
            folder=state.folder,
            group=state.group,
            programs=str(programs),
            node_programs=str(node_programs),
            archives=tuple(map(str, archives)),
            environment=sys.prefix,
            model=str(model),
            stand_in=stand_in,
            last=until,
            keep=keep,
        )
        result = run_plan_inside(state, plan)
        if result["faults"]:
            lines.say_always(f"logs: {copy_logs(Path(state.folder), logs)}")
    return result


def run_plan_inside(state: MachineState, plan: InsidePlan) -> dict[str, Any]:
    """Run lab.kube_inside in the node's namespaces, and read its result."""
    path = Path(state.folder, "plan.json")
    path.write_text(json.dumps(asdict(plan)), "utf-8")
    words = (sys.executable, "-m", "lab.kube_inside", str(path))
    result = Path(state.folder, RESULT_FILE)
    with kube_host.run_inside(NODE_NAME, words) as process:
        if plan.keep:
            access = f"nsenter --target {process.pid} --net --mount env KUBECONFIG={state.folder}/kubeconfig"
            click.echo(
                f"later, with the node: {access} {find_tool('kubectl')} get pods -A", err=True
            )
        try:
            process.wait()
        except KeyboardInterrupt:
            if not result.is_file():
                raise
    if not result.is_file():
        return {"figures": {}, "faults": [f"the node ended with code {process.returncode}"]}
    read: dict[str, Any] = json.loads(result.read_text("utf-8"))
    return read


def copy_logs(folder: Path, target: Path) -> Path:
    """Keep the logs of a run, in place of those of an earlier one."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for path in folder.glob("*.log"):
        shutil.copy(path, target)
    if (folder / "pod-logs").is_dir():
        shutil.copytree(folder / "pod-logs", target / "pods", symlinks=True)
    return target


def report_result(lines: ProgressLines, result: dict[str, Any], target: str | None) -> None:
    """Print faults, and write them as JSON with the figures where that is asked for."""
    for fault in result["faults"]:
        lines.say_always(f"FAULT {fault}")
    if target:
        text = json.dumps({"machine": platform.platform(), **result}, indent=2)
        if target == "-":
            click.echo(text)
        else:
            Path(target).write_text(f"{text}\n", "utf-8")


if __name__ == "__main__":
    run_kube(prog_name="scripts/kube")
