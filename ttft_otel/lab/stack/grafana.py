# SPDX-License-Identifier: Apache-2.0
"""Find a Grafana for the native stack and start it with our provisioning files; native.py and tests ask.

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

from ttft_otel.lab.models import cache_root
from ttft_otel.lab.recipes import HOST, Command
from ttft_otel.lab.stack.parts import DASHBOARDS, PROVISIONING, Addresses
from ttft_otel.lab.stack.pins import CHECKOUT

SHARED: Final = CHECKOUT.parent / "shared" / "tools" / "grafana"
REMEDY: Final = (
    "name the folder of an unpacked Grafana in GRAFANA_HOME, or a running one in GRAFANA_URL"
)

# A read-only Grafana that talks to nobody but our data sources.
SETTINGS: Final = """\
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


def home() -> Path | None:
    """The folder of an unpacked Grafana, if one can be had."""
    named = os.environ.get("GRAFANA_HOME")
    if named:
        return Path(named)
    archives = sorted(SHARED.glob("grafana-*.tar.xz"))
    return unpacked(archives[-1]) if archives else None


def unpacked(archive: Path) -> Path:
    """An archive's Grafana in the user's cache; unpacking takes some seconds, once."""
    digest = hashlib.sha256(f"{archive.name} {archive.stat().st_size}".encode()).hexdigest()
    target = cache_root() / "stack" / f"grafana-{digest[:16]}"
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(dir=target.parent) as scratch,
            tarfile.open(archive) as tar,
        ):
            tar.extractall(scratch, filter="data")
            # Another process may have been faster; then its copy stays.
            with contextlib.suppress(OSError):
                next(Path(scratch).iterdir()).rename(target)
    return target


def command(home: Path, at: Addresses, folder: Path) -> Command:
    """Grafana with our data sources and dashboards, its own files below `folder`."""
    # A Grafana without users does not start twice on one database; there is nothing in it to keep.
    shutil.rmtree(folder / "data", ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / "grafana.ini"
    text = SETTINGS.format(folder=folder, provisioning=PROVISIONING, host=HOST, port=at.grafana)
    settings.write_text(text, "utf-8")
    words = ("server", "--homepath", str(home), "--config", str(settings))
    env = at.env() | {"TTFT_DASHBOARDS": str(DASHBOARDS)}
    return Command(
        "grafana", (str(home / "bin" / "grafana"), *words), env, at.grafana, "/api/health"
    )
