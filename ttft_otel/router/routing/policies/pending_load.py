# SPDX-License-Identifier: Apache-2.0
"""Requests that were sent to an instance and have no first token yet; policy_state.py writes, policies read.

An entry is removed at its first token, error, disconnect or time-out. Sums are kept as integers, so
they return to exactly zero.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ttft_otel.router.routing.policies.prefill_model import PrefillLine, PrefillWork
from ttft_otel.router.types import Instance

RequestKey = tuple[str, str]  # leg, request id
US_PER_SECOND: Final = 1_000_000  # microseconds
# Entries older than this are dropped: a safety net in case the end of a request was never recorded.
MAX_PENDING_US: Final = 600 * US_PER_SECOND
AVERAGING_S: Final = 60  # seconds over which arrival rate and utilisation are averaged
# Upper bound of utilisation in the queueing formula, which diverges at 1.
MAX_BUSY_SHARE: Final = 0.95


class PendingRequest(NamedTuple):
    """One request without a first token; `predicted_s` is its predicted TTFT, None without prediction."""

    url: str
    sent_us: int
    work: PrefillWork
    block_keys: tuple[int, ...]
    predicted_s: float | None
    decodes: int = 0  # answers under way at the instance when it was sent
    base_model: str = ""  # whose prefill it teaches


# An absolute time, so that it stays right while nothing changes.
class BusyUntil(NamedTuple):
    """Predicted end of an instance's pending prefills, by one prefill model."""

    line: PrefillLine
    end_s: float  # on the monotonic clock
    min_wait_s: float  # seconds that are assumed to remain even after `end_s`


@dataclass(slots=True)
class InstanceLoad:
    """The pending requests of one instance, in the order in which they were sent, and their sums."""

    entries: dict[RequestKey, PendingRequest] = field(default_factory=dict)
    tokens_to_compute: int = 0
    pairs: int = 0
    # When the request before the first entry ended, so that this one began.
    head_started_us: int = 0
    # Blocks of pending prompts: cached once those have run.
    queued_blocks: Counter[int] = field(default_factory=Counter)
    recent_tokens: int = 0  # tokens sent to be computed, halved every window
    last_sent_us: int = 0
    # Cached prediction of a policy; reset whenever the entries change.
    busy_until: BusyUntil | None = None

    def estimate_running(self, now_us: int) -> tuple[PrefillWork, float] | None:
        """The prefill that is assumed to run at `now_us`, and for how many seconds; None when idle.

        Assumes that the engine prefills one prompt after the other, in the order of sending.
        """
        if not self.entries:
            return None
        entry = next(iter(self.entries.values()))
        # It waited for the one before it, or the instance was idle when it came.
        began_us = entry.sent_us if entry.sent_us > self.head_started_us else self.head_started_us
        return entry.work, (now_us - began_us) / US_PER_SECOND if now_us > began_us else 0.0


# Shared by all idle instances, so nothing must ever be written to it.
NO_LOAD: Final = InstanceLoad()


class PendingLoads:
    """The load of every instance of a leg.

    max_pending_us: microseconds after which an entry is dropped. window_s: seconds over which arrival rate
    and utilisation are averaged.
    """

    def __init__(self, max_pending_us: int = MAX_PENDING_US, window_s: int = AVERAGING_S) -> None:
        self.max_pending_us = max_pending_us
        self.window_s = window_s
        self.on_removed: Callable[[], None] | None = None  # an entry has left: with --max-queue-ms
        self._loads: dict[str, InstanceLoad] = {}  # by URL, of instances that were sent something
        self._entries: dict[RequestKey, PendingRequest] = {}  # in the order of sending
        self._busy_count = 0  # instances with entries
        # Exponentially weighted over the window: number of busy instances, and arrivals per second.
        self._mean_busy = self._arrival_rate = 0.0
        self._averaged_us = self._halved_us = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get_load(self, url: str) -> InstanceLoad:
        """The load of the instance at `url`; an empty one if it was sent nothing."""
        return self._loads.get(url, NO_LOAD)

    def count_decodes(self, instance: Instance) -> int:
        """How many answers are under way at `instance`: what is in flight and has its first token."""
        return max(instance.all_in_flight - len(self.get_load(instance.url).entries), 0)

    def find_entry(self, key: RequestKey) -> PendingRequest | None:
        """The pending request of `key`, None if it has its first token or is over."""
        return self._entries.get(key)

    def list_loads(self, instances: Iterable[Instance]) -> list[InstanceLoad]:
        """The loads of `instances`, in their order."""
        loads = self._loads
        return [loads.get(each.url, NO_LOAD) for each in instances]

    def estimate_delay_cost(self, now_us: int, instance_count: int) -> float:
        """Expected number of later requests delayed per extra second of prefill on a busy instance.

        instance_count: instances that requests can go to.
        In an M/G/1 queue with arrival rate r and utilisation u, an extra second of work delays the arrivals
        until the queue is empty again: r / (1 - u) per second, here with both per instance. Later requests
        can avoid the delay while other instances are idle, hence the factor of the share that is busy.
        """
        self._update_averages(now_us)
        # Instances that are no candidates now still take a part of the arrivals.
        instance_count = max(instance_count, len(self._loads))
        return (
            self._arrival_rate
            / instance_count
            / (1 - min(MAX_BUSY_SHARE, self._mean_busy / instance_count))
            * self._busy_count
            / instance_count
        )

    def add_pending(self, key: RequestKey, entry: PendingRequest) -> None:
        """Record that `entry` was sent; an earlier entry of `key` (a retried request) is replaced."""
        if key in self._entries:
            self.remove_pending(key, entry.sent_us)
        self.drop_expired(entry.sent_us)
        load = self._loads.get(entry.url) or self._add_load(entry.url, entry.sent_us)
        load.last_sent_us = entry.sent_us
        # Before the counts change: the time that has passed belongs to the old ones.
        self._update_averages(entry.sent_us)
        # With the decay below this is the mean rate over the window, without a list of arrivals.
        self._arrival_rate += 1 / self.window_s
        # Only if it was idle until now.
        self._busy_count += not load.entries
        load.recent_tokens += entry.work.tokens_to_compute
        load.busy_until = None
        # Of one object in two dicts: by age for expiry, by instance for its sums.
        self._entries[key] = load.entries[key] = entry
        load.tokens_to_compute += entry.work.tokens_to_compute
        load.pairs += entry.work.pairs
        if entry.block_keys:  # Counter's update() is slow also for nothing
            load.queued_blocks.update(entry.block_keys)

    def remove_pending(self, key: RequestKey, now_us: int) -> PendingRequest | None:
        """Remove the entry of `key`: it has its first token or will never have one. Idempotent.

        Returns the entry, None if there is none.
        """
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        load = self._loads[entry.url]
        # Entries are in the order of sending: when the first one leaves, the next is assumed to begin.
        if next(iter(load.entries)) == key:
            load.head_started_us = now_us
        self._update_averages(now_us)
        del load.entries[key]
        self._busy_count -= not load.entries
        load.busy_until = None
        load.tokens_to_compute -= entry.work.tokens_to_compute
        load.pairs -= entry.work.pairs
        # Counted and not a set: two pending prompts may share a prefix.
        queued = load.queued_blocks
        for block in entry.block_keys:
            copies = queued[block]
            if copies == 1:
                queued.pop(block)  # a Counter's own `del` costs more
            else:
                queued[block] = copies - 1
        if self.on_removed is not None:
            self.on_removed()
        return entry

    def drop_expired(self, now_us: int) -> None:
        """Remove entries older than `max_pending_us`, whose end was never recorded."""
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            # In the order of sending: all that follow are younger.
            if now_us - entry.sent_us < self.max_pending_us:
                return
            self.remove_pending(key, now_us)

    def _update_averages(self, now_us: int) -> None:
        """Decay the averages up to `now_us`, and halve `recent_tokens` once per window."""
        # Times of different callers may be out of order by microseconds.
        if now_us <= self._averaged_us:
            return
        window_us = self.window_s * US_PER_SECOND
        decay = math.exp((self._averaged_us - now_us) / window_us)
        self._arrival_rate *= decay
        self._mean_busy = self._mean_busy * decay + self._busy_count * (1 - decay)
        self._averaged_us = now_us
        if now_us >= self._halved_us + window_us:
            self._halved_us = now_us
            for load in self._loads.values():
                load.recent_tokens //= 2

    def _add_load(self, url: str, now_us: int) -> InstanceLoad:
        """Add an instance; those without entries that were sent nothing lately are removed."""
        # Here and not by a timer: only new instances can make it grow.
        outdated_us = now_us - self.window_s * US_PER_SECOND
        for other, load in list(self._loads.items()):
            if not load.entries and load.last_sent_us < outdated_us:
                del self._loads[other]
        load = self._loads[url] = InstanceLoad()
        return load
