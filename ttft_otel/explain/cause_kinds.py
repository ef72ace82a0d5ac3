# SPDX-License-Identifier: Apache-2.0
"""The kinds of causes that `explain` and `diff` name; detectors choose one, their JSON has it."""

from __future__ import annotations

from typing import Final

SLOW_INSTANCE: Final = "slow_instance"
SLOW_FLEET: Final = "slow_fleet"
PROCESS_PAUSE: Final = "process_pause"
HELD_BY_LONG_PROMPTS: Final = "held_by_long_prompts"
SETTING_LIMIT: Final = "setting_limit"
SET_ASIDE: Final = "set_aside"
COLD_PREFIX_CACHE: Final = "cold_prefix_cache"
LOAD_INCREASE: Final = "load_increase"
MIX_CHANGE: Final = "mix_change"
OWN_SIZE: Final = "own_size"
INSTANCE_SHIFT: Final = "instance_shift"
SLOW_HOP: Final = "slow_hop"
LOST_INSTANCE: Final = "lost_instance"
ROUTER_BUSY: Final = "router_busy"
FAILED_ATTEMPTS: Final = "failed_attempts"
LOST_REQUESTS: Final = "lost_requests"
NOTHING: Final = "nothing"
NOT_KNOWN: Final = "not_known"

# Kind -> what it says. `nothing` and `not_known` are answers, too.
CAUSE_KINDS: Final[dict[str, str]] = {
    SLOW_INSTANCE: "One of several instances takes longer for the same work.",
    SLOW_FLEET: "All instances take longer for the same work, since a moment.",
    PROCESS_PAUSE: "A process of an instance stopped for a while, which no work explains.",
    HELD_BY_LONG_PROMPTS: "Long prompts of others held the engine.",
    SETTING_LIMIT: "A setting of the scheduler, or the size of the KV cache, bounds what runs at once.",
    SET_ASIDE: "The scheduler set it aside for a reason of its own: a pause, a grammar, blocks or encodings.",
    COLD_PREFIX_CACHE: "Less of like prompts was found in the prefix cache.",
    LOAD_INCREASE: "More requests came in the same time.",
    MIX_CHANGE: "Other requests came: larger ones, other models, or of other tenants.",
    OWN_SIZE: "The late requests are larger, and took what their size takes.",
    INSTANCE_SHIFT: "Other instances served them; like requests of one instance took no longer.",
    SLOW_HOP: "The way between router and server, or between instances, took longer.",
    LOST_INSTANCE: "An instance served no more requests, and the others had its work.",
    ROUTER_BUSY: "The router's own process took long.",
    FAILED_ATTEMPTS: "Attempts on instances that failed came first.",
    LOST_REQUESTS: "So many requests ended without a first token that the others say little.",
    NOTHING: "The window is as usual.",
    NOT_KNOWN: "None of the causes that were looked at explains most of the time.",
}
