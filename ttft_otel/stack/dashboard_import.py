# SPDX-License-Identifier: Apache-2.0
"""Add our dashboards to a running Grafana of any version over its API, for commands/stack.py.

They ask whatever data sources of the types `prometheus` and `tempo` that Grafana has.
"""

from __future__ import annotations

import json
from typing import Final
from urllib.parse import urlsplit

from ttft_otel.stack import stack_files, stack_queries

JSON_CONTENT_TYPE: Final = "application/json"
SOURCE_TYPES: Final = ("prometheus", "tempo")


def import_dashboards(base: str, token: str = "") -> list[str]:
    """Create or replace them; gives their URLs. Raises BackendQueryError, StackFilesError.

    base: Grafana's URL, with NAME:PASSWORD@ where there is no token of a service account.
    """
    urls = []
    for path in sorted((stack_files.find_root() / "grafana" / "dashboards").glob("*.json")):
        board = json.loads(path.read_text("utf-8"))
        # overwrite: by uid, also over a version that somebody has edited there.
        body = json.dumps({"dashboard": board, "overwrite": True}).encode()
        stack_queries.send_body(f"{base}/api/dashboards/db", body, JSON_CONTENT_TYPE, "POST", token)
        urls.append(f"{strip_credentials(base)}/d/{board['uid']}")
    return urls


def list_missing_sources(base: str, token: str = "") -> list[str]:
    """The types of data sources that the dashboards need and that Grafana lacks. Raises BackendQueryError."""
    found = json.loads(
        stack_queries.send_body(f"{base}/api/datasources", None, JSON_CONTENT_TYPE, "GET", token)
    )
    return [name for name in SOURCE_TYPES if name not in {each["type"] for each in found}]


def strip_credentials(base: str) -> str:
    """The URL without user name and password, for output and files."""
    parts = urlsplit(base)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")
