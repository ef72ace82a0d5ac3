# SPDX-License-Identifier: Apache-2.0
"""Collectors as the chart configures them, read by the real collector; nothing is started."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from lab import chart
from lab.stack.binaries import StackBinaries

VALUES = [
    pytest.param(path, id=str(path.relative_to(chart.CHART))) for path in chart.find_values_files()
]


@pytest.mark.parametrize("values", VALUES)
def test_the_real_collector_takes_the_configuration(
    values: Path, binaries: StackBinaries, tmp_path: Path
) -> None:
    """With the arguments and variables of the pods; a list of the second tier is one of them."""
    documents = [each for each in yaml.safe_load_all(chart.render_chart(values)) if each]
    pods = [
        each["spec"]["template"]["spec"]["containers"][0]
        for each in documents
        if each["kind"] in ("Deployment", "StatefulSet") and "collector" in each["metadata"]["name"]
    ]
    for document in documents:
        if document["kind"] == "ConfigMap" and document["metadata"]["name"].endswith("collector"):
            for name, text in document["data"].items():
                (tmp_path / name).write_text(text, "utf-8")

    for container in pods:
        variables = {each["name"]: str(each["value"]) for each in container["env"]}
        variables["TTFT_COLLECTOR_STORAGE"] = str(tmp_path / "queue")
        words = [each.replace("/etc/otelcol", str(tmp_path)) for each in container["args"]]
        done = subprocess.run(
            [binaries.collector, "validate", *words],
            env=variables,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
