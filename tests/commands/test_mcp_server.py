# SPDX-License-Identifier: Apache-2.0
"""`ttft-otel mcp` as the official SDK's client starts it, over a store in which some waited for a place."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from mcp import Client
from mcp.client.stdio import StdioServerParameters

from tests.commands.test_answers import COUNT, make_record
from tests.explain.stored_records import build_spans, name_window, store_spans
from ttft_otel.commands import mcp_server
from ttft_otel.commands.report import report

ROOT = Path(__file__).parents[2]
WINDOW = name_window(0, COUNT)


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of requests of which every 16th waited for a place."""
    spans = build_spans(
        [make_record(number) for number in range(COUNT)], {"service.instance.id": "a"}
    )
    return store_spans(tmp_path_factory.mktemp("mcp") / "spans.db", spans)


def start_server(database: Path, folder: Path) -> Client:
    """A client of the command, which is started in another folder than the checkout."""
    arguments = ["-m", "ttft_otel.commands.main", "mcp", "--db", str(database)]
    environment = {"PYTHONPATH": str(ROOT)}
    return Client(
        StdioServerParameters(command=sys.executable, args=arguments, env=environment, cwd=folder)
    )


async def test_answers(database: Path, tmp_path: Path) -> None:
    """Each tool is read-only, and its answer is the command's JSON, which keeps to its schema."""
    half = COUNT // 2
    calls: dict[str, dict[str, Any]] = {
        "explain": {"since": WINDOW, "slo": 200.0},
        "report": {"since": WINDOW},
        "diff": {"a": name_window(0, half), "b": name_window(half, COUNT)},
        "whatif": {"since": WINDOW, "max-num-seqs": 8},
    }
    async with start_server(database, tmp_path) as client:
        tools = (await client.list_tools()).tools
        answers = {name: await client.call_tool(name, values) for name, values in calls.items()}

    assert {tool.name for tool in tools} == set(calls)
    for tool in tools:
        assert tool.annotations is not None and tool.annotations.read_only_hint
        jsonschema.validate(calls[tool.name], tool.input_schema)
        assert (
            not {"db", "tempo", "json", "perfetto", "junit"}
            & tool.input_schema["properties"].keys()
        )
    for name, answer in answers.items():
        assert not answer.is_error, answer.content
        found = json.loads(answer.content[0].text)
        schema = json.loads((ROOT / "docs" / f"{name}.schema.json").read_text("utf-8"))
        jsonschema.validate(found, schema)
    explained = json.loads(answers["explain"].content[0].text)
    assert explained["cause"]["stage"] == "prefill.queue"
    assert len(json.loads(answers["report"].content[0].text)["requests"]) == 20


@pytest.mark.full
async def test_refusals(database: Path, tmp_path: Path) -> None:
    """What is not offered, or cannot be answered, is an error in words; the server goes on."""
    calls: list[tuple[str, dict[str, Any], str]] = [
        ("serve", {}, "there is no tool 'serve'"),
        ("explain", {"db": "/etc/passwd"}, "explain has no db"),
        ("explain", {"since": "--help"}, "--help"),
        ("explain", {"last": 0}, "0 is not in the range"),
        ("diff", {"a": "1h.."}, "Missing option '--b'"),
        ("report", {"last": 2000}, "ask for fewer requests"),
    ]
    async with start_server(database, tmp_path) as client:
        for name, values, expected in calls:
            answer = await client.call_tool(name, values)
            assert expected in answer.content[0].text, (name, values)
            assert answer.is_error == ("answered" not in answer.content[0].text)
        assert not (await client.call_tool("report", {"last": 1})).is_error


def test_values_are_no_flags() -> None:
    """A value that begins with a dash stays the value of its flag."""
    commands = {"report": report}
    assert mcp_server.list_arguments(commands, "report", {"request": "--perfetto=x"}) == [
        *("report", "--json", "--request=--perfetto=x"),
    ]
