# SPDX-License-Identifier: Apache-2.0
"""Control the `inject` plugin: write its control file, and read its log of delays."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ttft_otel.model.stages import STAGES

# In the order of the stages; the plugin has them in its INJECTION_POINTS and patches.
INJECTION_PLACES: Final = tuple(
    dict.fromkeys(place for stage in STAGES for place in stage.injected_at)
)


@dataclass(frozen=True, slots=True)
class InjectedDelay:
    """One delay that took place; times are CLOCK_MONOTONIC in nanoseconds."""

    place: str
    pid: int
    start_ns: int
    end_ns: int

    @property
    def duration_ms(self) -> float:
        """Its duration in milliseconds."""
        return (self.end_ns - self.start_ns) / 1e6


class InjectionControl:
    """The control file of one or more servers; each change replaces all of its content."""

    def __init__(self, path: Path) -> None:
        """Start with nothing injected and an empty log."""
        self.path = path
        self.log = path.with_name(path.name + ".log")
        # An earlier server's delays must not be read as ours.
        self.log.unlink(missing_ok=True)
        self.applied = path.with_name(path.name + ".applied")  # a file for each process: its number
        shutil.rmtree(self.applied, ignore_errors=True)
        # Requests that a scheduler runs at once, in every content from the next one on; 0: as it was started.
        self.max_active = 0
        # Counts contents: processes note the number that they have applied.
        self.number = 0
        self.set_injections()

    def set_injections(
        self,
        delay_ms: Mapping[str, float] | None = None,
        *,
        off: Collection[str] = (),
        fail: Collection[str] = (),
        busy: bool = False,
        device: bool = False,
        min_tokens: int = 0,
        ec_patience_s: float | None = None,
    ) -> None:
        """Set what is injected from now on. Raises ValueError for an unknown place.

        delay_ms: place -> milliseconds; effective from the next call.
        off, fail: targets whose hooks are removed, or raise; effective after wait_applied().
        busy: delays use the CPU instead of sleeping.
        device: delays are kernels in the accelerator's stream; of forward and sample only in steps
            with min_tokens tokens or more.
        ec_patience_s: how long ECCPUConnector's consumers wait for an encoding (vLLM: 60 s).
        """
        unknown = set(delay_ms or ()) - set(INJECTION_PLACES)
        # A misspelt place would delay nothing, and the test would blame the hooks.
        if unknown:
            raise ValueError(
                f"no such place: {', '.join(sorted(unknown))}; known: {INJECTION_PLACES}"
            )
        content: dict[str, Any] = {
            "delay_ms": dict(delay_ms or {}),
            "off": sorted(off),
            "raise": sorted(fail),
            "busy": busy,
            "device": device,
            "min_tokens": min_tokens,
            "max_active": self.max_active,
            "number": self.number + 1,
        }
        self.number += 1
        if ec_patience_s is not None:
            content["ec_patience_s"] = ec_patience_s
        # Renamed into place: a server that reads meanwhile finds
        # the old content or the new, never half.
        draft = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        draft.write_text(json.dumps(content), encoding="utf-8")
        draft.replace(self.path)

    def wait_applied(self, timeout_s: float = 10.0) -> None:
        """Wait until every process with hooks has switched them as the last set_injections() says.

        Raises TimeoutError when a process, or all of them, have not after `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            numbers = self._read_applied_numbers()
            # No process yet is not the same as all: the server may still be starting.
            if numbers and all(number == self.number for number in numbers.values()):
                return
            if time.monotonic() > deadline:
                late = sorted(pid for pid, number in numbers.items() if number != self.number)
                raise TimeoutError(
                    f"{self.path}: number {self.number} not applied by {late or 'any'}"
                )
            time.sleep(0.005)

    def _read_applied_numbers(self) -> dict[int, int]:
        """Number of the content that each living process has applied, by process id."""
        # Processes that ended leave their notes behind.
        notes = self.applied.glob("[0-9]*")
        return {int(each.name): int(each.read_text()) for each in notes if _is_running(each.name)}

    @contextlib.contextmanager
    def inject_delay(self, place: str, ms: float, *, busy: bool = False) -> Iterator[None]:
        """Delay `place` by `ms` milliseconds while the block runs."""
        self.set_injections({place: ms}, busy=busy)
        try:
            yield
        finally:
            self.set_injections()

    def read_delays(self, since_ns: int = 0) -> list[InjectedDelay]:
        """Delays that began at or after `since_ns` (time.monotonic_ns()), oldest first."""
        if not self.log.exists():
            return []
        # One line for each delay, from all processes; they append in the order in which delays end.
        lines = self.log.read_text(encoding="utf-8").splitlines()
        logged = [InjectedDelay(**json.loads(line)) for line in lines]
        return sorted((d for d in logged if d.start_ns >= since_ns), key=lambda d: d.start_ns)


def _is_running(pid: str) -> bool:
    """Whether a process is there and not only waiting for its parent to collect its exit status."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    # The name before the state is in parentheses and may hold spaces and parentheses itself.
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")
