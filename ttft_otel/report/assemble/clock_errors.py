# SPDX-License-Identifier: Apache-2.0
"""The sentence about marks that are not exactly placed; below the page's and the terminal's figures.

A server tells on its spans by how much marks may be off that were not taken by its own clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ttft_otel.report.report_types import Request

NOTABLE_ERROR_US: Final = 200


def find_clock_error(requests: Iterable[Request]) -> int:
    """The greatest clock error of `requests`, in microseconds; 0 when none is worth a word."""
    # The worst of all: the sentence is about any boundary on the page.
    error_us = max((leg.clock_error_us for each in requests for leg in each.legs), default=0)
    return error_us if error_us > NOTABLE_ERROR_US else 0


def describe_clock_error(error_us: int) -> str:
    """The error in one sentence; "" for 0."""
    if not error_us:
        return ""
    return (
        f"boundaries of the workers' stages are up to {error_us / 1000:.1f} ms off "
        "(ttft.clock_error_us): see docs/reference/device-clock.md"
    )
