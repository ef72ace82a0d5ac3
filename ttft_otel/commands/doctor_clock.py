# SPDX-License-Identifier: Apache-2.0
"""doctor's line about the clock that a running server uses for its worker's marks, and why.

The server names it in the Server-Timing of doctor's own request.
"""

from __future__ import annotations

from typing import Final

from ttft_otel.model import timing

NOTABLE_ERROR_US: Final = 200  # docs/reference/device-clock.md: at most 150 at p99, as a rule
CLOCK_REASONS: Final = {
    "host": "host clock: it runs on a CPU, where work is done when a call returns",
    "device": "device clock: CUDA events, places to about {error_us} us",
    "lengths": "lengths only: no CUDA device, or a worker on another host than its engine core",
    "none": "no clock: this accelerator has no timing events",
}
LATE_REMEDY: Final = (
    "the thread that reads the device's results is late (does the server have enough CPU cores?), "
    "or NTP is correcting the host's clock"
)
GAPS_REMEDY: Final = "what lies between the worker's stages is unattributed: docs/limits.md"


def describe_clock(note: timing.ClockNote) -> tuple[bool, str, str]:
    """Whether all is well with the clock of `note`, the sentence that names it, and the remedy."""
    sentence = CLOCK_REASONS[note.word].format(error_us=note.error_us)
    if note.word not in ("host", "device"):
        return False, sentence, GAPS_REMEDY
    # A host clock has no such error; it reads 0.
    late = note.error_us > NOTABLE_ERROR_US
    return not late, sentence, LATE_REMEDY if late else ""
