# SPDX-License-Identifier: Apache-2.0
"""What is generated for the Helm chart: `python -m lab.chart` writes README.md and examples/*/rendered.yaml.

Input are values.yaml with its comments, the examples' values.yaml and the templates; tests/test_chart.py
compares, so that a change of a template shows as a diff of what users get.
"""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from lab.kube_tools import run_helm

CHECKOUT: Final = Path(__file__).resolve().parents[1]
CHART: Final = CHECKOUT / "deploy" / "helm" / "ttft-otel"
RELEASE = "ttft"
NAMESPACE = "observability"
# Longer values of a ConfigMap are files of this repository, which have tests and diffs of their own.
MAX_SHOWN_CHARS: Final = 600
COMMENT: Final = re.compile(r"^( *)# -- (.+)$")
KEY: Final = re.compile(r"^( *)([A-Za-z0-9]+):(.*)$")

README: Final = """# ttft-otel

Router, collector, dashboards and alerts for [ttft-otel](../../../README.md) on Kubernetes. How to begin:
[docs/guides/kubernetes.md](../../../docs/guides/kubernetes.md). What a new version asks for:
[UPGRADING.md](UPGRADING.md).

    helm install ttft deploy/helm/ttft-otel --namespace observability --create-namespace \\
      --set 'router.discover={k8s://default/app=vllm}' --set trial.enabled=true

Examples with what they render: [examples](examples). The tables are written by `python -m lab.chart`.

"""


def find_values_files() -> list[Path]:
    """Values of all examples and of ci/, with which the chart must render."""
    return [*sorted(CHART.glob("examples/*/values.yaml")), *sorted(CHART.glob("ci/*-values.yaml"))]


@functools.cache
def render_chart(values: Path) -> str:
    """The manifests for a file of values. Raises CalledProcessError."""
    done = run_helm("template", RELEASE, str(CHART), "--namespace", NAMESPACE, "-f", str(values))
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, "helm", done.stdout, done.stderr)
    return done.stdout


def shorten_manifests(text: str) -> str:
    """Manifests as a reader wants them: without the files that ConfigMaps and rules are made of."""
    documents = [each for each in yaml.load_all(text, yaml.CSafeLoader) if each]
    for document in documents:
        for key, value in document.get("data", {}).items():
            if len(value) > MAX_SHOWN_CHARS:
                document["data"][key] = "(a file of this repository)\n"
        for group in document.get("spec", {}).get("groups", ()):
            group["rules"] = ["(rules of grafana/prometheus)"]
        annotations = get_pod_annotations(document)
        if "checksum/config" in annotations:
            annotations["checksum/config"] = "(of the files)"
    return yaml.safe_dump_all(documents, sort_keys=False, width=120)


def get_pod_annotations(document: dict[str, Any]) -> dict[str, Any]:
    """The annotations of the pods that a document describes."""
    template = document.get("spec", {}).get("template", {})
    annotations: dict[str, Any] = template.get("metadata", {}).get("annotations") or {}
    return annotations


def list_rows(text: str) -> Iterator[tuple[str, str, str]]:
    """Dotted name, default and meaning of each documented value of values.yaml."""
    path: list[str] = []
    comment = ""
    for line in text.splitlines():
        if found := COMMENT.match(line):
            comment = found[2]
        elif found := KEY.match(line):
            depth = len(found[1]) // 2
            path = [*path[:depth], found[2]]
            if comment:
                default = found[3].strip() or "see values.yaml"
                yield ".".join(path), default.replace("|", "\\|"), comment
            comment = ""


def render_readme() -> str:
    """README.md with a table for each section of values.yaml."""
    rows = list(list_rows((CHART / "values.yaml").read_text("utf-8")))
    sections: dict[str, list[str]] = {}
    for name, default, meaning in rows:
        head, dot, _ = name.partition(".")
        lines = sections.setdefault(head if dot else "all", [])
        lines.append(f"| `{name}` | `{default}` | {meaning} |\n")
    table = "| value | default | meaning |\n|---|---|---|\n"
    return README + "\n".join(
        f"## {name}\n\n{table}{''.join(lines)}" for name, lines in sections.items()
    )


def render_files() -> dict[Path, str]:
    """All generated files with their content."""
    files = {CHART / "README.md": render_readme()}
    for values in sorted(CHART.glob("examples/*/values.yaml")):
        files[values.with_name("rendered.yaml")] = shorten_manifests(render_chart(values))
    return files


def write_files() -> None:
    """Write them."""
    for path, text in render_files().items():
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    write_files()
