# SPDX-License-Identifier: Apache-2.0
"""The command line: help without imports, remedies for missing packages."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

from ttft_otel import __version__
from ttft_otel.commands import main as cli


def test_help_is_light() -> None:
    """--help lists every subcommand with examples and imports none of them."""
    code = (
        "import sys; from ttft_otel.commands.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'fastapi', 'grpc', 'uvicorn', 'aiohttp', 'jinja2', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for name in ("serve", "router", "report", "doctor", "Examples:"):
        assert name in done.stdout


def test_missing_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """A subcommand that this version does not have is not blamed on an extra."""
    monkeypatch.setitem(cli.SUBCOMMANDS, "bench", cli.Subcommand("ttft_otel.absent", "bench", ""))
    result = CliRunner().invoke(cli.main, ["bench"])
    assert result.exit_code == 1
    assert "upgrade" in result.output and "[bench]" not in result.output


def test_unknown() -> None:
    """A word that is no subcommand is a usage error; --version prints the package's version."""
    assert CliRunner().invoke(cli.main, ["nonsense"]).exit_code == 2
    assert __version__ in CliRunner().invoke(cli.main, ["--version"]).output


def test_examples() -> None:
    """A subcommand's --help has examples; the router's are tested in tests/router/control."""
    for name in ("serve", "report", "diff", "explain", "whatif", "bench", "doctor"):
        result = CliRunner().invoke(cli.main, [name, "--help"])
        assert result.exit_code == 0, result.output
        assert "Examples:" in result.output
