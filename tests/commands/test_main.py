# SPDX-License-Identifier: Apache-2.0
"""The command line: help without imports, remedies for missing packages, and what is printed.

That fits 80 columns, in a pipe and on a terminal of that width, and no number is cut.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.commands.test_whatif import LIMITS
from tests.explain.stored_records import (
    BEGIN_S,
    draw_busy_arrivals,
    name_window,
    store_served_window,
    store_spans,
)
from tests.report.sample_records import make_routed_records, make_spans
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


WIDTH = 80
COUNT = 60
ROUTED_S = 10_000  # after the window of whatif
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
HALVES = [name_window(ROUTED_S + first, ROUTED_S + first + COUNT / 2) for first in (0, COUNT // 2)]
COMMANDS = {
    "report": ["report"],
    "report-many": ["report", "--since", name_window(ROUTED_S, ROUTED_S + COUNT)],
    "report-request": ["report", "--request", f"routed-{COUNT - 1}"],
    "explain": ["explain", "--since", name_window(ROUTED_S, ROUTED_S + COUNT), "--verbose"],
    "explain-request": ["explain", "--request", f"routed-{COUNT - 1}", "--verbose"],
    "diff": ["diff", "--a", HALVES[0], "--b", HALVES[1], "--verbose", "--fail-if", "ttft.mean > 1%"],
    "whatif": ["whatif", "--since", name_window(-1, 600), "--repetitions", "3", "--rate", "1.1x"],
    "doctor": ["doctor"],
}  # fmt: skip


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A window of one server, and later routed requests with the longest names, the second half slower."""
    path = tmp_path_factory.mktemp("width") / "spans.db"
    store_served_window(path, draw_busy_arrivals(), LIMITS)
    spans = []
    for number in range(COUNT):
        # Stages of more than a second, and of microseconds.
        factor = (
            30.0 if number == COUNT - 1 else (1 + number % 7) * (3 if number >= COUNT / 2 else 1)
        )
        start_ns = (BEGIN_S + ROUTED_S + number) * 10**9
        spans += make_spans(make_routed_records(f"routed-{number}", factor, start_ns=start_ns))
    return store_spans(path, spans)


def list_words(name: str, database: Path) -> list[str]:
    """A command line over the database, where the command reads one."""
    words = COMMANDS[name]
    return words if name == "doctor" else [words[0], "--db", str(database), *words[1:]]


def check_lines(output: str) -> None:
    """No line is wider than WIDTH, and nothing was cut to make it fit."""
    lines = ESCAPE.sub("", output).splitlines()
    wide = [line for line in lines if len(line) > WIDTH]
    assert len(lines) > 2 and not wide, "\n".join(wide)
    assert not re.search(r"\d…", re.sub(r"\d…\d", "", output)), output


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.filterwarnings("ignore")
def test_pipe(database: Path, name: str) -> None:
    """Where nobody says how wide it is."""
    env = {"COLUMNS": str(WIDTH)}
    result = CliRunner(env=env).invoke(cli.main, list_words(name, database))
    assert result.exit_code in (0, 1), result.output
    check_lines(result.stdout)
    # A unit stands beside its number.
    assert not re.search(r"(?m)^ *(ms|µs|s|%)(?!\w|,)", result.stdout)


@pytest.mark.parametrize("name", ["report-request", "explain", "diff"])
def test_terminal(database: Path, name: str) -> None:
    """On a terminal, colours and all."""
    outer, inner = os.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 50, WIDTH, 0, 0))
    env = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-m", "ttft_otel.commands.main", *list_words(name, database)],
        stdin=inner, stdout=inner, stderr=subprocess.DEVNULL, env={**env, "TERM": "xterm-256color"},
    )  # fmt: skip
    os.close(inner)
    output = b""
    with contextlib.suppress(OSError), process:  # the terminal ends with its last user
        while chunk := os.read(outer, 65536):
            output += chunk
    os.close(outer)
    text = output.decode()
    assert "\x1b[1m" in text
    check_lines(text)
