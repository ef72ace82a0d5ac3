# SPDX-License-Identifier: Apache-2.0
"""A whole Kubernetes node: scripts/kube, where root, its programs and its builds are there."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from lab import kube_host
from lab.kube_configs import PLUGIN_FOLDER
from lab.stack import go_builds
from lab.stack.program_pins import CHECKOUT, KUBERNETES_NODE_TOOL, KUBERNETES_TOOL

pytestmark = pytest.mark.full

LIMIT_S = 3600  # a busy machine starts each server in five minutes


@pytest.mark.timeout(LIMIT_S + 60)
def test_requests_survive_rollouts(tmp_path: Path) -> None:
    """Servers, router and collector on a real node: nothing fails while they are replaced, nothing stays."""
    if lacking := kube_host.find_lacking(PLUGIN_FOLDER):
        pytest.skip("; ".join(lacking))
    if not (go_builds.is_built(KUBERNETES_TOOL) and go_builds.is_built(KUBERNETES_NODE_TOOL)):
        pytest.skip("Kubernetes is not built: scripts/kube --until service does it once")
    settings, figures = kube_host.read_settings(), tmp_path / "figures.json"

    done = subprocess.run(
        (CHECKOUT / "scripts" / "kube", "--json", figures, "--logs", tmp_path / "logs"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )

    assert done.returncode == 0, done.stderr[-5000:]
    steps = json.loads(figures.read_text("utf-8"))["figures"]
    for name in ("backend rollout", "router rollout", "pod deleted"):
        assert steps[name]["requests"] > 0 == steps[name]["failed"]
    assert kube_host.read_settings() == settings
    assert not kube_host.get_state_path().exists()
    assert not list(kube_host.CONTROL_GROUPS.glob("*/ttft-kube-*"))
