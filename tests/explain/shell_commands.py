# SPDX-License-Identifier: Apache-2.0
"""Subcommands over a store as typed in a shell, and what they refuse; explain, diff and whatif use it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
from click.testing import CliRunner, Result

from tests.fake_tempo import FakeTempo
from ttft_otel.commands import main as cli

DOCS = Path(__file__).parents[2] / "docs"


class StoreCommand:
    """`ttft-otel NAME` over a store, with `flags` at each call; its JSON keeps to docs/NAME.schema.json."""

    def __init__(self, name: str, *flags: str) -> None:
        self.name, self.flags = name, flags
        self.schema = json.loads((DOCS / f"{name}.schema.json").read_text("utf-8"))

    def run(self, database: Path, *words: str) -> Result:
        """Run it in a terminal that is wide enough for one line each."""
        return self._invoke("--db", str(database), *words)

    def run_tempo(self, tempo: FakeTempo, *words: str) -> Result:
        """Run it in the same terminal, over a Tempo."""
        return self._invoke("--tempo", tempo.url, *words)

    def _invoke(self, *words: str) -> Result:
        return CliRunner(env={"COLUMNS": "2000"}).invoke(cli.main, [self.name, *self.flags, *words])

    def read_json(self, database: Path, *words: str) -> dict[str, Any]:
        """Its JSON, which keeps to the schema."""
        reported: dict[str, Any] = json.loads(self.run(database, *words, "--json").stdout)
        jsonschema.validate(reported, self.schema)
        return reported

    def check_refusal(self, database: Path, words: list[str], reported: str) -> None:
        """It refuses with `reported`; where the flags themselves are right, in its JSON as well."""
        result = self.run(database, *words)
        assert result.exit_code != 0 and reported in result.output
        if result.exit_code == 1:
            assert reported in self.read_json(database, *words)["refusal"]
