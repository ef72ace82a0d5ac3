# SPDX-License-Identifier: Apache-2.0
"""The kinds of causes that `explain` and `diff` name; detectors choose one, their JSON has it.

`nothing` and `not_known` are answers, too.
"""

from __future__ import annotations

from typing import Final

SLOW_INSTANCE: Final = "slow_instance"  # one of several instances takes longer for the same work
SLOW_FLEET: Final = "slow_fleet"  # all instances take longer for the same work, since a moment
PROCESS_PAUSE: Final = (
    "process_pause"  # a process of an instance stopped for a while, which no work explains
)
HELD_BY_LONG_PROMPTS: Final = "held_by_long_prompts"  # long prompts of others held the engine
SETTING_LIMIT: Final = (
    "setting_limit"  # a setting, or the size of the KV cache, bounds what runs at once
)
SET_ASIDE: Final = (
    "set_aside"  # the scheduler set it aside: a pause, a grammar, blocks or encodings
)
COLD_PREFIX_CACHE: Final = "cold_prefix_cache"  # less of like prompts was found in the prefix cache
LOAD_INCREASE: Final = "load_increase"  # more requests came in the same time
MIX_CHANGE: Final = (
    "mix_change"  # other requests came: larger ones, other models, or of other tenants
)
OWN_SIZE: Final = "own_size"  # the late requests are larger, and took what their size takes
INSTANCE_SHIFT: Final = "instance_shift"  # other instances served them; those of one took no longer
SLOW_HOP: Final = "slow_hop"  # the way between router and server, or between instances, took longer
LOST_INSTANCE: Final = (
    "lost_instance"  # an instance served no more requests, and the others had its work
)
ROUTER_BUSY: Final = "router_busy"  # the router's own process took long
FAILED_ATTEMPTS: Final = "failed_attempts"  # attempts on instances that failed came first
LOST_REQUESTS: Final = "lost_requests"  # so many have no first token that the others say little
NOTHING: Final = "nothing"  # the window is as usual
NOT_KNOWN: Final = "not_known"  # none of the causes that were looked at explains most of the time
# Answers that are no cause, and have no remedy.
NO_CAUSES: Final = (NOTHING, NOT_KNOWN, LOST_REQUESTS)
