# SPDX-License-Identifier: Apache-2.0
"""What a row of the ledger looks like, and the words that several rows share; the files beside fill it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

QUEUES: Final = ("encoder.queue", "prefill.queue")
COMPUTE: Final = ("dispatch", "encoder.compute", "prefill.compute", "prefill.stall")
WORKER: Final = (*COMPUTE, "ec.transfer", "kv.transfer")
ENGINE: Final = (*QUEUES, *WORKER, "sample", "output")
EVERYTHING: Final = ("receive", "preprocess", "ipc", *ENGINE, "egress")
SPANS: Final = "vLLM emits this time per request itself"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a target lives: module and dotted name; `since`/`until` bound the releases that have it."""

    module: str
    name: str
    since: str = ""
    until: str = ""


@dataclass(frozen=True, slots=True)
class Target:
    """One row: what we hang into, what it tells us, why a patch, and when the row can go."""

    name: str
    process: str
    places: tuple[Place, ...]
    marks: str
    lost: tuple[str, ...]
    why: str
    drop_when: str
    reads: tuple[str, ...] = ()
    lost_encode: tuple[str, ...] | None = None
    runner: str = ""
    part: bool = False  # a detail inside a stage: without it nothing becomes unattributed
