# SPDX-License-Identifier: Apache-2.0
"""Custom resource definitions of other projects, from their Go modules, for tests/cluster's API server.

Go downloads a module once; its hash must be the one written here.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lab.stack.go_builds import GoBuildError


@dataclass(frozen=True, slots=True)
class DefinitionModule:
    """A Go module that holds definitions.

    checksum: as go.sum has it. files: paths in the module.
    """

    module: str
    checksum: str
    files: tuple[str, ...]


MODULES: Final = (
    DefinitionModule(
        "github.com/prometheus-operator/prometheus-operator@v0.85.0",
        "h1:M5xLCLEoaW2IJfnuCwFzzpL+jSVQu3KGT84Pye+fW8s=",
        tuple(
            f"example/prometheus-operator-crd/monitoring.coreos.com_{name}.yaml"
            for name in ("prometheuses", "servicemonitors", "podmonitors", "prometheusrules")
        ),
    ),
    DefinitionModule(
        "github.com/open-telemetry/opentelemetry-operator@v0.138.0",
        "h1:PWNLD3i+sGpPLV2HpTylgGXuJB7iZp4cpoGDtw2XTBo=",
        ("config/crd/bases/opentelemetry.io_instrumentations.yaml",),
    ),
    DefinitionModule(
        "github.com/kserve/kserve@v0.17.0",
        "h1:IaynaBFzVQz1Xyrw5n3ncqzd5Y7L1RkO+YWvVwwtMQE=",
        ("config/crd/full/llmisvc/serving.kserve.io_llminferenceservices.yaml",),
    ),
)


def gather_definitions() -> list[Path]:
    """The files of all modules, downloaded if needed. Raises GoBuildError."""
    found = [download_module(each) / name for each in MODULES for name in each.files]
    if missing := [str(path) for path in found if not path.is_file()]:
        raise GoBuildError(f"no {', '.join(missing)}")
    return found


def download_module(wanted: DefinitionModule) -> Path:
    """The folder of a module. Raises GoBuildError, also for a hash that is not ours."""
    # In an empty folder: no go.mod of anybody's decides what is downloaded.
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            ("go", "mod", "download", "-json", wanted.module),
            cwd=folder,
            # The checksum database does not know all versions; the hashes above stand for it.
            env={**os.environ, "GOWORK": "off", "GOFLAGS": "", "GOSUMDB": "off"},
            capture_output=True,
            text=True,
        )
    said = json.loads(done.stdout or "{}")
    if done.returncode or "Dir" not in said:
        raise GoBuildError(f"{wanted.module}: {said.get('Error') or done.stderr}")
    if said["Sum"] != wanted.checksum:
        raise GoBuildError(f"{wanted.module} has the hash {said['Sum']}, not {wanted.checksum}")
    return Path(said["Dir"])
