# SPDX-License-Identifier: Apache-2.0
"""Run the benchmark as users do, by its command, and read the JSON that it writes."""

from __future__ import annotations

import functools
import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner, Result

from ttft_otel.commands import main as cli

BENCH_SCHEMA = json.loads(
    (Path(__file__).parents[2] / "docs" / "bench.schema.json").read_text(encoding="utf-8")
)
RunBench = Callable[..., Any]


@functools.cache
def build_validator() -> jsonschema.Draft202012Validator:
    """A validator of BENCH_SCHEMA, which is checked itself; that takes a quarter of a second."""
    jsonschema.Draft202012Validator.check_schema(BENCH_SCHEMA)
    return jsonschema.Draft202012Validator(BENCH_SCHEMA)


def validate_document(document: Any) -> Any:
    """Check a result document against docs/bench.schema.json."""
    build_validator().validate(document)
    return document


@pytest.fixture(autouse=True)
def tests_stay_frozen() -> Iterator[None]:
    """After a run, which thaws all objects, freeze them anew, as tests/conftest.py does after collection.

    Else the next run, which looks for garbage before it begins, would look through all tests: 0.1 s each.
    """
    yield
    if not gc.get_freeze_count():
        gc.collect(1)  # what this test has made
        gc.freeze()


def list_words(*arguments: object) -> list[str]:
    """Arguments of the command; what begins with `--` may be several of them, between blanks."""
    texts = map(str, arguments)
    return [word for text in texts for word in (text.split() if text[:2] == "--" else [text])]


def invoke_bench(*arguments: object) -> Result:
    """The command's outcome, which is no traceback."""
    result = CliRunner().invoke(cli.main, ["bench", *list_words(*arguments)])
    assert isinstance(result.exception, SystemExit | None), result.exception
    return result


@pytest.fixture
def bench() -> RunBench:
    """Run `ttft-otel bench ... --json`; gives the document, checked against its schema."""

    def run_bench_json(*arguments: object) -> Any:
        result = invoke_bench(*arguments, "--json")
        assert result.exit_code in (0, 3), result.output  # 3: this machine was too busy
        return validate_document(json.loads(result.stdout))

    return run_bench_json
