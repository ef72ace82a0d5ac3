# SPDX-License-Identifier: Apache-2.0
"""Delays on an accelerator: a kernel that spins in the stream that computes; the host goes on at once.

control.py asks for them when the control file says `device`; places.py asks which steps are delayed.
"""

from __future__ import annotations

from typing import Any

CALIBRATION_CYCLES = 20_000_000
cycles_per_s: list[float] = []
tokens_of_step = [0]  # of the forward that ran last, until its sampler has run


def queue(seconds: float) -> None:
    """Queue a kernel of `seconds`; the first call measures the device's clock and waits for it."""
    import torch  # not at import: the plugin is read in processes without it

    if not cycles_per_s:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(CALIBRATION_CYCLES)  # an idle device's clock is slow at first
        first.record()
        torch.cuda._sleep(CALIBRATION_CYCLES)
        last.record()
        last.synchronize()
        cycles_per_s.append(CALIBRATION_CYCLES / (first.elapsed_time(last) / 1000))
    torch.cuda._sleep(int(seconds * cycles_per_s[0]))


def is_delayed(
    place: str, arguments: tuple[Any, ...], named: dict[str, Any], min_tokens: int
) -> bool:
    """Whether this call's step has `min_tokens` or more; others are left alone. 0: all are delayed.

    Beside streams that decode, only the step with the probe's prompt is to be delayed.
    """
    if not min_tokens or place not in ("forward", "sample"):
        return True
    if place == "forward":
        positions = named.get("positions", arguments[2] if len(arguments) > 2 else None)
        tokens_of_step[0] = 0 if positions is None else int(positions.shape[-1])
        return tokens_of_step[0] >= min_tokens
    tokens, tokens_of_step[0] = tokens_of_step[0], 0  # a replayed graph calls no forward
    return tokens >= min_tokens
