# SPDX-License-Identifier: Apache-2.0
"""Write the control file of the `inject` guest and read what it did; tests and scripts steer here."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

# In the order of a request's life; a test holds this against the guest's own list.
PLACES = (
    *("receive", "media", "tokenize", "multimodal", "ipc", "ec_wait", "queue", "kv_wait"),
    *("dispatch", "ec_load", "encoder", "ec_save", "kv_load", "forward", "sample", "output"),
    "egress",
)


@dataclass(frozen=True, slots=True)
class Delay:
    """One delay that really happened, by the clock that all processes share (monotonic)."""

    place: str
    pid: int
    start_ns: int
    end_ns: int

    @property
    def ms(self) -> float:
        """How long it lasted."""
        return (self.end_ns - self.start_ns) / 1e6


class Control:
    """The control file of one or more servers; every change replaces the whole of it."""

    def __init__(self, path: Path) -> None:
        """Start with nothing injected and an empty log."""
        self.path = path
        self.log = path.with_name(path.name + ".log")
        self.log.unlink(missing_ok=True)
        self.set()

    def set(
        self,
        delay_ms: Mapping[str, float] | None = None,
        *,
        off: Collection[str] = (),
        fail: Collection[str] = (),
        busy: bool = False,
    ) -> None:
        """Say what holds from now on: delays by place, hooks switched off, hooks that raise.

        Delays count from the very next call; `off` and `fail` within about 0.1 s.
        """
        unknown = set(delay_ms or ()) - set(PLACES)
        if unknown:
            raise ValueError(f"no such place: {', '.join(sorted(unknown))}; known: {PLACES}")
        content = {
            "delay_ms": dict(delay_ms or {}),
            "off": sorted(off),
            "raise": sorted(fail),
            "busy": busy,
        }
        draft = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        draft.write_text(json.dumps(content), encoding="utf-8")
        draft.replace(self.path)

    @contextlib.contextmanager
    def delaying(self, place: str, ms: float, *, busy: bool = False) -> Iterator[None]:
        """One delay for the length of a block."""
        self.set({place: ms}, busy=busy)
        try:
            yield
        finally:
            self.set()

    def delays(self, since_ns: int = 0) -> list[Delay]:
        """What happened since a moment of time.monotonic_ns(), oldest first."""
        if not self.log.exists():
            return []
        lines = self.log.read_text(encoding="utf-8").splitlines()
        found = [Delay(**json.loads(line)) for line in lines]
        return sorted((d for d in found if d.start_ns >= since_ns), key=lambda d: d.start_ns)
