# SPDX-License-Identifier: Apache-2.0
"""Add our data sources and dashboards to a running Grafana of any version, over its API.

GRAFANA_URL names it, with who may change it: http://NAME:PASSWORD@HOST:PORT. native_stack.py and tests ask.
"""

from __future__ import annotations

import json
from string import Template
from typing import Any
from urllib.parse import urlsplit

from lab.stack.stack_parts import PROVISIONING, StackAddresses
from ttft_otel.stack import stack_queries


def import_dashboards(base: str, addresses: StackAddresses) -> bool:
    """Create or replace them; False, and nothing is changed, when the URL has no credentials."""
    if not urlsplit(base).username:
        return False
    # Data sources first: dashboards name them by their uid.
    for source in load_data_sources(addresses):
        put_or_create(base, "datasources", f"datasources/uid/{source['uid']}", source)
    stack_queries.import_dashboards(base)
    return True


def load_data_sources(addresses: StackAddresses) -> list[dict[str, Any]]:
    """The data sources of the provisioning files, with variables expanded as Grafana does."""
    import yaml  # not among what the package needs

    data_sources = []
    for path in sorted((PROVISIONING / "datasources").glob("*.yaml")):
        # $VARIABLES of others stay as they are, as Grafana leaves them.
        document = yaml.safe_load(
            Template(path.read_text("utf-8")).safe_substitute(addresses.build_env())
        )
        data_sources += document["datasources"]
    return data_sources


def put_or_create(base: str, collection: str, item: str, body: dict[str, Any]) -> None:
    """Replace the object of this name, or create it."""
    # Grafana's API has no "create or replace" for data sources: PUT fails for one that is missing.
    text = json.dumps(body).encode()
    try:
        stack_queries.send_body(f"{base}/api/{item}", text, stack_queries.JSON_CONTENT_TYPE, "PUT")
    except stack_queries.BackendQueryError as error:
        if "answered 404" not in str(error):
            raise
        stack_queries.send_body(f"{base}/api/{collection}", text, stack_queries.JSON_CONTENT_TYPE)
