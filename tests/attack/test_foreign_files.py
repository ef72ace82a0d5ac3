# SPDX-License-Identifier: Apache-2.0
"""Links and files that another user lays into a folder like /tmp lead us nowhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from attack.test_store_files import FILES, count_traces, store_span
from ttft_otel.commands.command_options import write_whole
from ttft_otel.report.store.database_schema import StoreError
from ttft_otel.report.store.span_store import SpanStore

NOBODY = 65534
needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="needs root, to make another user's files"
)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder as /tmp is."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


@needs_root
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("is_link", [True, False])
def test_a_database_of_somebody_else(
    name: str, is_link: bool, shared: Path, tmp_path: Path
) -> None:
    """`serve` writes neither through another user's link nor into another user's file, and says so."""
    target, laid = tmp_path / "precious", shared / name
    target.write_bytes(b"precious")
    laid.symlink_to(target) if is_link else laid.touch(0o666)
    os.chown(laid, NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(StoreError, match="is another user's; choose another with --db"):
        SpanStore(shared / "spans.db")
    assert target.read_bytes() == b"precious"
    assert not any((shared / each).exists() for each in FILES if each != name)


def test_a_link_of_our_own(shared: Path, tmp_path: Path) -> None:
    """The control: an operator's own link leads to where it should."""
    path = shared / "spans.db"
    path.symlink_to(tmp_path / "elsewhere.db")
    store = SpanStore(path)
    store_span(store, 1)
    store.close()
    assert count_traces(tmp_path / "elsewhere.db") == 1


def test_a_report_goes_through_no_link(shared: Path, tmp_path: Path) -> None:
    """--json FILE is written beside it first, under a name that somebody may have guessed."""
    target, wanted = tmp_path / "precious", shared / "report.json"
    target.write_text("precious")
    (shared / "report.json.part").symlink_to(target)
    write_whole(wanted, "{}")
    assert (target.read_text(), wanted.read_text()) == ("precious", "{}")
    assert not wanted.is_symlink()
