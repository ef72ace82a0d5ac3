# SPDX-License-Identifier: Apache-2.0
"""What a remedy's setting would bring, from what-if: the window is replayed with it. Pure; needs numpy.

Input: the remedy and a Recording of the window. commands/explain.py asks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ttft_otel.explain.explain.remedies import CACHE_MEMORY, Remedy
from ttft_otel.explain.whatif.planned_change import PlannedChange
from ttft_otel.explain.whatif.replay_facts import Recording
from ttft_otel.explain.whatif.what_if import predict_change
from ttft_otel.explain.whatif.what_if_figures import LEVEL, QUANTILES, TTFT, PredictedFigure
from ttft_otel.explain.window.request_facts import CannotTellError
from ttft_otel.model.names import keys

# Settings that a remedy can try -> the resource attribute that has their value on servers' spans.
SETTING_ATTRIBUTES: Final = {
    "--max-num-seqs": keys.ENGINE_MAX_SEQS,
    "--max-num-batched-tokens": keys.ENGINE_MAX_TOKENS,
    CACHE_MEMORY: keys.ENGINE_KV_TOKENS,
}
MIN_GAIN: Final = 0.02  # of the p99, below which a remedy moves nothing
REPETITIONS: Final = 20  # replays, as many as those of `whatif`


@dataclass(frozen=True, slots=True)
class RemedyPrediction:
    """The p99 of the TTFT, microseconds: as recorded, and predicted with `setting`."""

    setting: str
    recorded_us: float
    low_us: float
    high_us: float
    error: float  #: of the replayed p99 of the unchanged window, relative
    #: The p99 of the time per output token, which the setting costs; None where that is not known.
    token_time: PredictedFigure | None = None
    token_error: float = 0.0  #: as `error`, of the time per output token

    @property
    def helps(self) -> bool:
        """Whether the figure moves by more than the prediction's interval."""
        return self.high_us < (1 - MIN_GAIN) * self.recorded_us

    @property
    def sentence(self) -> str:
        low, high = (f"{us / 1000:.0f}" for us in (self.low_us, self.high_us))
        sentence = (
            f"Predicted with {self.setting}: p99 {low} to {high} ms ({LEVEL:.0%}), recorded "
            f"{self.recorded_us / 1000:.0f} ms; the model's error on the window itself is {self.error:+.0%}."
        )
        if self.token_time is None:
            return sentence
        return (
            f"{sentence} Its price: p99 of the time per output token {self.token_time.change:+.0%}, "
            f"{self.token_time.low / 1000:.1f} to {self.token_time.high / 1000:.1f} ms after "
            f"{self.token_time.recorded / 1000:.1f} ms (error {self.token_error:+.0%})."
        )


def predict_remedy(
    remedy: Remedy,
    recording: Recording,
    repetitions: int = REPETITIONS,
    track: Callable[[int], None] = lambda _: None,
) -> RemedyPrediction:
    """Replay the window with the remedy's setting. Raises CannotTellError, which says why not.

    track: called with 1 after each replay.
    """
    if remedy.trial is None:
        raise CannotTellError("what-if has no model of this remedy")
    flag, factor = remedy.trial
    recorded = max(
        (settings.get(SETTING_ATTRIBUTES[flag], 0) for settings in recording.settings.values()),
        default=0,
    )
    if not recorded:
        raise CannotTellError(
            f"the servers' spans do not tell {flag}; ttft-otel whatif takes it by hand"
        )
    value = max(1, round(recorded * factor))
    setting = f"{flag} {value}"
    if flag == CACHE_MEMORY:
        setting = f"{factor:g} times the {CACHE_MEMORY}"
        change = PlannedChange(kv_cache=factor)
    elif flag == "--max-num-seqs":
        change = PlannedChange(max_num_seqs=value)
    else:
        change = PlannedChange(max_batched_tokens=value)
    answer = predict_change(recording, change, PlannedChange(), repetitions, track=track)
    p99 = answer.figures[TTFT][QUANTILES.index(0.99)]
    return RemedyPrediction(
        setting=setting,
        recorded_us=float(p99.recorded),
        low_us=float(p99.low),
        high_us=float(p99.high),
        error=float(answer.errors[QUANTILES.index(0.99)]),
        token_time=answer.token_time[QUANTILES.index(0.99)] if answer.token_time else None,
        token_error=answer.token_errors[QUANTILES.index(0.99)] if answer.token_errors else 0.0,
    )
