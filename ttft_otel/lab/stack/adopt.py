# SPDX-License-Identifier: Apache-2.0
"""Give a Grafana that runs already, of any version, our data sources and dashboards over its API.

GRAFANA_URL names it, with who may change it: http://NAME:PASSWORD@HOST:PORT. native.py and tests ask.
"""

from __future__ import annotations

import json
from string import Template
from typing import Any
from urllib.parse import urlsplit

from ttft_otel.lab.stack import ask
from ttft_otel.lab.stack.parts import DASHBOARDS, PROVISIONING, Addresses

KIND = "application/json"


def adopt(base: str, at: Addresses) -> bool:
    """Create or replace them; False, and nothing done, when the URL names nobody who may."""
    if not urlsplit(base).username:
        return False
    for source in sources(at):
        put(base, "datasources", f"datasources/uid/{source['uid']}", source)
    for path in sorted(DASHBOARDS.glob("*.json")):
        board = json.loads(path.read_text("utf-8"))
        body = json.dumps({"dashboard": board, "overwrite": True}).encode()
        ask.post(f"{base}/api/dashboards/db", body, KIND)
    return True


def sources(at: Addresses) -> list[dict[str, Any]]:
    """The data sources of the provisioning files, with this stack's addresses, as Grafana expands them."""
    import yaml  # not among what the package needs

    found = []
    for path in sorted((PROVISIONING / "datasources").glob("*.yaml")):
        told = yaml.safe_load(Template(path.read_text("utf-8")).safe_substitute(at.env()))
        found += told["datasources"]
    return found


def put(base: str, many: str, one: str, body: dict[str, Any]) -> None:
    """Replace what has this name; create it if there is none."""
    text = json.dumps(body).encode()
    try:
        ask.post(f"{base}/api/{one}", text, KIND, "PUT")
    except ask.AskError as error:
        if "answered 404" not in str(error):
            raise
        ask.post(f"{base}/api/{many}", text, KIND)


def public(base: str) -> str:
    """The URL without who may change things: for screens and files."""
    parts = urlsplit(base)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")
