# SPDX-License-Identifier: Apache-2.0
"""Run the benchmark as its users do: the command, and the JSON that it writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner

from ttft_otel import cli

SCHEMA = json.loads(
    (Path(__file__).parents[2] / "docs" / "bench.schema.json").read_text(encoding="utf-8")
)
Bench = Callable[..., Any]


def checked(found: Any) -> Any:
    """A document that keeps to the schema."""
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(found, SCHEMA, jsonschema.Draft202012Validator)
    return found


@pytest.fixture
def bench() -> Bench:
    """`ttft-otel bench ... --json`; the document, checked against docs/bench.schema.json."""

    def run(*words: object) -> Any:
        result = CliRunner().invoke(cli.main, ["bench", *map(str, words), "--json"])
        assert result.exit_code in (0, 3), result.output  # 3: this machine was too busy
        return checked(json.loads(result.stdout))

    return run
