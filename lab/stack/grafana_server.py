# SPDX-License-Identifier: Apache-2.0
"""Find a Grafana for native_stack.py and for tests, and start it with our provisioning files.

Found by GRAFANA_URL (one that runs), GRAFANA_HOME (an unpacked one), or as an archive in a folder
`shared/tools/grafana` beside the checkout, which is unpacked into the user's cache once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import Final

from lab.server_commands import HOST, ServerCommand
from lab.stack.program_pins import CHECKOUT
from lab.stack.stack_parts import DASHBOARDS, PROVISIONING, StackAddresses
from lab.tiny_models import get_cache_root

SHARED_ARCHIVES: Final = CHECKOUT.parent / "shared" / "tools" / "grafana"
GRAFANA_REMEDY: Final = (
    "name the folder of an unpacked Grafana in GRAFANA_HOME, or a running one in GRAFANA_URL"
)

# A read-only Grafana that makes no connections except to our data sources.
GRAFANA_INI: Final = """\
[paths]
data = {folder}/data
logs = {folder}/logs
plugins = {folder}/plugins
provisioning = {provisioning}
[server]
http_addr = {host}
http_port = {port}
[analytics]
reporting_enabled = false
check_for_updates = false
check_for_plugin_updates = false
[plugins]
preinstall_disabled = true
[news]
news_feed_enabled = false
[security]
disable_gravatar = true
disable_initial_admin_creation = true
[auth]
disable_login_form = true
[auth.anonymous]
enabled = true
org_role = Viewer
[users]
viewers_can_edit = true
[log]
mode = console
level = warn
[feature_toggles]
enable = traceqlEditor traceqlSearch
"""


def find_grafana_home() -> Path | None:
    """The folder of an unpacked Grafana; None when there is none."""
    named = os.environ.get("GRAFANA_HOME")
    if named:
        return Path(named)
    # The last by name: the newest, while versions have equally many digits.
    archives = sorted(SHARED_ARCHIVES.glob("grafana-*.tar.xz"))
    return unpack_archive(archives[-1]) if archives else None


def unpack_archive(archive: Path) -> Path:
    """Unpack an archive into the user's cache, once; takes some seconds."""
    # Name and size stand for the content, so that a large archive is not read at every start.
    digest = hashlib.sha256(f"{archive.name} {archive.stat().st_size}".encode()).hexdigest()
    target = get_cache_root() / "stack" / f"grafana-{digest[:16]}"
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with (
            # Beside the target: a rename is atomic on one file system only.
            tempfile.TemporaryDirectory(dir=target.parent) as scratch,
            tarfile.open(archive) as tar,
        ):
            tar.extractall(scratch, filter="data")
            # Another process may have been faster; then its copy stays.
            with contextlib.suppress(OSError):
                next(Path(scratch).iterdir()).rename(target)
    return target


def build_grafana_command(home: Path, addresses: StackAddresses, folder: Path) -> ServerCommand:
    """Grafana with our data sources and dashboards, its own files below `folder`."""
    # A Grafana without users does not start twice on one database; there is nothing in it to keep.
    shutil.rmtree(folder / "data", ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / "grafana.ini"
    text = GRAFANA_INI.format(
        folder=folder, provisioning=PROVISIONING, host=HOST, port=addresses.grafana
    )
    settings.write_text(text, "utf-8")
    words = ("server", "--homepath", str(home), "--config", str(settings))
    # Provisioning files name addresses and the dashboards' folder by variables.
    env = addresses.build_env() | {"TTFT_DASHBOARDS": str(DASHBOARDS)}
    return ServerCommand(
        "grafana", (str(home / "bin" / "grafana"), *words), env, addresses.grafana, "/api/health"
    )
