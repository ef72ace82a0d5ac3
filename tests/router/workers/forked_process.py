# SPDX-License-Identifier: Apache-2.0
"""A second process that shares this one's memory, for tests of what the workers share."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkProcess
from typing import Any


@contextmanager
def run_forked(target: Callable[..., None], *arguments: Any) -> Iterator[ForkProcess]:
    """Run `target` in a forked process beside the block; fails when the process does."""
    process = multiprocessing.get_context("fork").Process(target=target, args=arguments)
    process.start()
    try:
        yield process
    finally:
        process.join(30)
    assert process.exitcode == 0
