# SPDX-License-Identifier: Apache-2.0
"""Child processes in a working directory that somebody else has filled with modules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ttft_otel.router.errors import UnreadablePrompt
from ttft_otel.router.routing.prompts.tokenizer_worker import TokenizeQuestion, TokenizerWorker
from ttft_otel.tracing.handoff import RecordSender, build_child_command
from ttft_otel.tracing.settings import Settings


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that appears when a module of the working directory is imported."""
    log = tmp_path / "imported"
    folder = tmp_path / "shared"
    folder.mkdir()
    for name in ("argparse", "msgspec", "signal", "ttft_otel", "asyncio"):
        (folder / f"{name}.py").write_text(
            f"open({str(log)!r}, 'w').close()\nraise SystemExit(9)\n"
        )
    monkeypatch.chdir(folder)
    # As in Python 3.10, which does not know it.
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    return log


def test_command(planted: Path) -> None:
    """What `python -m` would import from the working directory is not."""
    usual = subprocess.run((sys.executable, "-m", "json.tool", "--help"), capture_output=True)
    assert usual.returncode == 9 and planted.exists()
    planted.unlink()
    command = build_child_command("json.tool", "--help")
    ours = subprocess.run(command, capture_output=True, text=True)
    assert ours.returncode == 0 and "usage:" in ours.stdout
    assert not planted.exists()


def test_exporter(planted: Path) -> None:
    """The exporter imports nothing of the host's working directory."""
    sender = RecordSender(Settings(queue_bytes=1 << 16))
    assert sender.send(b"no record")
    sender.close(20)
    assert sender.get_counts()["foreign"] == 1  # it has run, and read what is no record
    assert not planted.exists()


async def test_tokenizer(planted: Path) -> None:
    """Nor does the tokenizer process of the router's."""
    worker = TokenizerWorker()
    try:
        await worker.ask_child(TokenizeQuestion("", "completion", b'{"prompt": [1]}', 1))
    except UnreadablePrompt as error:
        assert error.reason != "died"
    finally:
        await worker.close()
    assert not planted.exists()
