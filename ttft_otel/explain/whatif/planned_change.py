# SPDX-License-Identifier: Apache-2.0
"""What `ttft-otel whatif` is asked to change, parsed from words such as `1.5x`, `+1` and `+20%`. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

RATE_PATTERN: Final = re.compile(r"(\d+(?:\.\d+)?)x?")
SHARE_PATTERN: Final = re.compile(r"([+-]?\d+(?:\.\d+)?)%")
COUNT_PATTERN: Final = re.compile(r"\+(\d+)")
MAX_MORE: Final = 1000  # servers; each is an engine of the model


@dataclass(frozen=True, slots=True)
class PlannedChange:
    """What is changed; a field with its default leaves things as they were."""

    instances: int = 0  #: how many more; below 0 the last ones are gone
    encoders: int = 0  #: how many more
    max_num_seqs: int = 0
    max_batched_tokens: int = 0
    policy: str = ""  #: name of --routing-logic
    rate: float = 1.0  #: arrivals come so many times as fast
    cache_hit: float = 0.0  #: share of all prompt tokens that is cached in addition
    kv_cache: float = 1.0  #: the KV cache takes so many times as much


def parse_more(text: str) -> int:
    """`+2` -> 2. Raises ValueError with a sentence."""
    found = COUNT_PATTERN.fullmatch(text.strip())
    # Before int(): thousands of digits are no number of servers either.
    if found is None or len(found[1]) > 4 or int(found[1]) > MAX_MORE:
        raise ValueError(f"{text!r} is not a number of servers to add: write +1, up to +{MAX_MORE}")
    return int(found[1])


def parse_rate(text: str) -> float:
    """`1.5x` -> 1.5. Raises ValueError with a sentence."""
    found = RATE_PATTERN.fullmatch(text.strip())
    if found is None or not 0.01 <= float(found[1]) <= 100:
        raise ValueError(f"{text!r} is not a factor: write 1.5x for half as many again")
    return float(found[1])


def parse_share(text: str) -> float:
    """`+20%` -> 0.2. Raises ValueError with a sentence."""
    found = SHARE_PATTERN.fullmatch(text.strip())
    if found is None or abs(float(found[1])) > 100:
        raise ValueError(f"{text!r} is not a share of all prompt tokens: write +20%")
    return float(found[1]) / 100
